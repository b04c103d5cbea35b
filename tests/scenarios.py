"""Small trainings that run on every rank: what the tests compare. Device and world come from the environment."""

import contextlib
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddpopt import DDPOptStrategy, Plan

warnings.filterwarnings("ignore", module="lightning|torch")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Mlp(L.LightningModule):
    """Linear layers with a batch norm (buffers!) and a layer of another shape.

    Args:
        accumulate: micro-batches per update in manual optimisation; None: automatic optimisation.
        blocks_sync: in manual optimisation, whether the other micro-batches run under ``no_sync``.
        width: of the hidden layers; 64 gives weights of 16 KiB.
    """

    def __init__(self, *, accumulate: int | None = None, blocks_sync: bool = True, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(
            nn.Linear(16, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 4),
        )
        self.automatic_optimization = accumulate is None
        self.accumulate = accumulate or 1
        self.blocks_sync = blocks_sync
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.losses.append(float(loss.detach()))
        if self.automatic_optimization:
            return loss
        steps = (batch_idx + 1) % self.accumulate == 0
        no_sync = self.blocks_sync and not steps
        block = getattr(self.trainer.strategy, "block_backward_sync", contextlib.nullcontext)
        with block() if no_sync else contextlib.nullcontext():
            self.manual_backward(loss / self.accumulate)
        if steps:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return None

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.net(batch[0])

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Wide(Mlp):
    """Enough gradients to be tuned (290 KiB), in layers that give several layouts."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(width=256, **arguments)


def data(batch_size: int = 8, batches: int = 16) -> DataLoader:
    """This rank's own batches, in the same order in every epoch."""
    generator = torch.Generator().manual_seed(3 + (dist.get_rank() if dist.is_initialized() else 0))
    inputs = torch.randn(batch_size * batches, 16, generator=generator)
    labels = torch.randint(0, 4, (len(inputs),), generator=generator)
    return DataLoader(TensorDataset(inputs, labels), batch_size=batch_size, num_workers=0)


def trainer(strategy: Strategy | str, **arguments: Any) -> L.Trainer:
    """A quiet Trainer over all ranks of this session's group."""
    accelerator = "gpu" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = int(os.environ.get("WORLD_SIZE", "1")) // local
    defaults: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": -1,
        "use_distributed_sampler": False,
    }
    return L.Trainer(
        accelerator=accelerator, devices=local, num_nodes=nodes, strategy=strategy, **(defaults | arguments)
    )


class ReWrap(L.Callback):
    """Change to another plan before these batches (cycling through ``plans``)."""

    def __init__(self, plans: dict[int, Plan]) -> None:
        self.plans = plans

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        plan = self.plans.get(trainer.fit_loop.total_batch_idx)
        if plan is not None and isinstance(trainer.strategy, DDPOptStrategy):
            trainer.strategy.change_plan(plan)


def state_of(module: nn.Module) -> dict[str, Any]:
    """Parameters and buffers as numpy arrays: what comes back from a rank and compares bit for bit."""
    tensors = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
    return {n: (t.float() if t.dtype == torch.bfloat16 else t.clone()).numpy() for n, t in tensors.items()}


def train(
    arguments: dict[str, Any] | None,
    *,
    steps: int = 20,
    fits: int = 1,
    accumulate: int = 1,
    manual: str | None = None,
    plans: dict[int, Plan] | None = None,
    make_module: Callable[..., Mlp] = Mlp,
    callbacks: list[L.Callback] | None = None,
    **trainer_arguments: Any,
) -> dict[str, Any]:
    """Train and return the state.

    Args:
        arguments: of DDPOptStrategy; None: Lightning's stock ``DDPStrategy()``.
        steps: optimizer steps of each fit.
        fits: how often ``fit`` is called with the same Trainer.
        accumulate: micro-batches per optimizer step.
        manual: None, or ``"sync"`` / ``"no_sync"``: manual optimisation, and what its other micro-batches do.
        plans: batch index -> plan to change to.
    """
    strategy = DDPStrategy() if arguments is None else DDPOptStrategy(**arguments)
    if manual is None:
        module = make_module()
        trainer_arguments["accumulate_grad_batches"] = accumulate
    else:
        module = make_module(accumulate=accumulate, blocks_sync=manual == "no_sync")
    fitter = trainer(strategy, callbacks=[*(callbacks or []), ReWrap(plans or {})], **trainer_arguments)
    for fit in range(1, fits + 1):
        fitter.fit_loop.epoch_loop.max_steps = steps * fit
        fitter.fit(module, data())
    result: dict[str, Any] = {"state": state_of(module), "losses": module.losses, "steps": fitter.global_step}
    if isinstance(strategy, DDPOptStrategy):
        result |= {"layout": strategy.layout, "bytes": strategy.bytes_sent_per_step, "plan": strategy.plan}
        result["verdict"] = strategy.verdict
    return result


class Messages(logging.Handler):
    """Collects what the package says."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("lightning_ddpopt").addHandler(self)
        logging.getLogger("lightning_ddpopt").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def close(self) -> None:
        logging.getLogger("lightning_ddpopt").removeHandler(self)
        super().close()


def assert_ranks_equal(results: list[dict[str, Any]], what: str = "state") -> None:
    for other in results[1:]:
        for name, array in results[0][what].items():
            if "running" not in name:  # a batch norm sees its own rank's batches
                np.testing.assert_array_equal(array, other[what][name], err_msg=name)


class Sparse(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 3, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.table(batch[1] % 3).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def check_error(arguments: dict[str, Any], make: type[Mlp], plans: dict[int, Plan] | None = None, **mode: Any) -> str:
    try:
        train(arguments, make_module=make, plans=plans, **mode)
    except RuntimeError as error:
        return str(error)
    return "no error"

"""Trains a ViT under any strategy, and appends a record of the run.

One run, with Lightning's own launcher:     python examples/train.py strategy=ddpopt_bf16 trainer=cpu
A sweep, each job under torchrun:           python examples/train.py -m repeat=0,1,2,3,4 experiment=ddp,bucket_view
The table:                                  ddpopt report multirun/DATE/TIME

Groups: experiment (the article's rungs), model, data, strategy, trainer, transport, measure, workload (see conf/).
"""

import hashlib
import logging
import os
import resource
import shlex
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hydra
import lightning as L  # noqa: N812
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rung_checks import check_rung
from step_clock import StepClock
from torch.nn.parallel import DistributedDataParallel

from lightning_ddpopt import DDPOptStrategy, HookSpec, Layout, Plan
from lightning_ddpopt.machine.environment import device_name, exchange_variables, hardware, versions
from lightning_ddpopt.machine.transport import transports_of_this_process
from lightning_ddpopt.records import Record, append_record
from lightning_ddpopt.wrapping import all_reduce_bytes_sent, layout_of

log = logging.getLogger(__name__)


def micro_batch(effective: int, micro_batches: int) -> int:
    """Images of one micro-batch, for `${micro_batch:...}` in configs."""
    if effective % micro_batches:
        raise ValueError(f"an effective batch of {effective} cannot be split into {micro_batches} equal micro-batches")
    return effective // micro_batches


OmegaConf.register_new_resolver("micro_batch", micro_batch, replace=True)
OmegaConf.register_new_resolver("sum", lambda *numbers: sum(numbers), replace=True)


class ReadsWrapper(L.Callback):
    """What DDP was wrapped around the module, stock or ours, and its buckets; None where nothing was wrapped."""

    wrapper: DistributedDataParallel | None = None
    layout: Layout | None = None
    tuning_steps = 0

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            self.wrapper = trainer.strategy.model
            self.layout = layout_of(self.wrapper)
        if isinstance(trainer.strategy, DDPOptStrategy):
            verdict = trainer.strategy.verdict
            self.tuning_steps = trainer.global_step if trainer.strategy.is_tuning else verdict.steps if verdict else 0


def peak_memory_mib(device: torch.device) -> float:
    """Largest memory of this process: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def checksum(module: torch.nn.Module) -> str:
    """Equal for two models if and only if their parameters are equal bit for bit."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def commit() -> str | None:
    """This repository's commit, with `+` if files have changed since; None outside of one."""
    here = Path(__file__).parent
    try:
        answers = [
            subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=False).stdout.strip()
            for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except OSError:  # no git here
        return None
    return answers[0] + ("+" if answers[1] else "") or None


def plan_asked(config: DictConfig, strategy: Any) -> Plan | None:
    """How the config says that the run exchanges gradients; None without DDP."""
    if isinstance(strategy, str):
        return None
    given = dict(config.strategy)
    if given.get("plan") is not None:
        return Plan.load(given["plan"])
    fields = {
        name: given[name] for name in ("static_graph", "gradient_as_bucket_view", "bucket_cap_mb") if name in given
    }
    if not isinstance(strategy, DDPOptStrategy):
        return Plan(**({"gradient_as_bucket_view": False} | fields))
    if fields.get("bucket_cap_mb") == "auto":
        fields["bucket_cap_mb"] = None
    hook = "none" if given["comm_hook"] == "auto" else given["comm_hook"]  # what holds where nothing was tuned
    return Plan(**fields, hook=HookSpec(hook, given["comm_hook_options"] or {}))


def of_all_ranks(value: Any) -> list[Any]:
    """Every rank's value, in the order of the ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@hydra.main(config_path="../conf", config_name="train", version_base="1.3")
def main(config: DictConfig) -> float:
    """Train once; the objective is the step time in ms."""
    L.seed_everything(config.seed, verbose=False)
    model: L.LightningModule = hydra.utils.instantiate(config.model)
    data: L.LightningDataModule = hydra.utils.instantiate(config.data)
    strategy = hydra.utils.instantiate(config.strategy)
    micro_batches = config.trainer.accumulate_grad_batches
    clock = StepClock(config.measure.warmup_steps, config.measure.steps, micro_batches)
    wrapped = ReadsWrapper()
    callbacks = [clock, wrapped, *hydra.utils.instantiate(config.callbacks)]
    trainer: L.Trainer = hydra.utils.instantiate(config.trainer, strategy=strategy, callbacks=callbacks)

    trainer.fit(torch.compile(model) if config.compile else model, data)  # type: ignore[arg-type]
    device = trainer.strategy.root_device
    loss = trainer.strategy.reduce(trainer.callback_metrics["loss"].to(device))
    peak_mib = peak_memory_mib(device)
    tuned = isinstance(strategy, DDPOptStrategy) and strategy.verdict is not None
    asked = strategy.verdict.plan if tuned else plan_asked(config, strategy)
    if wrapped.tuning_steps >= config.measure.warmup_steps:
        raise ValueError(f"tuning took {wrapped.tuning_steps} steps or more, and measured steps lie in it: raise"
                         f" measure.warmup_steps={config.measure.warmup_steps}.")  # fmt: skip
    plan = strategy.plan if isinstance(strategy, DDPOptStrategy) else asked
    if trainer.world_size == 1 and wrapped.wrapper is None:
        plan = None
    sent = None
    if wrapped.layout is not None:
        is_ours = isinstance(strategy, DDPOptStrategy)
        exact = all_reduce_bytes_sent(wrapped.layout.total_bytes, trainer.world_size)
        sent = strategy.bytes_sent_per_step if is_ours else exact
    transports: list[str] = []
    if trainer.world_size > 1:
        uses_nccl = dist.get_backend() == "nccl"
        transports = transports_of_this_process() if uses_nccl else [dist.get_backend()]
    images = config.data.batch_size * micro_batches * trainer.world_size
    record = Record(
        rung=config.rung,
        label=config.label,
        repeat=config.repeat,
        measure=config.measure.name,
        model=HydraConfig.get().runtime.choices["model"],
        precision=str(config.trainer.precision),
        compiled=config.compile,
        device=device_name(device),
        world_size=trainer.world_size,
        num_nodes=trainer.num_nodes,
        images_per_step=images,
        steps_per_s=clock.steps_per_s(),
        steps_ms_by_rank=of_all_ranks(clock.steps_ms()),
        loss=float(loss) if loss.isfinite() else None,
        peak_memory_mib=round(peak_mib, 1),
        parameters=checksum(model),
        plan=plan,
        bucket_bytes=None if wrapped.layout is None else list(wrapped.layout.bucket_bytes),
        bytes_sent_per_step=sent,
        workload=config.workload,
        data=HydraConfig.get().runtime.choices["data"],
        transport_asked=config.transport,
        transports=sorted({transport for found in of_all_ranks(transports) for transport in found}),
        accuracy=trainer.validate(model, data, verbose=False)[0]["val_accuracy"] if trainer.limit_val_batches else None,
        hardware=hardware(),
        seed=config.seed,
        command=shlex.join(["train.py", *(o for o in HydraConfig.get().overrides.task if not o.startswith("record="))]),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=config.commit or commit(),
        versions=versions(),
        variables=exchange_variables(),
    )
    check_rung(record, asked, wrapped.wrapper, wrapped.layout, config.trainer.devices)
    if trainer.is_global_zero:
        append_record(hydra.utils.to_absolute_path(config.record), record)
        log.info("%s: %.2f ms a step, %.2f steps/s, record in %s", record.label, record.step_ms, record.steps_per_s,
                 os.path.relpath(config.record))  # fmt: skip
    return record.step_ms


if __name__ == "__main__":
    main()

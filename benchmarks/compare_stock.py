"""Step times of our strategy beside Lightning's stock `ddp`, interleaved in one run, with raw lines kept.

One process per GPU, under torchrun:

    torchrun --nproc-per-node 2 benchmarks/compare_stock.py --out records/compare.jsonl

Each repeat trains every variant once, in turn, in the same processes. A step is timed by CUDA events from before the
forward to after the optimizer step; inputs lie on the GPU. The figure of one repeat is the median over its steps, of
the slowest rank; that of a variant the median over repeats. Differences are paired: within a repeat, against `ddp`.
"""

import argparse
import datetime
import gc
import json
import logging
import os
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
import torch.distributed as dist
import torchvision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.utils.data import DataLoader, Dataset

from lightning_ddpopt import DDPOptStrategy, NsysCallback, OverlapMonitor
from lightning_ddpopt.machine.environment import exchange_variables, versions

# Variant -> a callback whose own cost is to be seen, under stock `ddp`.
CALLBACKS: dict[str, Callable[[], L.Callback]] = {
    "ddp, NsysCallback not yet open": lambda: NsysCallback(warmup_steps=10**9),
    "ddp, OverlapMonitor": OverlapMonitor,
}


def strategies(device: torch.device) -> dict[str, Any]:
    """Variant -> what makes its strategy. `ddp` is what the others are compared with."""
    if int(os.environ["WORLD_SIZE"]) == 1:
        alone = {"ddp": DDPStrategy, "single": lambda: SingleDeviceStrategy(device), "ddpopt": DDPOptStrategy}
        return alone | dict.fromkeys(CALLBACKS, DDPStrategy)

    def stock_powersgd() -> Strategy:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        return DDPStrategy(bucket_cap_mb=2000, ddp_comm_hook=powerSGD_hook.powerSGD_hook, ddp_comm_state=state)

    return {
        "ddp": DDPStrategy,
        "ddpopt cap 10": lambda: DDPOptStrategy(bucket_cap_mb=10),
        "ddpopt cap 10 static": lambda: DDPOptStrategy(bucket_cap_mb=10, static_graph=True),
        "ddp bf16 cap 50": lambda: DDPStrategy(bucket_cap_mb=50, ddp_comm_hook=default_hooks.bf16_compress_hook),
        "ddpopt bf16 cap 50": lambda: DDPOptStrategy(bucket_cap_mb=50, comm_hook="bf16"),
        "ddp powersgd cap 2000": stock_powersgd,
        "ddpopt powersgd cap 2000": lambda: DDPOptStrategy(bucket_cap_mb=2000, comm_hook="powersgd"),
        **dict.fromkeys(CALLBACKS, DDPStrategy),
    }


class Steps(Dataset[int]):
    """As many empty items as there are steps: the inputs lie on the device."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Classifier(L.LightningModule):
    def __init__(self, net: nn.Module, images: Tensor, labels: Tensor) -> None:
        super().__init__()
        self.net, self.images, self.labels = net, images, labels
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        self.events[-1][0].record()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(self.images), self.labels)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.events[-1][1].record()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters())


def run_once(
    strategy: Strategy, callbacks: list[L.Callback], module: Classifier, steps: int, warmup: int
) -> dict[str, Any]:
    """One fit; this rank's step times in ms after the warm-up, and what it took."""
    torch.cuda.reset_peak_memory_stats()
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = L.Trainer(
        accelerator="gpu",
        devices=local,
        num_nodes=int(os.environ["WORLD_SIZE"]) // local,
        strategy=strategy,
        callbacks=callbacks,
        max_steps=warmup + steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module.events.clear()
    trainer.fit(module, DataLoader(Steps(warmup + steps)))
    torch.cuda.synchronize()
    result: dict[str, Any] = {
        "steps_ms": [round(start.elapsed_time(end), 4) for start, end in module.events[warmup:]],
        "peak_memory_mib": round(torch.cuda.max_memory_allocated() / 2**20, 1),
    }
    if isinstance(strategy, DDPOptStrategy) and strategy.layout is not None:
        result |= {"buckets": len(strategy.layout.bucket_bytes), "bytes_sent_per_step": strategy.bytes_sent_per_step}
    return result


def environment(arguments: argparse.Namespace) -> dict[str, Any]:
    """What is needed to repeat the run."""
    git = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.date.today().isoformat(),
        "arguments": {key: str(value) for key, value in (vars(arguments) | {"out": arguments.out.name}).items()},
        "commit": git.stdout.strip() or None,
        "gpu": torch.cuda.get_device_name(),
        "gpus_on_this_host": torch.cuda.device_count(),
        "world_size": int(os.environ["WORLD_SIZE"]),
        "ranks_share_a_gpu": int(os.environ["LOCAL_WORLD_SIZE"]) * torch.cuda.device_count()
        < int(os.environ["WORLD_SIZE"]),
        "versions": versions(),
        "variables": exchange_variables(),
    }


def summary(records: list[dict[str, Any]]) -> str:
    """Median and range over the repeats for each variant, and the paired difference to `ddp`."""
    by_variant: dict[str, dict[int, float]] = {}
    for record in records:
        medians = [statistics.median(steps) for steps in record["steps_ms_by_rank"]]
        by_variant.setdefault(record["variant"], {})[record["repeat"]] = max(medians)
    lines = [f"{'variant':32}{'median ms':>10}{'min':>9}{'max':>9}{'- ddp':>9}{'min':>9}{'max':>9}"]
    for variant, repeats in by_variant.items():
        values = list(repeats.values())
        paired = [value - by_variant["ddp"][repeat] for repeat, value in repeats.items()]
        figures = [f(numbers) for numbers in (values, paired) for f in (statistics.median, min, max)]
        lines.append(f"{variant:32}{figures[0]:10.2f}" + "".join(f"{figure:9.2f}" for figure in figures[1:]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_l_32", help="a torchvision model for 224x224 images")
    parser.add_argument("--batch", type=int, default=32, help="images per GPU")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each variant in each repeat")
    parser.add_argument("--warmup", type=int, default=12, help="untimed: torch samples its timers in the first 10")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--variants", nargs="*", help="only these (ddp always)")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines: the environment, then one per run")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_ddpopt"):
        logging.getLogger(name).setLevel(logging.ERROR)

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    L.seed_everything(0, verbose=False)
    net = torchvision.models.get_model(arguments.model, weights=None)
    images = torch.randn(arguments.batch, 3, 224, 224, device=device)
    labels = torch.randint(0, 1000, (arguments.batch,), device=device)
    module = Classifier(net, images, labels)
    makers = strategies(device)
    chosen = [name for name in makers if not arguments.variants or name in {"ddp", *arguments.variants}]

    lines: list[dict[str, Any]] = []
    if dist.get_rank() == 0:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"environment": environment(arguments)}) + "\n", encoding="utf-8")
    for repeat in range(arguments.repeats):
        for variant in chosen:
            started = time.perf_counter()
            callbacks = [CALLBACKS[variant]()] if variant in CALLBACKS else []
            result = run_once(makers[variant](), callbacks, module, arguments.steps, arguments.warmup)
            gc.collect()
            steps: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(steps, result.pop("steps_ms"))
            seconds = round(time.perf_counter() - started, 2)
            lines.append(
                {"variant": variant, "repeat": repeat, "seconds": seconds, **result, "steps_ms_by_rank": steps}
            )
            if dist.get_rank() == 0:
                with arguments.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(lines[-1]) + "\n")
    if dist.get_rank() == 0:
        print(summary(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

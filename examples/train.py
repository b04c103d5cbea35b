"""Train a ViT under any strategy: `python examples/train.py strategy=ddpopt_bf16 trainer=cpu`.

Groups: model, data, strategy, trainer (see conf/). One run in one process per device, with Lightning's own launcher.
"""

import hashlib
import json
import logging
import resource
from pathlib import Path
from typing import Any

import hydra
import lightning as L  # noqa: N812
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from step_clock import StepClock, spread
from torch.nn.parallel import DistributedDataParallel

from lightning_ddpopt import DDPOptStrategy, Layout
from lightning_ddpopt.wrapping import all_reduce_bytes_sent, layout_of

log = logging.getLogger(__name__)


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


class ReadsLayout(L.Callback):
    """The buckets that DDP formed, stock or ours; None where nothing was wrapped."""

    layout: Layout | None = None

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            self.layout = layout_of(trainer.strategy.model)


@hydra.main(config_path="../conf", config_name="train", version_base="1.3")
def main(config: DictConfig) -> None:
    L.seed_everything(config.seed, verbose=False)
    model = hydra.utils.instantiate(config.model)
    data = hydra.utils.instantiate(config.data)
    strategy = hydra.utils.instantiate(config.strategy)
    clock, buckets = StepClock(config.warmup_steps), ReadsLayout()
    trainer: L.Trainer = hydra.utils.instantiate(config.trainer, strategy=strategy, callbacks=[clock, buckets])

    trainer.fit(model, data)
    loss = trainer.strategy.reduce(trainer.callback_metrics["loss"].to(trainer.strategy.root_device))
    peak_mib = peak_memory_mib(trainer.strategy.root_device)
    times_ms = clock.step_times_ms()
    if len(times_ms) < 2:
        raise ValueError(f"trainer.max_steps={config.trainer.max_steps} leaves no step to time: the first"
                         f" warmup_steps={config.warmup_steps} are left out. Raise max_steps.")  # fmt: skip
    fast, median, slow = spread(times_ms)
    figures: dict[str, Any] = {
        "strategy": HydraConfig.get().runtime.choices["strategy"],
        "world_size": trainer.world_size,
        "device": torch.cuda.get_device_name() if trainer.strategy.root_device.type == "cuda" else "CPU",
        "steps_timed": len(times_ms),
        "steps_per_s": 1000 / median,
        "steps_per_s_p10": 1000 / slow,
        "steps_per_s_p90": 1000 / fast,
        "loss": float(loss),
        "peak_memory_mib": peak_mib,
        "parameters": checksum(model),
        "accuracy": trainer.validate(model, data, verbose=False)[0]["val_accuracy"],
    }
    if buckets.layout is not None:
        exact = all_reduce_bytes_sent(buckets.layout.total_bytes, trainer.world_size)
        figures["buckets"] = len(buckets.layout.bucket_bytes)
        is_ours = isinstance(strategy, DDPOptStrategy)
        figures["bytes_sent_per_step"] = strategy.bytes_sent_per_step if is_ours else exact
    if trainer.is_global_zero:
        log.info("%s", figures)
        if config.result is not None:
            Path(hydra.utils.to_absolute_path(config.result)).write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()

"""A user's script, started by the tests in every way a run can start: `script.py HOW RESULT_FOLDER`.

Every rank writes its parameters, so that the tests can compare them.
"""

import sys
from pathlib import Path

import lightning as L  # noqa: N812
import torch
from scenarios import Mlp, state_of
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddpopt  # noqa: F401
from lightning_ddpopt import DDPOptStrategy


class Writes(L.Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        result = {
            "state": state_of(module),
            "wrapper": type(trainer.strategy.model).__name__,
            "strategy": type(trainer.strategy).__name__,
            "hook": trainer.strategy.plan.hook.name,
            "buckets": trainer.strategy.layout and len(trainer.strategy.layout.bucket_bytes),
        }
        torch.save(result, Path(self.folder) / f"rank{trainer.global_rank}.pt")


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(256, 16, generator=generator)
    labels = torch.randint(0, 4, (256,), generator=generator)
    return DataLoader(TensorDataset(inputs, labels), batch_size=8)


STRATEGIES = {
    "instance": lambda: DDPOptStrategy(comm_hook="bf16", bucket_cap_mb=0.004),
    "name": lambda: "ddpopt_bf16",
    "spawn": lambda: DDPOptStrategy(comm_hook="bf16", bucket_cap_mb=0.004, start_method="spawn"),
    "fork": lambda: DDPOptStrategy(comm_hook="bf16", bucket_cap_mb=0.004, start_method="fork"),
}


def main() -> None:
    how, folder = sys.argv[1:]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=STRATEGIES[how](),
        max_steps=12,
        callbacks=[Writes(folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Mlp(), loader())


if __name__ == "__main__":
    main()

"""The smallest before and after: the same Trainer, one argument changed. Runs on GPUs, or on two CPU processes.

python examples/swap_strategy.py ddp
python examples/swap_strategy.py ddpopt
"""

import sys

import lightning as L  # noqa: N812
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddpopt  # noqa: F401  # registers strategy="ddpopt"


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    L.seed_everything(0)
    model, dataset = Classifier(), TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
    strategy = sys.argv[1] if len(sys.argv) > 1 else "ddpopt"
    devices = max(2, torch.cuda.device_count())
    accelerator = "gpu" if torch.cuda.device_count() > 1 else "cpu"
    trainer = L.Trainer(accelerator=accelerator, devices=devices, strategy=strategy, max_steps=50, logger=False)
    trainer.fit(model, DataLoader(dataset, batch_size=32))
    if trainer.is_global_zero:
        total = sum(p.detach().double().sum().item() for p in model.parameters())
        print(f"{strategy}: sum of parameters {total:.12f}")

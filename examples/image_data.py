"""What the examples train on: real handwritten digits, or the article's random images."""

from typing import Any

import lightning as L  # noqa: N812
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset


def shuffled(data: L.LightningDataModule, dataset: Dataset[Any]) -> DistributedSampler[Any]:
    """The sampler that Lightning gives to DDP, for a single device too, so that it trains on the same batches."""
    world_size, rank = (data.trainer.world_size, data.trainer.global_rank) if data.trainer is not None else (1, 0)
    return DistributedSampler(dataset, world_size, rank, shuffle=True, seed=0)


class Digits(L.LightningDataModule):
    """scikit-learn's 1797 handwritten digits as images (3, 8, 8) in 0..1: 1280 to train on, 517 for validation.

    1280 is whole in steps of 256 images over all processes, with accumulation too.

    Args:
        batch_size: images per process and step.

    """

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1).expand(-1, 3, -1, -1)
        dataset = TensorDataset(images, torch.tensor(digits.target))
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist()
        self.train_set = torch.utils.data.Subset(dataset, order[:1280])
        self.val_set = torch.utils.data.Subset(dataset, order[1280:])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        sampler = shuffled(self, self.train_set)
        return DataLoader(self.train_set, self.batch_size, sampler=sampler, drop_last=True)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.val_set, self.batch_size)  # type: ignore[arg-type]


class _RandomImages(Dataset[tuple[Tensor, int]]):
    def __init__(self, num_images: int) -> None:
        self.num_images = num_images

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        label = int(torch.randint(0, 1000, (), generator=generator))
        return torch.randn(3, 224, 224, generator=generator), label


class Synthetic(L.LightningDataModule):
    """Random images (3, 224, 224) with labels in 0..999, made by loader workers; the same by index in every run.

    Args:
        batch_size: images per process and step.
        num_images: images of an epoch.
        num_workers: loader processes for each rank.

    """

    def __init__(self, batch_size: int, num_images: int, num_workers: int) -> None:
        super().__init__()
        self.batch_size, self.num_images, self.num_workers = batch_size, num_images, num_workers

    def train_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        images = _RandomImages(self.num_images)
        return self._loader(images, sampler=shuffled(self, images), drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return self._loader(_RandomImages(self.num_images // 16))

    def _loader(self, images: _RandomImages, **arguments: Any) -> DataLoader[tuple[Tensor, int]]:
        return DataLoader(
            images,
            self.batch_size,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
            **arguments,
        )

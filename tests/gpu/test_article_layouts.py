"""The bucket counts of ViT-L/32 by capacity, as the article's study has them."""

from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torchvision
from ranks import Ranks
from scenarios import trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddpopt import DDPOptStrategy

GOLDEN = {1: 99, 2: 99, 5: 74, 10: 74, 25: 37, 50: 20, 100: 11, 200: 6, 400: 3, 800: 2, 2000: 1, None: 38}


class Vit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torchvision.models.vit_l_32(weights=None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images = torch.randn(2, 3, 224, 224, device=self.device)
        return nn.functional.cross_entropy(self.net(images), torch.zeros(2, dtype=torch.long, device=self.device))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters())


def bucket_counts(static: bool) -> dict[Any, tuple[int, int]]:
    module, counts = Vit(), {}
    for cap in GOLDEN:
        strategy = DDPOptStrategy(bucket_cap_mb=cap, static_graph=static)
        trainer(strategy, max_steps=6).fit(module, DataLoader(range(6)))
        assert strategy.layout is not None
        counts[cap] = (len(strategy.layout.bucket_bytes), strategy.layout.total_bytes)
    return counts


@pytest.mark.parametrize("static", [True, False])
def test_bucket_counts_of_vit_l_32(two_ranks: Ranks, static: bool) -> None:
    first, second = two_ranks(bucket_counts, static)
    assert first == second
    assert {cap: count for cap, (count, _) in first.items()} == GOLDEN
    assert {total for _, total in first.values()} == {4 * 306_535_400}

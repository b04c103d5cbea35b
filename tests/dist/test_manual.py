"""Manual optimisation: several backwards in a step, and optimizers that take turns."""

from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from ranks import Ranks
from scenarios import (
    Messages,
    Mlp,
    assert_ranks_equal,
    data,
    state_of,
    trainer,
)
from torch import nn

from lightning_ddpopt import DDPOptStrategy


class TwoBackwards(Mlp):
    """Several backwards in one training_step; all of them, or only the last, synchronise."""

    def __init__(self, sync_all: bool) -> None:
        super().__init__(accumulate=1)
        self.sync_all = sync_all

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        for part in range(2):
            loss = nn.functional.cross_entropy(self.net(inputs[part::2]), labels[part::2]) / 2
            if part == 0 and not self.sync_all:
                with self.trainer.strategy.block_backward_sync():
                    self.manual_backward(loss)
            else:
                self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()


def two_backwards(arguments: dict[str, Any] | None, sync_all: bool, fits: int) -> dict[str, Any]:
    strategy = DDPStrategy() if arguments is None else DDPOptStrategy(**arguments)
    module, fitter = TwoBackwards(sync_all), trainer(strategy)
    for fit in range(1, fits + 1):
        fitter.fit_loop.epoch_loop.max_steps = 20 // fits * fit
        fitter.fit(module, data())
    return {"state": state_of(module)}


@pytest.mark.parametrize("fits", [1, 2])
@pytest.mark.parametrize("sync_all", [True, False])
@pytest.mark.parametrize("static", [True, False])
def test_several_backwards_in_a_step_equal_stock(two_ranks: Ranks, static: bool, sync_all: bool, fits: int) -> None:
    """Stock DDP with a static graph leaves the second backward of the first step unreduced, without a word."""
    ours = two_ranks(two_backwards, {"static_graph": static, "bucket_cap_mb": 0.004}, sync_all, fits)
    stock = two_ranks(two_backwards, None, sync_all, fits)
    for our, their in zip(ours, stock, strict=True):
        for name, array in their["state"].items():
            np.testing.assert_array_equal(our["state"][name], array, err_msg=name)


class Adversaries(L.LightningModule):
    """Two optimizers that take turns, as a GAN's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.one, self.other = nn.Linear(16, 4), nn.Linear(4, 4)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = nn.functional.cross_entropy(self.other(self.one(inputs)), labels)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(m.parameters(), lr=0.05) for m in (self.one, self.other)]


def play(arguments: dict[str, Any] | None) -> dict[str, Any]:
    find = {"find_unused_parameters": True}
    strategy = DDPStrategy(**find) if arguments is None else DDPOptStrategy(**arguments, **find)
    messages, module = Messages(), Adversaries()
    trainer(strategy, max_steps=20).fit(module, data())
    messages.close()
    return {"state": state_of(module), "said": messages.texts}


@pytest.mark.parametrize("static", [True, False])
def test_toggled_optimizers_equal_stock(two_ranks: Ranks, static: bool) -> None:
    ours, stock = two_ranks(play, {"static_graph": static}), two_ranks(play, None)
    assert_ranks_equal([*ours, *stock])
    told = [text for text in ours[0]["said"] if "static_graph=True has no effect while training_step switches" in text]
    assert len(told) == static

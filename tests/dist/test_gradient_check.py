"""The check after each wrap that the ranks hold the same gradients."""

from typing import Any

import pytest
import torch
from ranks import Ranks
from scenarios import (
    Mlp,
    check_error,
)

from lightning_ddpopt import Plan


class Spoiled(Mlp):
    """On rank 1 something adds to one gradient after the reduction, at one step."""

    at = 1

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        if self.global_rank == 1 and self.trainer.global_step == self.at:
            self.net[3].weight.grad[0, 0] += 1e-3


class SpoiledLater(Spoiled):
    at = 10


@pytest.mark.parametrize("mode", [{}, {"accumulate": 2}, {"accumulate": 2, "manual": "no_sync"}])
@pytest.mark.parametrize("arguments", [{}, {"static_graph": True}, {"comm_hook": "bf16"}])
def test_unequal_gradients_raise_with_the_parameters_name(
    two_ranks: Ranks, arguments: dict[str, Any], mode: dict[str, Any]
) -> None:
    for message in two_ranks(check_error, arguments, Spoiled, **mode):
        assert "the gradients of 'net.3.weight' are not the same on all ranks" in message
        assert "gradient_check_steps=0" in message
    assert two_ranks(check_error, arguments | {"gradient_check_steps": 0}, Spoiled, **mode) == ["no error"] * 2


def test_the_check_runs_again_after_every_wrap(two_ranks: Ranks) -> None:
    assert two_ranks(check_error, {}, SpoiledLater) == ["no error"] * 2
    re_wrapped = two_ranks(check_error, {}, SpoiledLater, {9: Plan(bucket_cap_mb=0.004)})
    assert all("'net.3.weight'" in message and "step 2 after the wrap" in message for message in re_wrapped)

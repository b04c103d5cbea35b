"""Tuning over NCCL: the tests of tests/dist with this folder's fixtures, and what only CUDA has."""

# ruff: noqa: F401
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import torch
from ranks import Ranks
from scenarios import Wide, assert_ranks_equal, train
from test_tuning import (
    test_a_failure_anywhere_ends_tuning_everywhere,
    test_hooks_are_tried_where_they_are_allowed,
    test_in_every_mode,
    test_loaders_of_unlike_length,
    test_nothing_is_left_behind,
    test_several_backward_passes_in_a_step_are_not_tuned,
    test_the_parameters_are_those_of_stock_ddp,
    test_the_verdict,
    test_three_ranks_agree,
    test_unfrozen_layers_are_tuned_anew,
)
from test_verdicts import test_a_cached_plan_other_than_the_default_is_verified_on_real_steps
from tuning_runs import NO_CACHE, stock


class Overflowing(Wide):
    """Rank 0's loss is so large at some steps that fp16 gradients overflow, and the optimizer does not step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        loss = super().training_step(batch, batch_idx)
        at = self.trainer.fit_loop.total_batch_idx
        return loss * 1e6 if self.global_rank == 0 and at in (4, 11, 30, 41) else loss


class Memory(L.Callback):
    """Allocated memory at the end of each step."""

    def __init__(self) -> None:
        self.allocated: list[int] = []

    def on_train_batch_end(self, *args: Any) -> None:
        torch.cuda.synchronize()
        self.allocated.append(torch.cuda.memory_allocated())


def tune_in_fp16(arguments: dict[str, Any] | None) -> dict[str, Any]:
    return train(arguments, steps=80, precision="16-mixed", make_module=Overflowing)


def test_skipped_steps_of_fp16(two_ranks: Ranks) -> None:
    results = two_ranks(tune_in_fp16, NO_CACHE)
    assert_ranks_equal([*results, two_ranks(tune_in_fp16, None)[0]])
    assert results[0]["verdict"] == results[1]["verdict"]
    assert results[0]["verdict"].trials
    assert all(np.isfinite(array).all() for array in results[0]["state"].values())


def tune_and_watch_memory() -> dict[str, Any]:
    memory = Memory()
    return train(NO_CACHE, steps=90, make_module=Wide, callbacks=[memory]) | {"allocated": memory.allocated}


def test_memory_after_tuning_is_that_before(two_ranks: Ranks) -> None:
    """The plan kept may lack the bucket view, and then holds the gradients once more."""
    for result in two_ranks(tune_and_watch_memory):
        before, after = result["allocated"][5], result["allocated"][-1]
        extra = 0 if result["plan"].gradient_as_bucket_view else 286_736
        assert after <= before + extra + 64 * 1024

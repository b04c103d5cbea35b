"""Hooks that are the user's own callables, torch's, and Lightning's arguments for them, on every device."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from scenarios import (
    Messages,
    assert_ranks_equal,
    train,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook


class Calls:
    def __init__(self, extra: float = 0.0) -> None:
        self.count, self.extra = 0, extra


def counting_hook(state: Calls, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state.count += 1
    bucket.buffer().add_(state.extra * dist.get_rank())
    if state.extra:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


def train_counting(how: str, extra: float = 0.0) -> dict[str, Any]:
    calls, messages = Calls(extra), Messages()
    arguments = {
        "ours": {"comm_hook": counting_hook, "comm_hook_options": {"state": calls}},
        "lightning's": {"ddp_comm_hook": counting_hook, "ddp_comm_state": calls},
        "wrapped": {
            "ddp_comm_hook": counting_hook,
            "ddp_comm_state": calls,
            "ddp_comm_wrapper": default_hooks.bf16_compress_wrapper,
        },
    }[how]
    result = train(arguments | {"bucket_cap_mb": 0.004})
    messages.close()
    return {"calls": calls.count, "said": messages.texts, **result}


@pytest.mark.parametrize("how", ["ours", "lightning's", "wrapped"])
def test_callable_hooks_run(two_ranks: Ranks, how: str) -> None:
    results, stock = two_ranks(train_counting, how), two_ranks(train, None)
    buckets = len(results[0]["layout"].bucket_bytes)
    assert buckets > 1
    assert [result["calls"] for result in results] == [1 + 19 * buckets] * 2  # the first step knows but one bucket
    assert_ranks_equal(results)
    same = all((results[0]["state"][n] == a).all() for n, a in stock[0]["state"].items())
    assert same == (how != "wrapped")
    assert results[0]["bytes"] is None


def test_a_callable_hook_that_means_to_leave_ranks_unequal_is_only_warned_about(two_ranks: Ranks) -> None:
    results = two_ranks(train_counting, "ours", 0.1)
    told = [text for text in results[0]["said"] if "are not the same on all ranks" in text]
    assert len(told) >= 1
    assert "set gradient_check_steps=0" in told[0]


@pytest.mark.parametrize("name", ["fp16_compress_hook", "bf16_compress_hook", "allreduce_hook"])
def test_torchs_own_hooks_run_on_the_cpu_too(two_ranks: Ranks, name: str) -> None:
    hook = getattr(default_hooks, name)
    results = two_ranks(train, {"ddp_comm_hook": hook, "bucket_cap_mb": 0.004})
    assert_ranks_equal(results)


def train_with_local_sgd(period: int) -> dict[str, Any]:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    state = PostLocalSGDState(None, groups[dist.get_rank()], start_localSGD_iter=4)
    arguments = {"ddp_comm_hook": post_localSGD_hook, "ddp_comm_state": state, "model_averaging_period": period}
    return train(arguments)


def test_post_local_sgd_averages_on_the_cpu_too(two_ranks: Ranks) -> None:
    assert_ranks_equal(two_ranks(train_with_local_sgd, 5))
    apart = two_ranks(train_with_local_sgd, 7)  # 20 steps do not end with an averaging
    with pytest.raises(AssertionError):
        assert_ranks_equal(apart)

"""With exact gradients and two ranks every plan trains the parameters of stock DDP, bit for bit."""

import functools
from typing import Any

import numpy as np
import pytest
from ranks import Ranks
from scenarios import train

from lightning_ddpopt import HookSpec, Plan

# Mlp(64) holds 22 KiB of gradients in 8 tensors: one bucket by default, several at these capacities.
CAPS = [None, 0.004, [0.001, 0.02], 2000]
MODES = [
    {"accumulate": 1},
    {"accumulate": 2},
    {"accumulate": 3},
    {"manual": "no_sync", "accumulate": 1},
    {"manual": "no_sync", "accumulate": 2},
    {"manual": "no_sync", "accumulate": 3},
    {"manual": "sync", "accumulate": 2},
    {"manual": "sync", "accumulate": 3},
]
# 16 batches an epoch: with 3 micro-batches the last window of each epoch is partial.
REWRAPS = {
    5: Plan(bucket_cap_mb=0.002),
    9: Plan(static_graph=True, gradient_as_bucket_view=False, bucket_cap_mb=[0.01, 0.001]),
    13: Plan(static_graph=True),
    14: Plan(gradient_as_bucket_view=False),
}
SCENARIOS: dict[str, dict[str, Any]] = {
    "once": {},
    "re-wrapped": {"plans": REWRAPS},
    "two fits": {"fits": 2, "steps": 10},
}


@pytest.fixture(scope="module")
def stock(two_ranks: Ranks) -> Any:
    """Stock results by mode and number of fits, made once."""

    @functools.cache
    def results(mode: tuple[tuple[str, Any], ...], fits: int, steps: int) -> list[dict[str, Any]]:
        return two_ranks(train, None, fits=fits, steps=steps, **dict(mode))

    return results


def assert_same(one: dict[str, Any], other: dict[str, Any], what: str = "state") -> None:
    assert one[what].keys() == other[what].keys()
    for name in one[what]:
        np.testing.assert_array_equal(one[what][name], other[what][name], err_msg=name, strict=True)


def name_of(mode: dict[str, Any]) -> str:
    return f"{mode.get('manual', 'automatic')}x{mode['accumulate']}"


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("mode", MODES, ids=name_of)
@pytest.mark.parametrize("cap", CAPS, ids=str)
@pytest.mark.parametrize("view", [True, False], ids=["view", "copy"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_parameters_are_those_of_stock_ddp(
    two_ranks: Ranks, stock: Any, static: bool, view: bool, cap: Any, mode: dict[str, Any], scenario: str
) -> None:
    arguments = {"static_graph": static, "gradient_as_bucket_view": view, "bucket_cap_mb": cap}
    settings = SCENARIOS[scenario]
    ours = two_ranks(train, arguments, **mode, **settings)
    theirs = stock(tuple(sorted(mode.items())), settings.get("fits", 1), settings.get("steps", 20))
    for our, their in zip(ours, theirs, strict=True):
        assert our["steps"] == their["steps"] == 20
        assert our["losses"] == their["losses"]
        assert_same(our, their)


READY_BYTES = [16, 1024, 256, 16384, 256, 256, 256, 4096]  # Mlp(64)'s gradients in the order in which they get ready


def expected_buckets(caps_mib: list[float]) -> tuple[int, ...]:
    """DDP's rule: a bucket closes once it holds its capacity; a parameter is never split; the last capacity repeats."""
    buckets, filling = [], 0
    for size in READY_BYTES:
        filling += size
        if filling >= int(caps_mib[min(len(buckets), len(caps_mib) - 1)] * 2**20):
            buckets.append(filling)
            filling = 0
    return tuple([*buckets, filling] if filling else buckets)


@pytest.mark.parametrize("cap", [None, 2000, 0.0001, 0.001, 0.004, [0.0005, 0.001], [0.001, 0.1]], ids=str)
@pytest.mark.parametrize("static", [True, False])
def test_the_layout_obtained_is_told(two_ranks: Ranks, static: bool, cap: Any) -> None:
    first, second = two_ranks(train, {"static_graph": static, "bucket_cap_mb": cap})
    assert first["layout"] == second["layout"]
    assert first["layout"].rebuilt
    caps = [1, 25] if cap is None else cap if isinstance(cap, list) else [cap]
    assert first["layout"].bucket_bytes == expected_buckets(caps)
    assert first["layout"].total_bytes == sum(READY_BYTES)
    assert first["bytes"] == sum(READY_BYTES)  # 2 (n - 1) / n is 1 for two ranks


def test_without_a_rebuild_the_first_layout_is_told(two_ranks: Ranks) -> None:
    first, _ = two_ranks(train, {"find_unused_parameters": True, "bucket_cap_mb": 0.004})
    assert not first["layout"].rebuilt
    assert len(first["layout"].bucket_bytes) > 1


def test_a_saved_plan_trains_the_same(two_ranks: Ranks, tmp_path: Any) -> None:
    plan = Plan(True, True, [0.001, 0.02])
    plan.save(tmp_path / "plan.json")
    from_file = two_ranks(train, {"plan": str(tmp_path / "plan.json")})
    by_arguments = two_ranks(train, {"static_graph": True, "bucket_cap_mb": [0.001, 0.02]})
    assert from_file[0]["plan"] == by_arguments[0]["plan"] == plan
    assert from_file[0]["layout"] == by_arguments[0]["layout"]
    assert_same(from_file[0], by_arguments[0])


@pytest.mark.parametrize("static", [True, False])
def test_three_ranks_stay_equal(three_ranks: Ranks, static: bool) -> None:
    """Above two ranks another layout sums in another order: equal ranks is what can be asked."""
    results = three_ranks(train, {"static_graph": static, "bucket_cap_mb": 0.004}, accumulate=2)
    for other in results[1:]:
        parameters = {n: a for n, a in results[0]["state"].items() if "running" not in n}
        for name, array in parameters.items():
            np.testing.assert_array_equal(array, other["state"][name], err_msg=name)


def test_a_hook_change_keeps_training(two_ranks: Ranks) -> None:
    plans = {4: Plan(hook=HookSpec("bf16")), 8: Plan(hook=HookSpec("powersgd")), 14: Plan()}
    first, second = two_ranks(train, {}, plans=plans)
    assert first["plan"] == Plan()
    parameters = [n for n in first["state"] if "running" not in n]
    for name in parameters:
        np.testing.assert_array_equal(first["state"][name], second["state"][name], err_msg=name)

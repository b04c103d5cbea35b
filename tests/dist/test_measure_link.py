"""Measuring the link on the training's own group."""

import time

import torch
import torch.distributed as dist
from ranks import Ranks

from lightning_ddpopt.tuning.link import Link, measure_link


def measure(largest_bytes: int, budget_s: float) -> tuple[Link, float]:
    group = dist.group.WORLD
    assert group is not None
    started = time.perf_counter()
    link = measure_link(group, torch.device("cpu"), largest_bytes, budget_s)
    return link, time.perf_counter() - started


def test_all_ranks_get_one_curve(two_ranks: Ranks) -> None:
    (first, _), (second, _) = two_ranks(measure, 5_000_000, 2.0)
    assert first == second
    assert first.payload_bytes == (65536, 262144, 1048576, 4194304, 5_000_000)
    assert all(cost > 0 for cost in first.cost_ms)


def test_a_budget_that_is_too_small_ends_early(two_ranks: Ranks) -> None:
    (first, seconds), (second, _) = two_ranks(measure, 400_000_000, 0.02)
    assert first == second
    assert first.payload_bytes[0] == 65536
    assert first.payload_bytes[-1] < 400_000_000
    assert seconds < 1.0


def test_the_smallest_payload_is_always_measured(two_ranks: Ranks) -> None:
    (first, _), _ = two_ranks(measure, 4_000_000, 1e-9)
    assert first.payload_bytes == (65536,)
    (tiny, _), _ = two_ranks(measure, 10, 1.0)
    assert tiny.payload_bytes == (65536,)

"""Interval arithmetic against tables, and against sets of integers."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ddpopt.profiling.overlap import Interval, clip, difference, intersection, merge, total


@pytest.mark.parametrize(
    ("intervals", "merged"),
    [
        ([], []),
        ([(3, 3)], []),
        ([(5, 2)], []),
        ([(0, 2), (2, 4)], [(0, 4)]),
        ([(3, 5), (0, 1)], [(0, 1), (3, 5)]),
        ([(0, 9), (1, 2), (8, 10)], [(0, 10)]),
    ],
)
def test_merge(intervals: list[Interval], merged: list[Interval]) -> None:
    assert merge(intervals) == merged
    assert total(intervals) == sum(end - start for start, end in merged)


def test_merge_joins_what_is_close() -> None:
    assert merge([(0, 1), (3, 4), (7, 8)], gap_ns=2) == [(0, 4), (7, 8)]


@pytest.mark.parametrize(
    ("communication", "compute", "hidden", "exposed"),
    [
        ([(10, 20)], [], [], [(10, 20)]),
        ([], [(10, 20)], [], []),
        ([(10, 20)], [(0, 30)], [(10, 20)], []),
        ([(10, 20)], [(20, 30)], [], [(10, 20)]),
        ([(10, 20)], [(0, 12), (14, 15), (18, 40)], [(10, 12), (14, 15), (18, 20)], [(12, 14), (15, 18)]),
        ([(0, 4), (2, 6), (8, 9)], [(3, 5), (4, 8)], [(3, 6)], [(0, 3), (8, 9)]),
        ([(0, 10)], [(10, 10), (4, 2)], [], [(0, 10)]),
        ([(-5, 5)], [(-1, 1)], [(-1, 1)], [(-5, -1), (1, 5)]),
    ],
)
def test_hidden_and_exposed(
    communication: list[Interval], compute: list[Interval], hidden: list[Interval], exposed: list[Interval]
) -> None:
    assert intersection(communication, compute) == hidden
    assert difference(communication, compute) == exposed


def test_clip() -> None:
    assert clip([(0, 5), (8, 12), (20, 30)], (3, 10)) == [(3, 5), (8, 10)]


intervals = st.lists(st.tuples(st.integers(-12, 12), st.integers(-12, 12)), max_size=8)


def points(some: list[Interval]) -> set[int]:
    return {point for start, end in some for point in range(start, end)}


@given(intervals, intervals)
def test_against_sets_of_points(left: list[Interval], right: list[Interval]) -> None:
    for found, expected in (
        (merge(left), points(left)),
        (intersection(left, right), points(left) & points(right)),
        (difference(left, right), points(left) - points(right)),
    ):
        assert points(found) == expected
        assert total(found) == len(expected)
        assert all(end < start for (_, end), (start, _) in pairwise(found))  # merged

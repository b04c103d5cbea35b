"""Clocks that differ, ranks that are late: by hand."""

import pytest

from lightning_ddpopt.profiling.alignment import align

MS = 1_000_000
FIRST = [(10 * MS, 20 * MS), (30 * MS, 40 * MS), (50 * MS, 60 * MS)]


def test_a_rank_that_comes_early_waits_and_one_that_comes_late_does_not() -> None:
    late = [(18 * MS, 20 * MS), (37 * MS, 40 * MS), (50 * MS, 60 * MS)]
    aligned = align([FIRST, late])
    assert aligned is not None
    assert aligned.offset_ns == (0, 0)
    assert aligned.wait_ns == ((8 * MS, 7 * MS, 0), (0, 0, 0))
    assert aligned.late_ns == ((0, 0, 0), (8 * MS, 7 * MS, 0))


@pytest.mark.parametrize("offset_ns", [5_000_000_000_000_001, -3 * MS])
def test_clocks_may_differ(offset_ns: int) -> None:
    third = [(start + offset_ns + 4 * MS, end + offset_ns) for start, end in FIRST]
    aligned = align([FIRST, FIRST, third])
    assert aligned is not None
    assert aligned.offset_ns == (0, 0, offset_ns)
    assert aligned.wait_ns == ((4 * MS,) * 3, (4 * MS,) * 3, (0,) * 3)


def test_one_end_that_is_off_does_not_move_the_clock() -> None:
    odd = [(10 * MS, 20 * MS), (30 * MS, 41 * MS), (50 * MS, 60 * MS)]
    aligned = align([FIRST, odd])
    assert aligned is not None
    assert aligned.offset_ns == (0, 0)


def test_a_wait_is_never_longer_than_the_collective() -> None:
    after = [(21 * MS, 22 * MS), *FIRST[1:]]
    aligned = align([FIRST, after])
    assert aligned is not None
    assert aligned.wait_ns[0][0] == 10 * MS


def test_other_collectives_do_not_align() -> None:
    assert align([FIRST, [(11 * MS, 19 * MS), (33 * MS, 47 * MS), (50 * MS, 77 * MS)]]) is None
    assert align([FIRST]) is None
    assert align([[], []]) is None

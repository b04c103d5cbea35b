"""Clocks that differ, ranks that are late: by hand."""

import pytest

from lightning_ddpopt.profiling.alignment import align, overlap

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


@pytest.mark.parametrize(
    ("length_ms", "apart_ms", "is_aligned"),
    [(0.2, 0.09, True), (0.2, 0.11, False), (10, 0.9, True), (10, 1.1, False), (500, 2.9, True), (500, 3.1, False)],
)
def test_ends_may_lie_a_tenth_of_a_collective_apart_but_no_more_than_3_ms(
    length_ms: float, apart_ms: float, is_aligned: bool
) -> None:
    """Ends that lie -x, 0, x apart from the other rank's: the clocks' median is right, x is left."""
    first = [(number * 1000 * MS, number * 1000 * MS + round(length_ms * MS)) for number in range(5)]
    other = [
        (start, end + round(off * apart_ms * MS)) for (start, end), off in zip(first, (-1, -1, 0, 1, 1), strict=True)
    ]
    assert (align([first, other]) is not None) == is_aligned


def test_windows_overlap() -> None:
    assert overlap([(0, 10), (10, 20), (5, 12)])
    assert not overlap([(0, 10), (11, 20)])

"""Arithmetic of time intervals: what is under what. Pure, in whole nanoseconds; knows nothing of traces.

An interval is a pair (start, end) and holds its start but not its end; one whose end is not after its start is empty.
"""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]


def merge(intervals: Iterable[Interval], gap_ns: int = 0) -> list[Interval]:
    """The union: sorted, disjoint, without empty ones. Pieces at most ``gap_ns`` apart become one."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start - merged[-1][1] <= gap_ns:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def total(intervals: Iterable[Interval]) -> int:
    """Length of the union, in nanoseconds."""
    return sum(end - start for start, end in merge(intervals))


def intersection(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """What is in both unions, merged."""
    return list(_common(merge(left), merge(right)))


def difference(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """What is in the union of ``left`` but not in that of ``right``, merged.

    With communication on the left and compute on the right: exposed communication.

    """
    kept, cuts = merge(left), merge(right)
    if not kept or not cuts:
        return kept
    low, high = min(kept[0][0], cuts[0][0]), max(kept[-1][1], cuts[-1][1])
    edges = [low, *(edge for cut in cuts for edge in cut), high]
    return list(_common(kept, merge(zip(edges[::2], edges[1::2], strict=True))))


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """What of the union lies inside ``window``, merged."""
    return intersection(intervals, [window])


def _common(left: list[Interval], right: list[Interval]) -> Iterator[Interval]:
    """Intersection of two merged lists."""
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            yield start, end
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1

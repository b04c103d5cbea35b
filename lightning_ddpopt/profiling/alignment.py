"""Tells transfer from waiting: lines up the ranks' clocks on the ends of their collectives.

A rank that arrives early waits inside its NCCL kernel. All ranks leave a collective together, whatever their clocks
say, and none can move bytes before the last has come: what a rank's kernel ran before that is **wait**, the rest
**wire**.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MAX_RESIDUAL = 0.1
"""Ends may lie this part of their collective's time apart, in the median, before the ranks count as not alignable."""
MIN_RESIDUAL_NS, MAX_RESIDUAL_NS = 100_000, 3_000_000
"""But this far in any case, and never further. NCCL's ends lie microseconds apart, gloo's some tens of them."""


@dataclass(frozen=True)
class Aligned:
    """The same collectives as seen by each rank.

    Args:
        offset_ns: by rank: what to take from its clock to get that of the first rank.
        wait_ns: by rank, then by collective: the part of it before the last rank started.
        late_ns: by rank, then by collective: its start less that of the first rank to start.

    """

    offset_ns: tuple[int, ...]
    wait_ns: tuple[tuple[int, ...], ...]
    late_ns: tuple[tuple[int, ...], ...]


def align(ranks: Sequence[Sequence[tuple[int, int]]]) -> Aligned | None:
    """Align the ranks, each given as the (start, end) in ns of its collectives, in one order for all.

    The clocks may differ by a constant, which is taken as the median difference of the ends.

    Returns:
        None if there is nothing to align, or if the ends do not fit each other: then these are not the same
        collectives.

    """
    first = ranks[0]
    if len(ranks) < 2 or not first:
        return None
    offsets = tuple(
        round(statistics.median(mine[1] - theirs[1] for mine, theirs in zip(rank, first, strict=True)))
        for rank in ranks
    )
    moved = [
        [(start - offset, end - offset) for start, end in rank] for rank, offset in zip(ranks, offsets, strict=True)
    ]
    by_collective = list(zip(*moved, strict=True))
    spread = statistics.median(max(end for _, end in same) - min(end for _, end in same) for same in by_collective)
    longest = statistics.median(max(end - start for start, end in same) for same in by_collective)
    if spread > min(max(MAX_RESIDUAL * longest, MIN_RESIDUAL_NS), MAX_RESIDUAL_NS):
        return None
    last = [max(start for start, _ in same) for same in by_collective]
    earliest = [min(start for start, _ in same) for same in by_collective]
    return Aligned(
        offsets,
        tuple(
            tuple(min(max(then - start, 0), end - start) for (start, end), then in zip(rank, last, strict=True))
            for rank in moved
        ),
        tuple(tuple(start - then for (start, _), then in zip(rank, earliest, strict=True)) for rank in moved),
    )


def overlap(windows: Sequence[tuple[int, int]]) -> bool:
    """Whether all windows, as (start, end) in ns of one clock, have a moment in common."""
    return max(start for start, _ in windows) <= min(end for _, end in windows)

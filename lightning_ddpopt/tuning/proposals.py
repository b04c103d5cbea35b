"""Which bucket capacities are worth a trial, by the model. Pure; imports no torch."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_ddpopt.tuning.link import Link
from lightning_ddpopt.tuning.simulator import (
    MIB,
    NO_INTERFERENCE,
    Buckets,
    Interference,
    bucket_bytes,
    buckets_of,
    end_of_reduction,
    launch_times,
    simulate,
)
from lightning_ddpopt.tuning.timeline import Timeline

CAPACITIES_MB = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0, 800.0)
PARTS = (2, 3, 4, 6, 8, 12, 16, 32)
"""A model is also split into about so many buckets: small ones need capacities that no list foresees."""
SMALLEST_MB = 1 / 16
ALIKE_MS, ALIKE_BUCKETS = 0.003, 1.25
"""Two capacities are alike if they predict the same within 0.3 % and their numbers of buckets within a factor 1.25."""
LIST_GAIN = 0.02
MOST_ATOMS = 250


@dataclass(frozen=True)
class Proposal:
    """One candidate.

    Args:
        bucket_cap_mb: as DDP takes it, in MiB.
        buckets: its layout.
        predicted_ms: step time that the model gives.
        exposed_ms: exposed communication in it.

    """

    bucket_cap_mb: float | tuple[float, ...] | None
    buckets: Buckets
    predicted_ms: float
    exposed_ms: float


def grid(timeline: Timeline) -> list[float]:
    """Single capacities in MiB, one for each layout, the largest for one bucket only."""
    total_mb = timeline.total_bytes / MIB
    parts = [_rounded(total_mb / part) for part in PARTS]
    capacities = sorted({*CAPACITIES_MB, *(part for part in parts if part >= SMALLEST_MB), math.ceil(total_mb) + 1.0})
    by_layout: dict[Buckets, float] = {}
    for capacity in capacities:
        by_layout.setdefault(buckets_of(timeline.gradients, capacity), capacity)
    return list(by_layout.values())


def propose(
    timeline: Timeline,
    link: Link,
    interference: Interference = NO_INTERFERENCE,
    payload_factor: float = 1.0,
    *,
    most: int = 3,
    capacities: Sequence[float] | None = None,
) -> list[Proposal]:
    """The best candidates, best first, none with the layout of torch's default capacity.

    They are single capacities of unlike layouts; a capacity for each bucket replaces the last of them only where it
    promises 2 % over the best single one. The model knows what a reduction costs, not what a bucket costs beside it:
    so one of several has at most half as many buckets as the first, if such a one promises anything.

    Args:
        timeline: the step without communication.
        link: the cost of reductions.
        interference: how they disturb each other.
        payload_factor: bytes on the wire per byte of gradient.
        most: how many at most.
        capacities: in MiB; only these then, in the order of what they promise.

    """

    def proposal(bucket_cap_mb: float | tuple[float, ...] | None) -> Proposal:
        buckets = buckets_of(timeline.gradients, bucket_cap_mb)
        simulation = simulate(timeline, buckets, link, interference, payload_factor)
        return Proposal(bucket_cap_mb, buckets, simulation.step_ms, simulation.exposed_ms)

    default = proposal(None)
    singles = sorted(
        (proposal(capacity) for capacity in capacities or grid(timeline)), key=lambda one: one.predicted_ms
    )
    chosen: list[Proposal] = []
    for single in singles:
        is_new = all(single.buckets != other.buckets for other in [default, *chosen])
        if len(chosen) < most and is_new and (capacities or not any(_are_alike(single, other) for other in chosen)):
            chosen.append(single)
    if capacities:
        return chosen
    best_single = min(default, singles[0], key=lambda one: one.predicted_ms)
    if len({gradient.dtype for gradient in timeline.gradients}) == 1:
        lists = [proposal(caps) for caps in _lists(timeline, link, interference, payload_factor, best_single)]
        best_list = min(lists, key=lambda one: one.predicted_ms, default=None)
        if best_list is not None and best_list.predicted_ms <= (1 - LIST_GAIN) * best_single.predicted_ms:
            chosen = [best_list, *chosen[: most - 1]]
    if most > 1 and chosen and not any(_has_half(one, chosen[0]) for one in chosen):
        others = chosen[: most - 1]
        few = [one for one in singles if _has_half(one, chosen[0]) and not any(_are_alike(one, it) for it in others)]
        if few and few[0].predicted_ms < default.predicted_ms:
            chosen = [*others, few[0]]
    return chosen


def _has_half(one: Proposal, other: Proposal) -> bool:
    return 2 * len(one.buckets) <= len(other.buckets)


def _are_alike(one: Proposal, other: Proposal) -> bool:
    few, many = sorted((len(one.buckets), len(other.buckets)))
    return abs(one.predicted_ms - other.predicted_ms) <= ALIKE_MS * other.predicted_ms and many <= ALIKE_BUCKETS * few


def _lists(
    timeline: Timeline, link: Link, interference: Interference, payload_factor: float, best: Proposal
) -> Iterator[tuple[float, ...]]:
    """Capacities for each bucket: the best single one with small first and last buckets, and the best of all."""
    sizes = bucket_bytes(timeline.gradients, best.buckets)
    cuts = list(itertools.accumulate(sizes))
    ends = list(itertools.accumulate(gradient.payload_bytes for gradient in timeline.gradients))
    for part in (4, 16):
        first = next(end for end in ends if end >= cuts[0] / part)
        last = next(end for end in ends if end >= ends[-1] - sizes[-1] / part or end == ends[-1])
        yield from _exact(timeline, [*sorted({first, *cuts[:-1], last} - {ends[-1]}), ends[-1]])
    for surcharge in (0.0, 0.25, 1.0):
        yield from _exact(timeline, _best_cuts(timeline, link, interference, payload_factor, surcharge))


def _exact(timeline: Timeline, cuts: list[int]) -> Iterator[tuple[float, ...]]:
    """The capacities that give buckets which end at these byte offsets, if DDP would form them exactly."""
    sizes = [end - start for start, end in itertools.pairwise([0, *cuts])]
    capacities = tuple(size / MIB for size in sizes)
    obtained = bucket_bytes(timeline.gradients, buckets_of(timeline.gradients, capacities))
    if min(sizes) > 0 and list(obtained) == sizes:
        yield capacities


def _best_cuts(
    timeline: Timeline, link: Link, interference: Interference, payload_factor: float, surcharge: float
) -> list[int]:
    """Ends of the buckets, in bytes, with which the last reduction ends first after backward; exact without surcharge.

    Dynamic programming over the ends of buckets: the reductions of the first i gradients end at best at ``f(i)``, the
    least end, over j < i, of a reduction of the gradients j to i that starts at ``max(f(j), ready(i))``. That is
    not yet the shortest step: backward is slowed by reductions, so that many small ones are dear; the surcharge, in
    parts of the smallest's cost, is for that.

    """
    atoms = _atoms(timeline)
    ready = [ready_ms for _, ready_ms in atoms]
    ends = [0, *(end for end, _ in atoms)]
    extra_ms = surcharge * link.cost(0) * (1 + interference.backward_slowdown)
    finish = [0.0] + [math.inf] * len(atoms)
    before = [0] * (len(atoms) + 1)
    for i in range(1, len(atoms) + 1):
        for j in range(i):
            cost_ms = link.cost((ends[i] - ends[j]) * payload_factor) + extra_ms
            start_ms = max(finish[j], ready[i - 1])
            end = end_of_reduction(start_ms, cost_ms, timeline.backward_ms, interference)
            if end < finish[i]:
                finish[i], before[i] = end, j
    cuts, i = [], len(atoms)
    while i > 0:
        cuts.append(ends[i])
        i = before[i]
    return cuts[::-1]


def _atoms(timeline: Timeline) -> list[tuple[int, float]]:
    """(end in bytes, launch in ms) of each gradient, neighbours merged where there are very many."""
    ends = itertools.accumulate(gradient.payload_bytes for gradient in timeline.gradients)
    atoms = list(zip(ends, launch_times(timeline.gradients), strict=True))
    if len(atoms) <= MOST_ATOMS:
        return atoms
    every = atoms[-1][0] / MOST_ATOMS
    merged = [atom for atom, following in itertools.pairwise(atoms) if following[0] // every > atom[0] // every]
    return [*merged, atoms[-1]]


def _rounded(capacity_mb: float) -> float:
    """To two significant digits."""
    return float(f"{capacity_mb:.2g}")

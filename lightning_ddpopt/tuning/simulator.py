"""What a layout costs: the pipeline of backward and reductions, simulated. Pure; imports no torch."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from lightning_ddpopt.tuning.link import Link
from lightning_ddpopt.tuning.timeline import Gradient, Timeline

MIB = 2**20
Buckets: TypeAlias = tuple[tuple[int, ...], ...]
"""Indices of the gradients in each bucket, in the order of reduction."""


def buckets_of(gradients: Sequence[Gradient], bucket_cap_mb: float | Sequence[float] | None) -> Buckets:
    """The buckets that DDP forms of gradients in ready order.

    As torch's ``compute_bucket_assignment_by_size``: a bucket holds one type and closes once it has reached its
    capacity; each type goes through the list of capacities for itself, and the last one repeats. What stays open at the
    end comes last; between several types that order is torch's hash order, here that of their first gradients.

    """
    if bucket_cap_mb is None:
        caps_mb: Sequence[float] = (1.0, 25.0)
    else:
        caps_mb = bucket_cap_mb if isinstance(bucket_cap_mb, Sequence) else (bucket_cap_mb,)
    limits = [int(cap * MIB) for cap in caps_mb]
    closed: list[tuple[int, ...]] = []
    filling: dict[str, list[int]] = {}
    size: dict[str, int] = {}
    closings: dict[str, int] = {}
    for index, gradient in enumerate(gradients):
        key = gradient.dtype
        filling.setdefault(key, []).append(index)
        size[key] = size.get(key, 0) + gradient.payload_bytes
        if size[key] >= limits[min(closings.get(key, 0), len(limits) - 1)]:
            closed.append(tuple(filling.pop(key)))
            size[key] = 0
            closings[key] = closings.get(key, 0) + 1
    return (*closed, *(tuple(rest) for rest in filling.values()))


@dataclass(frozen=True)
class Interference:
    """How compute and communication disturb each other.

    Args:
        backward_slowdown: while a reduction runs, backward takes ``1 + backward_slowdown`` times as long.
        communication_factor: a reduction in training costs this many times what the link measured.

    """

    backward_slowdown: float = 0.0
    communication_factor: float = 1.0


NO_INTERFERENCE = Interference()


@dataclass(frozen=True)
class Simulation:
    """One simulated step.

    Args:
        step_ms: the whole step.
        backward_ms: from the start of backward until nothing is left to compute in it.
        exposed_ms: from there to the end of the last reduction.
        reductions: start and end of each bucket's reduction in ms after the start of backward.

    """

    step_ms: float
    backward_ms: float
    exposed_ms: float
    reductions: tuple[tuple[float, float], ...]


def simulate(
    timeline: Timeline,
    buckets: Buckets,
    link: Link,
    interference: Interference = NO_INTERFERENCE,
    payload_factor: float = 1.0,
) -> Simulation:
    """Run one step.

    A bucket's reduction is launched when its gradients are ready and the buckets before it are launched; reductions run
    one after the other. While one runs, backward is slowed.

    Args:
        timeline: the step without communication.
        buckets: the layout.
        link: the cost of reductions.
        interference: how they disturb each other.
        payload_factor: bytes on the wire per byte of gradient (a hook's).

    """
    stretch = 1 + interference.backward_slowdown
    now_ms = computed_ms = free_ms = 0.0  # wall time, how much of backward is done by then, when the wire is free
    reductions: list[tuple[float, float]] = []

    def compute_until(target_ms: float) -> None:
        nonlocal now_ms, computed_ms
        work_ms = max(0.0, target_ms - computed_ms)
        slowed_ms = min(work_ms, max(0.0, free_ms - now_ms) / stretch)
        now_ms += slowed_ms * stretch + (work_ms - slowed_ms)
        computed_ms += work_ms

    for bucket in buckets:
        compute_until(max(timeline.gradients[index].ready_ms for index in bucket))
        size = sum(timeline.gradients[index].payload_bytes for index in bucket)
        start_ms = max(now_ms, free_ms)
        free_ms = start_ms + interference.communication_factor * link.cost(size * payload_factor)
        reductions.append((start_ms, free_ms))
    compute_until(timeline.backward_ms)
    exposed_ms = max(0.0, free_ms - now_ms)
    step_ms = timeline.forward_ms + now_ms + exposed_ms + timeline.rest_ms
    return Simulation(step_ms, now_ms, exposed_ms, tuple(reductions))


LARGEST_SLOWDOWN, FACTORS = 4.0, (0.2, 5.0)


def fit_interference(
    timeline: Timeline,
    buckets: Buckets,
    link: Link,
    *,
    measured_backward_ms: float,
    measured_exposed_ms: float,
    payload_factor: float = 1.0,
) -> Interference:
    """The interference with which :func:`simulate` gives what was measured under ``buckets``.

    Backward's length tells its slow-down, the exposed time what reductions cost; both grow with what they tell, so that
    bisection finds them, in turn until they settle.

    Args:
        timeline: the step without communication.
        buckets: the layout that was measured.
        link: the cost of reductions alone.
        measured_backward_ms: time from the start of backward to the last gradient.
        measured_exposed_ms: from there to the end of backward.
        payload_factor: as for :func:`simulate`.

    """

    def exposed_ms(factor: float, slowdown: float) -> float:
        return simulate(timeline, buckets, link, Interference(slowdown, factor), payload_factor).exposed_ms

    def backward_ms(slowdown: float, factor: float) -> float:
        return simulate(timeline, buckets, link, Interference(slowdown, factor), payload_factor).backward_ms

    slowdown, factor = 0.0, 1.0
    for _ in range(20):
        factor = _bisect(partial(exposed_ms, slowdown=slowdown), measured_exposed_ms, *FACTORS)
        slowdown = _bisect(partial(backward_ms, factor=factor), measured_backward_ms, 0.0, LARGEST_SLOWDOWN)
    return Interference(slowdown, factor)


def _bisect(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where a growing function reaches ``target``; the nearer end if it does not."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return (low + high) / 2


def bucket_bytes(gradients: Sequence[Gradient], buckets: Buckets) -> tuple[int, ...]:
    """Bytes of each bucket."""
    return tuple(sum(gradients[index].payload_bytes for index in bucket) for bucket in buckets)


def launch_times(gradients: Sequence[Gradient]) -> list[float]:
    """For each gradient in order, when it and all before it are ready, in ms."""
    return list(itertools.accumulate((gradient.ready_ms for gradient in gradients), max))

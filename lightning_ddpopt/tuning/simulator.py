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
    """How backward and a reduction slow each other down while both run. After backward a reduction has the link's cost.

    Args:
        backward_slowdown: backward takes ``1 + backward_slowdown`` times as long then.
        communication_slowdown: a reduction takes ``1 + communication_slowdown`` times as long then.

    """

    backward_slowdown: float = 0.0
    communication_slowdown: float = 0.0


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
    one after the other. While one runs beside backward, both are slowed.

    Args:
        timeline: the step without communication.
        buckets: the layout.
        link: the cost of reductions.
        interference: how they disturb each other.
        payload_factor: bytes on the wire per byte of gradient (a hook's).

    """
    slowdown = interference.backward_slowdown
    sizes = bucket_bytes(timeline.gradients, buckets)
    launch_ms = end_ms = 0.0  # as if nothing were slowed, that is in ms of work done in backward
    beside_ms = 0.0  # work that was done in backward beside a reduction
    reductions: list[tuple[float, float]] = []
    for bucket, size in zip(buckets, sizes, strict=True):
        launch_ms = max(launch_ms, *(timeline.gradients[index].ready_ms for index in bucket))
        start_ms, before_ms = max(launch_ms, end_ms), beside_ms
        end_ms = end_of_reduction(start_ms, link.cost(size * payload_factor), timeline.backward_ms, interference)
        beside_ms += max(0.0, min(end_ms, timeline.backward_ms) - start_ms)
        reductions.append((start_ms + slowdown * before_ms, end_ms + slowdown * beside_ms))
    backward_ms = timeline.backward_ms + slowdown * beside_ms
    exposed_ms = max(0.0, end_ms - timeline.backward_ms)
    step_ms = timeline.forward_ms + backward_ms + exposed_ms + timeline.rest_ms
    return Simulation(step_ms, backward_ms, exposed_ms, tuple(reductions))


def end_of_reduction(start_ms: float, cost_ms: float, backward_ms: float, interference: Interference) -> float:
    """When a reduction ends, in ms of work done in backward, and in wall time after it.

    Args:
        start_ms: when it starts, likewise.
        cost_ms: what it costs alone.
        backward_ms: all of backward's work.
        interference: how they disturb each other.

    """
    work_per_ms = (1 + interference.communication_slowdown) / (1 + interference.backward_slowdown)
    beside_ms = max(0.0, min(cost_ms * work_per_ms, backward_ms - start_ms))
    return start_ms + beside_ms + cost_ms - beside_ms / work_per_ms


LARGEST_BACKWARD_SLOWDOWN, LARGEST_COMMUNICATION_SLOWDOWN = 4.0, 2.0
EXPOSED_TOLERANCE = 0.1
"""So much of the exposed time may differ from the simulated one by what the link was measured with."""


def fit_interference(
    timeline: Timeline,
    buckets: Buckets,
    link: Link,
    *,
    measured_backward_ms: float,
    measured_exposed_ms: float,
    payload_factor: float = 1.0,
) -> Interference:
    """The interference with which :func:`simulate` comes nearest to what was measured under ``buckets``.

    Backward's length tells its slow-down, the exposed time that of the reductions; both grow with what they tell, so
    that bisection finds them, in turn until they settle. Reductions are taken as slowed only where that explains an
    exposed time that is longer than the link's by more than a tenth: where no reduction waits for another one, it tells
    nothing of those before.

    Args:
        timeline: the step without communication.
        buckets: the layout that was measured.
        link: the cost of reductions alone.
        measured_backward_ms: time from the start of backward to the last gradient.
        measured_exposed_ms: from there to the end of backward.
        payload_factor: as for :func:`simulate`.

    """

    def exposed_ms(communication: float, backward: float) -> float:
        return simulate(timeline, buckets, link, Interference(backward, communication), payload_factor).exposed_ms

    def backward_ms(backward: float, communication: float) -> float:
        return simulate(timeline, buckets, link, Interference(backward, communication), payload_factor).backward_ms

    def backward_slowdown(communication: float) -> float:
        simulated = partial(backward_ms, communication=communication)
        return _bisect(simulated, measured_backward_ms, LARGEST_BACKWARD_SLOWDOWN)

    backward = communication = 0.0
    for _ in range(20):
        simulated = partial(exposed_ms, backward=backward)
        communication = _bisect(simulated, measured_exposed_ms, LARGEST_COMMUNICATION_SLOWDOWN)
        backward = backward_slowdown(communication)
    alone = backward_slowdown(0.0)
    is_longer = measured_exposed_ms > (1 + EXPOSED_TOLERANCE) * exposed_ms(0.0, alone)
    explains_it = exposed_ms(communication, backward) > (1 - EXPOSED_TOLERANCE) * measured_exposed_ms
    return Interference(backward, communication) if is_longer and explains_it else Interference(alone, 0.0)


def _bisect(function: Callable[[float], float], target: float, largest: float) -> float:
    """The slow-down at which a growing function reaches ``target``; the nearest one allowed if it does not."""
    low, high = 0.0, largest
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return low if low == 0.0 else (low + high) / 2


def bucket_bytes(gradients: Sequence[Gradient], buckets: Buckets) -> tuple[int, ...]:
    """Bytes of each bucket."""
    return tuple(sum(gradients[index].payload_bytes for index in bucket) for bucket in buckets)


def launch_times(gradients: Sequence[Gradient]) -> list[float]:
    """For each gradient in order, when it and all before it are ready, in ms."""
    return list(itertools.accumulate((gradient.ready_ms for gradient in gradients), max))

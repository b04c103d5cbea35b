"""The figures of an analysis, as values; `analysis` computes them. All times in ms of the device, unless said."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Figures:
    """One step, or the mean over several. A figure that the trace cannot tell is None.

    Without a backward pass in the step its parts cannot be told, and without a forward not the wait for the batch.

    Args:
        step_ms: from when the device could begin with the step until it could begin with the next. The sum of
            ``data_wait_ms``, ``forward_ms``, ``backward_ms``, ``optimizer_ms`` and ``other_ms``.
        data_wait_ms: before forward: the wait for the batch and its copy to the device, and callbacks after the step
            before.
        forward_ms: from forward's first operation to its last.
        backward_ms: from the end of forward to the optimizer's first operation; exposed communication lies here.
        optimizer_ms: from the optimizer's first operation to its last.
        other_ms: after that.
        compute_ms: the device is at work on something that is no collective.
        backward_compute_ms: the part of compute that backward launched: what communication can hide under.
        communication_ms: a collective is on the device, waiting for late peers included.
        hidden_ms: the part of communication under compute.
        exposed_ms: the part of it that is not.
        wire_ms: the part of communication in which all ranks had come; needs all ranks' traces.
        wait_ms: the part before the last one had.
        exposed_wire_ms: the part of ``wire_ms`` that is exposed.
        idle_ms: the device has nothing to do.
        longest_idle_ms: the longest such gap.
        gradient_copies: device-to-device copies of reduced gradients out of their buckets.
        gradient_copy_ms: the time of these.
        gradient_copy_bytes: the bytes of these.
        host_copy_ms: copies from host to device.
        host_copy_bytes: the bytes of these.
        blocking_copies: of these, the ones that make the host wait.
        blocked_ms: how long the host waits there.
        backwards: backward passes (micro-batches).
        exchanges: backward passes in which gradients are reduced.
        early_exchanges: of these, the ones that another exchange follows before the optimizer's next step.
        reductions: collectives that reduce gradients: all-reduces in backward; where ranges tell of buckets, only those
            of buckets, as SyncBatchNorm reduces in backward too.
        collectives: all collectives; also broadcasts of buffers, and what the training step reduces.

    """

    step_ms: float
    data_wait_ms: float | None
    forward_ms: float | None
    backward_ms: float | None
    optimizer_ms: float | None
    other_ms: float | None
    compute_ms: float
    backward_compute_ms: float
    communication_ms: float
    hidden_ms: float
    exposed_ms: float
    wire_ms: float | None
    wait_ms: float | None
    exposed_wire_ms: float | None
    idle_ms: float | None
    longest_idle_ms: float | None
    gradient_copies: float | None
    gradient_copy_ms: float | None
    gradient_copy_bytes: float | None
    host_copy_ms: float | None
    host_copy_bytes: float | None
    blocking_copies: float | None
    blocked_ms: float | None
    backwards: float
    exchanges: float
    early_exchanges: float
    reductions: float
    collectives: float

    def percent(self, ms: float) -> float:
        """``ms`` as a percentage of the step."""
        return 100 * ms / self.step_ms if self.step_ms else 0.0


@dataclass(frozen=True)
class Collective:
    """One collective of a step, by its place in it; times are means over the steps, the rate is the median.

    Args:
        position: place in the step, from 0.
        name: ``"AllReduce"``, …
        bucket: index of the bucket that it reduces, where ranges tell.
        hook: the communication hook, where ranges tell.
        bucket_bytes: bytes of that bucket's gradients.
        payload_bytes: what the collective was given, where the trace tells. With the hook ``none`` that is the bucket.
        calls: how many there were.
        duration_ms: time on the device.
        exposed_ms: the part not under compute.
        wire_ms: the part in which all ranks had come.
        wait_ms: the part before.
        busbw_gb_per_s: bus bandwidth in 1e9 bytes/s, of an all-reduce with known payload: payload over time times
            2(n-1)/n for n ranks. Over ``wire_ms`` where that is known, else over the whole duration.

    """

    position: int
    name: str
    bucket: int | None
    hook: str | None
    bucket_bytes: int | None
    payload_bytes: int | None
    calls: int
    duration_ms: float
    exposed_ms: float
    wire_ms: float | None
    wait_ms: float | None
    busbw_gb_per_s: float | None


Spans: TypeAlias = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Timeline:
    """One step as lanes, in ms from a zero that all ranks share where they could be aligned."""

    step: str
    span: tuple[float, float]
    phases: tuple[tuple[str, float, float], ...]
    compute: Spans
    communication: Spans
    wait: Spans
    exposed: Spans
    gradient_copies: Spans


@dataclass(frozen=True)
class RankAnalysis:
    """One rank: the mean over its steps, each step, and its collectives.

    ``late_ms`` is how much later than the first rank it starts a collective, in the mean; ``last_share`` how often it
    is the last one; ``last_steps`` in how many of the analysis' ``compared_steps`` it is later than all others, in the
    mean over the step's collectives. All None where ranks could not be aligned. ``left_out`` names those of ``steps``
    that are in none of the means.

    """

    rank: int
    source: str
    file: str
    mean: Figures
    steps: tuple[tuple[str, Figures], ...]
    collectives: tuple[Collective, ...]
    late_ms: float | None
    last_share: float | None
    last_steps: int | None
    timeline: Timeline
    left_out: tuple[str, ...] = ()

    @property
    def meant_steps(self) -> int:
        """How many steps the means are over."""
        return len(self.steps) - len(self.left_out)


@dataclass(frozen=True)
class Analysis:
    """All ranks, and the mean over them.

    ``straggler`` is the rank that starts its collectives last, in the mean; ``compared_steps`` how many steps all ranks
    have with the same collectives.

    """

    ranks: tuple[RankAnalysis, ...]
    mean: Figures
    world_size: int | None
    is_cpu: bool
    is_ddp: bool
    straggler: int | None
    notes: tuple[str, ...]
    compared_steps: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings, for JSON; without the timelines, which are for pictures."""
        made = asdict(self)
        for rank in made["ranks"]:
            del rank["timeline"]
            rank["steps"] = [{"name": name, **figures} for name, figures in rank["steps"]]
        return made


def rate(gb_per_s: float | None) -> str:
    """A bandwidth as text: one decimal, or two digits if it is small; nothing for one that is not known."""
    return "" if not gb_per_s else f"{gb_per_s:.1f}" if gb_per_s >= 1 else f"{gb_per_s:.2g}"


def mean_of(figures: Sequence[Figures]) -> Figures:
    """The mean of each figure; None where one of them does not have it. The longest gap is the longest of all."""
    means: dict[str, Any] = {}
    for field in fields(Figures):
        values = [getattr(one, field.name) for one in figures]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            means[field.name] = None
        else:
            means[field.name] = max(known) if field.name == "longest_idle_ms" else statistics.mean(known)
    return Figures(**means)

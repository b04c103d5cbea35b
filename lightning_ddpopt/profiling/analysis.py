"""What traces say of a training step: its parts, its communication, what of that is exposed, and who waited for whom.

The results are values of ``figures``; what to make of them is left to ``findings``.
"""

import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from lightning_ddpopt.profiling.alignment import Aligned, align, overlap
from lightning_ddpopt.profiling.copies import backward_passes, blocking_copies, early_exchanges, gradient_copies
from lightning_ddpopt.profiling.events import REDUCTIONS, Trace, rows
from lightning_ddpopt.profiling.figures import Analysis, Collective, Figures, RankAnalysis, Spans, Timeline, mean_of
from lightning_ddpopt.profiling.overlap import Interval, clip, difference, intersection, merge, total
from lightning_ddpopt.profiling.phases import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    Phased,
    Step,
    assign_buckets,
    bucket_ranges,
    phased,
)

_TIMELINE_PIECES = 1500
"""The timeline joins pieces that are closer than the step over this: they would not be seen apart."""
_UNEVEN = 0.05  # of the first step

_PARTS: Mapping[str, frozenset[str]] = {
    "data wait": frozenset({FORWARD}),
    FORWARD: frozenset({FORWARD, BACKWARD}),
    BACKWARD: frozenset({BACKWARD}),
    OPTIMIZER: frozenset({BACKWARD}),
    "other": frozenset({BACKWARD}),
}
"""The parts of a step, and what must be in a step before they can be told."""


@dataclass
class _Call:
    """One collective as one rank saw it: ``row`` of its operations. ``wait_ns`` is -1 until ranks are aligned."""

    start_ns: int
    end_ns: int
    name: str
    payload_bytes: int
    group_size: int
    bucket: tuple[int, int, str] | None
    row: int
    exposed_ns: int = 0
    wait_ns: int = -1
    late_ns: int = -1

    @property
    def interval(self) -> Interval:
        return self.start_ns, self.end_ns

    @property
    def waiting(self) -> Interval:
        return self.start_ns, self.start_ns + max(self.wait_ns, 0)

    @property
    def moving(self) -> Interval:
        return self.start_ns + max(self.wait_ns, 0), self.end_ns


def analyze(traces: Sequence[Trace]) -> Analysis:
    """Analyse the traces of one run, one a rank.

    Raises:
        TraceError: a trace without steps.

    """
    ranks = [phased(trace) for trace in traces]
    calls = [_calls(rank) for rank in ranks]
    told = [trace.world_size for trace in traces if trace.world_size is not None]
    world_size = max(told) if told else len(traces) if len(traces) > 1 else None
    notes = _notes(ranks)
    if not told and world_size is not None:
        notes.append(f"The traces do not tell the world size: it is taken as the {world_size} that were given.")
    elif world_size is not None and len(traces) < world_size:
        notes.append(f"{len(traces)} of {world_size} ranks were given: waiting for the others counts as wire.")
    is_one_time = overlap([_window(trace) for trace in traces if trace.epoch_ns is not None] or [(0, 0)])
    aligned = _align(ranks, calls) if is_one_time else None
    if not is_one_time:
        notes.append(
            "The traces were recorded at different times, by the hosts' clocks: they are not of one run, or the clocks"
            " are wrong. Wire and wait cannot be told."
        )
    elif len(traces) > 1 and aligned is None and any(any(step) for rank in calls for step in rank):
        notes.append(
            "The ranks' collectives do not match in their steps, order and ends: wire and wait cannot be told."
        )
    left_out, told_of = _uneven_start(ranks, calls)
    notes += told_of
    offsets = aligned.offset_ns if aligned is not None else None
    return _summary(ranks, calls, world_size, offsets, left_out, tuple(notes))


def _window(trace: Trace) -> Interval:
    """When the trace was recorded, in Unix time."""
    zero = trace.epoch_ns or 0
    return zero + int(trace.operations["start_ns"].min()), zero + int(trace.operations["end_ns"].max())


def _notes(ranks: Sequence[Phased]) -> list[str]:
    """The ranks' notes, each once, with the ranks that it holds for unless these are all."""
    held: dict[str, list[int]] = {}
    for rank in ranks:
        for note in dict.fromkeys(rank.notes):
            held.setdefault(note, []).append(rank.trace.rank)
    return [
        note if len(numbers) == len(ranks) else f"Rank {', '.join(map(str, numbers))}: {note}"
        for note, numbers in held.items()
    ]


def _uneven_start(ranks: Sequence[Phased], calls: Sequence[Sequence[Sequence[_Call]]]) -> tuple[set[str], list[str]]:
    """Names of first steps in which a rank waits far longer than in the others, and notes on them.

    Profilers do not start on all ranks at once. Such a step is of no use on any rank, but it is kept where a rank has
    no other one.

    """
    found: list[tuple[str, str]] = []
    for rank, of_rank in zip(ranks, calls, strict=True):
        waits = [sum(max(call.wait_ns, 0) for call in step) for step in of_rank]
        first, later = rank.steps[0], max(waits[1:], default=0)
        if 0 < waits[0] >= max(3 * later, _UNEVEN * (first.end_ns - first.start_ns)):
            than = (
                f", the first step, and at most {_ms(later):.1f} ms in a later one" if waits[1:] else ", its only step"
            )
            found.append((first.name, f"Rank {rank.trace.rank} waits {_ms(waits[0]):.1f} ms in {first.name}{than}: "))
    left_out = {name for name, _ in found}
    if all({step.name for step in rank.steps} - left_out for rank in ranks):
        end = "the ranks' profilers did not start together. All ranks' means are without this step."
        return left_out, [note + end for _, note in found]
    end = "perhaps the ranks' profilers did not start together. The step is kept, for want of others: record more."
    return set(), [note + end for _, note in found]


def _summary(
    ranks: Sequence[Phased],
    calls: Sequence[Sequence[Sequence[_Call]]],
    world_size: int | None,
    offsets: Sequence[int] | None,
    left_out: set[str],
    notes: tuple[str, ...],
) -> Analysis:
    kept = [
        [index for index, step in enumerate(rank.steps) if step.name not in left_out] or list(range(len(rank.steps)))
        for rank in ranks
    ]
    shown = _shown_steps(ranks, kept)
    last, compared = _last_by_step(ranks, calls, kept)
    if offsets is None:
        zeros = [rank.steps[step].start_ns for rank, step in zip(ranks, shown, strict=True)]
    else:
        begins = [rank.steps[step].start_ns - offset for rank, step, offset in zip(ranks, shown, offsets, strict=True)]
        zeros = [min(begins) + offset for offset in offsets]
    made = []
    for rank, of_rank, step, zero, meant, last_steps in zip(ranks, calls, shown, zeros, kept, last, strict=True):
        has_buckets = any(call.bucket is not None for calls_ in of_rank for call in calls_)
        figures = tuple(
            (s.name, _figures(rank, index, of_rank[index], has_buckets)) for index, s in enumerate(rank.steps)
        )
        aligned = [call for index in meant for call in of_rank[index] if call.late_ns >= 0]
        late = [call.late_ns for call in aligned]
        is_last = [call.wait_ns == 0 for call in aligned]
        made.append(
            RankAnalysis(
                rank.trace.rank,
                rank.trace.source,
                rank.trace.path.name,
                mean_of([figures[index][1] for index in meant]),
                figures,
                _collectives([of_rank[index] for index in meant], world_size),
                statistics.mean(late) / 1e6 if late else None,
                statistics.mean(is_last) if is_last else None,
                last_steps if late else None,
                _timeline(rank, step, of_rank[step], zero),
                tuple(s.name for index, s in enumerate(rank.steps) if index not in meant),
            )
        )
    late_ms = {rank.rank: rank.late_ms for rank in made if rank.late_ms is not None}
    if any(rank.mean.backward_ms is None for rank in made):
        notes = (*notes, "A step without a backward pass has no parts: those that are left empty cannot be told.")
    return Analysis(
        tuple(made),
        mean_of([rank.mean for rank in made]),
        world_size,
        all(rank.trace.is_cpu for rank in ranks),
        any(_is_ddp(rank.trace) for rank in ranks) or any(any(step) for rank in calls for step in rank),
        max(late_ms, key=lambda rank: late_ms[rank]) if late_ms else None,
        notes,
        compared,
    )


def _last_by_step(
    ranks: Sequence[Phased], calls: Sequence[Sequence[Sequence[_Call]]], kept: Sequence[Sequence[int]]
) -> tuple[list[int], int]:
    """In how many steps each rank is the latest, in the mean over the step's collectives, and in how many any is."""
    late: dict[str, list[float]] = {}
    for rank, of_rank, meant in zip(ranks, calls, kept, strict=True):
        for index in meant:
            lates = [call.late_ns for call in of_rank[index] if call.late_ns >= 0]
            if lates:
                late.setdefault(rank.steps[index].name, []).append(statistics.mean(lates))
    compared = [by_rank for by_rank in late.values() if len(by_rank) == len(ranks)]
    last = [by_rank.index(max(by_rank)) for by_rank in compared]
    return [last.count(place) for place in range(len(ranks))], len(compared)


def _is_ddp(trace: Trace) -> bool:
    names = trace.ranges["name"]
    return bool(names.str.match(r"DistributedDataParallel\.forward|bucket \d+ |nccl").any())


def _calls(rank: Phased) -> list[list[_Call]]:
    """The collectives of each step, in the order in which the device began them."""
    buckets = bucket_ranges(rank.trace)
    found = []
    for index, step in enumerate(rank.steps):
        table = rank.operations
        table = table[(table["step"] == index) & (table["collective"] != "")]
        inside = [bucket for bucket in buckets if step.host_start_ns <= bucket[0] < step.host_end_ns]
        launches = [(int(row.launch_ns), int(row.thread), str(row.collective)) for row in rows(table)]
        compute = _compute(rank, step)
        calls = []
        for place, row, bucket in zip(table.index, rows(table), assign_buckets(launches, inside), strict=True):
            payload = int(row.payload_bytes)
            if payload < 0 and bucket is not None and bucket[2] == "none":
                payload = bucket[1]
            call = _Call(int(row.start_ns), int(row.end_ns), str(row.collective), payload, int(row.group_size), bucket,
                         int(place))  # fmt: skip
            call.exposed_ns = total(difference([call.interval], _near(compute, call.interval)))
            calls.append(call)
        found.append(calls)
    return found


def _align(ranks: Sequence[Phased], calls: Sequence[Sequence[Sequence[_Call]]]) -> Aligned | None:
    """Write wait and lateness into the calls that all ranks have, by the names of their steps."""
    steps = [{step.name: index for index, step in enumerate(rank.steps)} for rank in ranks]
    matched: list[list[_Call]] = [[] for _ in ranks]
    for name in steps[0]:
        if not all(name in names for names in steps):
            continue
        same = [of_rank[names[name]] for of_rank, names in zip(calls, steps, strict=True)]
        if len({tuple((call.name, call.payload_bytes) for call in one) for one in same}) == 1:
            for into, one in zip(matched, same, strict=True):
                into.extend(one)
    aligned = align([[call.interval for call in one] for one in matched])
    if aligned is not None:
        for one, waits, lates in zip(matched, aligned.wait_ns, aligned.late_ns, strict=True):
            for call, wait, late in zip(one, waits, lates, strict=True):
                call.wait_ns, call.late_ns = wait, late
    return aligned


def _intervals(table: pd.DataFrame) -> list[Interval]:
    return list(zip(table["start_ns"].tolist(), table["end_ns"].tolist(), strict=True))


def _compute(rank: Phased, step: Step) -> list[Interval]:
    table = rank.operations
    near = table[(table["collective"] == "") & (table["end_ns"] > step.start_ns) & (table["start_ns"] < step.end_ns)]
    return clip(_intervals(near), (step.start_ns, step.end_ns))


def _near(merged: list[Interval], window: Interval) -> list[Interval]:
    """Those of a merged list that can meet the window."""
    first = bisect_left(merged, (window[0],))
    return merged[max(first - 1, 0) : bisect_left(merged, (window[1],))]


def _figures(rank: Phased, index: int, calls: Sequence[_Call], has_buckets: bool) -> Figures:
    step = rank.steps[index]
    window = (step.start_ns, step.end_ns)
    own = rank.operations[rank.operations["step"] == index]
    compute = _compute(rank, step)
    communication = clip([call.interval for call in calls], window)
    exposed = difference(communication, compute)
    idle = difference([window], [*compute, *communication])
    is_aligned = all(call.wait_ns >= 0 for call in calls)
    moving = [call.moving for call in calls]
    parts: dict[str, int] = {}
    for phase, start, end in _segments(own, step, calls):
        parts[phase] = parts.get(phase, 0) + end - start
    backwards = backward_passes(own)
    in_buckets = [call.row for call in calls if call.bucket is not None]
    reduced = [
        one["collective"].isin(REDUCTIONS) & ((not has_buckets) | one.index.isin(in_buckets)) for one in backwards
    ]
    exchanges = [one for one, is_reduced in zip(backwards, reduced, strict=True) if is_reduced.any()]
    copies = gradient_copies(own, backwards)
    known = _known_parts(own)
    host_copies = own[own["direction"] == "HtoD"]
    blocked = blocking_copies(rank.trace, host_copies)

    def on_device(value: float) -> float | None:
        return None if rank.trace.is_cpu else value

    def part(name: str) -> float | None:
        return _ms(parts.get(name, 0)) if name in known else None

    return Figures(
        step_ms=_ms(step.end_ns - step.start_ns),
        data_wait_ms=part("data wait"),
        forward_ms=part(FORWARD),
        backward_ms=part(BACKWARD),
        optimizer_ms=part(OPTIMIZER),
        other_ms=part("other"),
        compute_ms=_ms(total(compute)),
        backward_compute_ms=_ms(total(_intervals(own[(own["collective"] == "") & (own["phase"] == BACKWARD)]))),
        communication_ms=_ms(total(communication)),
        hidden_ms=_ms(total(communication) - total(exposed)),
        exposed_ms=_ms(total(exposed)),
        wire_ms=_ms(total(moving)) if is_aligned else None,
        wait_ms=_ms(total(communication) - total(moving)) if is_aligned else None,
        exposed_wire_ms=_ms(total(intersection(exposed, moving))) if is_aligned else None,
        idle_ms=on_device(_ms(total(idle))),
        longest_idle_ms=on_device(_ms(max((end - start for start, end in idle), default=0))),
        gradient_copies=on_device(len(copies)),
        gradient_copy_ms=on_device(_ms(total(_intervals(copies)))),
        gradient_copy_bytes=on_device(float(copies["bytes"].clip(lower=0).sum())),
        host_copy_ms=on_device(_ms(total(_intervals(host_copies)))),
        host_copy_bytes=on_device(float(host_copies["bytes"].clip(lower=0).sum())),
        blocking_copies=on_device(len(blocked)),
        blocked_ms=on_device(_ms(sum(end - start for start, end in blocked))),
        backwards=len(backwards),
        exchanges=len(exchanges),
        early_exchanges=early_exchanges(own, exchanges),
        reductions=sum(int(is_reduced.sum()) for is_reduced in reduced),
        collectives=len(calls),
    )


def _known_parts(own: pd.DataFrame) -> set[str]:
    done = set(own.loc[own["collective"] == "", "phase"])
    return {name for name, needs in _PARTS.items() if done >= needs}


def _segments(own: pd.DataFrame, step: Step, calls: Sequence[_Call]) -> list[tuple[str, int, int]]:
    """The step cut into phases that follow each other, as (phase, start, end) in ns.

    A phase is from its first operation to its last. Backward also has the gap before it and the gap to the optimizer,
    where exposed communication is; the gap before a forward is a wait for data, but for communication that still runs.

    """
    work = own[(own["collective"] == "") & own["phase"].isin([FORWARD, BACKWARD, OPTIMIZER])].sort_values("start_ns")
    groups: list[tuple[str, int, int]] = []
    for phase, start, end in zip(work["phase"], work["start_ns"].tolist(), work["end_ns"].tolist(), strict=True):
        if groups and groups[-1][0] == phase:
            groups[-1] = (phase, groups[-1][1], max(end, groups[-1][2]))
        else:
            groups.append((phase, start, end))
    cut: list[tuple[str, int, int]] = []
    at, before = step.start_ns, ""
    for phase, start, end in groups:
        start, end = max(start, at), max(end, at)
        if phase == FORWARD:
            running = [call.end_ns for call in calls if call.start_ns < start]
            reduced = min(max([at, *running]), start) if before == BACKWARD else at
            cut += [(BACKWARD, at, reduced), ("data wait", reduced, start)]
        elif before:
            cut.append((BACKWARD if BACKWARD in (phase, before) else phase, at, start))
        else:
            cut.append(("data wait", at, start))
        cut.append((phase, start, end))
        at, before = end, phase
    if before == BACKWARD:  # no optimizer step follows
        reduced = min(max([at, *(call.end_ns for call in calls)]), step.end_ns)
        cut.append((BACKWARD, at, reduced))
        at = reduced
    cut.append(("other", at, max(step.end_ns, at)))
    joined: list[tuple[str, int, int]] = []
    for phase, start, end in cut:
        if end <= start:
            continue
        if joined and joined[-1][0] == phase:
            start = joined.pop()[1]
        joined.append((phase, start, end))
    return joined


def _collectives(calls: Iterable[Sequence[_Call]], world_size: int | None) -> tuple[Collective, ...]:
    same: dict[tuple[int, str, int, tuple[int, int, str] | None], list[_Call]] = {}
    for step in calls:
        for position, call in enumerate(step):
            same.setdefault((position, call.name, call.payload_bytes, call.bucket), []).append(call)
    made = []
    for (position, name, payload, bucket), group in sorted(same.items(), key=lambda item: item[0][0]):
        is_aligned = all(call.wait_ns >= 0 for call in group)
        rates = [rate for call in group if (rate := _busbw(call, world_size)) is not None]
        made.append(
            Collective(
                position,
                name,
                bucket[0] if bucket else None,
                bucket[2] if bucket else None,
                bucket[1] if bucket else None,
                payload if payload > 0 else None,
                len(group),
                _ms(statistics.mean(call.end_ns - call.start_ns for call in group)),
                _ms(statistics.mean(call.exposed_ns for call in group)),
                _ms(statistics.mean(call.moving[1] - call.moving[0] for call in group)) if is_aligned else None,
                _ms(statistics.mean(call.wait_ns for call in group)) if is_aligned else None,
                statistics.median(rates) if rates else None,
            )
        )
    return tuple(made)


def _busbw(call: _Call, world_size: int | None) -> float | None:
    size = call.group_size if call.group_size > 0 else world_size
    moving_ns = call.moving[1] - call.moving[0]
    if call.name != "AllReduce" or call.payload_bytes <= 0 or not size or moving_ns <= 0:
        return None
    return call.payload_bytes / moving_ns * 2 * (size - 1) / size


def _shown_steps(ranks: Sequence[Phased], kept: Sequence[Sequence[int]]) -> list[int]:
    """The step to draw: of the first rank the one of median length, and on the others the one of that name."""
    lengths = {index: ranks[0].steps[index].end_ns - ranks[0].steps[index].start_ns for index in kept[0]}
    chosen = sorted(lengths, key=lengths.__getitem__)[(len(lengths) - 1) // 2]
    name = ranks[0].steps[chosen].name
    return [
        next((index for index in meant if rank.steps[index].name == name), min(meant, key=lambda at: abs(at - chosen)))
        for rank, meant in zip(ranks, kept, strict=True)
    ]


def _timeline(rank: Phased, index: int, calls: Sequence[_Call], zero: int) -> Timeline:
    step = rank.steps[index]
    own = rank.operations[rank.operations["step"] == index]
    gap = (step.end_ns - step.start_ns) // _TIMELINE_PIECES
    compute = _compute(rank, step)
    communication = [call.interval for call in calls]
    known = _known_parts(own)

    def spans(intervals: Iterable[Interval]) -> Spans:
        return tuple((_ms(start - zero), _ms(end - zero)) for start, end in merge(intervals, gap))

    return Timeline(
        step.name,
        (_ms(step.start_ns - zero), _ms(step.end_ns - zero)),
        tuple(
            (phase, _ms(start - zero), _ms(end - zero))
            for phase, start, end in _segments(own, step, calls)
            if phase in known
        ),
        spans(compute),
        tuple((_ms(start - zero), _ms(end - zero)) for start, end in merge(communication)),
        spans(call.waiting for call in calls),
        spans(difference(communication, compute)),
        spans(_intervals(gradient_copies(own, backward_passes(own)))),
    )


def _ms(ns: float) -> float:
    return ns / 1e6

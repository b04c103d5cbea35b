"""Where each operation of a trace belongs: to which step, and in it to forward, backward, optimizer or the batch.

By launch, not by time: the host runs ahead of the device, so that the range of one batch often lies over the device's
work of the batch before.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from lightning_ddpopt.profiling.events import AUTOGRAD_NODE, Trace, TraceError, rows

FORWARD, BACKWARD, OPTIMIZER, BATCH, OTHER = "forward", "backward", "optimizer", "batch", "other"

_NUMBERED_STEPS = (re.compile(r"Batch (\d+)$"), re.compile(r"ProfilerStep#(\d+)$"))
_OPTIMIZER = re.compile(r"optimizer step$|Optimizer\.step#")
_FORWARD = re.compile(r"forward$|DistributedDataParallel\.forward$")
_PHASES = (
    (re.compile(r"get batch$|enumerate\(DataLoader\)#"), BATCH),
    (_FORWARD, FORWARD),
    (re.compile(rf"backward$|{AUTOGRAD_NODE}"), BACKWARD),
    (_OPTIMIZER, OPTIMIZER),
)
_HostStep: TypeAlias = tuple[str, int, int]

_BUCKET = re.compile(r"bucket (\d+) (\d+) bytes (\S+)$")


@dataclass(frozen=True)
class Step:
    """One step, in nanoseconds of the trace's clock.

    Args:
        name: as the range names it, ``"Batch 5"``.
        host_start_ns: start of its range on the host.
        host_end_ns: start of the next step's range; of the last step, the end of its own.
        start_ns: when the device could begin with it: the start of its range, or the end of the device's work for the
            steps before, whichever is later. So steps follow each other without gap or overlap.
        end_ns: start of the next step; of the last, when both the host and the device are done with it.

    """

    name: str
    host_start_ns: int
    host_end_ns: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Phased:
    """A trace's operations with columns ``step`` (index into ``steps``, or -1) and ``phase``, and what was left out."""

    trace: Trace
    steps: tuple[Step, ...]
    operations: pd.DataFrame
    notes: tuple[str, ...]


def phased(trace: Trace) -> Phased:
    """Find the steps, and say of each operation to which of them and to which phase it belongs.

    Raises:
        TraceError: the trace has no step.

    """
    host, notes = _host_steps(trace)
    operations = trace.operations.assign(step=-1, phase=OTHER)
    for index, (_, start, end) in enumerate(host):
        operations.loc[(operations["launch_ns"] >= start) & (operations["launch_ns"] < end), "step"] = index
    outside = int((operations["step"] < 0).sum())
    if outside:
        notes.append(f"{outside} of {len(operations)} operations were launched outside the steps and are left out.")
    if outside == len(operations):
        raise TraceError(
            f"{trace.path}: none of the {outside} operations was launched in a step; are the CUDA calls in the trace?"
            " Record with --trace=cuda,nvtx."
        )
    operations["phase"] = _phases(trace, operations)
    steps: list[Step] = []
    done = -1
    first = operations.loc[operations["step"] == 0, "launch_ns"].min()
    before = operations[(operations["step"] < 0) & (operations["launch_ns"] < first)]
    if len(before):
        done = int(before["end_ns"].max())
    starts = []
    for index, (_, start, _) in enumerate(host):
        starts.append(max(start, done))
        ends = operations.loc[operations["step"] == index, "end_ns"]
        done = max(done, int(ends.max())) if len(ends) else done
    for index, (name, start, end) in enumerate(host):
        is_followed = index + 1 < len(host) and host[index + 1][1] == end
        own = operations.loc[operations["step"] == index, "end_ns"]
        until = starts[index + 1] if is_followed else max(end, int(own.max()) if len(own) else end)
        steps.append(Step(name, start, end, starts[index], until))
    return Phased(trace, tuple(steps), operations, (*trace.notes, *notes))


def _host_steps(trace: Trace) -> tuple[list[_HostStep], list[str]]:
    """Name, start and end of each step on the host, and notes on what the edges of the window cut."""
    for pattern in _NUMBERED_STEPS:
        found = _named(trace.ranges, pattern)
        if len(found):
            return _numbered(trace, found, pattern)
    return _between_optimizer_steps(trace)


def _named(ranges: pd.DataFrame, pattern: re.Pattern[str]) -> pd.DataFrame:
    return ranges[[pattern.match(name) is not None for name in ranges["name"]]]


def _numbered(trace: Trace, found: pd.DataFrame, pattern: re.Pattern[str]) -> tuple[list[_HostStep], list[str]]:
    """Steps that a range marks. What lies between two of them (the loop, callbacks) belongs to the first.

    Not so where the next number is missing, or where there was a validation: that belongs to no step. A validation also
    cuts the range of the step whose batch was already fetched in two; the second one counts.

    """
    given = [
        (name, int(start), int(end))
        for name, start, end in zip(found["name"], found["start_ns"], found["end_ns"], strict=True)
    ]
    notes = [
        f"{name} was still open when the trace ended; it is left out." for name, start, end in given if end < start
    ]
    whole = [row for row in given if row[2] >= row[1]]
    if not whole:
        raise TraceError(f"{trace.path}: no step is whole, the trace ended inside its only one; record more steps.")
    numbers = [int(pattern.match(name)[1]) for name, _, _ in whole]  # type: ignore[index]
    validations = [int(start) for start in trace.ranges.loc[trace.ranges["name"] == "validation", "start_ns"]]
    steps = []
    for index, (name, start, end) in enumerate(whole):
        is_last = index + 1 == len(whole)
        if not is_last and numbers[index + 1] == numbers[index]:
            notes.append(f"{name} was interrupted; what it did before is left out.")
            continue
        until = end if is_last else whole[index + 1][1]
        is_followed = not is_last and numbers[index + 1] == numbers[index] + 1
        is_cut = any(end <= validation < until for validation in validations)
        steps.append((name, start, until if is_followed and not is_cut else end))
    return steps, notes


def _between_optimizer_steps(trace: Trace) -> tuple[list[_HostStep], list[str]]:
    """Without ranges of steps: a step ends where the optimizer's does, and the next one starts there."""
    ranges = trace.ranges[trace.ranges["end_ns"] >= trace.ranges["start_ns"]]
    ends = [
        int(end) for end in ranges.loc[ranges["name"].map(lambda name: _OPTIMIZER.match(name) is not None), "end_ns"]
    ]
    if not ends:
        raise TraceError(
            f"{trace.path}: no steps in the trace. It needs a range `Batch i` around each: add NsysCallback() to the"
            " Trainer's callbacks and record again; torch.profiler writes a range of a step only with"
            " profile(schedule=...) and profiler.step() after each step."
        )
    launches = trace.operations.loc[trace.operations["launch_ns"] >= 0, "launch_ns"]
    begin = int(min(launches.min(), ranges["start_ns"].min()))
    ends.sort()
    forward = _named(ranges, _FORWARD)["start_ns"]
    is_first_whole = any(begin <= start < ends[0] for start in forward) or len(ends) == 1
    edges = [begin, *ends] if is_first_whole else ends
    steps = [(f"step {index}", start, end) for index, (start, end) in enumerate(pairwise(edges))]
    notes = ["The trace has no range of a step: a step here is from the end of one optimizer step to that of the next."]
    if is_first_whole:
        notes.append("The first step starts with the trace, so that its wait for data may be cut.")
    return steps, notes


def _phases(trace: Trace, operations: pd.DataFrame) -> list[str]:
    """Phase of each operation: of the innermost range on its thread that has one.

    A thread without ranges of phases is autograd's: what it launches is backward's. So a `backward` range that was
    opened around ``loss.backward()``, on the thread that only waits there, does no harm. On a CPU autograd runs on the
    thread that called it: there its nodes, which torch.profiler names, are the ranges.

    """
    marks = []
    named: set[int] = set()
    for name, start, end, thread in rows(trace.ranges[["name", "start_ns", "end_ns", "thread"]]):
        phase = next((phase for pattern, phase in _PHASES if pattern.match(name)), None)
        if phase is not None and end >= start:
            marks.append((int(start), int(end), int(thread), phase))
            if not name.startswith(AUTOGRAD_NODE):  # on autograd's own thread what it launches between nodes counts too
                named.add(int(thread))
    marks.sort()
    launches, threads = operations["launch_ns"].to_numpy(), operations["thread"].to_numpy()
    is_guessed = ~np.isin(threads, list(named)) & (threads >= 0) & (operations["direction"] != "HtoD").to_numpy()
    labels = np.where(is_guessed, BACKWARD, OTHER).astype(object)
    order = {thread: np.flatnonzero(threads == thread) for thread in {mark[2] for mark in marks}}
    order = {thread: own[np.argsort(launches[own], kind="stable")] for thread, own in order.items()}

    def inside(mark: tuple[int, int, int, str]) -> Any:
        there = order[mark[2]]
        first, last = np.searchsorted(launches[there], mark[:2])
        return there[first:last]

    for mark in marks:  # outer ranges start before inner ones, which overwrite them
        labels[inside(mark)] = mark[3]
    # Lightning runs forward and backward in the optimizer's closure.
    backward = np.sort(launches[labels == BACKWARD])
    for mark in marks:
        before = int(np.searchsorted(backward, mark[1]))
        if mark[3] == OPTIMIZER and before and backward[before - 1] >= mark[0]:
            own = inside(mark)
            labels[own[(labels[own] == OPTIMIZER) & (launches[own] < backward[before - 1])]] = FORWARD
    if not any(phase == FORWARD for _, _, _, phase in marks):
        _guess_forward(operations, labels)
    return list(labels)


def _guess_forward(operations: pd.DataFrame, labels: Any) -> None:
    """Without a range of forward it is what a step launches before backward."""
    launches, steps = operations["launch_ns"].to_numpy(), operations["step"].to_numpy()
    is_backward = (labels == BACKWARD) & (operations["collective"] == "").to_numpy()
    for step in np.unique(steps[is_backward]):
        last = launches[(steps == step) & is_backward].max()
        is_before = (steps == step) & (labels == OTHER) & (launches < last)
        labels[is_before & (operations["direction"] != "HtoD").to_numpy()] = FORWARD


def bucket_ranges(trace: Trace) -> list[tuple[int, int, int, int, int, str]]:
    """Ranges of bucket reductions: start and end in ns, thread, index, bytes of the gradients, hook."""
    found = []
    for row in rows(trace.ranges):
        match = _BUCKET.match(str(row.name))
        if match is not None:
            end = int(row.end_ns) if row.end_ns >= row.start_ns else 2**62
            found.append((int(row.start_ns), end, int(row.thread), int(match[1]), int(match[2]), match[3]))
    return found


def assign_buckets(
    collectives: Sequence[tuple[int, int, str]], buckets: Sequence[tuple[int, int, int, int, int, str]]
) -> list[tuple[int, int, str] | None]:
    """The bucket (index, bytes, hook) of each collective of one step.

    Args:
        collectives: when and on which thread each was launched, and its name, in the order of launch.
        buckets: the ranges that start in the step.

    A collective belongs to the range that was open on its thread when it was launched. Where none was, as with gloo,
    whose collectives run on threads of their own, the all-reduces belong to the last ranges, one to one: micro-batches
    before the last may have ranges without a reduction. PowerSGD reduces more than once for a bucket.

    """
    found: list[tuple[int, int, str] | None] = []
    for launch, thread, _ in collectives:
        open_then = [bucket for bucket in buckets if bucket[2] == thread and bucket[0] <= launch < bucket[1]]
        found.append(max(open_then)[3:] if open_then else None)
    reduced = [index for index, (_, _, name) in enumerate(collectives) if name == "AllReduce"]
    last = sorted(buckets)[-len(reduced) :]
    is_known = any(found) or not reduced or len(last) < len(reduced) or any(bucket[5] == "powersgd" for bucket in last)
    if not is_known and all(bucket[0] <= collectives[index][0] for index, bucket in zip(reduced, last, strict=True)):
        for index, bucket in zip(reduced, last, strict=True):
            found[index] = bucket[3:]
    return found

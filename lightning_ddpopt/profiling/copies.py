"""Tells copies of gradients from those of activations, and copies that make the host wait from those that do not."""

import re
from collections.abc import Sequence
from itertools import pairwise

import pandas as pd

from lightning_ddpopt.profiling.events import REDUCTIONS, Trace, rows
from lightning_ddpopt.profiling.overlap import Interval
from lightning_ddpopt.profiling.phases import BACKWARD, FORWARD, OPTIMIZER

_SYNCHRONIZES = re.compile("(Stream|Device|Ctx)Synchronize")
_CLOCK_SLACK_NS = 20_000  # between the host's clock and the device's, in one trace


def backward_passes(own: pd.DataFrame) -> list[pd.DataFrame]:
    """The operations of each backward pass, in the order of their launch.

    A forward operation ends a pass, and so does one of the optimizer: adversarial training steps between two of them.
    Collectives alone are no pass: on threads of gloo's own, metrics are reduced too.

    """
    ordered = own[own["phase"].isin([FORWARD, BACKWARD, OPTIMIZER]) | (own["collective"] != "")]
    ordered = ordered.sort_values("launch_ns", kind="stable")
    turn = (ordered["phase"].isin([FORWARD, OPTIMIZER]) & (ordered["collective"] == "")).cumsum()
    backward = ordered[(ordered["phase"] == BACKWARD) & ordered["collective"].isin(("", *REDUCTIONS))]
    parts = [part for _, part in backward.groupby(turn[backward.index])]
    return [part for part in parts if (part["collective"] == "").any()]


def early_exchanges(own: pd.DataFrame, exchanges: Sequence[pd.DataFrame]) -> int:
    """Of the backward passes that exchange gradients, those that another follows before the optimizer steps.

    None where the step has no optimizer: then it cannot be told which exchange was used.

    """
    steps = own.loc[(own["phase"] == OPTIMIZER) & (own["collective"] == ""), "launch_ns"]
    if steps.empty:
        return 0
    begins = [int(one["launch_ns"].min()) for one in exchanges]
    return sum(not ((steps > begin) & (steps < after)).any() for begin, after in pairwise(begins))


def gradient_copies(own: pd.DataFrame, backwards: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Copies on the device of gradients after their reduction; activations are copied too, but before.

    DDP starts the last reduction when the last gradient is ready, and copies only then. Where a process group of one
    rank reduces nothing, the copies are what follows the last kernel of backward.

    """
    is_reduced = any(backward["collective"].isin(REDUCTIONS).any() for backward in backwards)
    found = []
    for backward in backwards:
        marks = backward[backward["collective"].isin(REDUCTIONS) if is_reduced else (backward["kind"] == "kernel")]
        if len(marks):
            after = backward["launch_ns"] > marks["launch_ns"].max()
            found.append(backward[after & (backward["direction"] == "DtoD")])
    return pd.concat(found) if found else own.iloc[:0]


def blocking_copies(trace: Trace, copies: pd.DataFrame) -> list[Interval]:
    """Where the host waits for a copy, in ns of its clock: the copy is of pageable memory, or the stream is
    synchronised before anything else is launched, until the copy is done.

    Waits for an event do not count: DDP reads its own timers so, right after the batch was copied.

    """
    if copies.empty or trace.calls.empty:
        return []
    found = []
    for row in rows(copies):
        calls = trace.calls[(trace.calls["thread"] == row.thread) & (trace.calls["start_ns"] >= row.launch_ns)].head(20)
        if calls.empty:
            continue
        names, starts, ends = (calls[column].tolist() for column in ("name", "start_ns", "end_ns"))
        is_near = (trace.operations["launch_ns"] > row.launch_ns) & (trace.operations["launch_ns"] <= starts[-1])
        launched = set(trace.operations.loc[is_near & (trace.operations["thread"] == row.thread), "launch_ns"])
        until = ends[0] if row.is_pageable else -1
        for name, start, end in zip(names[1:], starts[1:], ends[1:], strict=True):
            if start in launched:
                break
            if _SYNCHRONIZES.search(name):
                until = max(until, end if end + _CLOCK_SLACK_NS >= int(row.end_ns) else -1)
                break
        if until >= 0:
            found.append((int(row.launch_ns), until))
    return found

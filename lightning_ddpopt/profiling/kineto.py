"""Reads traces of torch.profiler (kineto) into the tables of ``events``."""

import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_ddpopt.profiling.events import (
    AUTOGRAD_NODE,
    CALL_COLUMNS,
    DIRECTIONS,
    OPERATION_COLUMNS,
    RANGE_COLUMNS,
    Trace,
    TraceError,
    collective_in,
    frame,
    rank_in_name,
    rows,
    sorted_by_time,
)

_CPU_NOTE = (
    "No GPU took part: compute is the operators of the host's threads, communication what gloo's threads do. Copies,"
    " launches and a device's idle time cannot be told, nor bytes where no bucket range tells them."
)
_GLOO = re.compile(r"gloo:(\w+)")
_GLOO_NAMES = {"all_reduce": "AllReduce", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter",
               "broadcast": "Broadcast", "reduce": "Reduce"}  # fmt: skip
_ITEM_BYTES = {
    "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4, "Long": 8, "Double": 8,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip


def load_kineto(path: Path) -> Trace:
    """Read a trace that ``export_chrome_trace`` wrote. Its rank is -1 if neither its content nor its name tells it.

    Raises:
        TraceError: no such trace, or a damaged one, or neither GPU work nor operators in it.

    """
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        events = data["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError, zlib.error) as error:
        raise TraceError(f"{path}: not a trace of torch.profiler (export_chrome_trace writes one).") from error
    try:
        return _trace(path, data, events)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(
            f"{path}: a damaged trace of torch.profiler ({type(error).__name__}: {error}); record it again."
        ) from error


def _trace(path: Path, data: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Trace:
    spans = [event for event in events if event.get("ph") == "X" and "ts" in event and "dur" in event]
    by_category: dict[str, list[Mapping[str, Any]]] = {}
    for event in spans:
        by_category.setdefault(str(event.get("cat", "")), []).append(event)

    calls = frame(
        [
            _span(event) | {"correlation": int(event.get("args", {}).get("correlation", -1))}
            for category in ("cuda_runtime", "cuda_driver")
            for event in by_category.get(category, [])
        ],
        CALL_COLUMNS,
    )
    nodes = [event for event in by_category.get("cpu_op", []) if str(event.get("name")).startswith(AUTOGRAD_NODE)]
    ranges = frame([_span(event) for event in [*by_category.get("user_annotation", []), *nodes]], RANGE_COLUMNS)
    launches = {row.correlation: (row.start_ns, row.thread) for row in rows(calls[::-1])}
    device = [
        _device_operation(kind, event, launches)
        for category, kind in (("kernel", "kernel"), ("gpu_memcpy", "copy"), ("gpu_memset", "set"))
        for event in by_category.get(category, [])
    ]
    is_cpu = not device
    if is_cpu:
        device = _cpu_operations(by_category.get("cpu_op", []))
        if not device:
            raise TraceError(
                f"{path}: neither GPU work nor operators in the trace; profile with activities CPU and CUDA."
            )
    device += _gloo_operations(by_category.get("user_annotation", []))
    distributed = data.get("distributedInfo") or {}
    rank = int(distributed.get("rank", -1))
    world_size = distributed.get("world_size")
    zero_ns = data.get("baseTimeNanoseconds")
    return Trace(
        path,
        rank if rank >= 0 else rank_in_name(path, trailing=False),
        "kineto",
        sorted_by_time(frame(device, OPERATION_COLUMNS)),
        sorted_by_time(ranges),
        sorted_by_time(calls),
        world_size=int(world_size) if world_size else None,
        is_cpu=is_cpu,
        notes=(_CPU_NOTE,) if is_cpu else (),
        epoch_ns=int(zero_ns) if zero_ns is not None else None,
    )


def _span(event: Mapping[str, Any]) -> dict[str, Any]:
    start = round(float(event["ts"]) * 1000)
    thread = event.get("tid", -1)
    return {
        "name": str(event["name"]),
        "start_ns": start,
        "end_ns": start + round(float(event["dur"]) * 1000),
        "thread": int(thread) if str(thread).isdigit() else -1,
    }


def _device_operation(kind: str, event: Mapping[str, Any], launches: Mapping[int, tuple[int, int]]) -> dict[str, Any]:
    args = event.get("args", {})
    span = _span(event)
    launch_ns, thread = launches.get(int(args.get("correlation", -1)), (-1, -1))
    row = span | {"kind": kind, "stream": int(args.get("stream", -1)), "launch_ns": launch_ns, "thread": thread}
    row["bytes"] = int(args.get("bytes", -1))
    if kind == "copy":
        row["direction"] = next((way for way in DIRECTIONS.values() if way in span["name"]), "")
        row["is_pageable"] = "Pageable" in span["name"]
    elif kind == "kernel":
        row["collective"] = collective_in(span["name"])
        if row["collective"]:
            item_bytes = _ITEM_BYTES.get(str(args.get("dtype")), 0)
            elements = int(args.get("In msg nelems", 0) or 0)
            row["payload_bytes"] = elements * item_bytes or -1
            row["group_size"] = int(args.get("Group size", -1))
    return row


def _cpu_operations(operators: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The outermost operators of each thread."""
    found: list[dict[str, Any]] = []
    ends: dict[int, int] = {}
    for span in sorted(map(_span, operators), key=lambda span: (span["start_ns"], -span["end_ns"])):
        if span["end_ns"] > ends.get(span["thread"], -1):
            ends[span["thread"]] = span["end_ns"]
            found.append(span | {"kind": "op", "launch_ns": span["start_ns"], "stream": span["thread"]})
    return found


def _gloo_operations(annotations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Gloo's collectives, which run on threads of its own."""
    found: list[dict[str, Any]] = []
    for span in map(_span, annotations):
        match = _GLOO.match(span["name"])
        if match is not None:
            place = {"kind": "op", "launch_ns": span["start_ns"], "stream": span["thread"]}
            found.append(span | place | {"collective": _GLOO_NAMES.get(match[1], match[1])})
    return found

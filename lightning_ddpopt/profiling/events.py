"""The few tables that a trace of any profiler is read into. What they mean is left to ``analysis``.

The tables, one row an event, all times in nanoseconds of the trace's own clock:

- ``operations``: what the device did. Columns ``kind`` ("kernel", "copy", "set", or "op" for an operator on a CPU),
  ``name``, ``start_ns``, ``end_ns``, ``stream``, ``bytes``, ``direction`` ("HtoD", "DtoH", "DtoD" or ""),
  ``is_pageable``, ``launch_ns`` and ``thread`` (when and where the host asked for it; -1 if that is not in the trace),
  ``collective`` ("AllReduce", … or ""), ``payload_bytes`` and ``group_size`` (-1 if not told).
- ``ranges``: named ranges of host code: ``name``, ``start_ns``, ``end_ns`` (-1: still open when the trace ended),
  ``thread``.
- ``calls``: calls of the CUDA API: ``name``, ``start_ns``, ``end_ns``, ``thread``, ``correlation``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

OPERATION_COLUMNS: Mapping[str, Any] = {
    "kind": "",
    "name": "",
    "start_ns": -1,
    "end_ns": -1,
    "stream": -1,
    "bytes": -1,
    "direction": "",
    "is_pageable": False,
    "launch_ns": -1,
    "thread": -1,
    "collective": "",
    "payload_bytes": -1,
    "group_size": -1,
}
RANGE_COLUMNS: Mapping[str, Any] = {"name": "", "start_ns": -1, "end_ns": -1, "thread": -1}
CALL_COLUMNS: Mapping[str, Any] = {**RANGE_COLUMNS, "correlation": -1}


REDUCTIONS = ("AllReduce", "ReduceScatter", "other")
"""Collectives that may reduce gradients; DDP also broadcasts buffers."""


class TraceError(ValueError):
    """A file that is no trace, or a trace that does not hold what an analysis needs. The message tells the way out."""


AUTOGRAD_NODE = "autograd::engine::evaluate_function"
"""So begin the operators of torch.profiler in which a node of the backward graph runs; kineto's are ranges too."""

DIRECTIONS = {1: "HtoD", 2: "DtoH", 8: "DtoD"}
_COLLECTIVE = re.compile(
    r"nccl\w*?[_:]?(AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|SendRecv|AlltoAll)", re.IGNORECASE
)


@dataclass(frozen=True)
class Trace:
    """One process's trace: what one device did, and which host code asked for it. For the tables see the module.

    Args:
        path: the file it came from.
        rank: of the process in its job.
        source: ``"nsys"`` or ``"kineto"`` (torch.profiler).
        operations: what the device did.
        ranges: named ranges of host code.
        calls: calls of the CUDA API.
        world_size: ranks in the job, or None where the trace does not tell.
        is_cpu: no GPU took part: the operations are operators on the host, and gloo's collectives.
        epoch_ns: Unix time of the clock's zero, in ns, or None where the trace does not tell.
        notes: what a reader of the figures must know about the trace.

    """

    path: Path
    rank: int
    source: str
    operations: pd.DataFrame
    ranges: pd.DataFrame
    calls: pd.DataFrame
    world_size: int | None = None
    is_cpu: bool = False
    notes: tuple[str, ...] = ()
    epoch_ns: int | None = None


def rows(table: pd.DataFrame) -> list[Any]:
    """The rows of a table as named tuples."""
    return list(table.itertuples(index=False))


def collective_in(name: str) -> str:
    """The collective that a kernel of NCCL does; ``"other"`` for one that its name does not tell."""
    if not name.startswith("nccl"):
        return ""
    found = _COLLECTIVE.match(name)
    return found[1] if found else "other"


def frame(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Any]) -> pd.DataFrame:
    """A table of rows, with the defaults of ``columns`` for what a row lacks."""
    values = {name: [row.get(name, default) for row in rows] for name, default in columns.items()}
    return pd.DataFrame({name: pd.Series(column, dtype=column_type(columns[name])) for name, column in values.items()})


def filled(table: pd.DataFrame, columns: Mapping[str, Any]) -> pd.DataFrame:
    """``table`` with exactly ``columns``, and their defaults where it has nothing."""
    made = {}
    for name, default in columns.items():
        column = table[name] if name in table else pd.Series(default, index=table.index, dtype=column_type(default))
        made[name] = column.where(column.notna(), default).astype(column_type(default))
    return pd.DataFrame(made)


def column_type(default: Any) -> Any:
    """The type of a column by its default."""
    return bool if isinstance(default, bool) else "int64" if isinstance(default, int) else object


def table_of(table: pd.DataFrame, columns: Mapping[str, Any]) -> pd.DataFrame:
    """Those columns of a table, in order of time."""
    return sorted_by_time(table[list(columns)])


def sorted_by_time(table: pd.DataFrame) -> pd.DataFrame:
    """The rows by start, then by end."""
    return table.sort_values(["start_ns", "end_ns"], kind="stable", ignore_index=True)


def rank_in_name(path: Path, trailing: bool) -> int:
    """The rank that a file's name tells, or -1: ``rank_3`` or ``rank3``, and if ``trailing`` a number at its end.

    Of several the last counts: ``powersgd_rank4_rank_1`` is of rank 1.

    """
    found = re.findall(r"rank[_-]?(\d+)", path.name, re.IGNORECASE)
    if not found and trailing:
        found = re.findall(r"[_-](\d{1,5})$", path.name.split(".")[0])
    return int(found[-1]) if found else -1

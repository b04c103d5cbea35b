"""Reads reports of nsys, exported to sqlite, into the tables of ``events``."""

import json
import sqlite3
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd

from lightning_ddpopt.profiling.events import (
    CALL_COLUMNS,
    DIRECTIONS,
    OPERATION_COLUMNS,
    RANGE_COLUMNS,
    Trace,
    TraceError,
    collective_in,
    column_type,
    filled,
    frame,
    rank_in_name,
    table_of,
)
from lightning_ddpopt.profiling.nsys import NsysError, find_nsys

_PAGEABLE = 0  # in ENUM_CUDA_MEM_KIND
_PUSH_POP, _START_END = 59, 60  # NVTX event types
_PROCESS = 2**24  # a globalTid is a globalPid, a multiple of this, plus the thread


def load_report(path: Path) -> list[Trace]:
    """Read a .nsys-rep: nsys exports it to a temporary directory.

    Raises:
        TraceError: there is no nsys, or it cannot export the file; or as :func:`load_sqlite`.

    """
    try:
        nsys = str(find_nsys())
    except NsysError as error:  # its message is of recording
        raise TraceError(
            f"{path}: reading a .nsys-rep needs nsys, which is not on PATH and not where NVIDIA's installers put it."
            f" Install it, or export the file where nsys is, with `nsys export --type sqlite {path.name}`, and give the"
            " .sqlite."
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / f"{path.stem}.sqlite"
        options = ["--type", "sqlite", "--force-overwrite", "true", "--output", str(exported)]
        command = [nsys, "export", *options, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not exported.is_file():
            said = (done.stderr or done.stdout).strip().splitlines()
            raise TraceError(f"{path}: nsys export failed: {said[-1] if said else f'status {done.returncode}'}")
        return load_sqlite(exported, path)


class _Export:
    """Tables of an exported report. Tables and columns come and go with the version and with what happened: probe."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}  # only those with rows
        self.strings: dict[int, str] = {}
        if "StringIds" in self._tables:
            self.strings = dict(connection.execute("SELECT id, value FROM StringIds"))

    def __contains__(self, table: str) -> bool:
        return table in self._tables

    def read(self, table: str, columns: Mapping[str, Any]) -> pd.DataFrame:
        """The wanted columns as whole numbers or text; where a column or a value is missing, its default."""
        if table not in self:
            return frame([], columns)
        there = {row[1] for row in self._connection.execute(f'PRAGMA table_info("{table}")')}
        parts = []
        for name, default in columns.items():
            instead = "''" if default == "" else str(int(default))
            parts.append(f'COALESCE("{name}", {instead}) AS "{name}"' if name in there else f'{instead} AS "{name}"')
        rows = self._connection.execute(f'SELECT {", ".join(parts)} FROM "{table}"').fetchall()
        values = list(zip(*rows, strict=True)) or [()] * len(columns)
        made = zip(columns.items(), values, strict=True)
        return pd.DataFrame({name: pd.Series(column, dtype=column_type(kind)) for (name, kind), column in made})

    def names(self, ids: "pd.Series[int]") -> "pd.Series[str]":
        return ids.map(lambda index: self.strings.get(index, "")).astype(object)


def load_sqlite(path: Path, shown: Path) -> list[Trace]:
    """Read what nsys exported to sqlite: a trace for each process with GPU work, in the order of their devices.

    The rank of each is -1 where the file's name does not tell it, or where there are several.

    Args:
        path: the database.
        shown: the file to name in messages, and to take the rank from.

    Raises:
        TraceError: no export of nsys, or no GPU work in it.

    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?immutable=1", uri=True)) as connection:
            export = _Export(connection)
            if "StringIds" not in export:
                raise TraceError(f"{shown}: no export of nsys: it has no table StringIds.")
            operations, calls, ranges = _operations(export), _calls(export), _nvtx(export)
            began = export.read("TARGET_INFO_SESSION_START_TIME", {"utcEpochNs": -1})["utcEpochNs"]
    except sqlite3.DatabaseError as error:
        raise TraceError(f"{shown}: not a database that nsys exported: {error}.") from error
    if operations.empty:
        reason = (
            "though it has NVTX ranges: that nsys is older than the CUDA runtime (take a newer one), --trace=cuda"
            " was missing, or the run was on the CPU (profile that with torch.profiler)"
            if len(ranges)
            else "nor NVTX ranges: the capture window never opened, or held no training step"
        )
        raise TraceError(f"{shown}: no GPU work in the report, {reason}.")

    if (operations["process"] < 0).any():  # an export without globalPid: all of it is one process
        for table in (operations, calls, ranges):
            table["process"] = -1
    launches = calls.drop_duplicates(["process", "correlation"]).rename(
        columns={"start_ns": "launch", "thread": "caller"}
    )
    operations = operations.merge(
        launches[["process", "correlation", "launch", "caller"]], on=["process", "correlation"], how="left"
    )
    operations["launch_ns"] = operations["launch"].fillna(-1).astype("int64")
    operations["thread"] = operations["caller"].fillna(-1).astype("int64")
    operations = _with_nccl_payload(operations, ranges)

    devices = operations.groupby("process")["device"].min().sort_values()
    traces: list[Trace] = []
    for process in devices.index:
        mine = operations[operations["process"] == process]
        here = ranges[ranges["process"] == process]
        rank = rank_in_name(shown, trailing=True) if len(devices) == 1 else -1
        told = here.loc[here["ranks"] > 0, "ranks"]
        traces.append(
            Trace(
                shown,
                rank,
                "nsys",
                table_of(mine, OPERATION_COLUMNS),
                table_of(here[here["is_range"] & (here["name"] != "")], RANGE_COLUMNS),
                table_of(calls[calls["process"] == process], CALL_COLUMNS),
                world_size=int(told.max()) if len(told) else None,
                epoch_ns=int(began.iloc[0]) if len(began) and began.iloc[0] > 0 else None,
            )
        )
    return traces


def _operations(export: _Export) -> pd.DataFrame:
    """Kernels, copies and memory sets, with columns ``process``, ``device`` and ``correlation`` besides ours."""
    common = {"start": -1, "end": -1, "deviceId": 0, "streamId": -1, "correlationId": -1, "globalPid": -1}
    kernels = export.read("CUPTI_ACTIVITY_KIND_KERNEL", common | {"shortName": -1, "demangledName": -1})
    names = kernels["shortName"].where(kernels["shortName"] >= 0, kernels["demangledName"])
    kernels = kernels.assign(kind="kernel", name=export.names(names))
    copies = export.read(
        "CUPTI_ACTIVITY_KIND_MEMCPY", common | {"bytes": -1, "copyKind": -1, "srcKind": -1, "dstKind": -1}
    )
    direction = copies["copyKind"].map(lambda kind: DIRECTIONS.get(kind, "")).astype(object)
    host = copies["srcKind"].where(direction == "HtoD", copies["dstKind"])
    is_pageable = (host == _PAGEABLE) & direction.isin(["HtoD", "DtoH"])
    copies = copies.assign(kind="copy", name="Memcpy " + direction, direction=direction, is_pageable=is_pageable)
    sets = export.read("CUPTI_ACTIVITY_KIND_MEMSET", common | {"bytes": -1}).assign(kind="set", name="Memset")
    table = pd.concat([part for part in (kernels, copies, sets) if len(part)] or [kernels], ignore_index=True)
    table = table.rename(columns={
        "start": "start_ns", "end": "end_ns", "streamId": "stream", "deviceId": "device", "globalPid": "process",
        "correlationId": "correlation",
    })  # fmt: skip
    extra = {"process": -1, "device": 0, "correlation": -1}
    table = filled(table, {**OPERATION_COLUMNS, **extra})
    is_kernel = table["kind"] == "kernel"
    table["collective"] = table["name"].where(is_kernel, "").map(collective_in).astype(object)
    return table.sort_values(["start_ns", "end_ns"], kind="stable", ignore_index=True)


def _calls(export: _Export) -> pd.DataFrame:
    wanted = {"start": -1, "end": -1, "globalTid": -1, "correlationId": -1, "nameId": -1}
    calls = export.read("CUPTI_ACTIVITY_KIND_RUNTIME", wanted)
    calls["name"] = export.names(calls["nameId"])
    calls = calls.rename(
        columns={"start": "start_ns", "end": "end_ns", "globalTid": "thread", "correlationId": "correlation"}
    )
    calls["process"] = calls["thread"] - calls["thread"] % _PROCESS
    return calls.sort_values("start_ns", kind="stable", ignore_index=True)


def _nvtx(export: _Export) -> pd.DataFrame:
    """Ranges of all domains, with the payload of NCCL's own ones where the export has it as JSON."""
    wanted = {"start": -1, "end": -1, "eventType": -1, "text": "", "textId": -1, "globalTid": -1, "jsonText": "",
              "jsonTextId": -1}  # fmt: skip
    events = export.read("NVTX_EVENTS", wanted)
    registered = export.names(events["textId"])
    payload = events["jsonText"].where(events["jsonText"] != "", export.names(events["jsonTextId"]))
    payloads = [_nccl_payload(text) for text in payload]
    events = events.assign(
        name=events["text"].where(events["text"] != "", registered),
        is_range=events["eventType"].isin([_PUSH_POP, _START_END]),
        payload_bytes=[size for size, _ in payloads],
        ranks=[ranks for _, ranks in payloads],
    ).rename(columns={"start": "start_ns", "end": "end_ns", "globalTid": "thread"})
    events["process"] = events["thread"] - events["thread"] % _PROCESS
    return events.sort_values("start_ns", kind="stable", ignore_index=True)


def _nccl_payload(text: str) -> tuple[int, int]:
    """Message size in bytes and number of ranks that NCCL's NVTX payload tells; -1 for what it does not."""
    try:
        told = json.loads(text) if text else {}
    except json.JSONDecodeError:
        told = {}
    if not isinstance(told, Mapping):
        told = {}
    found = [-1, -1]
    for key, value in told.items():
        for index, start in enumerate(("Message size", "No. of ranks")):
            if str(key).startswith(start) and str(value).isdigit():
                found[index] = int(value)
    return found[0], found[1]


def _with_nccl_payload(operations: pd.DataFrame, ranges: pd.DataFrame) -> pd.DataFrame:
    """Give a collective the payload of the NCCL range that it was launched in."""
    told = ranges[ranges["payload_bytes"] > 0]
    if told.empty:
        return operations
    for index in operations.index[operations["collective"] != ""]:
        launch, thread = operations.at[index, "launch_ns"], operations.at[index, "thread"]
        inside = told[(told["thread"] == thread) & (told["start_ns"] <= launch) & (launch < told["end_ns"])]
        if len(inside):
            operations.loc[index, "payload_bytes"] = int(inside["payload_bytes"].iloc[-1])
    return operations

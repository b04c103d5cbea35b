"""Reads traces from files, of nsys or of torch.profiler, one or many ranks. The tables are those of ``events``."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from lightning_ddpopt.profiling.events import Trace, TraceError
from lightning_ddpopt.profiling.kineto import load_kineto
from lightning_ddpopt.profiling.nsys_export import load_report, load_sqlite

__all__ = ["Trace", "TraceError", "load"]

_SUFFIXES = (".nsys-rep", ".sqlite", ".json", ".json.gz")
_ONE_RUN = "give the traces of one run, one a rank."


def load(paths: Iterable[str | Path]) -> list[Trace]:
    """Read traces, sorted by rank.

    A rank is what the trace of torch.profiler tells, or else what the file's name does (the last ``rank_3`` or
    ``rank3`` in it; for nsys also a number at its end). A report of nsys that holds several processes with GPU work is
    one trace for each of them, in order of their devices. Where no rank is known, the order of the files counts. Of a
    ``.nsys-rep`` and the ``.sqlite`` of the same name, the newer file is taken.

    Args:
        paths: ``.nsys-rep`` (needs nsys), ``.sqlite`` as nsys exports it, ``.json`` or ``.json.gz`` of torch.profiler;
            or a directory, for all of these in it.

    Raises:
        TraceError: a file cannot be read or holds no GPU work, or two are of the same rank; one sentence with the
            file and the way out.

    """
    files = _without_exported([file for path in paths for file in _files(Path(path))])
    if not files:
        raise TraceError("no trace was given.")
    given: set[Path] = set()
    for file in files:
        if file.resolve() in given:
            raise TraceError(f"{file} is given twice; {_ONE_RUN}")
        given.add(file.resolve())
    return _ranked([trace for file in files for trace in _load_file(file)])


def _ranked(traces: list[Trace]) -> list[Trace]:
    """In the order of their ranks; numbered where none is known."""
    known: dict[int, Trace] = {}
    for trace in traces:
        if trace.rank >= 0:
            same = known.setdefault(trace.rank, trace)
            if same is not trace:
                raise TraceError(f"{same.path} and {trace.path} are both of rank {trace.rank}; {_ONE_RUN}")
    if len(known) == len(traces):
        return [known[rank] for rank in sorted(known)]
    if known:
        unknown = next(trace.path for trace in traces if trace.rank < 0)
        raise TraceError(f"{unknown}: neither its name nor the trace tells its rank, as others do; add _rank_N to it.")
    note = "Ranks are numbered in the order of the files: neither names nor traces tell them apart."
    notes = [note] if len({trace.path for trace in traces}) > 1 else []
    return [replace(trace, rank=index, notes=(*trace.notes, *notes)) for index, trace in enumerate(traces)]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = [file for suffix in _SUFFIXES for file in path.glob(f"*{suffix}")]
    if not found:
        raise TraceError(f"{path}: no trace in this directory. Known are {', '.join(_SUFFIXES)}.")
    return sorted(found, key=_by_number)


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Sorts names with the numbers in them as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name) if part]


def _without_exported(files: list[Path]) -> list[Path]:
    """Without the older of a .nsys-rep and what it was exported to; where neither is, without the report."""
    there = set(files)

    def is_older(file: Path) -> bool:
        name = file.name
        if name.endswith(".nsys-rep"):
            other = file.with_name(f"{name.removesuffix('.nsys-rep')}.sqlite")
            return other in there and _changed_ns(file) <= _changed_ns(other)
        other = file.with_name(f"{name.removesuffix('.sqlite')}.nsys-rep")
        return name.endswith(".sqlite") and other in there and _changed_ns(file) < _changed_ns(other)

    return [file for file in files if not is_older(file)]


def _changed_ns(file: Path) -> int:
    return file.stat().st_mtime_ns if file.is_file() else -1


def _load_file(path: Path) -> list[Trace]:
    if not path.is_file():
        raise TraceError(f"{path}: no such file.")
    name = path.name.lower()
    if name.endswith(".nsys-rep"):
        return load_report(path)
    if name.endswith(".sqlite"):
        return load_sqlite(path, path)
    if name.endswith((".json", ".json.gz")):
        return [load_kineto(path)]
    raise TraceError(f"{path}: not a trace. Known are .nsys-rep, .sqlite (of nsys export), .json and .json.gz.")

"""Reads traces from files, of nsys or of torch.profiler, one or many ranks. The tables are those of ``events``."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from lightning_ddpopt.profiling.events import Trace, TraceError
from lightning_ddpopt.profiling.kineto import load_kineto
from lightning_ddpopt.profiling.nsys_export import load_report, load_sqlite

__all__ = ["Trace", "TraceError", "load"]

_SUFFIXES = (".nsys-rep", ".sqlite", ".json", ".json.gz")


def load(paths: Iterable[str | Path]) -> list[Trace]:
    """Read traces, sorted by rank.

    A rank is taken from the file's name (``rank_3``, ``rank3``; for nsys also a number at its end), or else from what
    the trace tells; where that leaves two of one number, the order of the files counts. A report of nsys that holds
    several processes with GPU work is one trace for each of them, in order of their devices.

    Args:
        paths: ``.nsys-rep`` (needs nsys on PATH), ``.sqlite`` as nsys exports it, ``.json`` or ``.json.gz`` of
            torch.profiler; or a directory, for all of these in it (of files of one name, the ``.sqlite``).

    Raises:
        TraceError: a file cannot be read or holds no GPU work; one sentence with the file and the way out.

    """
    traces = [trace for path in paths for file in _files(Path(path)) for trace in _load_file(file)]
    if not traces:
        raise TraceError("no trace was given.")
    ranks = [trace.rank for trace in traces]
    if len(set(ranks)) < len(ranks) or min(ranks) < 0:
        note = "Ranks are numbered in the order of the files: neither names nor traces tell them apart."
        note = note if len(traces) > 1 else ""
        traces = [replace(trace, rank=index, notes=(*trace.notes, *filter(None, [note])))
                  for index, trace in enumerate(traces)]  # fmt: skip
    return sorted(traces, key=lambda trace: trace.rank)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    exported = {file.name.removesuffix(".sqlite") for file in path.glob("*.sqlite")}
    found = [file for suffix in _SUFFIXES for file in path.glob(f"*{suffix}")]
    found = [file for file in found if file.name.removesuffix(".nsys-rep") not in exported]
    if not found:
        raise TraceError(f"{path}: no trace in this directory. Known are {', '.join(_SUFFIXES)}.")
    return sorted(found)


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

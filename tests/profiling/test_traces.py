"""Files that are no traces, or lack something: one sentence each, with the way out. Ranks, and directories."""

import gzip
import json
import sqlite3
import subprocess
from os import utime
from pathlib import Path
from typing import Any

import pytest
from made_reports import MAIN, NVTX, RUNTIME, Report

from lightning_ddpopt.profiling import nsys
from lightning_ddpopt.profiling.analysis import analyze
from lightning_ddpopt.profiling.traces import TraceError, load


def damaged(**of: Any) -> bytes:
    """A trace of one kernel, but for some of its fields; an ellipsis leaves one out."""
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1, "dur": 2, "args": {}} | of
    return json.dumps({"traceEvents": [{key: value for key, value in event.items() if value is not ...}]}).encode()


def report() -> Report:
    made = Report()
    made.step(0, 0)
    return made


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.sqlite: no such file"):
        load([tmp_path / "none.sqlite"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "not a trace. Known are .nsys-rep"),
        ("a.sqlite", b"no database at all, though it is long enough" * 30, "not a database that nsys exported"),
        ("a.json", b"{", "not a trace of torch.profiler"),
        ("a.json", b"[1, 2]", "not a trace of torch.profiler"),
        ("a.json.gz", b"\x1f\x8bbroken", "not a trace of torch.profiler"),
        ("a.json", b'{"traceEvents": []}', "neither GPU work nor operators"),
        ("a.json", b'{"traceEvents": null}', "a damaged trace"),
        ("a.json", b'{"traceEvents": [1, 2]}', "a damaged trace"),
        ("a.json", damaged(args=None), "a damaged trace"),
        ("a.json", damaged(args={"stream": "a"}), "a damaged trace"),
        ("a.json", damaged(args={"stream": 2**70}), "a damaged trace"),
        ("a.json", damaged(ts="x"), "a damaged trace"),
        ("a.json", damaged(ts=float("inf")), "a damaged trace"),
        ("a.json", damaged(name=...), "a damaged trace"),
        ("a.json", damaged()[:-1] + b', "distributedInfo": [1]}', "a damaged trace"),
    ],
)
def test_no_trace(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        load([tmp_path / name])
    assert name in str(caught.value)


def test_another_database(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "a.sqlite")
    connection.execute("CREATE TABLE things (name)")
    connection.close()
    with pytest.raises(TraceError, match="no export of nsys"):
        load([tmp_path / "a.sqlite"])


def test_no_kernels(tmp_path: Path) -> None:
    made = Report()
    made.span("Batch 0", 0, 10)
    with pytest.raises(TraceError, match="older than the CUDA runtime"):
        load([made.write(tmp_path / "a.sqlite")])
    with pytest.raises(TraceError, match="the capture window never opened"):
        load([made.write(tmp_path / "a.sqlite", without=[NVTX])])


def test_no_steps(tmp_path: Path) -> None:
    traces = load([report().write(tmp_path / "a.sqlite", without=[NVTX])])
    message = r"add NsysCallback\(\) to the Trainer's callbacks.*only with profile\(schedule=\.\.\.\)"
    with pytest.raises(TraceError, match=message):
        analyze(traces)


def test_no_whole_step(tmp_path: Path) -> None:
    made = Report()
    made.span("Batch 0", 0, None)
    made.kernel(2, 3, 1, MAIN)
    with pytest.raises(TraceError, match="no step is whole"):
        analyze(load([made.write(tmp_path / "a.sqlite")]))


def test_no_launches(tmp_path: Path) -> None:
    traces = load([report().write(tmp_path / "a.sqlite", without=[RUNTIME])])
    with pytest.raises(TraceError, match="none of the 6 operations was launched in a step"):
        analyze(traces)


def test_a_report_needs_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nsys, "_PLACES", ())
    (tmp_path / "rank_0.nsys-rep").touch()
    with pytest.raises(TraceError, match=r"needs nsys, which is not.*nsys export --type sqlite rank_0\.nsys-rep"):
        load([tmp_path / "rank_0.nsys-rep"])


@pytest.mark.parametrize("is_on_path", [True, False])
@pytest.mark.parametrize("works", [True, False])
def test_a_report_goes_through_nsys_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool, is_on_path: bool
) -> None:
    exported = report().write(tmp_path / "made.sqlite")
    tool = tmp_path / "nsys"
    last = f'[ "$1" = export ] && cp {exported} "$7"' if works else "echo first; echo the file is damaged >&2; exit 3"
    tool.write_text(f"#!/bin/sh\n{last}\n")
    tool.chmod(0o755)
    if is_on_path:
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    else:  # where an installer put it
        monkeypatch.setattr(nsys, "_PLACES", (str(tool),))
    (tmp_path / "run_5.nsys-rep").touch()
    if works:
        (trace,) = load([tmp_path / "run_5.nsys-rep"])
        assert (trace.rank, trace.path.name, len(trace.operations)) == (5, "run_5.nsys-rep", 6)
    else:
        with pytest.raises(TraceError, match="nsys export failed: the file is damaged"):
            load([tmp_path / "run_5.nsys-rep"])
    assert subprocess.run(["ls", tmp_path], capture_output=True, check=True, text=True).stdout.split() == [
        "made.sqlite", "nsys", "run_5.nsys-rep"]  # fmt: skip


def kernel_only(path: Path, rank: int | None = None) -> Path:
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1.5, "dur": 2.25, "tid": 7, "args": {"correlation": 1}}
    data = {"traceEvents": [event]} | ({} if rank is None else {"distributedInfo": {"rank": rank}})
    path.write_bytes(gzip.compress(json.dumps(data).encode()) if path.suffix == ".gz" else json.dumps(data).encode())
    return path


def test_ranks_by_name_by_content_or_by_order(tmp_path: Path) -> None:
    named = [report().write(tmp_path / f"{name}.sqlite") for name in ("run_rank_11", "run_rank2", "run_7")]
    assert [(trace.rank, trace.path.name) for trace in load(named)] == [
        (2, "run_rank2.sqlite"), (7, "run_7.sqlite"), (11, "run_rank_11.sqlite")]  # fmt: skip
    told = [kernel_only(tmp_path / "b.json", 1), kernel_only(tmp_path / "a.json.gz", 0)]
    assert [(trace.rank, trace.path.name) for trace in load(told)] == [(0, "a.json.gz"), (1, "b.json")]
    last = [kernel_only(tmp_path / f"psgd_rank4_rank_{rank}.json") for rank in (10, 9)]
    assert [trace.rank for trace in load(last)] == [9, 10]
    assert load([kernel_only(tmp_path / "rank_7.json", 1)])[0].rank == 1  # the trace knows better
    untold = [kernel_only(tmp_path / "d.json"), kernel_only(tmp_path / "c.json")]
    traces = load(untold)
    assert [(trace.rank, trace.path.name) for trace in traces] == [(0, "d.json"), (1, "c.json")]
    assert "in the order of the files" in traces[0].notes[0]
    assert load(untold[:1])[0].notes == ()


def test_times_of_kineto_are_microseconds(tmp_path: Path) -> None:
    (trace,) = load([kernel_only(tmp_path / "a.json", 0)])
    assert trace.operations[["start_ns", "end_ns", "launch_ns"]].to_numpy().tolist() == [[1500, 3750, -1]]


def test_a_directory_stands_for_its_traces(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace in this directory"):
        load([tmp_path])
    for rank in (0, 1):
        report().write(tmp_path / f"rank_{rank}.sqlite")
        (tmp_path / f"rank_{rank}.nsys-rep").touch()  # what the export was made of
        utime(tmp_path / f"rank_{rank}.nsys-rep", (1_000, 1_000))
    (tmp_path / "notes.txt").touch()
    assert [trace.path.name for trace in load([tmp_path])] == ["rank_0.sqlite", "rank_1.sqlite"]


def test_of_a_report_and_its_export_the_newer_is_taken(tmp_path: Path) -> None:
    exported, recorded = report().write(tmp_path / "rank_0.sqlite"), tmp_path / "rank_0.nsys-rep"
    recorded.touch()
    utime(recorded, (1_000, 1_000))
    (trace,) = load([recorded, exported])
    assert trace.path == exported
    utime(exported, (900, 900))
    for given in ([recorded, exported], [tmp_path]):
        with pytest.raises(TraceError, match=r"rank_0\.nsys-rep: "):  # which is empty
            load(given)


def test_one_rank_twice_is_refused(tmp_path: Path) -> None:
    one = report().write(tmp_path / "a_rank_0.sqlite")
    with pytest.raises(TraceError, match=r"a_rank_0\.sqlite is given twice; give the traces of one run, one a rank\."):
        load([one, tmp_path / ".." / tmp_path.name / one.name])
    other = report().write(tmp_path / "b_rank_0.sqlite")
    message = r"a_rank_0\.sqlite and .*b_rank_0\.sqlite are both of rank 0; give the traces of one run, one a rank\."
    for given in ([one, other], [tmp_path]):
        with pytest.raises(TraceError, match=message):
            load(given)
    with pytest.raises(TraceError, match=r"c\.json and .*d\.json are both of rank 3"):
        load([kernel_only(tmp_path / "c.json", 3), kernel_only(tmp_path / "d.json", 3)])


def test_a_rank_that_is_not_known_beside_one_that_is(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"c\.json: neither its name nor the trace tells its rank, as others do"):
        load([kernel_only(tmp_path / "d.json", 0), kernel_only(tmp_path / "c.json")])


def test_files_without_ranks_are_in_the_order_of_the_numbers_in_their_names(tmp_path: Path) -> None:
    for number in (10, 9, 100):
        kernel_only(tmp_path / f"host{number}.json")
    assert [trace.path.name for trace in load([tmp_path])] == ["host9.json", "host10.json", "host100.json"]

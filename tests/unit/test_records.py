"""Records: what is written comes back, and what is no record stays out."""

import json
import logging
import multiprocessing
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ddpopt import HookSpec, Plan
from lightning_ddpopt.records import RECORD_SCHEMA, Record, append_record, read_records
from lightning_ddpopt.report.summary import sections
from lightning_ddpopt.report.tables import tables

WRONG = [None, True, 0, -1, 1.5, "x", "", [], [1], ["x"], [[1.0], [2.0]], [[0.0], [1.0]], {}, {"a": "b"}, {"a": 1}]

RECORD = Record(
    rung="bf16",
    label="bf16",
    repeat=3,
    measure="claim",
    model="vit_tiny",
    precision="32-true",
    compiled=False,
    device="CPU",
    world_size=2,
    num_nodes=1,
    images_per_step=64,
    steps_per_s=9.5,
    steps_ms_by_rank=[[90.0, 100.0, 110.0], [95.0, 105.0, 125.0]],
    loss=0.25,
    peak_memory_mib=512.0,
    parameters="ab" * 32,
    plan=Plan(bucket_cap_mb=(1, 25), hook=HookSpec("powersgd", {"matrix_approximation_rank": 4})),
    bucket_bytes=[4096, 8192],
    bytes_sent_per_step=6144.0,
    transports=["gloo"],
    accuracy=0.875,
    hardware="2 CPU cores, 0 GPUs",
    seed=0,
    command="train.py 'label=a b'",
    time="2026-12-01T00:00:00+00:00",
    commit="0123456789ab",
    versions={"torch": "2.14.1"},
    variables={"OMP_NUM_THREADS": "1"},
)


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    records = [RECORD, replace(RECORD, plan=None, bucket_bytes=None, accuracy=None, time="2026-12-02T00:00:00+00:00")]
    for record in records:
        append_record(tmp_path / "new" / "folder.jsonl", record)
    assert read_records([tmp_path]) == records
    assert read_records([tmp_path / "new" / "folder.jsonl"]) == records


def test_a_line_tells_its_schema_and_a_summary() -> None:
    line = RECORD.to_dict()
    assert line["schema"] == RECORD_SCHEMA == 1
    assert set(line) == {"schema", "step_ms", *(f.name for f in fields(RECORD))}
    assert line["step_ms"] == {"median": 105.0, "p10": 97.0, "p90": 121.0}, "of the slowest rank"


def test_figures_are_those_of_the_slowest_rank() -> None:
    assert RECORD.step_ms == 105.0
    assert RECORD.images_per_s == pytest.approx(64 / 0.105)


def test_records_come_in_the_order_of_their_time(tmp_path: Path) -> None:
    for name, hour in (("a", 3), ("b", 1), ("a", 2)):
        append_record(tmp_path / f"{name}.jsonl", replace(RECORD, time=f"2026-12-01T0{hour}:00:00+00:00"))
    assert [record.time[11:13] for record in read_records([tmp_path])] == ["01", "02", "03"]


def test_a_torn_line_costs_only_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "records.jsonl"
    append_record(path, RECORD)
    line = path.read_bytes()
    path.write_bytes(line + line[: len(line) // 2])  # a process was killed while it wrote
    append_record(path, replace(RECORD, repeat=4))
    with caplog.at_level(logging.WARNING):
        records = read_records([path])
    assert [record.repeat for record in records] == [3, 4]
    assert len(caplog.messages) == 1
    assert "line 2" in caplog.messages[0]


@pytest.mark.parametrize(
    "line",
    [
        b"[1, 2]",
        b"7",
        b"not json",
        b"\xff\xfe",
        b'{"no": "schema"}',
        json.dumps(RECORD.to_dict() | {"schema": 2}).encode(),
        json.dumps({k: v for k, v in RECORD.to_dict().items() if k != "loss"}).encode(),
        json.dumps(RECORD.to_dict() | {"steps_ms_by_rank": []}).encode(),
        json.dumps(RECORD.to_dict() | {"steps_ms_by_rank": [[]]}).encode(),
        json.dumps(RECORD.to_dict() | {"steps_ms_by_rank": [["fast"]]}).encode(),
        json.dumps(RECORD.to_dict() | {"steps_ms_by_rank": 7}).encode(),
        json.dumps(RECORD.to_dict() | {"steps_ms_by_rank": [[-1.0]]}).encode(),
        json.dumps(RECORD.to_dict() | {"images_per_step": 0}).encode(),
        json.dumps(RECORD.to_dict() | {"steps_ms_by_rank": [[1.0]]}).encode(),
        json.dumps(RECORD.to_dict() | {"steps_ms_by_rank": [[1.0], [float("nan")]]}).encode(),
        json.dumps(RECORD.to_dict() | {"label": None}).encode(),
        json.dumps(RECORD.to_dict() | {"time": None}).encode(),
        json.dumps(RECORD.to_dict() | {"versions": None}).encode(),
        json.dumps(RECORD.to_dict() | {"transports": [1]}).encode(),
        json.dumps(RECORD.to_dict() | {"world_size": 0}).encode(),
        json.dumps(RECORD.to_dict() | {"repeat": True}).encode(),
        json.dumps(RECORD.to_dict() | {"steps_per_s": float("inf")}).encode(),
        b"[" * 100_000,
        json.dumps(RECORD.to_dict() | {"plan": {"schema": 1, "bucket_cap_mb": -1}}).encode(),
    ],
)
def test_what_is_no_record_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, line: bytes) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(line + b"\n")
    append_record(path, RECORD)
    with caplog.at_level(logging.WARNING):
        assert read_records([path]) == [RECORD]
    assert f"{path}: line 1" in caplog.text


@given(st.sampled_from([f.name for f in fields(Record)]), st.sampled_from(WRONG))
def test_no_wrong_value_gets_into_a_report(name: str, value: object) -> None:
    data = RECORD.to_dict() | {name: value}
    try:
        record = Record.from_dict(data)
    except ValueError:
        return
    json.dumps(record.to_dict(), allow_nan=False)
    assert record.step_ms > 0
    for section in sections([record, RECORD]):
        assert tables(section)


def test_a_run_that_diverged_is_kept(tmp_path: Path) -> None:
    append_record(tmp_path / "records.jsonl", replace(RECORD, loss=None))
    assert read_records([tmp_path])[0].loss is None


def test_a_file_given_twice_counts_once_and_a_folder_is_no_file(tmp_path: Path) -> None:
    append_record(tmp_path / "records.jsonl", RECORD)
    (tmp_path / "folder.jsonl").mkdir()
    assert read_records([tmp_path, tmp_path / "records.jsonl"]) == [RECORD]


def test_keys_of_later_versions_are_ignored() -> None:
    assert Record.from_dict(RECORD.to_dict() | {"exposed_ms": 3.0}) == RECORD


def test_a_path_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        read_records([tmp_path / "nowhere"])


def test_nan_is_no_figure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        append_record(tmp_path / "records.jsonl", replace(RECORD, peak_memory_mib=float("nan")))
    assert read_records([tmp_path]) == []


def _write(path: Path, writer: int) -> None:
    steps = 2 * [[float(step + 1) for step in range(5000)]]  # a line larger than any buffer
    for number in range(20):
        append_record(path, replace(RECORD, seed=writer, repeat=number, steps_ms_by_rank=steps))


def test_two_writers_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, writer)) for writer in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    found = sorted((record.seed, record.repeat) for record in read_records([path]))
    assert found == [(writer, number) for writer in range(2) for number in range(20)]


def test_records_and_transports_need_no_torch() -> None:
    code = (
        "import sys, lightning_ddpopt.records, lightning_ddpopt.machine.transport;"
        "sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

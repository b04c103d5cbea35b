"""benchmarks/scaling.py: the table from the lines, and jobs that fail or take too long."""

import json
import os
import sys
from pathlib import Path

import pytest
from scaling import ALONE_S, SHORTEST_S, TESTS_S, WEIGHTS, run, table


def write(file: Path, *lines: dict[str, object]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_the_table(tmp_path: Path) -> None:
    """By hand: 32 images a GPU; one GPU 80 ms, eight GPUs 100 and 400 ms."""
    write(
        tmp_path / "alone.jsonl",
        {"environment": {}},
        {"variant": "single", "steps_ms_by_rank": [[79.0, 80.0, 90.0]]},
        {"variant": "single", "steps_ms_by_rank": [[80.0, 80.0, 80.0]]},
        {"variant": "ddp", "steps_ms_by_rank": [[84.0]]},
    )
    write(
        tmp_path / "8_ranks_net.jsonl",
        {"environment": {}},
        {"part": "tune", "steps_ms": [1.0], "slowest_ms": [1.0]},
        *({"part": "rungs", "name": "ddp", "steps_ms": [1.0], "slowest_ms": [ms]} for ms in (390.0, 400.0, 420.0)),
        {"part": "rungs", "name": "powersgd", "steps_ms": [1.0], "slowest_ms": [100.0, 100.0, 300.0]},
        {"part": "grid", "name": "25", "steps_ms": [1.0], "slowest_ms": [200.0]},
        {"part": "grid", "name": "50", "steps_ms": [1.0], "slowest_ms": [160.0]},
        {"part": "claim", "variant": "ddp", "steps_ms": [1.0], "slowest_ms": [380.0]},
    )
    rows = table(tmp_path, [8], ["net", "p2p"], 32).splitlines()[2:]
    assert [[cell.strip() for cell in row.strip("|").split("|")] for row in rows] == [
        ["1", "", "single", "80.00", "", "400", "1.000", ""],
        ["1", "", "ddp", "84.00", "", "381", "0.952", ""],
        ["8", "net", "ddp: one bucket", "400.00 (390.00 to 420.00)", "3", "640", "0.200", "0.16"],
        ["8", "net", "powersgd", "100.00 (100.00 to 100.00)", "1", "2560", "0.800", "0.84"],
        ["8", "net", "Lightning's ddp, 30 steps a repeat", "380.00 (380.00 to 380.00)", "1", "674", "0.211", ""],
        ["8", "net", "best of the grid of 2, capacity 50", "160.00 (160.00 to 160.00)", "1", "1600", "0.500", ""],
    ]


def test_each_of_six_jobs_gets_time_within_nine_minutes() -> None:
    left_s = 9 * 60 - ALONE_S - TESTS_S  # what one GPU and the tests may take at most
    assert left_s * min(WEIGHTS.values()) / (2 * sum(WEIGHTS.values())) >= SHORTEST_S


@pytest.mark.parametrize(
    ("code", "seconds", "problem"),
    [
        ("print('well')", 30, ""),
        ("raise SystemExit(3)", 30, "exit status 3"),
        ("import time; time.sleep(60)", 1.0, "ran out of its 1 s"),
    ],
)
def test_what_a_job_did_is_told(tmp_path: Path, code: str, seconds: float, problem: str) -> None:
    log = tmp_path / "job.log"
    told = run(
        [sys.executable, "-u", "-c", f"import os; print(os.getpid(), os.environ['ASKED']); {code}"],
        seconds,
        log,
        {"ASKED": "net"},
    )
    assert told.startswith(problem)
    assert bool(told) == bool(problem)
    process, asked = log.read_text(encoding="utf-8").split()[:2]
    assert asked == "net"
    with pytest.raises(ProcessLookupError):
        os.kill(int(process), 0)

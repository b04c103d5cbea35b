"""What `ddpopt report` says of records whose figures are known."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from scipy import stats
from typer.testing import CliRunner

from lightning_ddpopt import HookSpec, Plan
from lightning_ddpopt.cli import app
from lightning_ddpopt.records import Record, append_record
from lightning_ddpopt.report import plots
from lightning_ddpopt.report.comparison import compare
from lightning_ddpopt.report.summary import Row, Section, Spread, sections
from lightning_ddpopt.report.tables import tables

STOCK = Plan(bucket_cap_mb=2000, gradient_as_bucket_view=False)
SINGLE_MS = [80.0, 81.0, 82.0]
DDP_MS = [100.0, 104.0, 102.0]
BF16_MS = [90.0, 91.0, 95.0]


def record(rung: str, repeat: int, step_ms: float, plan: Plan | None = STOCK, ranks: int = 2, **fields: Any) -> Record:
    values = {
        "rung": rung,
        "label": rung,
        "repeat": repeat,
        "measure": "claim",
        "model": "vit_l_32",
        "precision": "32-true",
        "compiled": False,
        "device": "NVIDIA H200",
        "world_size": ranks,
        "num_nodes": 1,
        "images_per_step": 32 * ranks,
        "steps_per_s": 900 / step_ms,
        "steps_ms_by_rank": [[step_ms - 20] * 30, [step_ms] * 30][:ranks] if ranks > 1 else [[step_ms] * 30],
        "loss": 7.0,
        "peak_memory_mib": 7000.0,
        "parameters": f"{'ddp' if rung == 'view' else rung}{repeat}",
        "plan": plan,
        "bucket_bytes": None if plan is None else [2**20, 3 * 2**20],
        "bytes_sent_per_step": None if plan is None else 4.0 * 2**20,
        "transports": ["P2P/CUMEM/read"] if ranks > 1 else [],
        "versions": {"torch": "2.11.0"},
        "hardware": "16 CPU cores, 2 GPUs",
        "seed": 0,
        "time": f"2026-12-0{1 + repeat}T00:00:00+00:00",
    }
    return Record(**(values | fields))


def ladder() -> list[Record]:
    found = []
    for repeat in range(3):
        found += [
            record("single", repeat, SINGLE_MS[repeat], None, 1),
            record("ddp", repeat, DDP_MS[repeat]),
            record("view", repeat, DDP_MS[repeat] - 1, replace(STOCK, gradient_as_bucket_view=True)),
            record("bf16", repeat, BF16_MS[repeat], replace(STOCK, hook=HookSpec("bf16"))),
            record("accumulate", repeat, 4 * BF16_MS[repeat], replace(STOCK, static_graph=True), images_per_step=256),
        ]
    return found


def rows_of(records: list[Record]) -> tuple[Section, dict[str, Row]]:
    (section,) = sections(records)
    return section, {row.key.label: row for row in section.rows}


def test_a_rows_figures() -> None:
    _, rows = rows_of(ladder())
    assert list(rows) == ["single", "ddp", "view", "bf16", "accumulate"], "in the order of the first run"
    assert rows["ddp"].step_ms == Spread(102.0, 100.0, 104.0), "of the slowest rank"
    assert rows["ddp"].images_per_s == pytest.approx(64 / 0.102)
    assert rows["ddp"].steps_per_s == pytest.approx(900 / 102)
    assert rows["single"].images_per_s == pytest.approx(32 / 0.081)


def test_differences_are_paired_by_repeat() -> None:
    section, rows = rows_of(ladder())
    assert section.reference(rows["bf16"]) is rows["ddp"]
    assert rows["bf16"].paired_ms(rows["ddp"]) == Spread(-10.0, -13.0, -7.0)
    assert rows["bf16"].throughput_over(rows["ddp"]) == pytest.approx(np.median([100 / 90, 104 / 91, 102 / 95]))
    assert section.reference(rows["accumulate"]) is rows["accumulate"], "steps of another size are not compared"
    assert rows["accumulate"].throughput_over(rows["ddp"]) is None


def test_repeats_that_one_side_lacks_are_not_paired() -> None:
    runs = [record("ddp", 0, 100.0), record("ddp", 1, 120.0), record("bf16", 1, 100.0), record("bf16", 2, 1.0)]
    _, rows = rows_of(runs)
    assert rows["bf16"].paired_ms(rows["ddp"]) == Spread(-20.0, -20.0, -20.0)
    _, rows = rows_of([record("ddp", 0, 100.0), record("bf16", 1, 100.0)])
    assert rows["bf16"].paired_ms(rows["ddp"]) is None
    assert rows["bf16"].throughput_over(rows["ddp"]) is None


def test_a_repeat_that_was_run_twice_counts_once() -> None:
    _, rows = rows_of([record("ddp", 0, 100.0), record("ddp", 0, 110.0), record("ddp", 1, 90.0)])
    assert rows["ddp"].step_ms_by_repeat == {0: 105.0, 1: 90.0}


def test_equal_parameters() -> None:
    _, rows = rows_of(ladder())
    assert rows["view"].same_parameters(rows["ddp"]) is True
    assert rows["bf16"].same_parameters(rows["ddp"]) is False


def test_what_differs_stands_apart() -> None:
    base = record("ddp", 0, 100.0)
    others = {"device": "CPU", "model": "vit_tiny", "precision": "bf16-mixed", "compiled": True, "measure": "article"}
    others |= {"workload": "adamw", "data": "digits"}
    assert len(sections([base, *(replace(base, **{name: value}) for name, value in others.items())])) == 8
    rows = [
        {"plan": Plan()},
        {"transports": ["NET/Socket"]},
        {"num_nodes": 2},
        {"images_per_step": 128},
        {"label": "b"},
    ]
    (section,) = sections([base, *(replace(base, **change) for change in rows), replace(base, repeat=1)])
    assert len(section.rows) == 6
    tuned = replace(base, variables={"NCCL_MIN_NCHANNELS": "8", "NCCL_P2P_DISABLE": "1"})
    (section,) = sections([base, tuned])
    assert [row[0] for row in tables(section)[0].rows] == ["ddp", "ddp NCCL_MIN_NCHANNELS=8"]
    assert len(sections([base, replace(base, variables={"OMP_NUM_THREADS": "1"})])[0].rows) == 1


def test_the_reference_is_stock_ddp_in_the_same_place() -> None:
    net = {"transports": ["NET/Socket"]}
    runs = [
        record("view", 0, 99.0, Plan()),
        record("ddp", 0, 100.0),
        record("view", 0, 99.0, Plan(), **net),
        record("bf16", 0, 90.0, Plan(), **net),
        record("ddp_1gpu", 0, 85.0, STOCK, 1),
        record("single", 0, 83.0, None, 1),
    ]
    (section,) = sections(runs)
    references = [section.reference(row).key.rung for row in section.rows]
    assert references == ["ddp", "ddp", "view", "view", "ddp_1gpu", "ddp_1gpu"]
    assert section.single(section.rows[0]) is section.rows[5]
    assert section.single(Row(section.rows[0].key._replace(images_per_rank=256), ())) is None, "of another batch"


def test_a_single_of_two_ranks_is_no_limit() -> None:
    (section,) = sections([record("single", 0, 50.0, None, 2), record("ddp", 0, 100.0)])
    assert section.single(section.rows[1]) is None


def test_runs_that_were_not_interleaved_are_told() -> None:
    runs = [record(rung, repeat, 100.0, time=f"2026-12-01T0{hour}:00:00") for hour, (rung, repeat) in
            enumerate([("ddp", 0), ("ddp", 1), ("bf16", 0), ("bf16", 1)])]  # fmt: skip
    assert "Not interleaved with the reference, so that drift counts as a difference: bf16." in _notes(runs)
    assert "Not interleaved" not in _notes(ladder())


def cells(records: list[Record], table: int) -> dict[str, dict[str, str]]:
    (section,) = sections(records)
    shown = tables(section)[table]
    return {row[0]: dict(zip(shown.header, row, strict=True)) for row in shown.rows}


def test_the_table_of_speed() -> None:
    shown = cells(ladder(), 0)
    assert shown["bf16"] == {
        "rung": "bf16",
        "ranks": "2",
        "transport": "P2P",
        "images/rank": "32",
        "runs": "3",
        "step ms": "91.00 (90.00 to 95.00)",
        "Δ ms": "-10.00 (-13.00 to -7.00)",
        "images/s": "703",
        "vs ref": "+11.1 %",
        "of single": "88.9 %",
        "steps/s": "9.89",
    }
    assert (shown["ddp"]["Δ ms"], shown["ddp"]["vs ref"], shown["single"]["of single"]) == ("ref", "", "")
    assert (shown["accumulate"]["Δ ms"], shown["accumulate"]["of single"]) == ("ref", "")


def test_the_table_of_outcomes() -> None:
    shown = cells(ladder(), 1)
    assert shown["view"] == {
        "rung": "view",
        "ranks": "2",
        "transport": "P2P",
        "images/rank": "32",
        "buckets": "2",
        "sent MiB": "4.000",
        "peak MiB": "7000",
        "loss": "7.0000",
        "parameters": "same bits",
    }
    assert shown["bf16"]["parameters"] == "differ"
    assert shown["single"]["buckets"] == shown["single"]["sent MiB"] == ""


def test_too_few_runs_are_not_for_claims() -> None:
    notes = [" ".join(tables(section)[0].notes) for section in sections(ladder())]
    assert "Not for claims: 3 repeats where a claim needs 5. Small" in notes[0]
    short = [replace(run, steps_ms_by_rank=run.world_size * [[1.0]]) for run in ladder() if run.repeat == 0]
    assert "1 timed step where a claim needs 30 and 1 repeat where a claim needs 5" in _notes(short)
    enough = [replace(run, repeat=repeat) for run in ladder()[:5] for repeat in range(5)]
    assert "Not for claims" not in " ".join(tables(sections(enough)[0])[0].notes)


def _notes(records: list[Record]) -> str:
    return " ".join(note for section in sections(records) for table in tables(section) for note in table.notes)


def test_all_versions_are_told() -> None:
    runs = [record("ddp", 0, 100.0), record("ddp", 1, 100.0, versions={"torch": "2.14.1"})]
    assert "torch 2.11.0 and 2.14.1" in " ".join(tables(sections(runs)[0])[1].notes)


def test_a_comparison_has_welchs_interval() -> None:
    before = [record("ddp", repeat, ms) for repeat, ms in enumerate((100.0, 101.0, 99.0, 100.0, 102.0))]
    after = [record("ddp", repeat, ms, Plan(), device="B200") for repeat, ms in enumerate((90.0, 92.0, 91.0))]
    (compared,) = compare(before, after)
    (line,) = compared.comparisons
    logs = [np.log([run.step_ms for run in runs]) for runs in (before, after)]
    means, errors = [x.mean() for x in logs], [x.var(ddof=1) / len(x) for x in logs]
    freedom = sum(errors) ** 2 / sum(e**2 / (len(x) - 1) for e, x in zip(errors, logs, strict=True))
    reach = stats.t.ppf(0.975, freedom) * np.sqrt(sum(errors))
    assert line.ratio == pytest.approx(np.exp(means[1] - means[0]))
    assert (line.low, line.high) == pytest.approx(tuple(np.exp(means[1] - means[0] + sign * reach) for sign in (-1, 1)))
    assert line.differs


def test_noise_is_no_difference() -> None:
    before = [record("ddp", repeat, ms) for repeat, ms in enumerate((100.0, 110.0, 90.0))]
    after = [record("ddp", repeat, ms) for repeat, ms in enumerate((95.0, 108.0, 99.0))]
    (line,) = compare(before, after)[0].comparisons
    assert line.low is not None
    assert line.high is not None
    assert line.low < 1 < line.high
    assert not line.differs


def test_compared_rows_have_one_plan_or_are_alone() -> None:
    caps = [record("ddp", 0, ms, replace(STOCK, bucket_cap_mb=cap)) for ms, cap in ((90.0, 25), (100.0, 2000))]
    (compared,) = compare(caps, caps[::-1])
    assert [line.ratio for line in compared.comparisons] == [1, 1]
    (compared,) = compare(caps, [record("ddp", 0, 50.0, Plan())])
    assert (compared.comparisons, compared.ambiguous) == ((), ("ddp on 2 over P2P",))


def test_a_set_is_compared_on_its_own_device() -> None:
    here, there = record("ddp", 0, 100.0), record("ddp", 0, 200.0, device="A100")
    assert [line.ratio for c in compare([here], [there, here]) for line in c.comparisons] == [1]
    other = record("ddp", 0, 300.0, device="B200")
    assert [line.ratio for c in compare([here], [there, other]) for line in c.comparisons] == pytest.approx([2, 3])


def test_one_run_has_no_interval_and_missing_rows_are_named() -> None:
    (compared,) = compare([record("ddp", 0, 100.0), record("view", 0, 99.0)], [record("ddp", 0, 50.0)])
    (line,) = compared.comparisons
    assert (line.ratio, line.low, line.high, line.differs) == (pytest.approx(0.5), None, None, False)
    assert compared.only_in_one == ("view on 2 over P2P",)


def write(path: Path, records: list[Record]) -> Path:
    for run in records:
        append_record(path, run)
    return path


def sweep() -> list[Record]:
    return [
        record(
            "bucket_sweep", 0, 100.0 - cap / 100, Plan(bucket_cap_mb=cap, hook=HookSpec(hook)), label=f"{hook} {cap}"
        )
        for hook in ("none", "bf16")
        for cap in (25, 100, 2000)
    ]


def test_the_command_shows_and_writes(tmp_path: Path) -> None:
    write(tmp_path / "a" / "records.jsonl", ladder())
    write(tmp_path / "b" / "records.jsonl", sweep())
    files = ["--markdown", str(tmp_path / "r.md"), "--png", str(tmp_path / "r.png")]
    done = CliRunner().invoke(app, ["report", str(tmp_path / "a"), str(tmp_path / "b"), *files])
    assert done.exit_code == 0, done.output
    assert "91.00 (90.00 to 95.00)" in done.output
    markdown = (tmp_path / "r.md").read_text()
    assert "| bf16 | 2 | P2P | 32 | 3 | 91.00 (90.00 to 95.00) | -10.00 (-13.00 to -7.00) | 703 |" in markdown
    for line in re.findall(r"^\|.*\|$", markdown, re.M):
        assert line.count("|") in (10, 12)
    image = imread(tmp_path / "r.png")
    assert image.shape[1] == 1440
    assert len(np.unique(image[..., :3].reshape(-1, 3), axis=0)) > 20


def test_a_picture_shows_of_a_sweep_the_best_and_a_line_a_hook() -> None:
    (section,) = sections([*ladder(), *sweep()])
    assert [row.key.label for row in plots._bars(section)] == [
        *("single", "ddp", "view", "bf16", "accumulate"),
        *("none 2000", "bf16 2000"),
    ]
    assert {hook: len(rows) for (hook, _), rows in plots._sweep(section).items()} == {"none": 3, "bf16": 3}


def test_a_line_for_each_swept_rung() -> None:
    others = [replace(run, rung="ddp", label=f"ddp {run.label}") for run in sweep()]
    (section,) = sections([*sweep(), *others])
    assert sorted(hook for hook, _ in plots._sweep(section)) == ["bf16", "bf16, ddp 3", "none", "none, ddp 2"]


def test_the_command_compares(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ladder())
    write(tmp_path / "b.jsonl", [replace(run, steps_ms_by_rank=run.world_size * [[50.0] * 30]) for run in ladder()])
    done = CliRunner().invoke(app, ["report", "--compare", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
    assert done.exit_code == 0, done.output
    assert re.search(r"ddp +2 +P2P +102\.00 \(100\.00 to 104\.00\) +50\.00 +3, 3 +0\.4903 .* faster", done.output)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["empty"], "no records in"),
        (["empty", "--compare"], "--compare takes two paths, before and after; got 1"),
        (["empty", "empty", "--compare"], "no records in"),
        (["full", "empty", "--compare"], "no records in"),
        (["full", "full", "--compare", "--png", "x.png"], "leave out --compare"),
        (["full", "other", "--compare"], "no workload in common"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    write(Path("full", "r.jsonl"), ladder())
    write(Path("other", "r.jsonl"), [record("ddp", 0, 100.0, model="another")])
    done = CliRunner().invoke(app, ["report", *arguments])
    assert done.exit_code == 2
    assert said in re.sub(r"[\s│]+", " ", done.output)


def test_help_imports_no_torch_and_no_matplotlib() -> None:
    code = (
        "import sys, lightning_ddpopt.cli as cli\n"
        "try: cli.app(['report', '--help'])\n"
        "except SystemExit as leave: assert leave.code == 0\n"
        "sys.exit(bool({'torch', 'lightning', 'matplotlib', 'scipy', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Show the records" in done.stdout

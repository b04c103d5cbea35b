"""Every rung on the CPU, in its shortest form, through the ladder and the torchrun launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_ddpopt.records import Record, read_records
from lightning_ddpopt.tuning.verdict import Verdict

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORTEST = ["measure.warmup_steps=3", "measure.steps=2", "measure.cooldown_steps=0", "trainer.limit_val_batches=1"]


def run(*command: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "RANK", "WORLD", "LOCAL_"))}
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment | {"OMP_NUM_THREADS": "1", "DDPOPT_CACHE_DIR": str(cwd / "verdicts")},
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )


@pytest.mark.timeout(600)
def test_every_rung(tmp_path: Path) -> None:
    rungs = "--rungs=single,ddp_1gpu,ddp,static_graph,bucket_view,bf16,powersgd,ddp_default,bucket_sweep,accumulate"
    done = run(str(EXAMPLES / "ladder.py"), "--short", rungs, "--out", str(tmp_path / "a b"), *SHORTEST, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_records([tmp_path / "a b"])
    records = {record.label: record for record in found}
    assert len(records) == len(found)
    together = ["ddp", "static_graph", "bucket_view", "bf16", "powersgd", "ddp_default"]
    sweep = [f"{hook} cap {capacity}" for hook in ("none", "bf16") for capacity in (0.25, 2000)]
    assert list(records) == ["single", "ddp_1gpu", *together, *sweep, "accumulate 1", "accumulate 4"]

    alone = ("single", "ddp_1gpu")
    for label, record in records.items():
        ranks = 1 if label in alone else 2
        assert record.world_size == len(record.steps_ms_by_rank) == ranks
        assert record.transports == ([] if label in alone else ["gloo"])
        assert all(len(steps) == 2 for steps in record.steps_ms_by_rank)
        assert record.images_per_step == ranks * (64 if record.rung == "accumulate" else 32)
    assert records["single"].plan is None
    assert records["single"].parameters == records["ddp_1gpu"].parameters

    stock = records["ddp"]
    assert stock.plan is not None
    assert not stock.plan.gradient_as_bucket_view
    exact = ["static_graph", "bucket_view", "ddp_default", *(label for label in sweep if "none" in label)]
    assert {records[label].parameters for label in exact} == {stock.parameters}
    assert len({records[label].parameters for label in ("ddp", "bf16", "powersgd")}) == 3
    # Other micro-batches hold other images, and their mean is that of the whole only up to rounding.
    assert records["accumulate 4"].parameters != records["accumulate 1"].parameters

    assert buckets(stock) == buckets(records["bucket_view"]) == buckets(records["none cap 2000"]) == 1
    assert buckets(records["none cap 0.25"]) > 2
    assert sent(stock) == sum(stock.bucket_bytes or []), "an all-reduce of two ranks sends the payload once"
    assert sent(records["bf16"]) == sent(stock) / 2
    assert sent(records["powersgd"]) < sent(stock) / 20

    assert "same bits" in done.stdout
    assert (tmp_path / "a b" / "report.md").read_text().count("\n| ") == 2 * (2 + len(records))
    assert (tmp_path / "a b" / "report.png").stat().st_size > 10_000
    assert not list(tmp_path.glob("outputs")), "everything is in the folder that was asked for"


def test_the_rung_that_tunes(tmp_path: Path) -> None:
    short = ["measure.steps=2", "measure.cooldown_steps=0", "trainer.limit_val_batches=1"]
    done = run(str(EXAMPLES / "ladder.py"), "--short", "--rungs=ddpopt", "--out=tuned", *short, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tuning took" in done.stdout.replace("\n", " ")
    assert (tmp_path / "tuned" / "verdict.png").stat().st_size > 10_000
    (verdict,) = (Verdict.load(path) for path in (tmp_path / "tuned").rglob("ddpopt_verdict.json"))
    (record,) = read_records([tmp_path / "tuned"])
    kept = verdict.trial_of(verdict.plan)
    assert kept is not None
    assert record.plan == verdict.plan
    assert tuple(record.bucket_bytes or []) == kept.bucket_bytes


def test_steps_of_tuning_are_not_measured(tmp_path: Path) -> None:
    command = [str(EXAMPLES / "train.py"), "-m", "experiment=ddpopt", "trainer=cpu", *SHORTEST]
    done = run(*command, "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert done.returncode != 0
    assert "measured steps lie in it: raise measure.warmup_steps=3" in done.stdout + done.stderr
    assert not list(tmp_path.rglob("record.jsonl"))


def test_a_rung_that_did_something_else_fails_loudly(tmp_path: Path) -> None:
    command = [str(EXAMPLES / "train.py"), "-m", "experiment=ddp", "transport=p2p", "trainer=cpu", *SHORTEST]
    done = run(*command, "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert done.returncode != 0
    assert "rung 'ddp' did not do what it says" in done.stdout + done.stderr
    assert "transport p2p was asked for, found: gloo" in done.stdout + done.stderr
    assert not list(tmp_path.rglob("*.jsonl"))


def test_the_ladder_goes_on_after_a_failure_and_tells(tmp_path: Path) -> None:
    options = ["--short", "--rungs", "single,accumulate", "--out", str(tmp_path / "out")]
    command = [str(EXAMPLES / "ladder.py"), *options, *SHORTEST, "++effective_batch_size=66", "repeat=3"]
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 1
    assert "66 cannot be split into 4 equal micro-batches" in done.stdout + done.stderr
    labels = [(record.label, record.repeat) for record in read_records([tmp_path / "out"])]
    assert labels == [("single", 3), ("accumulate 1", 3)]
    assert "1 sweeps had failed jobs" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rungs", "ddp,nothing"], "'nothing' is none of single, ddp_1gpu, ddp,"),
        (["--num-nodes", "2"], "both --num-nodes and --rendezvous HOST:PORT"),
        (["--rendezvous", "host:29500"], "both --num-nodes and --rendezvous HOST:PORT"),
        (["--num-nodes", "2", "--rendezvous", "host"], "both --num-nodes and --rendezvous HOST:PORT"),
        (["--num-nodes", "2", "--rendezvous", "host:65000"], "there are 65535"),
        (["--num-nodes", "2", "--rendezvous", "host:29500", "--rungs", "single"], "none of single runs on 0 GPU"),
        (["--transports", "tcp"], "'tcp' is none of auto, p2p, shm, net"),
        (["--devices", "2,x"], "'2,x' must be numbers of at least 1"),
        (["--repeats", "0"], "must be at least 1"),
    ],
)
def test_mistakes(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = run(str(EXAMPLES / "ladder.py"), *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr


def buckets(record: Record) -> int:
    return len(record.bucket_bytes or [])


def sent(record: Record) -> float:
    assert record.bytes_sent_per_step is not None
    return record.bytes_sent_per_step

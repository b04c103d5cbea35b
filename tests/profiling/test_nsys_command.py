"""`ddpopt nsys`: the command it builds, what it says when something is missing, and whole rounds on the CPU."""

import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import lightning as L  # noqa: N812
import pytest

from lightning_ddpopt import NsysCallback
from lightning_ddpopt.profiling import nsys
from lightning_ddpopt.profiling.nsys import NsysError, Profile

TESTS = Path(__file__).parents[1]
PROGRAM = """
import sys
import lightning as L
from scenarios import Mlp, data
from lightning_ddpopt import DDPOptStrategy, NsysCallback
steps, own = int(sys.argv[1]), sys.argv[2:]
if own == ["fail"]:
    raise SystemExit(3)
callbacks = [NsysCallback(warmup_steps=2, profile_steps=1)] if own else []
L.Trainer(accelerator="cpu", devices=2, strategy=DDPOptStrategy(), max_steps=steps, logger=False, callbacks=callbacks,
          enable_checkpointing=False, enable_progress_bar=False, use_distributed_sampler=False).fit(Mlp(), data())
"""


def profile(**changes: object) -> Profile:
    return Profile(**({"program": ("train.py", "a b"), "nproc": 2} | changes))  # type: ignore[arg-type]


def fake_nsys(folder: Path, said: str) -> Path:
    path = folder / "nsys"
    path.write_text(f"#!/bin/sh\necho '{said}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("NVIDIA Nsight Systems version 2025.3.1.90-253135822126v0", (2025, 3)),
        ("NVIDIA Nsight Systems version 2023.4.4.54-234433681190v0", (2023, 4)),
        ("something else", (0, 0)),
    ],
)
def test_the_version(tmp_path: Path, said: str, version: tuple[int, int]) -> None:
    assert nsys.nsys_version(fake_nsys(tmp_path, said)) == version
    assert nsys.nsys_version(tmp_path / "nothing") == (0, 0)


def test_finding_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_nsys(tmp_path, "")
    assert nsys.find_nsys(str(tmp_path)) == path
    newer = tmp_path / "installed" / "2025.6.1" / "bin"
    older = tmp_path / "installed" / "2025.10.1" / "bin"
    for folder, version in ((newer, "version 2025.10.1"), (older, "version 2025.6.1")):
        folder.mkdir(parents=True)
        fake_nsys(folder, version)
    monkeypatch.setattr(nsys, "_PLACES", (f"{tmp_path}/installed/*/bin/nsys",))
    assert nsys.find_nsys("/nowhere") == newer / "nsys", "the newest"
    monkeypatch.setattr(nsys, "_PLACES", ())
    with pytest.raises(NsysError, match=r"not on PATH.*Install it.*--profiler torch"):
        nsys.find_nsys("/nowhere")


@pytest.mark.parametrize(
    ("of", "cuda", "is_too_old"),
    [
        ((2023, 4), (13, 0), True),
        ((2025, 3), (13, 0), False),
        ((2025, 3), (13, 2), False),
        ((2023, 4), (12, 8), False),
        ((2023, 3), (12, 8), True),
        ((0, 0), (11, 8), False),
        ((2023, 4), None, False),
    ],
)
def test_an_nsys_older_than_cuda(of: tuple[int, int], cuda: tuple[int, int] | None, is_too_old: bool) -> None:
    said = nsys.too_old(of, cuda)
    assert (said is not None) == is_too_old
    if said is not None:
        assert "the reports will have ranges and no kernels" in said


@pytest.mark.parametrize(("said", "cuda"), [("13.0", (13, 0)), ("12.8.1", (12, 8)), (None, None), ("", None)])
def test_the_cuda_of_torch(said: str | None, cuda: tuple[int, int] | None) -> None:
    assert nsys.release(said) == cuda


def test_reports_are_those_of_the_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a_rank_10.x", "a_rank_2.x", "a_rank_4_rank_0.x", "ba_rank_1.x", "a_rank_1.xx", "a[b]_rank_0.x"):
        Path(name).touch()
    assert profile(output="a").reports(".x") == ["a_rank_2.x", "a_rank_10.x"]
    assert profile(output="a[b]").reports(".x") == ["a[b]_rank_0.x"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nproc": 0}, "--nproc and --profile-steps must be at least 1"),
        ({"profile_steps": 0}, "--nproc and --profile-steps must be at least 1"),
        ({"warmup_steps": -1}, "--warmup-steps at least 0"),
        ({"output": "folder/"}, "--output folder/ is a folder"),
    ],
)
def test_options_that_cannot_work(changes: dict[str, object], said: str) -> None:
    with pytest.raises(NsysError, match=said):
        profile(**changes)


def test_nccl_is_traced_where_nsys_knows_it() -> None:
    path = Path("/opt/nsys")
    assert "--trace=cuda,nvtx" in nsys.nsys_arguments(profile(), path, (2025, 3))
    assert "--trace=cuda,nvtx,nccl" in nsys.nsys_arguments(profile(), path, (2025, 6))
    assert "--trace=cuda,osrt" in nsys.nsys_arguments(profile(trace="cuda,osrt"), path, (2025, 6))
    on_gpu = nsys.nsys_arguments(profile(output="a/b"), path, (2025, 6))
    assert {"--capture-range=cudaProfilerApi", "--output=a/b_rank_%q{RANK}"} <= set(on_gpu)
    on_cpu = nsys.nsys_arguments(profile(uses_cuda=False), path, (2025, 6))
    assert {"--trace=nvtx", "--capture-range=nvtx", "--nvtx-capture=capture@ddpopt"} <= set(on_cpu)


@pytest.mark.parametrize(
    ("program", "command"),
    [
        (("train.py", "x=1"), [sys.executable, "train.py", "x=1"]),
        (("-m", "pkg.app"), [sys.executable, "-m", "pkg.app"]),
        (("bash", "-c", "true"), ["bash", "-c", "true"]),
    ],
)
def test_the_program(program: tuple[str, ...], command: list[str]) -> None:
    started = nsys.torchrun(profile(program=program), ["nsys", "profile"])
    assert started[-len(command) - 2 :] == ["nsys", "profile", *command]
    assert {"--nproc-per-node=2", "--no-python", "--standalone"} <= set(started)


def test_a_trainer_gets_the_callback_only_under_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nsys.callbacks() == []
    monkeypatch.setenv(nsys.PROFILER_VARIABLE, "torch")
    assert nsys.callbacks() == [], "a variable that a user has set for a callback of theirs"
    monkeypatch.setenv(nsys.WINDOW_VARIABLE, "7:2")
    (added,) = nsys.callbacks()
    assert isinstance(added, NsysCallback)
    assert (added.warmup_steps, added.profile_steps, added.gives_way) == (7, 2, True)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert sum(isinstance(c, NsysCallback) for c in trainer.callbacks) == 1  # type: ignore[attr-defined]


def ddpopt(folder: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    (folder / "program.py").write_text(PROGRAM)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "RANK", "WORLD", "LOCAL_", "TORCHEL"))}
    kept |= {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-m", "lightning_ddpopt.cli", *arguments]
    return subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=100, check=False)


def test_a_round_with_torch_profiler(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "t_nccl_host_1.log").write_text("NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct")
    run = ["nsys", "--profiler", "torch", "--nproc", "2", "--output", "new/t", "--warmup-steps", "4"]
    done = ddpopt(tmp_path, *run, "--profile-steps", "2", "--", "program.py", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "transport" not in done.stderr, "the log is of another run"
    assert "new/t_rank_0.json.gz\n  new/t_rank_1.json.gz" in done.stderr
    following = re.search(r"Next: ddpopt (.*)", done.stderr)
    assert following is not None
    analyzed = ddpopt(tmp_path, *following[1].split())
    assert analyzed.returncode == 0, analyzed.stdout + analyzed.stderr
    # Two steps of rank 0; on a busy machine the first may be so slow that it is left out as a start-up step.
    assert re.search(r"^0 +[12] +\d", analyzed.stdout, re.M)
    assert re.search(r"AllReduce +0 +none +0\.021", analyzed.stdout)


def test_a_callback_of_the_program_comes_first(tmp_path: Path) -> None:
    run = ["nsys", "--profiler", "torch", "--nproc", "2", "--output", "t", "--", "program.py", "8", "own"]
    done = ddpopt(tmp_path, *run)
    assert done.returncode == 0, done.stdout + done.stderr
    analyzed = ddpopt(tmp_path, "analyze", "t_rank_0.json.gz", "t_rank_1.json.gz")
    assert re.search(r"^0 +1 +\d", analyzed.stdout, re.M), "its one step, not the command's three"


def test_a_run_that_is_too_short_and_one_that_fails(tmp_path: Path) -> None:
    (tmp_path / "t_rank_0.json.gz").write_bytes(b"of an earlier run")
    run = ["nsys", "--profiler", "torch", "--nproc", "2", "--output", "t", "--", "program.py"]
    done = ddpopt(tmp_path, *run, "3")
    assert done.returncode == 1
    assert "no report was written: the program trained for fewer steps than --warmup-steps" in done.stderr
    done = ddpopt(tmp_path, *run, "3", "fail")
    assert done.returncode == 1
    assert "the program ended with exit status 1; its output says why" in done.stderr


def test_without_nsys(tmp_path: Path) -> None:
    done = ddpopt(tmp_path, "nsys", "--", "program.py", "8", PATH=os.path.dirname(sys.executable))
    if done.returncode == 0:
        pytest.fail("nsys is installed where NVIDIA puts it")
    assert "nsys (Nsight Systems) is not on PATH" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_profiler_is_refused(tmp_path: Path) -> None:
    done = ddpopt(tmp_path, "nsys", "--profiler", "vtune", "--", "program.py", "8")
    assert done.returncode == 2
    assert "--profiler vtune: must be nsys or torch" in re.sub(r"\s+", " ", done.stderr)


@pytest.mark.skipif(shutil.which("nsys") is None, reason="nsys is not on PATH")
def test_a_round_with_a_real_nsys_without_cuda(tmp_path: Path) -> None:
    run = ["nsys", "--nproc", "2", "--output", "n", "--warmup-steps", "4", "--profile-steps", "2", "--", "program.py"]
    done = ddpopt(tmp_path, *run, "8")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        report = tmp_path / f"n_rank_{rank}.nsys-rep"
        assert report.exists()
        subprocess.run(["nsys", "export", "--type=sqlite", "--output=n.sqlite", "--force-overwrite=true", str(report)],
                       cwd=tmp_path, capture_output=True, check=True)  # fmt: skip
        connection = sqlite3.connect(tmp_path / "n.sqlite")
        query = "SELECT COALESCE(text, value) FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId WHERE eventType = 59"
        names = [name for (name,) in connection.execute(f"{query} ORDER BY start")]
        connection.close()
        step = ["get batch", "forward", "backward", "bucket 0 22544 bytes none", "optimizer step"]
        assert names == ["capture", "Batch 4", *step, "Batch 5", *step]

"""`hydra/launcher=torchrun`: sweeps of a small Hydra app whose ranks tell what they see."""

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra_app
import pytest
import torch
from hydra import compose, initialize
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from ranks import free_port
from torch.distributed.elastic.utils.api import macros

from hydra_plugins.ddpopt import start, torchrun_launcher
from hydra_plugins.ddpopt.logs import failure, last_words
from hydra_plugins.ddpopt.nodes import Nodes
from hydra_plugins.ddpopt.torchrun_launcher import TorchrunLauncher

HERE = Path(__file__).parent
APP = [sys.executable, str(HERE / "hydra_app.py")]
GONE_WITHIN_S = 15


def environment(**variables: str) -> dict[str, str]:
    ranks = ("MASTER_", "RANK", "WORLD", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "HYDRA_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ranks)}
    kept["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE / "hydra_package")])
    return kept | {"OMP_NUM_THREADS": "1"} | variables


def command(folder: Path, *arguments: str, app: list[str] = APP, ranks: int | None = 2) -> list[str]:
    launcher = [] if ranks is None else [f"hydra.launcher.nproc_per_node={ranks}"]
    return [*app, "-m", "hydra/launcher=torchrun", *launcher, f"hydra.sweep.dir='{folder}'", *arguments]


def sweep(command: list[str], cwd: Path, status: int = 0, **variables: str) -> str:
    done = subprocess.run(
        command, env=environment(**variables), cwd=cwd, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def seen(folder: Path, ranks: int = 2, first: int = 0) -> list[dict[str, Any]]:
    """What each rank of a job told; its log holds it once."""
    found = []
    for rank in range(first, first + ranks):
        lines = [line for line in (folder / f"rank_{rank}.log").read_text().splitlines() if line.startswith("SEEN ")]
        assert len(lines) == 1
        found.append(json.loads(lines[0].removeprefix("SEEN ")))
    return found


def processes(tag: str) -> dict[int, str]:
    """Command lines of the running processes with an argument that contains ``tag``, by process id."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = process.joinpath("cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if tag in line:
            found[int(process.name)] = line.replace("\0", " ")
    return found


def wait_for(what: str, condition: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.05)


# ---- two jobs of two ranks


@pytest.fixture(scope="module")
def two_jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweeps")
    drawing = ["hydra/sweeper=drawing", "hydra.sweeper.record=record.json"]
    with socket.create_server(("127.0.0.1", 0)) as taken:  # as by a job of another sweep
        port = str(taken.getsockname()[1])
        (folder / "output").write_text(sweep(command(folder / "sweep", *drawing), folder, MASTER_PORT=port))
    (folder / "taken_port").write_text(port)
    return folder


@pytest.fixture
def record(two_jobs: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((two_jobs / "record.json").read_text())
    return found


def test_a_sweep_is_one_tree(two_jobs: Path) -> None:
    files = {str(path.relative_to(two_jobs)) for path in two_jobs.rglob("*") if path.is_file()}
    of_a_job = ["rank_0.log", "rank_1.log", "torchrun.log", "hydra_app.log"]
    of_a_job += [f".hydra/{name}.yaml" for name in ("config", "hydra", "overrides")]
    assert files == {"output", "taken_port", "record.json"} | {
        f"sweep/{job}/{name}" for job in (0, 1) for name in of_a_job
    }


def test_each_rank_sees_the_value_that_the_sweeper_drew(two_jobs: Path, record: list[dict[str, Any]]) -> None:
    drawn = [job["drawn"] for job in record]
    assert drawn[0] != drawn[1]
    for number, x in enumerate(drawn):
        assert [rank["config"]["x"] for rank in seen(two_jobs / "sweep" / str(number))] == [x, x]


def test_the_sweeper_gets_rank_zeros_objective_and_the_jobs_config(
    two_jobs: Path, record: list[dict[str, Any]]
) -> None:
    for number, job in enumerate(record):
        assert job["objective"] == job["x"] == job["drawn"]
        assert job["overrides"] == [f"x={job['drawn']!r}"]
        assert job["working_dir"] == str(two_jobs / "sweep" / str(number))


def test_all_ranks_of_a_job_see_one_config(two_jobs: Path) -> None:
    jobs = [seen(two_jobs / "sweep" / str(number)) for number in (0, 1)]
    configs = [[rank["config"] for rank in job] for job in jobs]
    for first, second in configs:
        assert (first.pop("rank"), second.pop("rank")) == ("0", "1")
        assert first == second
        assert first["random"] == first["nested"]["follows"] != first["nested"]["list"][1]
    for changing in ("clock", "random", "number"):
        assert configs[0][0][changing] != configs[1][0][changing]


def test_hydras_values_are_those_of_the_job(two_jobs: Path) -> None:
    for number in (0, 1):
        folder = two_jobs / "sweep" / str(number)
        for rank, told in enumerate(seen(folder)):
            assert told["output_dir"] == str(folder)
            assert told["cwd"] == told["original_cwd"] == str(two_jobs)
            assert told["job"] == [number, str(number), "hydra_app", f"x={told['config']['x']}"]
            assert told["mode"] == "RunMode.RUN"
            assert (told["environment"]["RANK"], told["environment"]["WORLD_SIZE"]) == (str(rank), "2")
            assert not told["torch"], "the ranks of one node need no torch of ours"


def test_a_job_takes_a_port_that_nobody_has(two_jobs: Path) -> None:
    taken = (two_jobs / "taken_port").read_text()
    for job in "01":
        first, second = [rank["environment"]["MASTER_PORT"] for rank in seen(two_jobs / "sweep" / job)]
        assert first == second != taken


def test_the_launcher_tells_of_each_job(two_jobs: Path, record: list[dict[str, Any]]) -> None:
    output = (two_jobs / "output").read_text()
    for number, job in enumerate(record):
        assert re.search(rf"#{number} x={job['drawn']!r}: 2 ranks", output)
        assert re.search(rf"#{number} x={job['drawn']!r}: done in \d", output)


# ---- failures and interruptions


def test_failing_and_killed_ranks_fail_their_jobs_only(tmp_path: Path) -> None:
    tag = uuid.uuid4().hex
    arguments = ["act=raise,die,unpicklable,exit", f"+tag={tag}"]
    output = sweep(command(tmp_path / "sweep", *arguments), tmp_path, status=1)
    log = f"{tmp_path}/sweep/{{}}/rank_1.log ends with: {{}}\n"
    raised = "rank 1 ended with exit status 1; " + log.format(0, "ValueError: these are the last words")
    killed = "rank 1 was killed by SIGKILL; " + log.format(1, "mid-step")
    assert re.search(r"#0 act=raise: FAILED after \d+\.\d s: " + re.escape(raised), output)
    assert re.search(r"#1 act=die: FAILED after \d+\.\d s: " + re.escape(killed), output)
    assert re.search(r"#2 act=unpicklable: done", output)
    returned_not = "did not return from the job (did it call sys.exit?); see " + f"{tmp_path}/sweep/3/rank_0.log"
    assert re.search(r"#3 act=exit: FAILED after .* " + re.escape(returned_not), output)
    assert "3 of 4 jobs failed: #0, #1, #3\n" in output
    assert "Traceback" not in output, "the message says it all"
    assert "cannot be pickled, the sweeper gets None" in (tmp_path / "sweep" / "2" / "rank_0.log").read_text()
    assert processes(tag) == {}


CONTROLLING_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A terminal for a program, and everything that it shows."""

    def __init__(self) -> None:
        self.keyboard, self.device = pty.openpty()
        self.shown = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # its way to say that the last program has left
            while part := os.read(self.keyboard, 1 << 12):
                self.shown += part

    def close(self) -> None:
        os.close(self.device)
        self._reader.join(10)
        os.close(self.keyboard)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("how", "status"), [("Ctrl-C", -signal.SIGINT), ("SIGTERM", 128 + signal.SIGTERM), ("SIGKILL", -signal.SIGKILL)]
)
def test_no_process_is_left(tmp_path: Path, terminal: Terminal, how: str, status: int) -> None:
    tag = uuid.uuid4().hex
    arguments = command(tmp_path / "sweep", "act=wait", f"+tag={tag}")
    parent = subprocess.Popen(
        [sys.executable, "-c", CONTROLLING_TERMINAL, *arguments],
        env=environment(COLUMNS="300", TERM="xterm", TMPDIR=str(tmp_path)),
        cwd=tmp_path,
        start_new_session=True,
        **dict.fromkeys(("stdin", "stdout", "stderr"), terminal.device),  # type: ignore[call-overload]
    )
    try:
        logs = [tmp_path / "sweep" / "0" / f"rank_{rank}.log" for rank in range(2)]
        words = ("SEEN", "waiting")
        for log, word in zip(logs, words, strict=True):
            wait_for(word, lambda log=log, word=word: log.exists() and word in log.read_text(), 40)
        assert len(processes(tag)) == 5, "launcher, torchrun, two ranks, and what one of them started"
        if how == "Ctrl-C":
            live = rf"#0 act=wait \+tag={tag}: 2 ranks, \d+ s  SEEN "
            wait_for("the live line", lambda: re.search(live, terminal.shown.decode(errors="replace")), 10)
            os.write(terminal.keyboard, b"\x03")
        else:
            parent.send_signal(getattr(signal, how))
        assert parent.wait(GONE_WITHIN_S) == status
        wait_for("no process left", lambda: not processes(tag), GONE_WITHIN_S)
    finally:
        parent.kill()
        parent.wait()
        for process in processes(tag):
            os.kill(process, signal.SIGKILL)


def test_a_program_that_does_not_stop_is_killed_and_the_interruption_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag, log = uuid.uuid4().hex, tmp_path / "log"
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"

    def interrupt(seconds: float) -> None:
        wait_for("ready", lambda: log.exists() and "ready" in log.read_text(), 10)
        raise KeyboardInterrupt

    monkeypatch.setattr(torchrun_launcher, "time", SimpleNamespace(sleep=interrupt))
    monkeypatch.setattr(torchrun_launcher, "_GRACE_S", 0.3)
    launcher = TorchrunLauncher(nproc_per_node=1, shutdown_timeout_s=0)
    with pytest.raises(KeyboardInterrupt):
        launcher._run_to_its_end(0, [sys.executable, "-c", stubborn, tag], log, str(tmp_path), "job")
    assert processes(tag) == {}


def test_torchrun_is_not_waited_for_when_another_node_failed_and_its_own_ranks_have_ended(tmp_path: Path) -> None:
    tag, log = uuid.uuid4().hex, tmp_path / "log"
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    launcher = TorchrunLauncher(nproc_per_node=1, shutdown_timeout_s=60)
    is_ready = lambda job: "on there: why" if log.exists() and log.read_text() else None  # noqa: E731
    launcher.nodes = SimpleNamespace(trouble=is_ready)  # type: ignore[assignment]
    started = time.monotonic()
    with pytest.raises(torchrun_launcher.SweepError, match="on there: why"):
        launcher._run_to_its_end(0, [sys.executable, "-c", deaf, tag], log, str(tmp_path), "job")
    assert time.monotonic() - started < 15
    assert processes(tag) == {}


def test_a_job_is_not_told_of_an_earlier_failure_in_its_folder(tmp_path: Path) -> None:
    logs = tmp_path / "torchrun.log"
    cause = "Root Cause (first observed failure):\n[0]:\n  rank      : {} (local_rank: 0)\n  exitcode  : {} (pid: 1)\n"
    logs.write_text(cause.format(0, -9))
    earlier = logs.stat().st_size
    with logs.open("a") as file:
        file.write("no port\n")
    no_cause = failure(1, tmp_path, logs, earlier)
    assert no_cause == f"torchrun ended with exit status 1; {logs} ends with: no port"
    with logs.open("a") as file:
        file.write(cause.format(3, -6))
    expected = f"rank 3 was killed by SIGABRT; see {tmp_path}/rank_3.log"
    assert failure(1, tmp_path, logs, earlier) == expected
    assert failure(-9, tmp_path, tmp_path / "torchrun.log", logs.stat().st_size).startswith(
        "torchrun was killed by SIGKILL; "
    )


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("loss 1\rloss 2\n\n", "loss 2"),
        (
            "Traceback (most recent call last):\n  File\nmodule.MyError: why\n    full_key: x\nNCCL: bye\n",
            "module.MyError: why",
        ),
        ("Traceback (most recent call last):\n  a\nA: 1\n\nTraceback (most recent call last):\n  b\nB: 2\n", "B: 2"),
        ("Traceback (most recent call last):\n  cut", "  cut"),
    ],
)
def test_last_words(tmp_path: Path, log: str, words: str) -> None:
    (tmp_path / "log").write_text(log)
    assert last_words(tmp_path / "log", of_an_exception=True) == f"{tmp_path}/log ends with: {words}"


# ---- overrides


def in_hydras_grammar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(in_hydras_grammar, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{in_hydras_grammar(item)}" for key, item in value.items()) + "}"
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + m[2].replace("'", r"\'"), value) + "'"


NASTY_TEXT = st.text(st.sampled_from("""=, '"[]{}()\\$%:~@?*#+-\t/.24é✓xr\n"""), max_size=10).filter(
    lambda text: "${" not in text
)
TEXT = NASTY_TEXT | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=10).filter(
    lambda text: "${" not in text
)
VALUES = st.recursive(
    TEXT | st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z]\w{0,3}", fullmatch=True).filter(
        lambda key: key.isascii() and key not in ("nan", "inf", "null", "true", "false")), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def through_torchrun(arguments: list[str]) -> list[str]:
    """What torchrun and start.py make of the arguments of an app."""
    return [start._unescaped(argument) for argument in macros.substitute(list(map(start.escaped, arguments)), "0")]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=VALUES, path=TEXT)
def test_overrides_arrive_as_they_were(monkeypatch: pytest.MonkeyPatch, value: Any, path: str) -> None:
    monkeypatch.setattr(sys, "argv", ["app.py"])
    given = [f"value={in_hydras_grammar(value)}", f"other={in_hydras_grammar('${x} $${x} %24')}"]
    config = OmegaConf.create({"hydra": {"overrides": {"hydra": ["hydra.mode=MULTIRUN", "hydra.verbose=true"]}}})
    arguments = torchrun_launcher._child_overrides(config, given, Path(path))
    parsed = OverridesParser.create().parse_overrides(through_torchrun(arguments))
    values = {override.key_or_group: override.value() for override in parsed}
    assert values["value"] == value
    assert type(values["value"]) is type(value)
    assert values["other"] == "${x} $${x} %24"
    assert (values["hydra.mode"], values["hydra.verbose"]) == ("RUN", True)
    assert values["hydra.callbacks.torchrun_job.job"] == str(Path(path))
    assert len(values) == len(parsed) == 6


def test_nasty_overrides_and_folders(tmp_path: Path) -> None:
    texts = ["a=b c", 'it\'s "quoted"', "x,y [z] {w: 1}", "\\d \\\\ \\", "é ✓", "", "null", "1", "$$ $HOME", "%24 %25"]
    overrides = [
        f"value={in_hydras_grammar([*texts, None, True, 1.5, {'a': ['b=c']}])}",
        "other='${x} ${oc.env:NASTY} ${local_rank}'",
        "+local_rank=seven",
        r"+escaped='\${x}'",
        "+key.new=[1,2]",
        "~clock",
        "x=-1e-3",
    ]
    folder = tmp_path / "a folder, with $$ = é {RANK}"
    folder.mkdir()
    hydras = ["hydra.job.chdir=true", "hydra.sweep.subdir='job ${hydra.job.num}'", "hydra.output_subdir=null"]
    sweep(command(Path("sweep"), *hydras, *overrides, ranks=1), folder, NASTY="a $$ b")
    job = folder / "sweep" / "job 0"
    (told,) = seen(job, ranks=1)
    assert told["output_dir"] == told["cwd"] == str(job)
    assert told["original_cwd"] == str(folder)
    assert {path.name for path in job.iterdir()} == {"rank_0.log", "torchrun.log", "hydra_app.log"}, "output_subdir"
    GlobalHydra.instance().clear()
    with initialize(config_path=None, version_base="1.3"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("NASTY", "a $$ b")
        patch.setenv("RANK", "0")
        composed = compose("app_config", overrides=overrides)
        OmegaConf.set_struct(composed, False)
        for of_the_job in ("random", "nested", "number"):
            told["config"].pop(of_the_job)
            del composed[of_the_job]
        assert told["config"] == OmegaConf.to_container(composed, resolve=True)
    assert told["config"]["value"] == [*texts, None, True, 1.5, {"a": ["b=c"]}]
    assert told["config"]["other"] == "-0.001 a $$ b seven"
    assert told["config"]["escaped"] == "${x}"


# ---- how an app is started


def test_a_module_with_a_config_dir_and_the_number_of_ranks_as_an_axis(tmp_path: Path) -> None:
    (tmp_path / "extra" / "size").mkdir(parents=True)
    (tmp_path / "extra" / "size" / "large.yaml").write_text("width: 9")
    module = [sys.executable, "-m", "pkg.app", "--config-dir", "extra"]
    sweep(command(tmp_path / "sweep", "n=2,1", "size=large", app=module, ranks=None), tmp_path)
    for job, ranks in enumerate((2, 1)):
        for told in seen(tmp_path / "sweep" / str(job), ranks):
            assert told["environment"]["WORLD_SIZE"] == str(ranks)
            assert told["config"] == {"n": ranks, "size": {"width": 9}}
            assert told["job"][:3] == [job, str(job), "app"]
        assert len(list((tmp_path / "sweep" / str(job)).glob("rank_*"))) == ranks


CONFIG = """
defaults:
  - _self_
  - override hydra/launcher: torchrun
x: 1
act: return
label: ${hydra:job.name}
hydra:
  mode: MULTIRUN
  launcher: {nproc_per_node: 1}
  sweep: {dir: "out/${now:%Y}", subdir: "${hydra.job.override_dirname}"}
  job: {name: mine}
  sweeper: {params: {x: choice(3)}}
"""


def test_another_config_that_makes_itself_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "other.yaml").write_text(CONFIG)
    flags = ["-W", "ignore::ImportWarning", "-X", "faulthandler"]  # no -O: Hydra 1.3 cannot read overrides with it
    app = [sys.executable, *flags, *APP[1:]]
    sweep([*app, f"--config-path={tmp_path / 'conf'}", "--config-name", "other"], tmp_path)
    (told,) = [seen(path, 1)[0] for path in (tmp_path / "out").glob("*/*") if path.is_dir()]
    assert told["config"] == {"x": 3, "act": "return", "label": "mine"}
    assert re.fullmatch(rf"{tmp_path}/out/\d{{4}}/x=3", told["output_dir"])
    assert told["cwd"] == str(tmp_path)
    assert told["flags"] == [["ignore::ImportWarning"], {"faulthandler": True}]


def test_the_jobs_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    main = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(torchrun_launcher.SweepError, match=r"start it as `python app.py`"):
        torchrun_launcher._app()
    main.__file__ = str(tmp_path)
    monkeypatch.setattr(subprocess, "_args_from_interpreter_flags", lambda: ["-O"])
    assert torchrun_launcher._app() == [sys.executable, "-O", "-u", str(tmp_path)]
    for name, program in {"pkg.app": "pkg.app", "pkg.__main__": "pkg"}.items():
        main.__spec__ = type(pytest.__spec__)(name, None)  # type: ignore[arg-type]
        assert torchrun_launcher._app() == [sys.executable, "-O", "-u", "-m", program]
    main.__spec__ = type(pytest.__spec__)("__main__", None)  # type: ignore[arg-type]
    assert torchrun_launcher._app() == [sys.executable, "-O", "-u", str(tmp_path)]


# ---- several nodes


@contextlib.contextmanager
def two_nodes(
    tmp_path: Path, *arguments: str, ranks: int, of_node: Callable[[int], list[str]] = lambda index: []
) -> Iterator[dict[Path, subprocess.Popen[bytes]]]:
    """Two launchers that meet on this machine, by their folders."""
    meeting = ["hydra.launcher.nnodes=2", f"hydra.launcher.rdzv_endpoint=127.0.0.1:{free_port()}"]
    running: dict[Path, subprocess.Popen[bytes]] = {}
    try:
        for index in range(2):
            node = tmp_path / f"node_{index}"
            node.mkdir()
            words = command(node, *meeting, *arguments, *of_node(index), ranks=ranks)
            with (node / "output").open("wb") as output:
                running[node] = subprocess.Popen(
                    words, env=environment(), cwd=node, stdout=output, stderr=subprocess.STDOUT
                )
        yield running
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait(40)


def test_each_job_of_several_nodes_meets_at_a_port_of_its_own() -> None:
    launcher = TorchrunLauncher(nproc_per_node=1, nnodes=2, rdzv_endpoint="127.0.0.1:5000")
    for job, endpoint in enumerate(["127.0.0.1:5001", "127.0.0.1:5002"]):  # the launchers meet at 5000
        assert f"--rdzv-endpoint={endpoint}" in launcher._rendezvous(job)


def test_nodes_with_different_jobs_are_told_so(tmp_path: Path) -> None:
    with two_nodes(tmp_path, ranks=1, of_node=lambda index: [f"x={index + 1}"]) as running:
        assert [launcher.wait(60) for launcher in running.values()] == [1, 1]
    logs = "".join(log.read_text() for log in tmp_path.rglob("rank_*.log"))
    assert re.search(r"node 1 of the job was given 'x=[12]', and node 0 'x=[12]'\. Start the same", logs)
    assert "Start the same command on every node, and give a sampling sweeper a seed." in logs


def test_two_nodes_share_each_job_and_its_failure(tmp_path: Path) -> None:
    sampler = ["hydra/sweeper=drawing", "hydra.sweeper.seed=7", "hydra.sweeper.record=record.json"]
    with two_nodes(tmp_path, *sampler, "act=raise in the first job", ranks=2) as running:  # rank 1, the others return
        statuses = [launcher.wait(60) for launcher in running.values()]
    nodes = list(running)
    outputs = [(node / "output").read_text() for node in nodes]
    assert statuses == [1, 1], outputs
    records = [json.loads((node / "record.json").read_text()) for node in nodes]

    (raised,) = (node for node in nodes if (node / "0" / "rank_1.log").exists())
    log = raised / "0" / "rank_1.log"
    failure = f"on {socket.gethostname()}: rank 1 ended with exit status 1; {log} ends with: ValueError: these are the"
    for output, record in zip(outputs, records, strict=True):
        assert record[0]["failure"] == f"{failure} last words"
        after = re.search(r"#0 .*: FAILED after (\d+)\.\d s: " + re.escape(failure), output)
        assert after is not None, output
        assert int(after[1]) < 30, "torchrun waits 300 s for the other node, and is deaf to SIGTERM then"
        assert "1 of 2 jobs failed: #0\n" in output

    by_node = sorted(nodes, key=lambda node: not (node / "1" / "rank_0.log").exists())  # who was first is node 0
    told = [*seen(by_node[0] / "1", first=0), *seen(by_node[1] / "1", first=2)]
    assert [rank["environment"] for rank in told] == [
        {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_PORT": told[0]["environment"]["MASTER_PORT"]}
        for rank in range(4)
    ]
    assert len({(rank["config"]["x"], rank["config"]["clock"], rank["config"]["random"]) for rank in told}) == 1
    assert [rank["output_dir"] for rank in told] == [str(node / "1") for node in by_node for _ in range(2)]
    objectives = [record[1]["objective"] for record in records]
    assert objectives == [told[0]["config"]["x"]] * 2, "rank 0's on both nodes, so that both sweepers draw the same"


def test_a_killed_launcher_ends_the_jobs_of_the_other_node(tmp_path: Path) -> None:
    with two_nodes(tmp_path, "act=wait,return", ranks=1) as running:
        (left, launcher), (_, killed) = running.items()
        for node in running:
            log = node / "0"
            wait_for(
                "the ranks", lambda log=log: any("SEEN" in path.read_text() for path in log.glob("rank_*.log")), 40
            )
        killed.kill()
        assert launcher.wait(GONE_WITHIN_S) == 1
    lost = re.escape(f"the connection to the launcher on {socket.gethostname()} is lost (has it ended?)")
    output = (left / "output").read_text()
    for job in ("#0 act=wait", "#1 act=return"):
        assert re.search(rf"{job}: FAILED after \d+\.\d s: {lost}\n", output), output


def is_open(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
        return True
    return False


@pytest.fixture
def three() -> Iterator[list[Nodes]]:
    """Three launchers' views of each other, the host's first; a launcher of another sweep came between them."""
    endpoint = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor() as pool:
        host = pool.submit(Nodes.meet, endpoint, 3, "mine", 20)
        wait_for("the host", lambda: is_open(endpoint), 5)
        with pytest.raises(TimeoutError, match=r"no meeting of 3 launchers at 127.* within 0\.5 s .*Start the same"):
            Nodes.meet(endpoint, 3, "another", 0.5)
        others = [pool.submit(Nodes.meet, endpoint, 3, "mine", 20) for _ in range(2)]
        nodes = [host.result(20), *(other.result(20) for other in others)]
    yield nodes
    for node in nodes:
        node.leave()


def failures(nodes: list[Nodes], job: int, wait_s: float = 20) -> list[str | None]:
    with ThreadPoolExecutor() as pool:
        return [asked.result(30) for asked in [pool.submit(node.failure, job, wait_s) for node in nodes]]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_all_launchers_know_what_one_tells(three: list[Nodes], failing: int) -> None:
    expected = f"on {socket.gethostname()}: why"
    assert [node.trouble(0) for node in three] == [None] * 3
    three[failing].tell(0, "why")
    for node in three:
        wait_for("the news", lambda node=node: [other.trouble(0) for other in three] and node.trouble(0) == expected, 5)
    for node in three:
        if node is not three[failing]:
            node.tell(0, "torchrun lost the other")  # what the first failure explains
    assert failures(three, 0) == [expected] * 3
    for node in three:
        node.tell(1, None)
    assert failures(three, 1) == [None] * 3


@pytest.mark.parametrize("gone", [0, 2])
def test_a_launcher_that_ends_keeps_nobody_waiting(three: list[Nodes], gone: int) -> None:
    for node in three:
        node.tell(0, None)
    assert failures(three, 0) == [None] * 3
    three.pop(gone).leave()
    wait_for("the loss", lambda: all(node.trouble(1) for node in three), 5)
    for node in three:
        node.tell(1, "torchrun was stopped")
    for told in failures(three, 1):
        assert f"the connection to the launcher on {socket.gethostname()} is lost (has it ended?)" in str(told)
    assert [node.trouble(0) for node in three] == [None] * 2, "it ended after job 0"


def test_a_silent_launcher_keeps_nobody_waiting(three: list[Nodes]) -> None:
    for node in three[:2]:
        node.tell(0, None)
    (said, *_) = failures(three[:2], 0, wait_s=0.3)
    assert said == f"the launcher on {socket.gethostname()} did not tell within 0.3 s how the job ended"
    wait_for("later jobs fail", lambda: all(node.trouble(1) for node in three), 5)


def test_a_launcher_that_is_alone_gives_up() -> None:
    with pytest.raises(TimeoutError, match=r"only 1 of 2 launchers came to the meeting"):
        Nodes.meet(f"127.0.0.1:{free_port()}", 2, "mine", 0.1)


# ---- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nproc_per_node": 0}, "hydra.launcher.nproc_per_node=0 must be 'auto' or a whole number of at least 1."),
        ({"nproc_per_node": "x"}, "hydra.launcher.nproc_per_node='x' must be 'auto' or a whole number of at least 1."),
        ({"nproc_per_node": True}, "hydra.launcher.nproc_per_node=True must be 'auto' or a whole number"),
        ({"nnodes": 0}, "hydra.launcher.nnodes=0 must be a whole number of at least 1."),
        ({"nnodes": 2}, "hydra.launcher.rdzv_endpoint=None must be HOST:PORT of one of the 2 nodes"),
        ({"shutdown_timeout_s": "soon"}, "hydra.launcher.shutdown_timeout_s='soon' must be a number of seconds, of at"),
        ({"shutdown_timeout_s": float("nan")}, "hydra.launcher.shutdown_timeout_s=nan must be a number of seconds"),
        (
            {"shutdown_timeout_s": -1},
            "hydra.launcher.shutdown_timeout_s=-1 must be a number of seconds, of at least 0.",
        ),
        ({"nnodes": 2, "rdzv_endpoint": "host"}, "hydra.launcher.rdzv_endpoint='host' must be HOST:PORT"),
        ({"rdzv_endpoint": "host:1"}, "hydra.launcher.rdzv_endpoint='host:1' is for several nodes: set nnodes, or"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TorchrunLauncher(**({"nproc_per_node": 1} | arguments))


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 1), (3, 3)])
def test_a_rank_per_gpu(monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert torchrun_launcher._ranks("auto") == ranks


@pytest.mark.parametrize(
    ("argument", "variables", "message"),
    [
        ("hydra.launcher.nproc_per_node=0", {}, "must be 'auto' or a whole number of at least 1."),
        ("x=1", {"TORCHELASTIC_RUN_ID": "x"}, "this sweep was started by torchrun, so that every rank would run all"),
    ],
)
def test_mistakes_are_told_without_a_traceback(
    tmp_path: Path, argument: str, variables: dict[str, str], message: str
) -> None:
    output = sweep(command(tmp_path / "sweep", argument), tmp_path, status=1, **variables)
    assert message in output
    assert "Traceback" not in output


# ---- in other people's apps


def test_another_app_finds_our_groups_and_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, hydra_plugins.ddpopt.search_path\n"
        "from hydra.core.plugins import Plugins\n"
        "Plugins.instance()\n"
        "assert 'hydra_plugins.ddpopt.torchrun_launcher' in sys.modules\n"
        "print('torch' in sys.modules)"
    )
    assert sweep([sys.executable, "-c", code], tmp_path) == "False\n"
    groups = ["hydra/launcher=torchrun", "+strategy=ddpopt_bf16", "--cfg", "all"]
    config = OmegaConf.create(sweep([*APP, *groups], tmp_path))
    assert config.hydra.launcher._target_ == "hydra_plugins.ddpopt.torchrun_launcher.TorchrunLauncher"
    assert config.strategy._target_ == "lightning_ddpopt.DDPOptStrategy"
    assert set(hydra_app.CONFIG) | {"strategy", "hydra"} == set(config)

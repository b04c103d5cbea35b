"""The launcher `hydra/launcher=torchrun`: every job of a sweep is one single run under torchrun.

Lightning's own launcher starts child ranks by running the same command again, which in a sweep runs the whole sweep in
each of them. Here the sweep runs in one process that trains nothing; each job gets fresh processes, its own port and
folder, and hands its objective value back.
"""

import logging
import math
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import (
    JobReturn,
    JobRuntime,
    JobStatus,
    configure_log,
    filter_overrides,
    setup_globals,
)
from hydra.errors import CompactHydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict, read_write

from hydra_plugins.ddpopt.job import Job
from hydra_plugins.ddpopt.logs import failure, live_line
from hydra_plugins.ddpopt.nodes import Nodes
from hydra_plugins.ddpopt.pinning import TORCHRUN_VARIABLES, pins_of
from hydra_plugins.ddpopt.start import JOB_VARIABLE, SESSION_VARIABLE, escaped

log = logging.getLogger(__name__)

_START = Path(__file__).with_name("start.py")
_POLL_S = 0.1
_GRACE_S = 5  # for torchrun itself, when its ranks have ended
_DEAF_S = 2  # for torchrun when it has no ranks any more
_MEETING_S = 600  # for the launchers of all nodes to come; torchrun's rendezvous waits as long
_OUTCOME_S = 300  # for the other nodes' outcome of a job, as in torchrun; one that is gone is known at once


class SweepError(CompactHydraException):
    """Whose message says all; Hydra prints it without a traceback."""


class TorchrunLauncher(Launcher):
    """Runs the jobs of a batch one after the other, each in ``torchrun --nproc-per-node N``.

    A job's folder (`hydra.sweep.dir/subdir`) holds `rank_0.log`, `rank_1.log`, … with all output of each rank, and
    `torchrun.log`. All jobs of a batch run; a failed one is returned as failed, so that the sweeper raises and the
    command exits with an error. Ctrl-C, SIGTERM, SIGHUP or the end of the launching process stop the ranks too.

    With several nodes, the launchers meet before the first job and keep their connections for the whole sweep: a job
    that fails on one node is stopped and failed on all, with the same message, and all start the next one together.
    When a launcher ends early, the running job and all later ones fail on the others.

    Args:
        nproc_per_node: ranks on this machine, ``"auto"`` for one per GPU and one without GPUs. Read from the config of
            each job, so that ``hydra.launcher.nproc_per_node=${trainer.devices}`` makes it an axis of the sweep.
        nnodes: machines. The same sweep is started on each, a sampling one with the same seed; the ranks of all take
            rank 0's resolved values, and the sweepers of all get rank 0's objective.
        rdzv_endpoint: with several nodes, HOST:PORT of one of them. The launchers meet at PORT, the ranks of job k at
            PORT + 1 + k.
        rdzv_id: with several nodes, the same name on all, different for sweeps that run at the same time.
        shutdown_timeout_s: seconds that ranks may take to end after SIGTERM before they are killed.
        torchrun_args: further arguments of torchrun, each as ``--name=value``.

    Raises:
        ValueError: a value that cannot work.

    """

    def __init__(
        self,
        nproc_per_node: int | str = "auto",
        nnodes: int = 1,
        rdzv_endpoint: str | None = None,
        rdzv_id: str = "ddpopt",
        shutdown_timeout_s: float = 30,
        torchrun_args: Sequence[str] = (),
    ) -> None:
        if isinstance(nnodes, bool) or not isinstance(nnodes, int) or nnodes < 1:
            raise ValueError(f"hydra.launcher.nnodes={nnodes!r} must be a whole number of at least 1.")
        if nnodes > 1 and not (isinstance(rdzv_endpoint, str) and re.fullmatch(r".+:\d+", rdzv_endpoint)):
            raise ValueError(f"hydra.launcher.rdzv_endpoint={rdzv_endpoint!r} must be HOST:PORT of one of the"
                             f" {nnodes} nodes, the same on each.")  # fmt: skip
        if nnodes == 1 and rdzv_endpoint is not None:
            raise ValueError(f"hydra.launcher.rdzv_endpoint={rdzv_endpoint!r} is for several nodes: set nnodes, or"
                             " leave it out; on one node every job takes a free port.")  # fmt: skip
        if (isinstance(shutdown_timeout_s, bool) or not isinstance(shutdown_timeout_s, int | float)
                or not 0 <= shutdown_timeout_s < math.inf):  # fmt: skip
            raise ValueError(f"hydra.launcher.shutdown_timeout_s={shutdown_timeout_s!r} must be a number of seconds, of"
                             " at least 0.")  # fmt: skip
        _ranks(nproc_per_node)
        self.nnodes = nnodes
        self.rdzv_endpoint = rdzv_endpoint
        self.rdzv_id = rdzv_id
        self.shutdown_timeout_s = shutdown_timeout_s
        self.torchrun_args = list(torchrun_args)
        self.nodes: Nodes | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise SweepError("this sweep was started by torchrun, so that every rank would run all of it: start it"
                             " with python; hydra/launcher=torchrun starts torchrun for each job.")  # fmt: skip
        self.hydra_context = hydra_context
        self.config = config
        self.app = _app()

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        log.info("Launching %d jobs under torchrun, output in %s", len(job_overrides), self.config.hydra.sweep.dir)
        with _signals_raise(), tempfile.TemporaryDirectory(prefix="ddpopt_") as scratch:
            self._meet()
            jobs = [
                self._run(initial_job_idx + index, list(overrides), name, Path(scratch))
                for index, (overrides, name) in enumerate(zip(job_overrides, _names(job_overrides), strict=True))
            ]
        failed = [initial_job_idx + index for index, job in enumerate(jobs) if job.status == JobStatus.FAILED]
        if failed:
            log.error("%d of %d jobs failed: %s", len(failed), len(jobs), ", ".join(f"#{number}" for number in failed))
        return jobs

    def _meet(self) -> None:
        if self.rdzv_endpoint is None or self.nodes is not None:
            return
        log.info("Waiting for the launchers of %d nodes at %s", self.nnodes, self.rdzv_endpoint)
        try:
            self.nodes = Nodes.meet(self.rdzv_endpoint, self.nnodes, self.rdzv_id, _MEETING_S)
        except TimeoutError as error:
            raise SweepError(f"hydra/launcher=torchrun: {error}") from error

    def _run(self, number: int, overrides: list[str], name: str, scratch: Path) -> JobReturn:
        """One job from its overrides to its result; a job that cannot run is a failed one."""
        name = f"#{number} {name}".rstrip()
        started = time.monotonic()
        job = JobReturn(overrides=overrides, task_name=JobRuntime.instance().get("name"))
        previous = HydraConfig.instance().cfg
        try:
            job.return_value = self._train_on_all(number, overrides, scratch, name, job)
            job.status = JobStatus.COMPLETED
            log.info("%s: done in %.1f s", name, time.monotonic() - started)
        except Exception as error:
            job.return_value, job.status = error, JobStatus.FAILED
            log.error("%s: FAILED after %.1f s: %s", name, time.monotonic() - started, error)
        finally:
            HydraConfig.instance().cfg = previous
        return job

    def _train_on_all(self, number: int, overrides: list[str], scratch: Path, name: str, job: JobReturn) -> Any:
        """Train, and with several nodes fail where any of them fails."""
        if self.nodes is None:
            return self._train(number, overrides, scratch, name, job)
        value, cause = None, None
        try:
            self._fail_as_others(number)
            value = self._train(number, overrides, scratch, name, job)
        except Exception as error:
            cause = error
            said = str(error) if isinstance(error, SweepError) else f"{type(error).__name__}: {error}"
            self.nodes.tell(number, said)
        else:
            self.nodes.tell(number, None)
        failure = self.nodes.failure(number, self.shutdown_timeout_s + _OUTCOME_S)
        if failure is not None:
            raise SweepError(failure) from cause
        return value

    def _fail_as_others(self, number: int) -> None:
        trouble = None if self.nodes is None else self.nodes.trouble(number)
        if trouble is not None:
            raise SweepError(trouble)

    def _train(self, number: int, overrides: list[str], scratch: Path, name: str, job: JobReturn) -> Any:
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        HydraConfig.instance().set_config(config)
        folder = Path(str(config.hydra.sweep.dir), str(config.hydra.sweep.subdir)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
            config.hydra.runtime.output_dir = str(folder)
        HydraConfig.instance().set_config(config)
        job.hydra_cfg, job.working_dir = config, str(folder)
        job.cfg = config.copy()
        with open_dict(job.cfg):
            del job.cfg["hydra"]

        description, result = scratch / f"{number}.job", scratch / f"{number}.result"
        Job(number, str(folder), pins_of(config, datetime.now()), str(result)).save(description)
        ranks = _ranks(config.hydra.launcher.get("nproc_per_node", "auto"))
        app = [*self.app, *_child_overrides(config, overrides, description)]
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--no-python", f"--nproc-per-node={ranks}"),
            *self._rendezvous(number),
            *self.torchrun_args,
            *(sys.executable, str(_START), str(int(signal.SIGKILL))),
            *map(escaped, [str(folder / "rank_{RANK}.log"), *app]),
        ]
        logs = folder / ("torchrun.log" if self.nnodes == 1 else f"torchrun_{socket.gethostname()}.log")
        earlier = logs.stat().st_size if logs.exists() else 0  # of a sweep before this one, or of a job in one folder
        with live_line(f"{name}: {ranks} ranks", folder / "rank_0.log", log):
            code = self._run_to_its_end(number, command, logs, str(config.hydra.runtime.cwd), str(description))
        if code != 0:
            raise SweepError(failure(code, folder, logs, earlier))
        if not result.exists():
            raise SweepError("the ranks ended without an error but did not return from the job (did it call sys.exit?);"
                             f" see {folder / 'rank_0.log'}")  # fmt: skip
        return pickle.loads(result.read_bytes())

    def _rendezvous(self, number: int) -> list[str]:
        if self.rdzv_endpoint is None:  # torchrun takes a free port and keeps it: no other job can get it in between
            return ["--standalone", "--local-addr=127.0.0.1"]
        host, _, port = self.rdzv_endpoint.rpartition(":")
        return [
            f"--nnodes={self.nnodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={host}:{int(port) + 1 + number}",
            f"--rdzv-id={self.rdzv_id}-{number}",
            # torchrun (2.14) asks whether this machine's host name resolves to the endpoint, and tells the other nodes
            # that name: both fail where the name stands for another interface than the endpoint's, or for none.
            *([] if _is_loopback(host) else [f"--rdzv-conf=is_host={int(_is_this_machine(host))}"]),
            f"--local-addr={_address_towards(host)}",
        ]

    def _run_to_its_end(self, number: int, command: list[str], logs: Path, folder: str, job: str) -> int:
        """Exit status of torchrun; whatever happens, neither it nor its ranks outlive this call."""
        environment = {name: value for name, value in os.environ.items() if not _belongs_to_a_rank(name)}
        environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(int(self.shutdown_timeout_s))
        environment[JOB_VARIABLE] = job
        process = subprocess.Popen(
            [sys.executable, str(_START), str(int(signal.SIGTERM)), *map(escaped, [str(logs), *command])],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal reaches only this process, which then stops the ranks
        )
        try:
            while process.poll() is None:
                self._fail_as_others(number)
                time.sleep(_POLL_S)
            return process.returncode
        except (KeyboardInterrupt, SystemExit):
            if self.nodes is not None:
                self.nodes.leave()  # the other nodes stop their ranks while this one does
            raise
        finally:
            try:
                if process.poll() is None:
                    self._stop(process, job)
            finally:
                process.kill()  # takes ranks that are left with it
                process.wait()
                _kill_what_ranks_left(job)

    def _stop(self, process: subprocess.Popen[bytes], job: str) -> None:
        """Let torchrun end its ranks, which have sessions of their own."""
        process.terminate()
        left_s = self.shutdown_timeout_s + _GRACE_S
        step_s = left_s if self.nodes is None else _DEAF_S
        while left_s > 0:
            with suppress(subprocess.TimeoutExpired):  # which would end the job only, not the sweep
                process.wait(min(step_s, left_s))
                return
            left_s -= step_s
            # At its end torchrun (2.14) waits for the other nodes in C++, for up to 300 s, and is deaf to signals.
            if self.nodes is not None and sys.platform.startswith("linux") and not _processes_of_ranks(job):
                return


def _is_loopback(host: str) -> bool:
    return all(ip_address(info[4][0]).is_loopback for info in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM))


def _is_this_machine(host: str) -> bool:
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def _address_towards(host: str) -> str:
    """This machine's address on the interface that reaches ``host``."""
    family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """What tells the jobs of a batch apart: the overrides that not all of them have."""
    shared = set.intersection(*(set(overrides) for overrides in jobs)) if len(jobs) > 1 else set()
    return [" ".join(o for o in filter_overrides(overrides) if o not in shared) for overrides in jobs]


def _app() -> list[str]:
    """The command that started this process, without its arguments."""
    # A private function of CPython's, which multiprocessing starts its children with too: -O, -W, -X and the like.
    python = [sys.executable, *subprocess._args_from_interpreter_flags(), "-u"]  # type: ignore[attr-defined]
    main = sys.modules["__main__"]
    specification = getattr(main, "__spec__", None)
    if specification is not None and specification.name != "__main__":  # which a folder with a __main__.py has
        return [*python, "-m", specification.name.removesuffix(".__main__")]
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).exists():
        raise SweepError("hydra/launcher=torchrun starts the app again by its file or module, and there is none:"
                         " start it as `python app.py` or `python -m package.app`.")  # fmt: skip
    return [*python, str(Path(file).absolute())]


def _child_overrides(config: DictConfig, overrides: list[str], description: Path) -> list[str]:
    """Arguments of the app in each rank: what this process was given, with the values of one job."""
    given = get_args()
    flags = {"--config-path": given.config_path, "--config-name": given.config_name, "--config-dir": given.config_dir}
    hydras = [override for override in config.hydra.overrides.hydra if not override.startswith("hydra.mode=")]
    return [
        *(f"{flag}={value}" for flag, value in flags.items() if value is not None),
        *hydras,
        *(override for override in overrides if override not in hydras),
        "hydra.mode=RUN",
        "++hydra.callbacks.torchrun_job._target_=hydra_plugins.ddpopt.job.TorchrunJob",
        f"++hydra.callbacks.torchrun_job.job={_quoted(str(description))}",
    ]


def _quoted(text: str) -> str:
    """As a value in Hydra's grammar of overrides."""
    text = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + found[2].replace("'", r"\'"), text)
    return "'" + text.replace("${", r"\${") + "'"


def _ranks(nproc_per_node: Any) -> int:
    if nproc_per_node == "auto":
        import torch

        return max(1, torch.cuda.device_count())
    if isinstance(nproc_per_node, bool) or not isinstance(nproc_per_node, int) or nproc_per_node < 1:
        raise ValueError(f"hydra.launcher.nproc_per_node={nproc_per_node!r} must be 'auto' or a whole number of at"
                         " least 1.")  # fmt: skip
    return nproc_per_node


def _belongs_to_a_rank(variable: str) -> bool:
    return variable in TORCHRUN_VARIABLES or variable.startswith("TORCHELASTIC_")


def _kill_what_ranks_left(job: str) -> None:
    """Kill what ranks started and left in their sessions, which torchrun stops only with a living rank."""
    for process in _processes_of_ranks(job):
        with suppress(OSError):  # another user's, or it has ended
            os.kill(process, signal.SIGKILL)


def _processes_of_ranks(job: str) -> list[int]:
    """The ranks that run, and what they have started in their sessions. Empty on systems without /proc."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = process.joinpath("environ").read_bytes().split(b"\0")
            session = os.getsid(int(process.name))
        except OSError:  # another user's, or it has ended
            continue
        if {f"{JOB_VARIABLE}={job}".encode(), f"{SESSION_VARIABLE}={session}".encode()} <= set(environment):
            found.append(int(process.name))
    return found


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind this process as Ctrl-C does, with their usual exit status."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

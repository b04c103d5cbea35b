"""What runs in each rank of a job: takes the launcher's values before it, brings the objective back after it."""

import logging
import os
import pickle
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, flag_override

from hydra_plugins.ddpopt.pinning import Pins, pin

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_NODES_WAIT = timedelta(minutes=5)  # for each other, at the start and, as torchrun does, at the end of a job

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """What the launcher tells the ranks of one job, in a pickle file.

    Args:
        number: `hydra.job.num` and `hydra.job.id`.
        folder: absolute path that becomes `hydra.run.dir`.
        pins: see :class:`~hydra_plugins.ddpopt.pinning.Pins`.
        result: file for the pickled objective value of rank 0, written by the first rank of the machine.

    """

    number: int
    folder: str
    pins: Pins
    result: str

    @classmethod
    def load(cls, path: str) -> "Job":
        job: Job = pickle.loads(Path(path).read_bytes())  # Hydra's scan makes classes twice: no check of its class
        return job

    def save(self, path: Path) -> None:
        path.write_bytes(pickle.dumps(self))


class TorchrunJob(Callback):
    """Hydra callback that the launcher adds to each rank's config.

    Hydra turns exceptions of callbacks into warnings; here a rank that cannot have the job's values must not run, so
    they become ``SystemExit``.

    Args:
        job: path of the :class:`Job`.

    """

    def __init__(self, job: str) -> None:
        self.path = job

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            self.job = Job.load(self.path)
            if int(os.environ["GROUP_WORLD_SIZE"]) > 1:
                _check_that_nodes_agree(list(config.hydra.overrides.task))
                self.job = replace(self.job, pins=_from_rank_zero("pins", self.job.pins))
            with flag_override(config, ["readonly", "struct"], False):
                config.hydra.run.dir = self.job.folder.replace("${", r"\${")
                config.hydra.job.num = self.job.number
                config.hydra.job.id = str(self.job.number)
            pin(config, self.job.pins)
        except Exception as error:
            raise SystemExit(f"hydra/launcher=torchrun: rank {os.environ.get('RANK')} could not take over the job"
                             f" from the launcher: {type(error).__name__}: {error}") from error  # fmt: skip

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if os.environ["LOCAL_RANK"] != "0":
            return
        result = _pickled(job_return.return_value) if job_return.status == JobStatus.COMPLETED else None
        if int(os.environ["GROUP_WORLD_SIZE"]) > 1 and (result is not None or os.environ["RANK"] == "0"):
            # A sampling sweeper draws the same values on every node only if it is told the same objective.
            try:
                result = _from_rank_zero("result", result)
            except Exception as error:
                raise SystemExit(f"hydra/launcher=torchrun: rank 0 of the job told no objective value:"
                                 f" {type(error).__name__}: {error}") from error  # fmt: skip
            if result is None and os.environ["RANK"] != "0":
                raise SystemExit("hydra/launcher=torchrun: rank 0 of the job failed.")
        if result is not None:
            partial = Path(self.job.result + ".partial")
            partial.write_bytes(result)
            partial.rename(self.job.result)


def _check_that_nodes_agree(overrides: list[str]) -> None:
    """All nodes must run the same job: another command, or a sampling sweeper without a seed, would give them others.

    Each node tells its overrides to all, so that all of them stop.

    Raises:
        ValueError: they differ.

    """
    store, first = _agents_store(), ""
    store.set(f"{_key('overrides')}/{os.environ['GROUP_RANK']}", " ".join(overrides))
    for node in range(int(os.environ["GROUP_WORLD_SIZE"])):
        told = store.get(f"{_key('overrides')}/{node}").decode()
        first = first if node else told
        if told != first:
            raise ValueError(f"node {node} of the job was given {told!r}, and node 0 {first!r}. Start the same command"
                             " on every node, and give a sampling sweeper a seed.")  # fmt: skip


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        log.warning("the job's return value %r cannot be pickled, the sweeper gets None: %s", value, error)
        return pickle.dumps(None)


def _from_rank_zero(name: str, value: Any) -> Any:
    """What rank 0 passes as ``value``, on the ranks that call this, through the store that torchrun's agents keep."""
    store = _agents_store()
    if os.environ["RANK"] == "0":
        store.set(_key(name), pickle.dumps(value).hex())
        return value
    return pickle.loads(bytes.fromhex(store.get(_key(name)).decode()))


def _key(name: str) -> str:
    return f"ddpopt/{name}/{os.environ['TORCHELASTIC_RUN_ID']}/{os.environ['TORCHELASTIC_RESTART_COUNT']}"


def _agents_store() -> "TCPStore":
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise RuntimeError("torchrun's agents keep no store; use the c10d rendezvous"
                           " and leave TORCH_DISABLE_SHARE_RDZV_TCP_STORE unset")  # fmt: skip
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=_NODES_WAIT)

"""What runs in each rank of a job: takes the launcher's values before it, brings the objective back after it."""

import logging
import os
import pickle
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, flag_override

from hydra_plugins.ddpopt.pinning import Pins, pin

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """What the launcher tells the ranks of one job, in a pickle file.

    Args:
        number: `hydra.job.num` and `hydra.job.id`.
        folder: absolute path that becomes `hydra.run.dir`.
        pins: see :class:`~hydra_plugins.ddpopt.pinning.Pins`.
        result: file for the pickled objective value, written by the first rank of the machine.

    """

    number: int
    folder: str
    pins: Pins
    result: str

    @classmethod
    def load(cls, path: str) -> "Job":
        job = pickle.loads(Path(path).read_bytes())
        assert isinstance(job, cls)
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
                self.job = replace(self.job, pins=_those_of_rank_zero(self.job.pins))
            with flag_override(config, ["readonly", "struct"], False):
                config.hydra.run.dir = self.job.folder.replace("${", r"\${")
                config.hydra.job.num = self.job.number
                config.hydra.job.id = str(self.job.number)
            pin(config, self.job.pins)
        except Exception as error:
            raise SystemExit(f"hydra/launcher=torchrun: rank {os.environ.get('RANK')} could not take over the job"
                             f" from the launcher: {type(error).__name__}: {error}") from error  # fmt: skip

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if os.environ["LOCAL_RANK"] != "0" or job_return.status != JobStatus.COMPLETED:
            return
        value = job_return.return_value
        try:
            pickled = pickle.dumps(value)
        except Exception as error:
            log.warning("the job's return value %r cannot be pickled, the sweeper gets None: %s", value, error)
            pickled = pickle.dumps(None)
        partial = Path(self.job.result + ".partial")
        partial.write_bytes(pickled)
        partial.rename(self.job.result)


def _those_of_rank_zero(pins: Pins) -> Pins:
    """Exchange the pins over the nodes, through the store that torchrun's agents keep."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise RuntimeError("torchrun's agents keep no store; use the c10d rendezvous"
                           " and leave TORCH_DISABLE_SHARE_RDZV_TCP_STORE unset")  # fmt: skip
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=60)
    )
    key = f"ddpopt/job/{os.environ['TORCHELASTIC_RUN_ID']}/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    if os.environ["RANK"] == "0":
        store.set(key, pickle.dumps(pins).hex())
        return pins
    shared = pickle.loads(bytes.fromhex(store.get(key).decode()))
    assert isinstance(shared, Pins)
    return shared

"""A Hydra plugin of somebody else's: a sweeper that draws its values, as sampling sweepers do."""

import json
import random
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class DrawingSweeper(Sweeper):
    """Draws ``x`` for each job, writes down what it drew and what the launcher returned, and raises what failed."""

    def __init__(self, jobs: int, record: str, seed: int | None = None) -> None:
        self.jobs = jobs
        self.seed = seed
        self.record = Path(record)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        generator = random.Random(self.seed)
        drawn = [generator.random() for _ in range(self.jobs)]
        returned = self.launcher.launch([[*arguments, f"x={x!r}"] for x in drawn], initial_job_idx=0)
        jobs = [
            {
                "drawn": x,
                "objective": job.return_value if job.status == JobStatus.COMPLETED else None,
                "failure": str(job._return_value) if job.status == JobStatus.FAILED else None,
                "overrides": list(job.overrides or []),
                "working_dir": job.working_dir,
                "x": None if job.cfg is None else job.cfg.x,
            }
            for x, job in zip(drawn, returned, strict=True)
        ]
        self.record.write_text(json.dumps(jobs))
        for job in returned:
            job.return_value  # noqa: B018 - raises


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="drawing",
    node={"_target_": "hydra_plugins.drawing.DrawingSweeper", "jobs": 2, "record": "???", "seed": None},
    provider="drawing",
)

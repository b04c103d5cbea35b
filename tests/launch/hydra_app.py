"""A Hydra app for the tests of the launcher, in ranks that need no torch: tells what it sees, and fails on demand."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

OmegaConf.register_new_resolver("random", lambda *_: random.random(), replace=True)

CONFIG = {
    "x": 0.0,
    "value": None,
    "other": None,
    "act": "return",
    "who": 1,  # the rank that acts, the others wait for it as they would in a collective
    "clock": "${now:%H:%M:%S.%f}",
    "random": "${random:}",
    "nested": {"list": [1, "${random:twice}"], "follows": "${random}"},
    "rank": "${oc.env:RANK,none}",
    "number": "${hydra:job.num}",
}
ConfigStore.instance().store(name="app_config", node=CONFIG)


def tell(config: DictConfig) -> None:
    """Print what this rank sees as one line of JSON."""
    hydras = HydraConfig.get()
    seen = {
        "config": OmegaConf.to_container(config, resolve=True, enum_to_str=True),
        "cwd": os.getcwd(),
        "output_dir": hydras.runtime.output_dir,
        "original_cwd": hydras.runtime.cwd,
        "job": [hydras.job.num, hydras.job.id, hydras.job.name, hydras.job.override_dirname],
        "mode": str(hydras.mode),
        "environment": {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")},
        "torch": "torch" in sys.modules,
        "flags": [sys.warnoptions, sys._xoptions],
    }
    print("SEEN", json.dumps(seen), flush=True)


@hydra.main(version_base="1.3", config_path=None, config_name="app_config")
def main(config: DictConfig) -> Any:
    tell(config)
    rank = int(os.environ["RANK"])
    if config.act == "return":
        return config.x + 100 * rank
    if config.act == "unpicklable":
        return lambda: rank
    if config.act == "exit":
        sys.exit(0)
    if config.act == "raise in the first job":  # which the other ranks end well
        if rank == config.who and HydraConfig.get().job.num == 0:
            raise ValueError("these are the last words")
        return config.x + 100 * rank
    if rank == config.who:
        print("mid-step", flush=True)
        if config.act == "raise":
            raise ValueError("these are the last words")
        # What a data loader's worker is to a rank.
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *sys.argv])
        if config.act == "die":  # as the kernel does when memory is short
            os.kill(os.getpid(), signal.SIGKILL)
        print("waiting", flush=True)
    time.sleep(60)
    return None


if __name__ == "__main__":
    main()

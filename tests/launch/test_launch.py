"""The strategy in fresh processes: by name and instance, popen, spawn, fork, torchrun, LightningCLI and Hydra."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import free_port

HERE = Path(__file__).parent
CLI_YAML = """
trainer:
  accelerator: cpu
  devices: 2
  max_steps: 12
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: lightning_ddpopt.DDPOptStrategy
    init_args:
      static_graph: true
      bucket_cap_mb: [0.001, 0.02]
      comm_hook: powersgd
      comm_hook_options:
        matrix_approximation_rank: 2
      find_unused_parameters: true
"""


def run(command: list[str], **variables: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "RANK", "WORLD", "LOCAL_"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent)])
    environment |= {"OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def results(folder: Path) -> list[dict[str, Any]]:
    found = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.pt", "rank1.pt"]
    for name, array in found[0]["state"].items():
        if "running" not in name:
            np.testing.assert_array_equal(array, found[1]["state"][name], err_msg=name)
    return found


@pytest.mark.parametrize("how", ["instance", "name", "spawn", "fork"])
def test_lightnings_launchers(tmp_path: Path, how: str) -> None:
    output = run([sys.executable, str(HERE / "script.py"), how, str(tmp_path)])
    for result in results(tmp_path):
        assert result["strategy"] == "DDPOptStrategy"
        assert result["wrapper"] == "DistributedDataParallel"
        assert result["hook"] == "bf16"
        assert result["buckets"] == (1 if how == "name" else 2)
    assert output.count("ddpopt: plan:") == 1, "rank zero speaks once, without the user setting up logging"
    assert "hook bf16" in output


def test_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    output = run([*torchrun, str(HERE / "script.py"), "instance", str(tmp_path)])
    assert [result["hook"] for result in results(tmp_path)] == ["bf16"] * 2
    assert output.count("ddpopt: plan:") == 1


def test_lightning_cli(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CLI_YAML)
    folder = tmp_path / "results"
    folder.mkdir()
    run([sys.executable, str(HERE / "cli.py"), "fit", "--config", str(config)], RESULT_FOLDER=str(folder))
    for result in results(folder):
        assert (result["hook"], result["buckets"]) == ("powersgd", 2)

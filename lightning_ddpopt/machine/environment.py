"""Versions, device and variables: what a figure was measured with."""

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

from lightning_ddpopt import __version__

# Variables that change how gradients travel. Their values may hold names of this machine, which records leave out.
_PREFIXES = (
    *("NCCL_", "FI_", "GLOO_", "DDPOPT_", "OMP_NUM_THREADS"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC", "PYTORCH_CUDA_ALLOC"),
)
_LEFT_OUT = {
    *("NCCL_DEBUG_FILE", "NCCL_HOSTID", "NCCL_TOPO_FILE", "NCCL_TOPO_DUMP_FILE"),  # names of this machine
    *("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_VERSION"),  # change nothing
    *("DDPOPT_JOB", "DDPOPT_SESSION", "DDPOPT_CACHE_DIR"),  # of the launcher, and a folder of this machine
}


def versions() -> dict[str, str]:
    """Name -> version of what a step time depends on; what is not there is left out."""
    found = {"python": platform.python_version(), "lightning_ddpopt": __version__, "torch": str(torch.__version__)}
    for name in ("lightning", "torchvision"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def exchange_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment's variables that change how gradients travel."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_PREFIXES) and name not in _LEFT_OUT
    }


def device_name(device: torch.device) -> str:
    """The accelerator's name, or ``"CPU"``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def hardware() -> str:
    """Processors and GPUs of this machine, used or not."""
    gpus = torch.cuda.device_count()
    return f"{os.cpu_count()} CPU cores, {gpus} GPU{'s' if gpus != 1 else ''}"

"""Starts a program under a profiler, one for each rank: what `ddpopt nsys` does. Imports no torch.

Which steps are recorded is :class:`~lightning_ddpopt.profiling.capture.NsysCallback`'s; where the program's Trainer has
none, one is added to it (see :func:`callbacks`).
"""

import glob
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROFILER_VARIABLE = "DDPOPT_PROFILER"
OUTPUT_VARIABLE = "DDPOPT_PROFILE_OUTPUT"
WINDOW_VARIABLE = "DDPOPT_PROFILE_STEPS"
"""Set by `ddpopt nsys` for the program: `nsys` or `torch`, the beginning of the files' names, `WARMUP:STEPS`."""

Version = tuple[int, int]

NCCL_TRACE = (2025, 5)
"""The first nsys that is taken to know `--trace=nccl`: 2025.3 refuses it, the article's 2025.6 knows it."""

# CUDA -> the nsys in its toolkit. An older nsys records NVTX there and no kernels. 12.4: Debian's packages; 13.0: the
# kernels of torch 2.11+cu130 were seen with nsys 2025.3.
_NSYS_OF_CUDA: Mapping[Version, Version] = {(12, 4): (2023, 4), (13, 0): (2025, 3)}

_PLACES = (
    "/opt/nvidia/nsight-systems/*/bin/nsys",
    "/opt/nvidia/nsight-systems/*/target-linux-*/nsys",
    "/usr/local/cuda*/bin/nsys",
    "/opt/nvidia/nsight-compute/*/host/target-linux-*/nsys",
)


class NsysError(Exception):
    """Profiling cannot start, or left no report; the message says why, and what to do."""


@dataclass(frozen=True)
class Profile:
    """What is to be recorded.

    Args:
        program: the program and its arguments; a file that ends in `.py`, or `-m module`, is run by this Python.
        nproc: ranks on this machine.
        output: beginning of the reports' names; `_rank_N` and an ending are added.
        trace: what nsys records, as its `--trace`; None: CUDA, NVTX and, where nsys knows it, NCCL.
        warmup_steps, profile_steps: the window, where the program has no NsysCallback of its own.
        nccl_debug: level of NCCL's log, one file a process beside the reports; None: no log.
        uses_cuda: whether the program trains on GPUs.

    """

    program: tuple[str, ...]
    nproc: int
    output: str = "ddpopt"
    trace: str | None = None
    warmup_steps: int = 10
    profile_steps: int = 3
    nccl_debug: str | None = None
    uses_cuda: bool = True

    def __post_init__(self) -> None:
        if self.nproc < 1 or self.profile_steps < 1 or self.warmup_steps < 0:
            raise NsysError("--nproc and --profile-steps must be at least 1, --warmup-steps at least 0.")
        if Path(self.output).is_dir() or self.output.endswith(os.sep):
            raise NsysError(f"--output {self.output} is a folder: give the beginning of a file's name in it.")

    def reports(self, ending: str) -> list[str]:
        """The reports that are there, in the order of their ranks."""
        name = re.compile(re.escape(Path(self.output).name) + r"_rank_(\d+)" + re.escape(ending))
        found = [(int(match[1]), path) for path in self._folder.glob("*") if (match := name.fullmatch(path.name))]
        return [str(Path(self.output).parent / path.name) for _, path in sorted(found)]

    def nccl_logs(self) -> list[Path]:
        """NCCL's logs that are there."""
        return sorted(self._folder.glob(f"{glob.escape(Path(self.output).name)}_nccl_*.log"))

    @property
    def _folder(self) -> Path:
        return Path(self.output).absolute().parent


def find_nsys(path: str | None = None) -> Path:
    """The nsys on PATH, or else the newest where NVIDIA's installers put it.

    Raises:
        NsysError: there is none.

    """
    found = shutil.which("nsys", path=path)
    if found is not None:
        return Path(found)
    installed = [Path(name) for place in _PLACES for name in glob.glob(place) if os.access(name, os.X_OK)]
    if installed:
        return max(installed, key=nsys_version)
    raise NsysError("nsys (Nsight Systems) is not on PATH and not where NVIDIA's installers put it. Install it (the"
                    " package nsight-systems-cli of NVIDIA's repositories, or the CUDA toolkit), or use"
                    " `--profiler torch`, which needs no nsys.")  # fmt: skip


def nsys_version(nsys: Path) -> Version:
    """Year and release that ``nsys --version`` tells; (0, 0) if it tells none."""
    try:
        said = subprocess.run([nsys, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0, 0
    found = re.search(r"\b(20\d\d)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def release(text: str | None) -> Version | None:
    """``"13.0"`` as (13, 0): what ``torch.version.cuda`` says; None for a build without CUDA."""
    found = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(found[1]), int(found[2])) if found else None


def too_old(nsys: Version, cuda: Version | None) -> str | None:
    """Why kernels will be missing in the reports, if they will."""
    if cuda is None:
        return None
    needed = max((first for of, first in _NSYS_OF_CUDA.items() if of <= cuda), default=(0, 0))
    if nsys >= needed:
        return None
    return (f"nsys {nsys[0]}.{nsys[1]} is older than CUDA {cuda[0]}.{cuda[1]}, torch's: the reports will have ranges"
            f" and no kernels. Install nsys {needed[0]}.{needed[1]} or newer, or use `--profiler torch`.")  # fmt: skip


def nsys_arguments(profile: Profile, nsys: Path, of: Version) -> list[str]:
    """The command up to the program; nsys replaces `%q{RANK}` in each rank."""
    if profile.uses_cuda:
        known = "cuda,nvtx,nccl" if of >= NCCL_TRACE else "cuda,nvtx"
        window = ["--capture-range=cudaProfilerApi"]
    else:
        known, window = "nvtx", ["--capture-range=nvtx", "--nvtx-capture=capture@ddpopt"]
    return [
        *(str(nsys), "profile", *window, "--capture-range-end=stop", f"--trace={profile.trace or known}"),
        *("--sample=none", "--cpuctxsw=none", "--force-overwrite=true", f"--output={profile.output}_rank_%q{{RANK}}"),
    ]


def torchrun(profile: Profile, before_the_program: Sequence[str]) -> list[str]:
    """The command that starts all ranks."""
    program = list(profile.program)
    if program[0].endswith(".py") or program[0] == "-m":
        program = [sys.executable, *program]
    ranks = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={profile.nproc}", "--no-python"]
    return [sys.executable, "-m", "torch.distributed.run", *ranks, *before_the_program, *program]


def run(profile: Profile, profiler: str, nsys: Path | None = None, of: Version = (0, 0)) -> list[str]:
    """Run the program on all ranks, each under its profiler, to the end.

    Args:
        profile: what is recorded.
        profiler: ``"nsys"`` or ``"torch"``.
        nsys: needed for ``"nsys"``.
        of: its version.

    Returns:
        The reports, rank by rank.

    Raises:
        NsysError: the program failed, or left no report.

    """
    before: list[str] = [] if nsys is None else nsys_arguments(profile, nsys, of)
    variables = {
        PROFILER_VARIABLE: profiler,
        OUTPUT_VARIABLE: str(Path(profile.output).absolute()),
        WINDOW_VARIABLE: f"{profile.warmup_steps}:{profile.profile_steps}",
    }
    if profile.nccl_debug is not None:
        log = f"{Path(profile.output).absolute()}_nccl_%h_%p.log"
        variables |= {"NCCL_DEBUG": profile.nccl_debug, "NCCL_DEBUG_FILE": log}
    endings = (".json.gz",) if profiler == "torch" else (".nsys-rep", ".qdstrm")
    # Those of an earlier run would be taken for this one's; `nsys stats` leaves an .sqlite beside a report.
    for stale in [name for ending in (*endings, ".sqlite") for name in profile.reports(ending)] + profile.nccl_logs():
        os.remove(stale)
    Path(profile.output).absolute().parent.mkdir(parents=True, exist_ok=True)
    code = subprocess.run(torchrun(profile, before), env=os.environ | variables, check=False).returncode
    reports = profile.reports(endings[0])
    if code != 0:
        kept = f" Reports that were written: {', '.join(reports)}." if reports else ""
        raise NsysError(f"the program ended with exit status {code}; its output says why.{kept}")
    if not reports and profiler == "nsys" and profile.reports(".qdstrm"):
        raise NsysError(f"nsys recorded {', '.join(profile.reports('.qdstrm'))} but could not import it: run its"
                        " QdstrmImporter (in the host-linux-x64 folder of Nsight Systems) with -i FILE.")  # fmt: skip
    if not reports:
        raise NsysError("no report was written: the program trained for fewer steps than --warmup-steps, or not with"
                        " lightning.pytorch.Trainer, or this package is not installed where it runs; there, give the"
                        " Trainer callbacks=[NsysCallback()].")  # fmt: skip
    return reports


def callbacks() -> list[Any]:
    """What every Trainer gets in a program that `ddpopt nsys` has started, and nothing anywhere else.

    Lightning calls this through the entry point group `lightning.pytorch.callbacks_factory`.

    """
    if PROFILER_VARIABLE not in os.environ or WINDOW_VARIABLE not in os.environ:
        return []
    from lightning_ddpopt.profiling.capture import NsysCallback

    warmup_steps, _, profile_steps = os.environ[WINDOW_VARIABLE].partition(":")
    return [NsysCallback(int(warmup_steps), int(profile_steps), gives_way=True)]

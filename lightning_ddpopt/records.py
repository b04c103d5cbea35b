"""Records: one finished run with its environment, one JSON object a line. Imports no torch."""

import fcntl
import json
import logging
import math
import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_ddpopt.plan import Plan

log = logging.getLogger(__name__)

RECORD_SCHEMA = 1


@dataclass(frozen=True)
class Record:
    """One finished run.

    Args:
        rung: the experiment.
        label: the experiment and what it sweeps over, as ``"bucket_sweep bf16 25"``.
        repeat: which of the interleaved repeats; runs with the same number are compared with each other.
        measure: how steps were counted: ``"article"`` (3 steps) or ``"claim"`` (at least 30).
        model, precision, compiled, workload, data: what was trained, how, on what.
        device: name of the accelerator, or ``"CPU"``.
        world_size, num_nodes: ranks in all, and machines.
        images_per_step: images of all ranks in one optimizer step.
        steps_per_s: timed steps over the wall time between two device synchronisations, loader and loop included.
        steps_ms_by_rank: for each rank, the time of each timed step in ms, from before the forward to after the
            optimizer step.
        loss: of the last batch, mean over ranks; None if it was not finite.
        peak_memory_mib: rank zero's largest memory: allocated on a GPU, resident on a CPU.
        parameters: SHA-256 of the trained parameters: equal for two runs that trained the same bits.
        plan: how gradients were exchanged; None where nothing was wrapped.
        bucket_bytes: bytes of gradient in each bucket that DDP formed; None where nothing was wrapped.
        bytes_sent_per_step: bytes each rank sent for gradients in one optimizer step; None where it is not known.
        transport_asked, transports: what was asked for, and what NCCL's log names; ``["gloo"]`` on CPU.
        accuracy: validation accuracy after training, if it was measured.
        hardware: processors and GPUs of rank zero's machine.
        seed, command, time, commit, versions, variables: what is needed to repeat the run. ``time`` is in UTC,
            ``commit`` ends in ``+`` if files had changed since.

    """

    rung: str
    label: str
    repeat: int
    measure: str
    model: str
    precision: str
    compiled: bool
    device: str
    world_size: int
    num_nodes: int
    images_per_step: int
    steps_per_s: float
    steps_ms_by_rank: list[list[float]]
    loss: float | None
    peak_memory_mib: float
    parameters: str
    plan: Plan | None = None
    bucket_bytes: list[int] | None = None
    bytes_sent_per_step: float | None = None
    transport_asked: str = "auto"
    transports: list[str] = field(default_factory=list)
    accuracy: float | None = None
    workload: str = ""
    data: str = ""
    hardware: str = ""
    seed: int | None = None
    command: str = ""
    time: str = ""
    commit: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def step_ms(self) -> float:
        """Median step time of the slowest rank, in ms."""
        return statistics.median(self._slowest_rank)

    @property
    def images_per_s(self) -> float:
        """Images of all ranks per second, by :attr:`step_ms`."""
        return 1000 * self.images_per_step / self.step_ms

    @property
    def _slowest_rank(self) -> list[float]:
        return max(self.steps_ms_by_rank, key=statistics.median)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the schema, and a summary of the step times for those who read the file without us."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["plan"] = None if self.plan is None else self.plan.to_dict()
        return {"schema": RECORD_SCHEMA, **values, "step_ms": asdict(_Spread.of(self._slowest_rank))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Record":
        """Build a record from :meth:`to_dict`'s output; keys that are not known are ignored.

        Raises:
            ValueError: not a record, another schema, or a field that is missing or no record can have.

        """
        if not isinstance(data, Mapping) or data.get("schema") != RECORD_SCHEMA:
            found = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f"not a record: schema must be {RECORD_SCHEMA}, got {found!r}")
        values = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        if values.get("plan") is not None:
            values["plan"] = Plan.from_dict(values["plan"])
        try:
            record = cls(**values)
        except TypeError as error:
            raise ValueError(f"not a record: {error}") from error
        record._check()
        return record

    def _check(self) -> None:
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise ValueError(f"not a record: {name}={value!r}")
        steps = [step for steps in self.steps_ms_by_rank if isinstance(steps, list) for step in steps]
        is_whole = all(isinstance(steps, list) and steps for steps in self.steps_ms_by_rank)
        if not is_whole or not all(isinstance(step, int | float) and 0 < step < math.inf for step in steps):
            raise ValueError("not a record: steps_ms_by_rank must hold times above 0 for each rank")
        if self.world_size < 1 or self.num_nodes < 1 or self.images_per_step < 1 or not 0 < self.steps_per_s < math.inf:
            raise ValueError("not a record: ranks, nodes, images and steps per second must be above 0")
        if len(self.steps_ms_by_rank) != self.world_size:
            raise ValueError(f"not a record: {self.world_size} ranks, {len(self.steps_ms_by_rank)} lists of step times")
        texts = [*self.transports, *self.versions.values(), *self.variables.values()]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("not a record: transports, versions and variables must be text")


_NUMBER, _NONE = (int, float), (type(None),)
_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("rung", "label", "measure", "model", "precision", "device", "parameters"), (str,)),
    **dict.fromkeys(("transport_asked", "workload", "data", "hardware", "command", "time"), (str,)),
    **dict.fromkeys(("repeat", "world_size", "num_nodes", "images_per_step"), (int,)),
    **dict.fromkeys(("steps_per_s", "peak_memory_mib"), _NUMBER),
    **dict.fromkeys(("loss", "accuracy", "bytes_sent_per_step"), _NUMBER + _NONE),
    **dict.fromkeys(("steps_ms_by_rank", "transports"), (list,)),
    **dict.fromkeys(("versions", "variables"), (Mapping,)),
    "bucket_bytes": (list, *_NONE),
    "compiled": (bool,),
    "plan": (Plan, *_NONE),
    "seed": (int, *_NONE),
    "commit": (str, *_NONE),
}


@dataclass(frozen=True)
class _Spread:
    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: list[float]) -> "_Spread":
        deciles = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values * 9
        return cls(*(round(value, 4) for value in (statistics.median(values), deciles[0], deciles[-1])))


def append_record(path: str | Path, record: Record) -> None:
    """Append one line; several processes may append to one file, and a line that one of them left torn stays alone."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record.to_dict(), allow_nan=False).encode() + b"\n"
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if file.seek(0, os.SEEK_END) > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line)


def read_records(paths: Iterable[str | Path]) -> list[Record]:
    """Read record files, and all `*.jsonl` below directories, in the order of their time.

    Lines that hold no record (torn, foreign, of a newer schema) are left out with a warning that names them.

    Raises:
        FileNotFoundError: a path that does not exist.

    """
    records: list[Record] = []
    files: set[Path] = set()  # a file counts once, given by itself and with its folder
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
        files.update(file.resolve() for file in (sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]))
    for file in sorted(file for file in files if file.is_file()):
        records += _read_file(file)
    return sorted(records, key=lambda record: record.time)


def _read_file(path: Path) -> list[Record]:
    records, refused = [], []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            records.append(Record.from_dict(json.loads(line)))
        except (ValueError, RecursionError) as error:  # also json's and unicode's
            refused.append(f"line {number} ({error})")
    if refused:
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        log.warning("%s: %s%s left out, no record of this version", path, refused[0], more)
    return records

"""What a set of records says: rows of equal runs, each beside its reference and the single device. Pure arithmetic."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightning_ddpopt.plan import Plan
from lightning_ddpopt.records import Record

REFERENCES = ("ddp", "ddp_1gpu")
"""Rungs that others on the same ranks and transport are compared with: stock DDP."""
SINGLE = "single"
# These make the transport, which stands in the table; torchrun sets the threads by the number of ranks.
_TOLD_BY_TRANSPORT = {
    *("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "FI_EFA_ENABLE_SHM_TRANSFER", "OMP_NUM_THREADS"),
    *("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_VERSION", "DDPOPT_JOB", "DDPOPT_SESSION"),  # in earlier records
}


class Spread(NamedTuple):
    """Median and range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        numbers = list(values)
        return cls(statistics.median(numbers), min(numbers), max(numbers))


class SectionKey(NamedTuple):
    """What runs must have in common to stand in one table."""

    device: str
    model: str
    precision: str
    compiled: bool
    workload: str
    data: str
    measure: str


class RowKey(NamedTuple):
    """What runs must have in common to be repeats of each other."""

    label: str
    rung: str
    plan: Plan | None
    world_size: int
    num_nodes: int
    transport: str
    images_per_rank: float
    variables: tuple[tuple[str, str], ...]

    @property
    def place(self) -> tuple[int, int, str, float]:
        """What two rows must have in common for their step times to be compared."""
        return self.world_size, self.num_nodes, self.transport, self.images_per_rank


@dataclass(frozen=True)
class Row:
    """Runs that are repeats of each other."""

    key: RowKey
    records: tuple[Record, ...]

    @cached_property
    def step_ms_by_repeat(self) -> dict[int, float]:
        """Repeat -> step time in ms; the median, where a repeat was run several times."""
        found: dict[int, list[float]] = {}
        for record in self.records:
            found.setdefault(record.repeat, []).append(record.step_ms)
        return {repeat: statistics.median(values) for repeat, values in sorted(found.items())}

    @property
    def step_ms(self) -> Spread:
        """Step time in ms over the repeats."""
        return Spread.of(self.step_ms_by_repeat.values())

    @property
    def images_per_s(self) -> float:
        """Images of all ranks per second, by the median step time."""
        return 1000 * self.key.images_per_rank * self.key.world_size / self.step_ms.median

    @property
    def steps_per_s(self) -> float:
        """Steps per second of wall time, the loader and the Trainer's loop included."""
        return statistics.median(record.steps_per_s for record in self.records)

    def paired_ms(self, reference: "Row") -> Spread | None:
        """Step time less the reference's of the same repeat, in ms; None if they have no repeat in common."""
        mine, theirs = self.step_ms_by_repeat, reference.step_ms_by_repeat
        common = mine.keys() & theirs.keys()
        return Spread.of(mine[repeat] - theirs[repeat] for repeat in common) if common else None

    def throughput_over(self, reference: "Row") -> float | None:
        """Images per second and rank over the reference's of the same repeat: the median ratio.

        None if they have no repeat in common, or steps of another size.

        """
        mine, theirs = self.step_ms_by_repeat, reference.step_ms_by_repeat
        common = mine.keys() & theirs.keys()
        if not common or self.key.images_per_rank != reference.key.images_per_rank:
            return None
        return statistics.median(theirs[repeat] / mine[repeat] for repeat in common)

    def is_interleaved_with(self, other: "Row") -> bool:
        """Whether the runs of two rows alternate, as far as their times tell, or there is but one of either."""
        mine, theirs = ([record.time for record in row.records] for row in (self, other))
        return min(len(mine), len(theirs)) < 2 or not (max(mine) < min(theirs) or max(theirs) < min(mine))

    def same_parameters(self, reference: "Row") -> bool | None:
        """Whether both trained to the same bits in each repeat; None if they have no repeat in common."""
        mine, theirs = _parameters(self), _parameters(reference)
        common = mine.keys() & theirs.keys()
        return all(mine[run] == theirs[run] for run in common) if common else None

    def median(self, field: str) -> float | None:
        """Median of a number over the runs; None if one of them does not have it."""
        values = [getattr(record, field) for record in self.records]
        return None if None in values else statistics.median(values)


@dataclass(frozen=True)
class Section:
    """Rows that may be compared."""

    key: SectionKey
    rows: tuple[Row, ...]

    @property
    def records(self) -> list[Record]:
        return [record for row in self.rows for record in row.records]

    def single(self, row: Row) -> Row | None:
        """One device without DDP on batches of the same size: the limit."""
        alone = (other for other in self.rows if other.key.rung == SINGLE and other.key.world_size == 1)
        return next((other for other in alone if other.key.images_per_rank == row.key.images_per_rank), None)

    def reference(self, row: Row) -> Row:
        """What `row` is compared with: stock DDP in the same place, or else the first rung there."""
        there = [other for other in self.rows if other.key.place == row.key.place]
        return next((other for other in there if other.key.rung in REFERENCES), there[0])


def sections(records: Sequence[Record]) -> list[Section]:
    """Sort records into sections and rows, in the order in which they first appear."""
    found: dict[SectionKey, dict[RowKey, list[Record]]] = {}
    for record in records:
        found.setdefault(_section_key(record), {}).setdefault(_row_key(record), []).append(record)
    return [Section(key, tuple(Row(row, tuple(runs)) for row, runs in rows.items())) for key, rows in found.items()]


def _row_key(record: Record) -> RowKey:
    kinds = sorted({name.split("/")[0] for name in record.transports})
    return RowKey(
        record.label,
        record.rung,
        record.plan,
        record.world_size,
        record.num_nodes,
        "+".join(kinds),
        record.images_per_step / record.world_size,
        tuple(sorted((name, value) for name, value in record.variables.items() if name not in _TOLD_BY_TRANSPORT)),
    )


def _section_key(record: Record) -> SectionKey:
    return SectionKey(
        record.device,
        record.model,
        record.precision,
        record.compiled,
        record.workload,
        record.data,
        record.measure,
    )


def _parameters(row: Row) -> dict[tuple[int, int | None], str]:
    return {(record.repeat, record.seed): record.parameters for record in row.records}

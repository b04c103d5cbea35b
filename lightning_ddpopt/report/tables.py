"""Tables of a report: for the terminal through rich, and as markdown, with the same cells."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lightning_ddpopt.records import Record
from lightning_ddpopt.report.comparison import CONFIDENCE, ComparedSection, Comparison
from lightning_ddpopt.report.summary import Row, Section, SectionKey, Spread

CLAIM_REPEATS, CLAIM_STEPS = 5, 30
MIB = 2**20


@dataclass(frozen=True)
class TextTable:
    """A table of text, with a title above and notes below it. The first column is text, the others are figures."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def __rich__(self) -> RenderableType:
        table = Table(title=escape(self.title), title_justify="left", title_style="bold", box=None, pad_edge=False)
        for index, name in enumerate(self.header):
            table.add_column(escape(name), justify="right" if index else "left", no_wrap=index == 0, overflow="fold")
        for row in self.rows:
            table.add_row(*map(escape, row))
        return Group(table, *(Text(note, style="dim") for note in self.notes), "")

    def markdown(self) -> str:
        lines = [self.header, ("---", *["---:"] * (len(self.header) - 1)), *self.rows]
        table = "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)
        notes = "".join(f"\n\n{note}" for note in self.notes)
        return f"### {self.title}\n\n{table}{notes}\n"


Cell = Callable[[Row], str]


def tables(section: Section) -> list[TextTable]:
    """How fast the rows are, and what they trained and sent."""
    shared = set.intersection(*(set(row.key.variables) for row in section.rows))
    where: dict[str, Cell] = {
        "rung": lambda row: " ".join(
            [row.key.label, *(f"{k}={v}" for k, v in row.key.variables if (k, v) not in shared)]
        ),
        "ranks": lambda row: _ranks(row.key.world_size, row.key.num_nodes),
        "transport": lambda row: row.key.transport,
    }
    if len({row.key.images_per_rank for row in section.rows}) > 1:
        where["images/rank"] = lambda row: f"{row.key.images_per_rank:g}"
    speed = where | {
        "runs": lambda row: str(len(row.records)),
        "step ms": lambda row: _spread(row.step_ms),
        "Δ ms": lambda row: _against(section, row, lambda other: _signed(row.paired_ms(other)), "ref"),
        "images/s": lambda row: f"{row.images_per_s:.0f}",
        "vs ref": lambda row: _against(section, row, lambda other: _percent(row.throughput_over(other))),
        "of single": lambda row: _of_single(section, row),
        "steps/s": lambda row: f"{row.steps_per_s:.2f}",
    }
    outcome = where | {
        "buckets": lambda row: _buckets(row.records),
        "sent MiB": lambda row: _number(row.median("bytes_sent_per_step"), ".3f", MIB),
        "peak MiB": lambda row: _number(row.median("peak_memory_mib"), ".0f"),
        "loss": lambda row: _number(row.median("loss"), ".4f"),
        "accuracy": lambda row: _number(row.median("accuracy"), ".3f"),
        "parameters": lambda row: _against(section, row, lambda other: _same(row.same_parameters(other))),
    }
    notes = [
        "step ms: median and range over the runs, of the slowest rank's median step. ref: stock ddp, or else the first"
        " rung, on the same ranks and transport with the same batch; Δ and vs ref are paired with it by repeat.",
        "of single: images/s per rank over the single device's, with the same batch, paired. steps/s: by wall time, the"
        " loader included.",
        *_cautions(section),
    ]
    facts = _facts(section.records)
    name = title(section.key)
    return [
        _table(f"Speed: {name}", speed, section.rows, notes),
        _table(f"Outcome: {name}", outcome, section.rows, [f"sent: by each rank for gradients in a step. {facts}"]),
    ]


def comparison_table(compared: ComparedSection) -> TextTable:
    """One line for each row that both sets have."""
    devices = [section.key.device for section in (compared.before, compared.after)]
    cells: dict[str, Callable[[Comparison], str]] = {
        "rung": lambda line: line.before.key.label,
        "ranks": lambda line: _ranks(line.before.key.world_size, line.before.key.num_nodes),
        "transport": lambda line: line.before.key.transport,
        "before ms": lambda line: _spread(line.before.step_ms),
        "after ms": lambda line: _spread(line.after.step_ms),
        "runs": lambda line: f"{len(line.before.step_ms_by_repeat)}, {len(line.after.step_ms_by_repeat)}",
        "after / before": lambda line: f"{line.ratio:.4f}",
        f"{CONFIDENCE:.0%} interval": _interval,
        "": lambda line: ("faster" if line.ratio < 1 else "slower") if line.differs else "",
    }
    notes = [
        f"Ratio of step times, with Welch's {CONFIDENCE:.0%} interval over the logarithms of the repeats, for each line"
        " by itself; it needs two repeats on either side.",
        f"Before: {_facts(compared.before.records)}",
        f"After: {_facts(compared.after.records)}",
    ]
    if compared.ambiguous:
        notes.append(f"Left out, several rows of that name and none with one plan: {', '.join(compared.ambiguous)}.")
    if compared.only_in_one:
        notes.append(f"Only in one of them: {', '.join(compared.only_in_one)}.")
    device = devices[0] if devices[0] == devices[1] else " against ".join(devices)
    rows = tuple(tuple(cell(line) for cell in cells.values()) for line in compared.comparisons)
    return TextTable(
        f"Compared: {title(compared.before.key._replace(device=device))}", tuple(cells), rows, tuple(notes)
    )


def title(key: SectionKey) -> str:
    """A section in one line."""
    compiled = ", torch.compile" if key.compiled else ""
    workload = ", ".join(part for part in (key.workload, key.data) if part)
    what = f"{key.model} ({workload})" if workload else key.model
    return f"{what}, {key.precision}{compiled}, on {key.device}, measure {key.measure}"


def _table(name: str, cells: dict[str, Cell], rows: Sequence[Row], notes: Iterable[str]) -> TextTable:
    columns = {header: [cell(row) for row in rows] for header, cell in cells.items()}
    shown = {header: column for header, column in columns.items() if any(column)}
    return TextTable(name, tuple(shown), tuple(zip(*shown.values(), strict=True)), tuple(notes))


def _cautions(section: Section) -> list[str]:
    steps = min(len(record.steps_ms_by_rank[0]) for record in section.records)
    repeats = min(len(row.step_ms_by_repeat) for row in section.rows)
    short = [f"{_counted(found, noun)} where a claim needs {needed}"
             for found, needed, noun in ((steps, CLAIM_STEPS, "timed step"), (repeats, CLAIM_REPEATS, "repeat"))
             if found < needed]  # fmt: skip
    cautions = [f"Not for claims: {' and '.join(short)}. Small differences are noise."] if short else []
    apart = [row.key.label for row in section.rows if not row.is_interleaved_with(section.reference(row))]
    if apart:
        cautions.append(
            f"Not interleaved with the reference, so that drift counts as a difference: {', '.join(apart)}."
        )
    return cautions


def _facts(records: Sequence[Record]) -> str:
    """Versions and hardware; where runs differ in them, all values."""
    versions: dict[str, set[str]] = {}
    for record in records:
        for name, version in record.versions.items():
            versions.setdefault(name, set()).add(version)
    shown = [f"{name} {' and '.join(sorted(values))}" for name, values in versions.items()]
    hardware = sorted({record.hardware for record in records if record.hardware})
    commits = sorted({record.commit for record in records if record.commit})
    days = sorted({record.time[:10] for record in records if record.time})
    parts = [*hardware, ", ".join(shown), f"commit {' and '.join(commits)}" if commits else "", " to ".join(
        days if len(days) < 2 else [days[0], days[-1]])]  # fmt: skip
    return "; ".join(part for part in parts if part) + "."


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _ranks(world_size: int, num_nodes: int) -> str:
    return str(world_size) if num_nodes == 1 else f"{world_size} on {num_nodes} nodes"


def _against(section: Section, row: Row, show: Callable[[Row], str], itself: str = "") -> str:
    """A cell that compares a row with its reference; ``itself`` for the reference."""
    other = section.reference(row)
    return itself if other is row else show(other)


def _of_single(section: Section, row: Row) -> str:
    single = section.single(row)
    ratio = None if single is None or row is single else row.throughput_over(single)
    return "" if ratio is None else f"{100 * ratio:.1f} %"


def _spread(spread: Spread) -> str:
    if spread.low == spread.high:
        return f"{spread.median:.2f}"
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"


def _signed(spread: Spread | None) -> str:
    if spread is None:
        return ""
    if spread.low == spread.high:
        return f"{spread.median:+.2f}"
    return f"{spread.median:+.2f} ({spread.low:+.2f} to {spread.high:+.2f})"


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


def _same(same: bool | None) -> str:
    return "" if same is None else "same bits" if same else "differ"


def _number(value: float | None, form: str, unit: float = 1) -> str:
    return "" if value is None else format(value / unit, form)


def _buckets(records: Sequence[Record]) -> str:
    counts = sorted({len(record.bucket_bytes) for record in records if record.bucket_bytes is not None})
    return " or ".join(map(str, counts))


def _interval(line: Comparison) -> str:
    return "" if line.low is None or line.high is None else f"{line.low:.4f} to {line.high:.4f}"

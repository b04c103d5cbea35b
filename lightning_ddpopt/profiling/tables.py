"""An analysis as tables of text, for the terminal and for the page."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.text import Text

from lightning_ddpopt.profiling.figures import Analysis, Collective, Figures, RankAnalysis, rate
from lightning_ddpopt.profiling.findings import Finding
from lightning_ddpopt.report.tables import TextTable

_MIB = 2**20
_Row = TypeVar("_Row")
_ALL = "all"


def tables(analysis: Analysis) -> list[TextTable]:
    """Parts of the step, communication, copies, and the collectives of the first rank."""
    first = analysis.ranks[0]
    return [
        step_table(analysis),
        communication_table(analysis),
        *([] if analysis.is_cpu else [copies_table(analysis)]),
        *([collectives_table(first)] if first.collectives else []),
    ]


def step_table(analysis: Analysis) -> TextTable:
    """Step time and its parts, by rank and over all."""
    cells: dict[str, Callable[[tuple[str, Figures, int]], str]] = {
        "rank": lambda row: row[0],
        "steps": lambda row: str(row[2]) if row[2] else "",
        "step ms": lambda row: f"{row[1].step_ms:.2f}",
        "data wait": lambda row: _number(row[1].data_wait_ms, ".2f"),
        "forward": lambda row: _number(row[1].forward_ms, ".2f"),
        "backward": lambda row: _number(row[1].backward_ms, ".2f"),
        "optimizer": lambda row: _number(row[1].optimizer_ms, ".2f"),
        "other": lambda row: _number(row[1].other_ms, ".2f"),
        "idle": lambda row: _number(row[1].idle_ms, ".2f"),
        "longest idle": lambda row: _number(row[1].longest_idle_ms, ".2f"),
    }
    rows = [(str(rank.rank), rank.mean, rank.meant_steps) for rank in analysis.ranks]
    notes = [
        "ms of the device, mean over the steps. Backward lasts until the optimizer starts, exposed communication"
        " included; idle time is part of the others.",
        *analysis.notes,
    ]
    return _table("Step", cells, [*rows, *_over_all(analysis)], notes)


def communication_table(analysis: Analysis) -> TextTable:
    """Communication: hidden and exposed, wire and wait, and who is late."""
    late = {str(rank.rank): rank for rank in analysis.ranks}

    def lateness(row: tuple[str, Figures, int]) -> str:
        rank = late.get(row[0])
        if rank is None or rank.late_ms is None or rank.last_share is None:
            return ""
        return f"{rank.late_ms:.2f} ({100 * rank.last_share:.0f} %)"

    def both(ms: Callable[[Figures], float | None]) -> Callable[[tuple[str, Figures, int]], str]:
        def cell(row: tuple[str, Figures, int]) -> str:
            value = ms(row[1])
            return "" if value is None else f"{value:.2f} ({row[1].percent(value):.1f} %)"

        return cell

    cells: dict[str, Callable[[tuple[str, Figures, int]], str]] = {
        "rank": lambda row: row[0],
        "collectives": lambda row: f"{row[1].collectives:.3g}",
        "communication": both(lambda figures: figures.communication_ms),
        "hidden": both(lambda figures: figures.hidden_ms),
        "exposed": both(lambda figures: figures.exposed_ms),
        "wire": both(lambda figures: figures.wire_ms),
        "exposed wire": both(lambda figures: figures.exposed_wire_ms),
        "wait": both(lambda figures: figures.wait_ms),
        "late ms (last)": lateness,
    }
    rows = [(str(rank.rank), rank.mean, rank.meant_steps) for rank in analysis.ranks]
    notes = [
        "ms a step, and per cent of it. Exposed: not under compute. Wait: before the last rank had come; wire: after."
    ]
    if any(rank.late_ms is not None for rank in analysis.ranks):
        notes.append("Late: how much later than the first rank it starts a collective, and how often it is the last.")
    return _table("Communication", cells, [*rows, *_over_all(analysis)], notes)


def copies_table(analysis: Analysis) -> TextTable:
    """Copies of gradients on the device, and from the host."""
    cells: dict[str, Callable[[tuple[str, Figures, int]], str]] = {
        "rank": lambda row: row[0],
        "gradient copies": lambda row: _number(row[1].gradient_copies, ".4g"),
        "MiB": lambda row: _number(row[1].gradient_copy_bytes, ".1f", _MIB),
        "ms": lambda row: _number(row[1].gradient_copy_ms, ".2f"),
        "from host MiB": lambda row: _number(row[1].host_copy_bytes, ".1f", _MIB),
        "from host ms": lambda row: _number(row[1].host_copy_ms, ".2f"),
        "blocking": lambda row: _number(row[1].blocking_copies, ".3g"),
        "host blocked ms": lambda row: _number(row[1].blocked_ms, ".2f"),
    }
    rows = [(str(rank.rank), rank.mean, rank.meant_steps) for rank in analysis.ranks]
    notes = ["A step. Gradient copies: on the device, after the reductions and before the optimizer."]
    return _table("Copies", cells, [*rows, *_over_all(analysis)], notes)


def collectives_table(rank: RankAnalysis) -> TextTable:
    """The collectives of one rank's step."""
    cells: dict[str, Callable[[Collective], str]] = {
        "collective": lambda one: f"{one.position} {one.name}",
        "bucket": lambda one: "" if one.bucket is None else str(one.bucket),
        "hook": lambda one: one.hook or "",
        "bucket MiB": lambda one: _number(one.bucket_bytes, ".3f", _MIB),
        "payload MiB": lambda one: _number(one.payload_bytes, ".3f", _MIB),
        "ms": lambda one: f"{one.duration_ms:.3f}",
        "exposed ms": lambda one: f"{one.exposed_ms:.3f}",
        "wire ms": lambda one: _number(one.wire_ms, ".3f"),
        "wait ms": lambda one: _number(one.wait_ms, ".3f"),
        "busbw GB/s": lambda one: rate(one.busbw_gb_per_s),
    }
    notes = []
    if any(one.payload_bytes is None and one.name == "AllReduce" for one in rank.collectives):
        notes.append("Where no payload stands, the trace does not tell it: so no bandwidth either.")
    if any(one.busbw_gb_per_s for one in rank.collectives):
        time = "wire time" if all(one.wire_ms is not None for one in rank.collectives) else "its time, waiting included"
        notes.append(f"busbw: payload over {time}, times 2(n-1)/n for n ranks.")
    return _table(f"Collectives of rank {rank.rank}", cells, rank.collectives, notes)


def before_after_table(before: Analysis, after: Analysis) -> TextTable:
    """The means over all ranks, before and after."""
    shown = {
        "step": "step_ms",
        "data wait": "data_wait_ms",
        "forward": "forward_ms",
        "backward": "backward_ms",
        "optimizer": "optimizer_ms",
        "communication": "communication_ms",
        "hidden": "hidden_ms",
        "exposed": "exposed_ms",
        "wire": "wire_ms",
        "exposed wire": "exposed_wire_ms",
        "wait": "wait_ms",
        "gradient copies": "gradient_copy_ms",
        "idle": "idle_ms",
    }
    rows = []
    for name, field in shown.items():
        was, now = getattr(before.mean, field), getattr(after.mean, field)
        if was is None and now is None:
            continue
        change = "" if was is None or now is None else f"{now - was:+.2f}"
        rows.append((name, _number(was, ".2f"), _number(now, ".2f"), change))
    return TextTable(
        "Before and after", ("ms a step", "before", "after", "change"), tuple(rows), ("Mean over the ranks.",)
    )


def findings_text(found: Sequence[Finding]) -> Text:
    """Findings for the terminal."""
    text = Text()
    text.append("Findings\n", style="bold")
    for one in found:
        text.append(f"{one.rule}: ", style="bold red")
        text.append(f"{one.evidence}\n")
        text.append(f"  → {one.remedy}\n", style="green")
    if not found:
        text.append("None.\n")
    return text


def _over_all(analysis: Analysis) -> list[tuple[str, Figures, int]]:
    return [(_ALL, analysis.mean, 0)] if len(analysis.ranks) > 1 else []


def _table(
    title: str, cells: dict[str, Callable[[_Row], str]], rows: Sequence[_Row], notes: Sequence[str]
) -> TextTable:
    columns = {header: [cell(row) for row in rows] for header, cell in cells.items()}
    shown = {header: column for header, column in columns.items() if any(column)}
    return TextTable(title, tuple(shown), tuple(zip(*shown.values(), strict=True)), tuple(notes))


def _number(value: float | None, form: str, unit: float = 1) -> str:
    return "" if value is None else format(value / unit, form)

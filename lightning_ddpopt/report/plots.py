"""Pictures of a report: throughput by rung and transport, and by bucket capacity and hook."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_ddpopt.plan import Plan
from lightning_ddpopt.report.summary import Row, Section
from lightning_ddpopt.report.tables import title

_LINES = ("-", "--", ":", "-.")


def save(sections: Sequence[Section], path: str | Path) -> None:
    """Write one PNG with a row of panels for each section."""
    heights = [max(3.0, 1.2 + 0.22 * len(_bars(section))) for section in sections]
    figure = Figure(figsize=(12, sum(heights)), layout="constrained")
    panels = figure.subfigures(len(sections), squeeze=False, height_ratios=heights)
    for section, panel in zip(sections, panels[:, 0], strict=True):
        panel.suptitle(title(section.key), fontsize=10)
        if any(_sweep(section)):
            left, right = panel.subplots(1, 2)
            _draw_capacities(section, right)
        else:
            left = panel.subplots(1, 1)
        _draw_rungs(section, left)
    figure.savefig(path, format="png", dpi=120)


def _draw_rungs(section: Section, axes: Axes) -> None:
    """A bar a row: median throughput, with the range over the repeats."""
    rows = _bars(section)
    colours = {transport: f"C{index}" for index, transport in enumerate(dict.fromkeys(map(_transport, rows)))}
    for place, row in enumerate(rows):
        spread, images = row.step_ms, 1000 * row.key.images_per_rank
        value = images / spread.median
        axes.barh(place, value, color=colours[_transport(row)])
        axes.errorbar(value, place, xerr=[[value - images / spread.high], [images / spread.low - value]], color="black",
                      capsize=2, linewidth=1)  # fmt: skip
        axes.text(0, place, f" {value:.0f}", va="center", color="white", fontsize=7)
    single = section.single(rows[0])
    if single is not None:
        axes.axvline(_per_rank(single), color="black", linestyle="--", linewidth=1, label="single")
    for transport, colour in colours.items():
        axes.barh(0, 0, color=colour, label=transport)
    ranks = {row.key.world_size for row in rows if row.key.world_size > 1}
    axes.set_yticks(range(len(rows)), [_name(row, len(ranks) > 1) for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("images/s per rank")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=5, frameon=False)


def _draw_capacities(section: Section, axes: Axes) -> None:
    """A line a hook and transport."""
    series = _sweep(section)
    places = list(dict.fromkeys(place for _, place in series))
    hooks = list(dict.fromkeys(hook for hook, _ in series))
    for (hook, place), rows in series.items():
        points = sorted((_capacity(row), _per_rank(row)) for row in rows)
        name = hook if len(places) == 1 else f"{hook}, {place}"
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=f"C{hooks.index(hook)}",
                  linestyle=_LINES[places.index(place) % len(_LINES)], label=name)  # fmt: skip
    single = section.single(next(iter(series.values()))[0])
    if single is not None:
        axes.axhline(_per_rank(single), color="black", linestyle="--", linewidth=1, label="single")
    capacities = sorted({_capacity(row) for rows in series.values() for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(capacities, [f"{capacity:g}" for capacity in capacities], fontsize=7)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bucket_cap_mb (MiB)")
    axes.set_ylabel("images/s per rank")
    axes.legend(fontsize=7)


def _sweep(section: Section) -> dict[tuple[str, str], list[Row]]:
    """Rows that differ in their capacity alone, by hook and by ranks and transport; of rungs that have several."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in section.rows:
        plan = row.key.plan
        if plan is not None and isinstance(plan.bucket_cap_mb, float):
            alike = (row.key.rung, replace(plan, bucket_cap_mb=None), row.key.place, row.key.variables)
            found.setdefault(alike, []).append(row)
    several = {alike: rows for alike, rows in found.items() if len({_capacity(row) for row in rows}) > 1}
    series: dict[tuple[str, str], list[Row]] = {}
    for rows in several.values():
        hook, place = str(_plan(rows[0]).hook), f"{rows[0].key.world_size} ranks {rows[0].key.transport}"
        if (hook, place) in series:  # another rung, graph, view or batch
            hook = f"{hook}, {rows[0].key.rung} {len(series)}"
        series[hook, place] = rows
    return series


def _bars(section: Section) -> list[Row]:
    """All rows, but of a sweep over capacities only the best for each hook and transport."""
    series = _sweep(section)
    swept = [row for rows in series.values() for row in rows]
    best = [max(rows, key=_per_rank) for rows in series.values()]
    return [row for row in section.rows if row in best or row not in swept]


def _plan(row: Row) -> Plan:
    assert row.key.plan is not None
    return row.key.plan


def _capacity(row: Row) -> float:
    capacity = _plan(row).bucket_cap_mb
    assert isinstance(capacity, float)
    return capacity


def _per_rank(row: Row) -> float:
    return row.images_per_s / row.key.world_size


def _transport(row: Row) -> str:
    return row.key.transport or "one rank"


def _name(row: Row, with_ranks: bool) -> str:
    return f"{row.key.label} ({row.key.world_size})" if with_ranks else row.key.label

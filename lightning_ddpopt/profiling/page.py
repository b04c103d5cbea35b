"""An analysis as one HTML page that needs nothing else: figures, a timeline of each rank, and before / after."""

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from lightning_ddpopt.profiling.figures import Analysis, RankAnalysis, Spans
from lightning_ddpopt.profiling.findings import Finding, findings
from lightning_ddpopt.profiling.tables import (
    before_after_table,
    collectives_table,
    communication_table,
    copies_table,
    step_table,
)
from lightning_ddpopt.report.tables import TextTable

_LEFT, _RIGHT = 122, 10
_LANE, _GAP, _PHASE = 26, 8, 16
_MAX_TIMELINES = 16

_STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --card: #ffffff; --ink: #1d1f23; --soft: #666b74; --line: #dcdee2;
  --compute: #4a7fb5; --hidden: #6aa84f; --exposed: #d1495b; --shade: #d1495b22; --wait: #e9a23b; --copy: #8e5bb5;
  --data: #c9ccd1; --forward: #b9d9b0; --backward: #d3c4e3; --optimizer: #f0dc9b; --other: #e8e9eb;
  --phase-ink: #26292e; }
@media (prefers-color-scheme: dark) { :root { --page: #15171a; --card: #1e2125; --ink: #e6e8eb; --soft: #9aa1ab;
  --line: #363b42; --compute: #5b93cc; --hidden: #75b65a; --exposed: #e8647a; --shade: #e8647a33; --wait: #e2a74f;
  --copy: #b48ad6; --data: #5a6069; --forward: #3f6b38; --backward: #5d4a78; --optimizer: #7c6a26; --other: #33383f;
  --phase-ink: #eef0f2; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 1500px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
.soft, .note { color: var(--soft); } .note { font-size: .85rem; margin: .2rem 0; }
.cards { display: flex; flex-wrap: wrap; gap: .7rem; margin: 1rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .6rem .9rem; min-width: 9.5rem; }
.card b { display: block; font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.card .change { font-size: .85rem; }
.finding { background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--exposed);
  border-radius: 6px; padding: .5rem .9rem; margin: .5rem 0; }
.finding code { color: var(--soft); font-size: .85rem; } .finding p { margin: .15rem 0; }
.sides { display: grid; gap: 0 2rem; grid-template-columns: minmax(0, 1fr); }
@media (min-width: 1000px) { .sides.two { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
th, td { text-align: right; padding: .2rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } th:first-child, td:first-child { text-align: left; padding-left: 0; }
summary { cursor: pointer; margin: .5rem 0; }
svg { display: block; width: 100%; height: auto; margin: .2rem 0 .8rem; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); } svg text.soft { fill: var(--soft); }
svg text.phase { fill: var(--phase-ink); font-size: 11px; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; font-size: .85rem; color: var(--soft); }
.legend i { display: inline-block; width: .9rem; height: .7rem; margin-right: .35rem; border-radius: 2px; }
"""


def page(analysis: Analysis, baseline: Analysis | None = None) -> str:
    """The page as text.

    Args:
        analysis: what to show; with a baseline, the state after.
        baseline: the state before.

    """
    sides = [("", analysis)] if baseline is None else [("Before", baseline), ("After", analysis)]
    span_ms = max(rank.timeline.span[1] for _, side in sides for rank in side.ranks)
    files = "; ".join(
        (f"{name.lower()}: " if name else "") + ", ".join(rank.file for rank in side.ranks) for name, side in sides
    )
    body = [
        "<h1>Where a training step's time goes</h1>",
        f'<div class="soft">{escape(files)}</div>',
        _cards(analysis, baseline),
        *_section("Findings", sides, lambda side: _findings(findings(side))),
        *_section("Timeline of one step", sides, lambda side: _timelines(side, span_ms, len(sides)), _legend()),
        *([] if baseline is None else [_html(before_after_table(baseline, analysis), 2)]),
        *_section("Figures", sides, _figures, is_wide=True),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>ddpopt analyze</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _section(
    title: str,
    sides: Sequence[tuple[str, Analysis]],
    show: Callable[[Analysis], str],
    before: str = "",
    is_wide: bool = False,
) -> Iterable[str]:
    yield f"<h2>{title}</h2>{before}"
    parts = [f"<div>{f'<h3>{name}</h3>' if name else ''}{show(side)}</div>" for name, side in sides]
    yield f'<div class="sides{" two" if len(sides) > 1 and not is_wide else ""}">{"".join(parts)}</div>'


def _cards(analysis: Analysis, baseline: Analysis | None) -> str:
    shown = {
        "step": "step_ms",
        "communication": "communication_ms",
        "exposed": "exposed_ms",
        "exposed wire": "exposed_wire_ms",
        "wait for late ranks": "wait_ms",
        "idle": "idle_ms",
    }
    return (
        f'<div class="cards">{"".join(_card(name, field, analysis, baseline) for name, field in shown.items())}</div>'
    )


def _card(name: str, field: str, analysis: Analysis, baseline: Analysis | None) -> str:
    value = getattr(analysis.mean, field)
    if value is None:
        return ""
    change = "" if field == "step_ms" else f"{analysis.mean.percent(value):.1f} % of the step"
    was = None if baseline is None else getattr(baseline.mean, field)
    if was is not None:
        change = f"before {was:.1f} ms, {value - was:+.1f}"
    return f'<div class="card">{escape(name)}<b>{value:.1f} ms</b><span class="change soft">{change}</span></div>'


def _findings(found: Sequence[Finding]) -> str:
    if not found:
        return "<p>None.</p>"
    return "".join(
        f'<div class="finding"><code>{escape(one.rule)}</code><p>{escape(one.evidence)}</p>'
        f"<p><b>{escape(one.remedy)}</b></p></div>"
        for one in found
    )


def _legend() -> str:
    colours = {
        "compute": "compute",
        "communication under compute": "hidden",
        "exposed": "exposed",
        "waiting for a late rank": "wait",
        "gradient copies": "copy",
    }
    items = "".join(
        f'<span><i style="background:var(--{colour})"></i>{name}</span>' for name, colour in colours.items()
    )
    return f'<div class="legend">{items}</div>'


def _timelines(analysis: Analysis, span_ms: float, columns: int) -> str:
    shown = analysis.ranks[:_MAX_TIMELINES]
    pictures = "".join(_timeline(rank, span_ms, 1300 if columns == 1 else 720) for rank in shown)
    if len(shown) < len(analysis.ranks):
        pictures += f'<p class="note">The first {len(shown)} of {len(analysis.ranks)} ranks.</p>'
    return pictures


def _timeline(rank: RankAnalysis, span_ms: float, width: int) -> str:
    """Lanes of one rank: phases, compute, communication; the exposed part is shaded through both lanes."""
    timeline = rank.timeline
    scale = (width - _LEFT - _RIGHT) / span_ms

    def bar(start: float, end: float, top: float, height: float, fill: str, title: str = "", least: float = 0.6) -> str:
        tip = f"<title>{escape(title)}</title>" if title else ""
        x, w = _LEFT + start * scale, max((end - start) * scale, least)
        return f'<rect x="{x:.2f}" y="{top}" width="{w:.2f}" height="{height}" fill="var(--{fill})">{tip}</rect>'

    def bars(spans: Spans, top: float, height: float, fill: str, name: str) -> str:
        return "".join(bar(start, end, top, height, fill, f"{name}: {end - start:.3f} ms") for start, end in spans)

    top = 20
    compute_top = top + _PHASE + _GAP
    communication_top = compute_top + _LANE + _GAP
    bottom = communication_top + _LANE
    parts = [f'<text x="0" y="12" font-weight="600">rank {rank.rank}</text>',
             f'<text x="{_LEFT}" y="12" class="soft">{escape(timeline.step)},'
             f" {timeline.span[1] - timeline.span[0]:.1f} ms</text>"]  # fmt: skip
    for name, y in (("phase", top + 12), ("compute", compute_top + 17), ("communication", communication_top + 17)):
        parts.append(f'<text x="0" y="{y}" class="soft">{name}</text>')
    for phase, start, end in timeline.phases:
        fill = {"data wait": "data"}.get(phase, phase)
        parts.append(bar(start, end, top, _PHASE, fill, f"{phase}: {end - start:.2f} ms"))
        if (end - start) * scale > 7 * len(phase) + 4:
            parts.append(
                f'<text class="phase" x="{_LEFT + (start + end) / 2 * scale:.1f}" y="{top + 12}"'
                f' text-anchor="middle">{phase}</text>'
            )
    for start, end in timeline.exposed:
        parts.append(bar(start, end, compute_top - 3, bottom - compute_top + 6, "shade", least=0))
    parts.append(bars(timeline.compute, compute_top, _LANE, "compute", "compute"))
    parts.append(bars(timeline.gradient_copies, compute_top, _LANE, "copy", "gradient copies"))
    for number, (start, end) in enumerate(timeline.communication):
        parts.append(
            bar(start, end, communication_top, _LANE, "hidden", f"communication {number}: {end - start:.3f} ms")
        )
    parts.append(bars(timeline.exposed, communication_top, _LANE, "exposed", "exposed"))
    parts.append(bars(timeline.wait, communication_top + _LANE - 8, 8, "wait", "waiting for a late rank"))
    parts.append(_axis(span_ms, scale, bottom + 4))
    label = (
        f"Rank {rank.rank}: {rank.mean.exposed_ms:.1f} of {rank.mean.communication_ms:.1f} ms communication are exposed"
    )
    return f'<svg viewBox="0 0 {width} {bottom + 24}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _axis(span_ms: float, scale: float, top: float) -> str:
    unit = 10 ** math.floor(math.log10(span_ms / 4)) if span_ms > 0 else 1
    step = next(unit * factor for factor in (1, 2, 5, 10) if span_ms / (unit * factor) <= 8)
    marks = [step * index for index in range(int(span_ms / step + 1e-9) + 1)]
    parts = [f'<line x1="{_LEFT}" x2="{_LEFT + span_ms * scale:.1f}" y1="{top}" y2="{top}" stroke="var(--line)"/>']
    for mark in marks:
        x = _LEFT + mark * scale
        unit_name = " ms" if mark == 0 else ""
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + 4}" stroke="var(--soft)"/>')
        parts.append(f'<text class="soft" x="{x:.1f}" y="{top + 16}" text-anchor="middle">{mark:g}{unit_name}</text>')
    return "".join(parts)


def _figures(analysis: Analysis) -> str:
    shown = [_html(step_table(analysis)), _html(communication_table(analysis))]
    if not analysis.is_cpu:
        shown.append(_html(copies_table(analysis)))
    for index, rank in enumerate(analysis.ranks):
        if rank.collectives:
            table = _html(collectives_table(rank), 0)
            opened = " open" if index == 0 and len(rank.collectives) <= 40 else ""
            shown.append(f"<details{opened}><summary>Collectives of rank {rank.rank}</summary>{table}</details>")
    return "".join(shown)


def _html(table: TextTable, level: int = 3) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.header)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    title = f"<h{level}>{escape(table.title)}</h{level}>" if level else ""
    return f'{title}<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{notes}'

"""Compares two sets of records: another machine, another version, another day."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ddpopt.records import Record
from lightning_ddpopt.report.summary import Row, Section, sections

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Comparison:
    """One row that both sets have.

    Args:
        before, after: the row in either set.
        ratio: step time after over before.
        low, high: the confidence interval of the ratio; None where a set has fewer than two repeats.

    """

    before: Row
    after: Row
    ratio: float
    low: float | None
    high: float | None

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


@dataclass(frozen=True)
class ComparedSection:
    """Two sections of one workload, with the rows that both have, and the names of those that cannot be paired."""

    before: Section
    after: Section
    comparisons: tuple[Comparison, ...]
    only_in_one: tuple[str, ...]
    ambiguous: tuple[str, ...]


def compare(before: Sequence[Record], after: Sequence[Record]) -> list[ComparedSection]:
    """Pair sections that train the same model in the same way: on the same device, or else on every other one.

    A row's figures are its repeats' step times: each repeat is a run of its own, while the steps of a run depend on
    each other. The interval is Welch's for the difference of the mean logarithms (Welch, Biometrika 1947).

    """
    compared = []
    for section in sections(before):
        alike = [other for other in sections(after) if other.key[1:] == section.key[1:]]
        same_device = [other for other in alike if other.key == section.key]
        compared += [_compare_sections(section, other) for other in same_device or alike]
    return compared


def _compare_sections(before: Section, after: Section) -> ComparedSection:
    """Rows of one name and plan are pairs; of one name where each side has one: the plan may be what has changed."""
    first, second = _by_name(before), _by_name(after)
    pairs: list[tuple[Row, Row]] = []
    ambiguous: list[str] = []
    for name in first.keys() & second.keys():
        plans = [{row.key.plan: row for row in rows} for rows in (first[name], second[name])]
        common = [(row, plans[1][plan]) for plan, row in plans[0].items() if plan in plans[1]]
        if len(first[name]) == len(second[name]) == 1:
            common = [(first[name][0], second[name][0])]
        pairs += common
        ambiguous += [] if common else [_shown(name)]
    pairs.sort(key=lambda pair: before.rows.index(pair[0]))
    alone = [_shown(name) for name in first.keys() ^ second.keys()]
    return ComparedSection(
        before,
        after,
        tuple(_compare(*pair) for pair in pairs),
        tuple(sorted(alone)),
        tuple(sorted(ambiguous)),
    )


_Name = tuple[str, tuple[int, int, str, float]]


def _by_name(section: Section) -> dict[_Name, list[Row]]:
    found: dict[_Name, list[Row]] = {}
    for row in section.rows:
        found.setdefault((row.key.label, row.key.place), []).append(row)
    return found


def _shown(name: _Name) -> str:
    label, (ranks, _, transport, _) = name
    return f"{label} on {ranks} over {transport}" if transport else label


def _compare(before: Row, after: Row) -> Comparison:
    from scipy.stats import ttest_ind

    first, second = ([math.log(ms) for ms in row.step_ms_by_repeat.values()] for row in (before, after))
    ratio = math.exp(sum(second) / len(second) - sum(first) / len(first))
    if min(len(first), len(second)) < 2:
        return Comparison(before, after, ratio, None, None)
    if max(first) == min(first) and max(second) == min(second):  # without spread Welch's interval is not defined
        return Comparison(before, after, ratio, ratio, ratio)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # scipy's of repeats that are equal on one side
        interval = ttest_ind(second, first, equal_var=False).confidence_interval(CONFIDENCE)
    return Comparison(before, after, ratio, math.exp(interval.low), math.exp(interval.high))

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
    """Two sections of one workload, with the rows that both have, and the names of those that one lacks."""

    before: Section
    after: Section
    comparisons: tuple[Comparison, ...]
    only_in_one: tuple[str, ...]


def compare(before: Sequence[Record], after: Sequence[Record]) -> list[ComparedSection]:
    """Pair sections that train the same model in the same way, whatever their device.

    A row's figures are its repeats' step times: each repeat is a run of its own, while the steps of a run depend on
    each other. The interval is Welch's for the difference of the mean logarithms (Welch, Biometrika 1947).

    """
    theirs: dict[tuple[object, ...], Section] = {section.key[1:]: section for section in sections(after)}
    return [
        _compare_sections(section, theirs[section.key[1:]]) for section in sections(before) if section.key[1:] in theirs
    ]


def _compare_sections(before: Section, after: Section) -> ComparedSection:
    first, second = _by_name(before), _by_name(after)
    pairs = [(row, second[name]) for name, row in first.items() if name in second]
    alone = [*(first.keys() - second.keys()), *(second.keys() - first.keys())]
    names = [f"{label} on {ranks} over {transport}" if transport else label for label, ranks, _, transport, _ in alone]
    return ComparedSection(before, after, tuple(_compare(*pair) for pair in pairs), tuple(sorted(names)))


def _by_name(section: Section) -> dict[tuple[str, int, int, str, float], Row]:
    """Without the plan: that may be what changed. The last one wins where two differ in it alone."""
    return {
        (row.key.label, row.key.world_size, row.key.num_nodes, row.key.transport, row.key.images_per_rank): row
        for row in section.rows
    }


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

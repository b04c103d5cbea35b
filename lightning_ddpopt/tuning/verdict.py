"""What tuning found: :class:`Trial` and :class:`Verdict`, as values that go to JSON and back. Imports no torch."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ddpopt.plan import Plan
from lightning_ddpopt.tuning.link import Link
from lightning_ddpopt.tuning.simulator import Interference
from lightning_ddpopt.tuning.timeline import Timeline

VERDICT_SCHEMA = 2


def median_error(values: Sequence[float]) -> float:
    """Standard error of the median, from the median absolute deviation; infinite for fewer than three values.

    1.4826 turns the deviation into a standard deviation, 1.2533 that of the mean into that of the median, for normal
    noise (Huber, Robust Statistics, 1981).

    """
    if len(values) < 3:
        return math.inf
    center = statistics.median(values)
    deviation = statistics.median(abs(value - center) for value in values)
    return 1.2533 * 1.4826 * deviation / math.sqrt(len(values))


def capacity_of(default: Plan) -> str:
    """How to call the plan that others are compared with."""
    return "torch's default capacity" if default.bucket_cap_mb is None else "the given capacity"


@dataclass(frozen=True)
class Trial:
    """One candidate, and the real training steps that it ran.

    Args:
        plan: the candidate.
        bucket_bytes: bytes of gradient in each of its buckets, as DDP forms them from the measured timeline.
        steps_ms: for each timed step, its time on the rank that waited least, in ms, forward to optimizer step.
        predicted_ms: step time that the model gives; None where there is no model.

    """

    plan: Plan
    bucket_bytes: tuple[int, ...]
    steps_ms: tuple[float, ...]
    predicted_ms: float | None = None

    @property
    def median_ms(self) -> float:
        """Median step time in ms."""
        return statistics.median(self.steps_ms)

    @property
    def error_ms(self) -> float:
        """Standard error of :attr:`median_ms` in ms."""
        return median_error(self.steps_ms)


@dataclass(frozen=True)
class Verdict:
    """The plan kept, what was tried, and what that gained and cost.

    Args:
        plan: the plan kept.
        default: the user's settings with torch's default capacity.
        reason: why, in one sentence.
        trials: what ran, the default first; empty where nothing was tried.
        steps: optimizer steps spent on tuning.
        seconds: wall time of tuning.
        cost_s: the part of ``seconds`` beyond what as many steps of the default take.
        predicted_gain_ms: with ``observe``, the gain that the model promises; else None.
        timeline, link, interference: the measured model; None where it was not made.
        payload_factor: bytes on the wire per byte of gradient under the default's hook.
        is_verified: whether it is an earlier verdict that held in a short comparison, whose steps stand in ``trials``.

    """

    plan: Plan
    default: Plan
    reason: str
    trials: tuple[Trial, ...] = ()
    steps: int = 0
    seconds: float = 0.0
    cost_s: float = 0.0
    predicted_gain_ms: float | None = None
    timeline: Timeline | None = None
    link: Link | None = None
    interference: Interference | None = None
    payload_factor: float = 1.0
    is_verified: bool = False

    def trial_of(self, plan: Plan) -> Trial | None:
        """The trial of ``plan``, if it ran."""
        return next((trial for trial in self.trials if trial.plan == plan), None)

    @property
    def gain_ms(self) -> float:
        """How much less a step takes than by default, in ms (medians); 0 where the default is kept."""
        default, kept = self.trial_of(self.default), self.trial_of(self.plan)
        return default.median_ms - kept.median_ms if default and kept else 0.0

    def __str__(self) -> str:
        default, kept = self.trial_of(self.default), self.trial_of(self.plan)
        parts = [self.reason]
        if default is not None and kept is not None and kept is not default:
            parts.append(
                f"{kept.median_ms:.2f} ms a step instead of {default.median_ms:.2f} by {capacity_of(self.default)}"
                f" ({-100 * self.gain_ms / default.median_ms:+.1f} %)"
            )
        if self.steps:
            count = f", {len(self.trials)} plans tried" if self.trials else ""
            parts.append(
                f"tuning took {self.steps} steps and {self.cost_s:.2g} s more than they take by default{count}"
            )
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings; the inverse of :meth:`from_dict`."""
        fit = self.interference
        return {
            "schema": VERDICT_SCHEMA,
            "plan": self.plan.to_dict(),
            "default": self.default.to_dict(),
            "reason": self.reason,
            "trials": [
                {
                    "plan": trial.plan.to_dict(),
                    "bucket_bytes": list(trial.bucket_bytes),
                    "steps_ms": list(trial.steps_ms),
                    "predicted_ms": trial.predicted_ms,
                }
                for trial in self.trials
            ],
            "steps": self.steps,
            "seconds": self.seconds,
            "cost_s": self.cost_s,
            "predicted_gain_ms": self.predicted_gain_ms,
            "payload_factor": self.payload_factor,
            "is_verified": self.is_verified,
            "timeline": self.timeline and self.timeline.to_dict(),
            "link": self.link and self.link.to_dict(),
            "interference": fit
            and {
                "backward_slowdown": fit.backward_slowdown,
                "communication_slowdown": fit.communication_slowdown,
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Verdict":
        """Build a verdict from :meth:`to_dict`'s output.

        Raises:
            ValueError: not a verdict, or of another schema.

        """
        if not isinstance(data, Mapping) or data.get("schema") != VERDICT_SCHEMA:
            found = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f"not a verdict: schema must be {VERDICT_SCHEMA}, got {found!r}")
        try:
            return cls(
                plan=Plan.from_dict(data["plan"]),
                default=Plan.from_dict(data["default"]),
                reason=str(data["reason"]),
                trials=tuple(
                    Trial(
                        Plan.from_dict(trial["plan"]),
                        tuple(int(size) for size in trial["bucket_bytes"]),
                        tuple(float(step) for step in trial["steps_ms"]),
                        trial["predicted_ms"],
                    )
                    for trial in data["trials"]
                ),
                steps=int(data["steps"]),
                seconds=float(data["seconds"]),
                cost_s=float(data["cost_s"]),
                predicted_gain_ms=data["predicted_gain_ms"],
                timeline=data["timeline"] and Timeline.from_dict(data["timeline"]),
                link=data["link"] and Link.from_dict(data["link"]),
                interference=data["interference"] and Interference(**data["interference"]),
                payload_factor=float(data["payload_factor"]),
                is_verified=bool(data["is_verified"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a verdict: {error!r}") from error

    def save(self, path: str | Path) -> None:
        """Write the verdict to ``path`` as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Verdict":
        """Read a verdict that :meth:`save` wrote.

        Raises:
            ValueError: the file cannot be read or holds no verdict; the message names the file.

        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{str(path)!r} holds no verdict: {error}") from error

"""What the user may say about tuning, checked. Imports no torch."""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from lightning_ddpopt.plan import Plan


@dataclass(frozen=True)
class TuningOptions:
    """Options of ``DDPOptStrategy(tuning={...})``.

    Args:
        observe: train with torch's own capacity, change nothing, and say at the end of the measuring what could be
            gained.
        max_steps: optimizer steps to spend on capacities; ``comm_hook="auto"`` takes half as many on top.
        max_seconds: wall time to spend in all.
        candidates: capacities in MiB to try instead of those that the model proposes.
        cache: keep the verdict for the next run of the same model on the same machines: True for the user's cache
            folder (``$DDPOPT_CACHE_DIR``, ``$XDG_CACHE_HOME/ddpopt`` or ``~/.cache/ddpopt``), a folder, or False.
        recheck_every_n_steps: compare the plan with torch's default again every so many optimizer steps, for networks
            that others share; None: never.

    Raises:
        ValueError: a value that cannot work, with what is allowed.

    """

    observe: bool = False
    max_steps: int = 64
    max_seconds: float = 60.0
    candidates: tuple[float, ...] | None = None
    cache: bool | str = True
    recheck_every_n_steps: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.observe, bool):
            raise ValueError(f"tuning: observe={self.observe!r} must be True or False.")
        if not _is_whole(self.max_steps, 1):
            raise ValueError(f"tuning: max_steps={self.max_steps!r} must be a whole number of at least 1.")
        is_number = isinstance(self.max_seconds, numbers.Real) and not isinstance(self.max_seconds, bool)
        if not is_number or not 0 < self.max_seconds < math.inf:
            raise ValueError(f"tuning: max_seconds={self.max_seconds!r} must be a number of seconds above 0.")
        if not isinstance(self.cache, bool | str) or self.cache == "":
            raise ValueError(f"tuning: cache={self.cache!r} must be True, False or a folder.")
        if self.recheck_every_n_steps is not None and not _is_whole(self.recheck_every_n_steps, 100):
            raise ValueError(
                f"tuning: recheck_every_n_steps={self.recheck_every_n_steps!r} must be None or a whole number of at"
                " least 100: a check takes about 16 steps."
            )
        if self.candidates is not None:
            if isinstance(self.candidates, str) or not isinstance(self.candidates, Sequence) or not self.candidates:
                raise ValueError(f"tuning: candidates={self.candidates!r} must be a list of capacities in MiB.")
            for capacity in self.candidates:
                if not isinstance(Plan(bucket_cap_mb=capacity).bucket_cap_mb, float):
                    raise ValueError(f"tuning: candidates: {capacity!r} must be a number of MiB.")
            object.__setattr__(self, "candidates", tuple(float(capacity) for capacity in self.candidates))

    @classmethod
    def of(cls, tuning: bool | str | Mapping[str, Any]) -> "TuningOptions | None":
        """The options that the argument ``tuning`` means; None: no tuning.

        Raises:
            ValueError: none of what is allowed.

        """
        if isinstance(tuning, bool):
            return cls() if tuning else None
        if tuning == "observe":
            return cls(observe=True)
        names = [field.name for field in fields(cls)]
        if not isinstance(tuning, Mapping):
            raise ValueError(
                f"tuning={tuning!r} must be True, False, 'observe' or a mapping of options ({', '.join(names)})."
            )
        unknown = [key for key in tuning if key not in names]
        if unknown:
            raise ValueError(f"tuning has no option {unknown[0]!r}. Its options: {', '.join(names)}.")
        return replace(cls(), **tuning)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least

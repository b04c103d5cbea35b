"""What a run does to exchange gradients, as a value: :class:`Plan` and :class:`HookSpec`.

The only home of defaults and of their validation. Imports no torch, so that command lines and reports can read plans.
"""

import json
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

HookOption: TypeAlias = bool | int | float | str

PLAN_SCHEMA = 1

# Hook name -> its options with their defaults. PowerSGD's names are those of torch's `PowerSGDState`.
HOOK_DEFAULTS: Mapping[str, Mapping[str, HookOption]] = {
    "none": {},
    "fp16": {},
    "bf16": {},
    "powersgd": {
        "matrix_approximation_rank": 1,
        "start_powerSGD_iter": 2,
        "min_compression_rate": 2.0,
        "use_error_feedback": True,
        "warm_start": True,
        "random_seed": 0,
    },
}
CUSTOM_HOOK = "custom"
"""Name of a hook that is the user's own callable. A plan can tell its qualified name but cannot bring it back."""

_MINIMUM: Mapping[str, float] = {
    "matrix_approximation_rank": 1,
    "start_powerSGD_iter": 0,
    "min_compression_rate": 0,
    "random_seed": 0,
}


@dataclass(frozen=True)
class HookSpec:
    """A communication hook by name plus options; built late, at each wrap.

    Args:
        name: ``"none"``, ``"fp16"``, ``"bf16"``, ``"powersgd"``, or ``"custom"`` for a callable of the user's.
        options: options of that hook. What is left out takes its default, so that equal hooks compare equal.

    Raises:
        ValueError: an unknown name, an option which that hook lacks, or a value out of range.

    """

    name: str = "none"
    options: Mapping[str, HookOption] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.options, Mapping):
            raise ValueError(f"comm_hook_options must be a mapping of option names to values, got {self.options!r}.")
        if self.name == CUSTOM_HOOK:
            options = dict(self.options)
        elif isinstance(self.name, str) and self.name in HOOK_DEFAULTS:
            options = _checked_options(self.name, self.options)
        else:
            allowed = ", ".join(repr(name) for name in HOOK_DEFAULTS)
            raise ValueError(f"comm_hook={self.name!r} is not known. Allowed: {allowed}, or a callable.")
        object.__setattr__(self, "options", MappingProxyType(options))

    def __reduce__(self) -> tuple[type["HookSpec"], tuple[str, dict[str, HookOption]]]:
        return HookSpec, (self.name, dict(self.options))  # a mappingproxy cannot be pickled

    def __str__(self) -> str:
        defaults = HOOK_DEFAULTS.get(self.name, {})
        shown = [f"{key}={value}" for key, value in self.options.items() if value != defaults.get(key)]
        return f"{self.name}({', '.join(shown)})" if shown else self.name


def _checked_options(name: str, given: Mapping[str, HookOption]) -> dict[str, HookOption]:
    defaults = HOOK_DEFAULTS[name]
    unknown = [key for key in given if key not in defaults]
    if unknown:
        allowed = ", ".join(defaults) if defaults else "none at all"
        raise ValueError(f"comm_hook_options: hook {name!r} has no option {unknown[0]!r}. Its options: {allowed}.")
    return {key: _checked_option(name, key, given.get(key, default), default) for key, default in defaults.items()}


def _checked_option(name: str, key: str, value: Any, default: HookOption) -> HookOption:
    where = f"comm_hook_options: {key}={value!r} of hook {name!r}"
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"{where} must be true or false.")
        return value
    is_whole = isinstance(default, int)
    is_number = isinstance(value, numbers.Integral if is_whole else numbers.Real) and not isinstance(value, bool)
    minimum = _MINIMUM[key]
    if not is_number or not minimum <= value < 2**63:  # also refuses nan
        noun = "a whole number" if is_whole else "a finite number"
        raise ValueError(f"{where} must be {noun} of at least {minimum:g} and below 2**63.")
    return int(value) if is_whole else float(value)


@dataclass(frozen=True)
class Plan:
    """How one run exchanges gradients. Immutable; equal by value; goes to JSON and back.

    Args:
        static_graph: the user's promise that every iteration uses the same graph (see
            :class:`~torch.nn.parallel.DistributedDataParallel`).
        gradient_as_bucket_view: let ``.grad`` be a view into the reduction buckets: one gradient copy less.
        bucket_cap_mb: bucket capacity in MiB. None is torch's default (first bucket 1 MiB, then 25 MiB). A sequence
            gives one capacity per bucket in gradient-ready order; the last one repeats.
        hook: the communication hook.

    Raises:
        ValueError: a value that DDP would misread or refuse late, with what is allowed.

    """

    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    bucket_cap_mb: float | tuple[float, ...] | None = None
    hook: HookSpec = field(default_factory=HookSpec)

    def __post_init__(self) -> None:
        for name in ("static_graph", "gradient_as_bucket_view"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False.")
        if not isinstance(self.hook, HookSpec):
            raise ValueError(f"hook={self.hook!r} must be a HookSpec, for example HookSpec('bf16').")
        object.__setattr__(self, "bucket_cap_mb", _checked_bucket_cap_mb(self.bucket_cap_mb))

    @classmethod
    def stock(cls) -> "Plan":
        """The plan of torch's own DistributedDataParallel when it is given no arguments."""
        return cls(gradient_as_bucket_view=False)

    def __str__(self) -> str:
        if self.bucket_cap_mb is None:
            capacity = "torch's default bucket capacity"
        elif isinstance(self.bucket_cap_mb, tuple):
            capacity = "bucket capacities " + ", ".join(map(_shown, self.bucket_cap_mb)) + " MiB"
        else:
            capacity = f"bucket capacity {_shown(self.bucket_cap_mb)} MiB"
        graph = "static graph" if self.static_graph else "dynamic graph"
        view = "bucket view" if self.gradient_as_bucket_view else "no bucket view"
        return f"{graph}, {view}, {capacity}, hook {self.hook}"

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings; the inverse of :meth:`from_dict`."""
        cap = self.bucket_cap_mb
        return {
            "schema": PLAN_SCHEMA,
            "static_graph": self.static_graph,
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "bucket_cap_mb": list(cap) if isinstance(cap, tuple) else cap,
            "hook": {"name": self.hook.name, "options": dict(self.hook.options)},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Plan":
        """Build a plan from :meth:`to_dict`'s output.

        Raises:
            ValueError: not a plan, an unknown key, or another schema.

        """
        if not isinstance(data, Mapping) or data.get("schema") != PLAN_SCHEMA or data["schema"] is True:
            found = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f"not a plan: schema must be {PLAN_SCHEMA}, got {found!r}. Write plans with Plan.save().")
        values = {key: value for key, value in data.items() if key != "schema"}
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            allowed = ", ".join(f.name for f in fields(cls))
            raise ValueError(f"a plan has no field {unknown[0]!r}. Its fields: {allowed}.")
        if "hook" in values:
            hook = values["hook"]
            if not isinstance(hook, Mapping) or not {"name"} <= set(hook) <= {"name", "options"}:
                raise ValueError(f"hook={hook!r} of a plan must be a mapping with 'name' and, if any, 'options'.")
            values["hook"] = HookSpec(hook["name"], hook.get("options", {}))
        return cls(**values)

    def to_json(self) -> str:
        """The plan as one JSON object."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: the text is not JSON, or not a plan.

        """
        return cls.from_dict(json.loads(text))

    def save(self, path: str | Path) -> None:
        """Write the plan to ``path`` as JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan that :meth:`save` wrote.

        Raises:
            ValueError: the file cannot be read or holds no plan; the message names the file.

        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"plan={str(path)!r}: {error}") from error


def _checked_bucket_cap_mb(value: Any) -> float | tuple[float, ...] | None:
    if value is None:
        return None
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if not value:
            raise ValueError("bucket_cap_mb=[] holds no capacity. Give one number of MiB per bucket, or None.")
        return tuple(_checked_capacity(cap) for cap in value)
    return _checked_capacity(value)


def _checked_capacity(value: Any) -> float:
    smallest, largest = 2.0**-20, 2.0**42  # one byte; DDP keeps the capacity in bytes as a signed 64-bit integer
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not smallest <= value <= largest:  # also false for nan
        raise ValueError(
            f"bucket_cap_mb={value!r} is not a capacity. Allowed: a number of MiB from 2**-20 (one byte) to 2**42, one"
            " number per bucket, or None for torch's default; for one single bucket give more MiB than the model has."
        )
    return float(value)


def _shown(capacity: float) -> str:
    """Short, and different for different capacities."""
    return str(int(capacity)) if capacity.is_integer() else repr(capacity)

"""Makes every rank of a job see one config.

Ranks compose the job's config each for themselves. What differs between processes is ``${now:...}`` and resolvers of
the user's (random numbers, identifiers): the launching process evaluates these once, the ranks take its values.
"""

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import PurePath
from typing import Any

from hydra.core.utils import setup_globals
from omegaconf import Container, DictConfig, ListConfig, OmegaConf, flag_override, resolvers

# What torchrun sets for each rank: `${oc.env:RANK}` means that rank's.
TORCHRUN_VARIABLES = frozenset(
    [f"{scope}{name}" for scope in ("", "LOCAL_", "GROUP_", "ROLE_") for name in ("RANK", "WORLD_SIZE")]
    + ["NODE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"]
)

_RESOLVER_CALL = re.compile(r"\$\{\s*([A-Za-z_][\w.]*)\s*:")
_COMPUTED_CALL = re.compile(r"\$\{\s*[\w.]*\$\{[^{}]*\}[\w.]*\s*:")  # ${${which_resolver}:...}
_SAME_EVERYWHERE = re.compile(r"oc\..*|hydra|now|python_version")

Path = tuple[Any, ...]


@dataclass(frozen=True)
class Pins:
    """What the ranks of a job take from the process that launched it.

    Args:
        launched_at: the time that ``${now:...}`` tells.
        now: values that ``${now:...}`` has had already in the launching process, by its arguments.
        values: path in the config and what to assign there, for nodes that call a resolver of the user's.

    """

    launched_at: datetime
    now: dict[Any, Any]
    values: list[tuple[Path, Any]]


def pins_of(config: DictConfig, launched_at: datetime) -> Pins:
    """Evaluate what may differ between processes. ``config`` is the job's, with its ``hydra`` node."""
    with _now_is(launched_at), _rank_variables_unknown():
        values = [pin for key in config if key != "hydra" for pin in _values(config, (key,))]
        return Pins(launched_at, dict(OmegaConf.get_cache(config).get("now", {})), values)


def pin(config: DictConfig, pins: Pins) -> None:
    """Put the launching process's values into a rank's config, and set its clock for ``${now:...}``."""
    _register_now(pins.launched_at)
    cache = OmegaConf.get_cache(config)
    cache.setdefault("now", {}).update(pins.now)
    OmegaConf.set_cache(config, cache)
    for path, value in pins.values:
        container: Any = config
        for key in path[:-1]:
            container = container[key]
        with flag_override(container, ["readonly", "struct"], False):  # the container may have flags of its own
            container[path[-1]] = value


def _values(container: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Pins of the node at the end of ``path``, which lies in ``container``, and of those below it."""
    key = path[-1]
    if OmegaConf.is_missing(container, key):
        return
    if OmegaConf.is_interpolation(container, key):
        text = str(OmegaConf.to_container(_only(container, key), resolve=False))
        calls = _RESOLVER_CALL.findall(text)
        if all(_SAME_EVERYWHERE.fullmatch(name) for name in calls) and not _COMPUTED_CALL.search(text):
            return
        try:
            value = _assignable(container[key])
            pickle.dumps(value)
        except Exception:  # not registered yet, what only a rank knows, or no plain value: each rank evaluates it
            return
        yield path, value
        return
    child = container[key]
    if isinstance(child, DictConfig):
        for name in child:
            yield from _values(child, (*path, name))
    elif isinstance(child, ListConfig):
        for index in range(len(child)):
            yield from _values(child, (*path, index))


def _assignable(value: Any) -> Any:
    """What makes a node hold ``value`` when it is assigned. Raises TypeError for what configs cannot hold."""
    if isinstance(value, Container):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, dict):
        return {key: _assignable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_assignable(item) for item in value]
    if value is None or isinstance(value, bool | bytes | Enum | PurePath):
        return value
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)  # it is no interpolation
    for plain in (int, float):  # NumPy's float is a float, but configs take none
        if isinstance(value, plain):
            return plain(value)
    raise TypeError(f"a config cannot hold {value!r}")


def _only(container: Any, key: Any) -> ListConfig:
    """A container that holds nothing but one node of another."""
    node = container._get_node(key)
    return OmegaConf.create([node._value()])


@contextmanager
def _now_is(time: datetime) -> Iterator[None]:
    _register_now(time)
    try:
        yield
    finally:
        setup_globals()


def _register_now(time: datetime) -> None:
    OmegaConf.register_new_resolver("now", time.strftime, use_cache=True, replace=True)


@contextmanager
def _rank_variables_unknown() -> Iterator[None]:
    """Let nodes that depend on torchrun's variables fail to resolve, wherever the variable is named."""

    def environment(key: str, *default: Any) -> Any:
        if key in TORCHRUN_VARIABLES or key.startswith("TORCHELASTIC_"):
            raise KeyError(key)
        return os.environ[key] if key in os.environ else resolvers.oc.env(key, *default)

    OmegaConf.register_new_resolver("oc.env", environment, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", resolvers.oc.env, replace=True)

"""What the ranks of a sweep's job take from the process that launched it."""

import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import setup_globals
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.ddpopt.pinning import pin, pins_of

LAUNCHED = datetime(2024, 5, 6, 7, 8, 9, 123456)


class Colour(Enum):
    RED = 1


class Opaque:
    pass


@pytest.fixture(autouse=True)
def process() -> Iterator[Callable[[str], None]]:
    """Resolvers that give another value in each process; call the fixture to become the other one."""
    who = ["parent"]
    OmegaConf.register_new_resolver("mine", lambda *arguments: f"{who[0]}{''.join(map(str, arguments))}", replace=True)
    OmegaConf.register_new_resolver("made", lambda kind: _made(kind, who[0]), replace=True)
    setup_globals()
    yield lambda name: who.__setitem__(0, name)
    for name in ("mine", "made", "later", "text"):
        OmegaConf.clear_resolver(name)
    setup_globals()


def _made(kind: str, who: str) -> Any:
    return {
        "dict": {"by": who, "${not}": ["${an}", {"interpolation": r"\${x}"}]},
        "list": [who, None, 1.5],
        "interpolation": who + "${oops}",
        "enum": Colour.RED if who == "parent" else None,
        "path": Path(who),
        "subclass": type("Float", (float,), {})(1.5 if who == "parent" else 2.5),
        "opaque": Opaque(),
        "type": Opaque,
        "function": lambda: who,
        "none": None if who == "parent" else 1,
    }[kind]


def in_a_rank(process: Callable[[str], None], make: Callable[[], DictConfig]) -> DictConfig:
    """The config as a rank sees it; the pins travel as they do, pickled."""
    pins = pickle.loads(pickle.dumps(pins_of(make(), LAUNCHED)))
    process("rank")
    config = make()
    pin(config, pins)
    return config


def plain(config: Any) -> Callable[[], DictConfig]:
    return lambda: OmegaConf.create(config)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("${mine:}", "parent"),
        ("a ${mine:} b", "a parent b"),
        ("${ mine : 1}", "parent1"),
        ("${mine:${mine:1}}", "parentparent1"),
        ("${mine:${n}}", "parent3"),
        ("${oc.decode:${mine:}}", "parent"),
        ("${oc.dict.values:source}", ["parent"]),
        ("${${which}:7}", "parent7"),
        ("${source.key}", "parent"),
        (["${mine:}", [{"deep": "${mine:2}"}]], ["parent", [{"deep": "parent2"}]]),
        ("${made:dict}", {"by": "parent", "${not}": ["${an}", {"interpolation": r"\${x}"}]}),
        ("${made:list}", ["parent", None, 1.5]),
        ("${made:interpolation}", "parent${oops}"),
        ("${made:enum}", Colour.RED),
        ("${made:path}", Path("parent")),
        ("${made:subclass}", 1.5),
        ("${made:none}", None),
        ("${now:%H:%M:%S.%f}", "07:08:09.123456"),
        ("${mine:${now:%S}}", "parent09"),
    ],
)
def test_ranks_take_the_launchers_value(process: Callable[[str], None], value: Any, expected: Any) -> None:
    make = plain({"v": value, "n": 3, "which": "mine", "source": {"key": "${mine:}"}})
    config = in_a_rank(process, make)
    assert OmegaConf.to_container(config, resolve=True)["v"] == expected  # type: ignore[call-overload,index]


@pytest.mark.parametrize("value", ["${n}", "${n}:${n}", "${oc.env:HOME,x}", "${python_version:}", "???"])
def test_what_is_the_same_in_all_processes_is_left_as_it_is(value: str) -> None:
    assert pins_of(OmegaConf.create({"v": value, "n": 3}), LAUNCHED).values == []


def test_an_interpolation_of_plain_values_still_follows_them(process: Callable[[str], None]) -> None:
    config = in_a_rank(process, plain({"a": "${mine:}", "b": "${a}/${n}", "n": 3}))
    config.n = 4
    assert config.b == "parent/4"


@pytest.mark.parametrize("value", ["${made:opaque}", "${made:type}", "${made:function}"])
def test_what_no_config_can_hold_is_evaluated_by_each_rank(process: Callable[[str], None], value: str) -> None:
    config = in_a_rank(process, plain({"v": value, "w": "${mine:}"}))
    assert isinstance(config.v, Opaque | type | Callable)  # type: ignore[arg-type]
    assert config.w == "parent"


@pytest.mark.parametrize(
    "value",
    ["${oc.env:RANK}", "${mine:${oc.env:LOCAL_RANK}}", "${mine:${oc.env:TORCHELASTIC_RUN_ID,none}}", "${mine:${rank}}"],
)
def test_what_depends_on_the_rank_stays_the_ranks(
    process: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    make = plain({"v": value, "rank": "${oc.env:RANK,0}"})
    pins = pins_of(make(), LAUNCHED)
    process("rank")
    for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "5")
    config = make()
    pin(config, pins)
    assert config.v == ("5" if value == "${oc.env:RANK}" else "rank5")


def test_the_resolvers_are_the_usual_ones_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    pins_of(OmegaConf.create({"v": "${mine:${oc.env:RANK}}"}), LAUNCHED)
    monkeypatch.setenv("RANK", "5")
    config = OmegaConf.create({"rank": "${oc.env:RANK}", "none": "${oc.env:NO_SUCH,null}", "year": "${now:%Y}"})
    assert (config.rank, config.none, config.year) == ("5", None, str(datetime.now().year))
    assert "NO_SUCH" not in os.environ


def test_what_cannot_be_resolved_is_left_to_the_ranks(process: Callable[[str], None]) -> None:
    make = plain({"missing": "???", "unknown": "${later:}", "failing": "${mine:${missing}}", "none": None})
    config = in_a_rank(process, make)
    OmegaConf.register_new_resolver("later", lambda: "registered by the app", replace=True)
    config.missing = 1
    assert config == {"missing": 1, "unknown": "registered by the app", "failing": "rank1", "none": None}


def test_times_that_the_sweep_has_told_already_stay(process: Callable[[str], None]) -> None:
    master = OmegaConf.create({"v": "${now:%S.%f}"})
    told = master.v

    def make() -> DictConfig:
        config = OmegaConf.create({"v": "${now:%S.%f}", "other": "${now:%Y}"})
        OmegaConf.copy_cache(from_config=master, to_config=config)
        return config

    pins = pins_of(make(), LAUNCHED)
    config = OmegaConf.create({"v": "${now:%S.%f}", "other": "${now:%Y}"})
    pin(config, pins)
    assert (config.v, config.other) == (told, "2024")


@dataclass(frozen=True)
class Frozen:
    name: str = "${mine:}"
    length: int = "${oc.decode:${made:subclass}}"  # type: ignore[assignment]


@dataclass
class Schema:
    frozen: Frozen = field(default_factory=Frozen)
    colour: Colour = "${made:enum}"  # type: ignore[assignment]
    names: list[str] = field(default_factory=lambda: ["${mine:}"])
    by_number: dict[int, str] = field(default_factory=lambda: {1: "${mine:}"})


def test_structured_and_frozen_configs(process: Callable[[str], None]) -> None:
    config = in_a_rank(process, lambda: OmegaConf.structured(Schema))
    assert config.frozen.name == "parent"
    assert (config.colour, config.names, config.by_number) == (Colour.RED, ["parent"], {1: "parent"})
    assert OmegaConf.get_type(config.frozen) is Frozen
    assert OmegaConf.is_readonly(config.frozen)


def test_flags_of_any_level_are_overcome_and_kept(process: Callable[[str], None]) -> None:
    def make() -> DictConfig:
        config = OmegaConf.create({"a": {"v": "${mine:}"}, "l": ["${mine:}"]})
        OmegaConf.set_readonly(config, True)
        OmegaConf.set_readonly(config.a, True)
        OmegaConf.set_readonly(config.l, True)
        OmegaConf.set_struct(config.a, True)
        return config

    config = in_a_rank(process, make)
    assert config == {"a": {"v": "parent"}, "l": ["parent"]}
    assert OmegaConf.is_readonly(config.a)
    assert OmegaConf.is_struct(config.a)


def test_the_hydra_node_is_left_to_hydra() -> None:
    assert pins_of(OmegaConf.create({"hydra": {"v": "${mine:}"}}), LAUNCHED).values == []


@given(st.text(alphabet=st.sampled_from(r"${}\ab:'. "), max_size=12).filter(lambda text: text != "???"))
def test_any_text_arrives_as_it_was(text: str) -> None:
    OmegaConf.register_new_resolver("made", lambda: {"top": [text]}, replace=True)
    OmegaConf.register_new_resolver("text", lambda: text, replace=True)
    pins = pins_of(OmegaConf.create({"v": "${text:}", "d": "${made:}"}), LAUNCHED)
    config = OmegaConf.create({"v": None, "d": None})
    pin(config, pins)
    assert [path for path, _ in pins.values] == [("v",), ("d",)]
    assert (config.v, config.d.top[0]) == (text, text)

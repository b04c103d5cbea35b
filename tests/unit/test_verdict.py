"""Verdicts as files, and the cache that keeps them."""

import json
import logging
from pathlib import Path

import pytest

from lightning_ddpopt.plan import Plan
from lightning_ddpopt.tuning.cache import VerdictCache, default_folder
from lightning_ddpopt.tuning.link import Link
from lightning_ddpopt.tuning.simulator import Interference
from lightning_ddpopt.tuning.timeline import Gradient, Timeline
from lightning_ddpopt.tuning.verdict import Trial, Verdict

FAST = Plan(bucket_cap_mb=(1.0, 8.0))
VERDICT = Verdict(
    plan=FAST,
    default=Plan(),
    reason="it is the fastest",
    trials=(Trial(Plan(), (4, 8), (10.0, 11.0, 10.0), 9.5), Trial(FAST, (12,), (8.0, 8.0, 9.0))),
    steps=12,
    seconds=0.5,
    cost_s=0.25,
    timeline=Timeline((Gradient("a", 12, 1.0),), 1.0, 2.0, 3.0),
    link=Link((1,), (1.0,)),
    interference=Interference(0.1, 0.5),
)
KEY = {"parameters": "abc", "world_size": 2}


def test_what_it_says() -> None:
    assert VERDICT.gain_ms == 2.0
    assert str(VERDICT) == (
        "it is the fastest; 8.00 ms a step instead of 10.00 by torch's default capacity (-20.0 %); tuning took 12 steps"
        " and 0.25 s more than they take by default, 2 plans tried"
    )
    assert Verdict(Plan(), Plan(), "nothing").gain_ms == 0.0


def test_there_and_back(tmp_path: Path) -> None:
    VERDICT.save(tmp_path / "verdict.json")
    assert Verdict.load(tmp_path / "verdict.json") == VERDICT
    bare = Verdict(Plan(), Plan(), "nothing")
    assert Verdict.from_dict(json.loads(json.dumps(bare.to_dict()))) == bare


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1}', "[" * 10000])
def test_what_is_no_verdict_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "v.json").write_text(text)
    with pytest.raises(ValueError, match=r"v\.json' holds no verdict"):
        Verdict.load(tmp_path / "v.json")


def test_the_cache_keeps_a_verdict_for_its_key(tmp_path: Path) -> None:
    cache = VerdictCache(tmp_path / "new" / "folder")
    assert cache.load(KEY) is None
    cache.store(KEY, VERDICT)
    assert cache.load(dict(reversed(KEY.items()))) == VERDICT
    assert cache.load(KEY | {"world_size": 4}) is None
    assert [path.name for path in cache.folder.iterdir()] == [cache.path(KEY).name], "nothing half-written is left"


@pytest.mark.parametrize("damage", ["corrupt", "foreign", "newer", "binary"])
def test_a_file_that_cannot_be_used_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    cache = VerdictCache(tmp_path)
    cache.store(KEY, VERDICT)
    path = cache.path(KEY)
    data = json.loads(path.read_text())
    if damage == "corrupt":
        path.write_text(path.read_text()[:50])
    if damage == "foreign":
        path.write_text(json.dumps(data | {"key": {"parameters": "other"}}))
    if damage == "newer":
        data["verdict"]["schema"] = 99
        path.write_text(json.dumps(data))
    if damage == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    with caplog.at_level(logging.WARNING):
        assert cache.load(KEY) is None
    assert f"the cached verdict {path} is ignored" in caplog.text


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        VerdictCache(tmp_path / "file" / "folder").store(KEY, VERDICT)
    assert "the verdict is not cached" in caplog.text


def test_where_the_users_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPOPT_CACHE_DIR", "/mine")
    assert default_folder() == Path("/mine")
    monkeypatch.delenv("DDPOPT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_folder() == Path("/cache/ddpopt")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache" / "ddpopt"

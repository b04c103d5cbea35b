"""Keeps verdicts between runs: one JSON file for each case, under a key that says all the case depends on."""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_ddpopt.messages import say_here
from lightning_ddpopt.tuning.verdict import Verdict

log = logging.getLogger(__name__)


def default_folder() -> Path:
    """``$DDPOPT_CACHE_DIR``, else ``$XDG_CACHE_HOME/ddpopt``, else ``~/.cache/ddpopt``."""
    if folder := os.environ.get("DDPOPT_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddpopt"


class VerdictCache:
    """Verdicts in files of one folder.

    Args:
        folder: made when something is stored.

    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, key: Mapping[str, Any]) -> Path:
        """The file for ``key``."""
        return self.folder / f"verdict_{hashlib.sha256(_canonical(key).encode()).hexdigest()[:20]}.json"

    def load(self, key: Mapping[str, Any]) -> Verdict | None:
        """The verdict stored under ``key``; None, with a warning if a file is there that does not hold it."""
        path = self.path(key)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or _canonical(data.get("key")) != _canonical(key):
                raise ValueError("it belongs to another case")
            return Verdict.from_dict(data["verdict"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            say_here(log, f"the cached verdict {path} is ignored: {error!r}", logging.WARNING)
            return None

    def store(self, key: Mapping[str, Any], verdict: Verdict) -> None:
        """Keep ``verdict`` under ``key``; a folder that cannot be written to is warned about."""
        try:
            text = json.dumps({"key": dict(key), "verdict": verdict.to_dict()}, indent=1, allow_nan=False)
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False, encoding="utf-8") as file:
                file.write(text)
            os.replace(file.name, self.path(key))  # whole or not at all, whoever else reads or writes
        except (OSError, ValueError, TypeError) as error:
            say_here(log, f"the verdict is not cached: {error}", logging.WARNING)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)

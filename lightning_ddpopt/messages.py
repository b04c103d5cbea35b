"""How the package speaks: once, on rank zero, through `logging`, and visibly where the user has set up no logging."""

import logging

from lightning_utilities.core.rank_zero import rank_zero_only

_package_log = logging.getLogger("lightning_ddpopt")


def say_here(log: logging.Logger, message: str, level: int = logging.INFO) -> None:
    """Log ``message`` on the rank that calls.

    As Lightning does for its own logger, a handler is added where no logger up to the root has one. Where the user,
    Hydra or pytest has set up logging, theirs holds, level and all.

    """
    if not _package_log.hasHandlers():
        _package_log.addHandler(logging.StreamHandler())
        _package_log.setLevel(logging.INFO)
    log.log(level, "ddpopt: %s", message)


@rank_zero_only
def say(log: logging.Logger, message: str, level: int = logging.INFO) -> None:
    """Log ``message`` on rank zero."""
    say_here(log, message, level)


def some(names: list[str], most: int = 5) -> str:
    """The first few names, quoted, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more parameters"

"""What torchrun and the ranks of a job have written: why it failed, and what it says while it runs."""

import logging
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_TRACEBACK = "Traceback (most recent call last):"
_HYDRAS_LAST_WORDS = "Set the environment variable HYDRA_FULL_ERROR=1"


def failure(code: int, folder: Path, logs: Path, earlier: int) -> str:
    """Which rank failed first, how, and its last words. The first ``earlier`` bytes of ``logs`` are not this job's."""
    text = logs.read_bytes()[earlier:].decode(errors="replace")
    cause = re.search(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", text, re.S)
    if cause is None:
        return f"torchrun {_ended(code)}; {last_words(logs)}"
    rank, status = int(cause[1]), int(cause[2])
    return f"rank {rank} {_ended(status)}; {last_words(folder / f'rank_{rank}.log', of_an_exception=status > 0)}"


def _ended(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


def last_words(path: Path, of_an_exception: bool = False) -> str:
    """The last line of a log in a sentence, or the line of the exception that ended it."""
    said = last_lines(path)
    if not said:
        return f"see {path}"
    line = said[-1]
    if of_an_exception and _TRACEBACK in said:
        trace = said[len(said) - said[::-1].index(_TRACEBACK) :]
        line = next((words for words in trace if not words.startswith(" ")), line)
    return f"{path} ends with: {line[:300]}"


def last_lines(path: Path) -> list[str]:
    """The lines of the last 8 KiB that hold something; none if there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            lines = re.split(r"[\r\n]+", file.read().decode(errors="replace"))
    except OSError:
        return []
    return [line.rstrip() for line in lines if line.strip() and not line.startswith(_HYDRAS_LAST_WORDS)]


@contextmanager
def live_line(text: str, output: Path, log: logging.Logger) -> Iterator[None]:
    """On a terminal, one line that tells the running job, for how long, and what its first rank said last."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    if not console.is_terminal:
        log.info("%s, running", text)
        yield
        return
    started, ended = time.monotonic(), threading.Event()

    def update(show: Callable[[str], None]) -> None:
        while not ended.wait(0.5):
            line = f"{text}, {time.monotonic() - started:.0f} s  {' '.join(last_lines(output)[-1:])}"
            show(escape(line[: max(20, console.width - 4)]))

    with console.status(escape(text)) as status:
        thread = threading.Thread(target=update, args=[status.update], daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

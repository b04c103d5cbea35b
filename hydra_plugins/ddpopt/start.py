"""Becomes another program that ends when its parent does, with all its output in a file.

    python start.py SIGNAL LOG PROGRAM [ARGUMENT ...]

SIGNAL (a number) is sent to the program when its parent dies; `{RANK}` in LOG is replaced by the variable RANK. The
signal outlives exec, and needs no code in the program. On systems without prctl there is no such signal.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def _die_with_parent(signal_number: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def main() -> None:
    """Read the arguments, and become the program."""
    _, signal_number, log, *command = sys.argv
    _die_with_parent(int(signal_number))
    path = log.replace("{RANK}", os.environ.get("RANK", ""))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()

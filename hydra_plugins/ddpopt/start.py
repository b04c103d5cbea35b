"""Becomes another program that ends when its parent does, with all its output in a file.

    python start.py SIGNAL LOG PROGRAM [ARGUMENT ...]

SIGNAL (a number) is sent to the program when its parent dies; `{RANK}` in LOG's name is replaced by the variable RANK.
The signal outlives exec, and needs no code in the program. On systems without prctl there is no such signal.

Arguments come as `escaped` made them, because torchrun rewrites the `$` of its program's arguments (`$$` to `$`,
`${local_rank}` to a number).
"""

import ctypes
import os
import sys

JOB_VARIABLE, SESSION_VARIABLE = "DDPOPT_JOB", "DDPOPT_SESSION"  # how the launcher tells what a rank has started

_PR_SET_PDEATHSIG = 1


def escaped(argument: str) -> str:
    """Without ``$``."""
    return argument.replace("%", "%25").replace("$", "%24")


def _unescaped(argument: str) -> str:
    return argument.replace("%24", "$").replace("%25", "%")


def _die_with_parent(signal_number: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def main() -> None:
    """Read the arguments, and become the program."""
    signal_number, log, *command = map(_unescaped, sys.argv[1:])
    _die_with_parent(int(signal_number))
    folder, name = os.path.split(log)
    if "{RANK}" in name:
        name = name.replace("{RANK}", os.environ["RANK"])
        os.environ[SESSION_VARIABLE] = str(os.getsid(0))  # torchrun gives each rank a session
    path = os.path.join(folder, name)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()

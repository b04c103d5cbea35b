"""Which transport NCCL took, read from its log. Imports no torch.

NCCL (2.28) names it for each channel, with ``NCCL_DEBUG=INFO`` and subsystem INIT:
``Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read``, ``via SHM/direct/direct``, ``[send] via NET/Socket/0``.
"""

import glob
import os
import re
from collections.abc import Mapping

_CHANNEL = re.compile(r"NCCL INFO Channel .* via (\S+)")


def transports_in(nccl_log: str) -> list[str]:
    """The transports that a log names, sorted, without the index of the network device: ``["NET/Socket"]``."""
    named = {"/".join(part for part in via.split("/") if not part.isdigit()) for via in _CHANNEL.findall(nccl_log)}
    return sorted(named)


def is_transport(found: str, asked: str) -> bool:
    """Whether what NCCL took is of the kind that was asked for: ``p2p``, ``shm`` or ``net``."""
    return found.split("/")[0].lower() == asked.lower()


def transports_of_this_process(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The transports of this process by the log that ``NCCL_DEBUG_FILE`` names; none where there is no such log."""
    pattern = environment.get("NCCL_DEBUG_FILE", "")
    if "%p" not in pattern:  # one file for all, or none: it would tell of other processes too
        return []
    files = glob.glob(glob.escape(pattern).replace("%h", "*").replace("%p", str(os.getpid())))
    texts = []
    for name in files:
        with open(name, encoding="utf-8", errors="replace") as file:
            texts.append(file.read())
    return transports_in("\n".join(texts))

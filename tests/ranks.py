"""Two (or more) long-lived processes in one process group, so that a session pays for starting torch only once."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

COLLECTIVE_TIMEOUT = timedelta(seconds=45)


class RankError(AssertionError):
    """A function raised on a rank; the message holds the rank's traceback."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def elastic_environment(rank: int, world_size: int, port: int, *, nodes: int = 1) -> dict[str, str]:
    """The variables torchrun would set, so that Lightning takes the processes as they are."""
    local_world_size = world_size // nodes
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % local_world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(rank // local_world_size),
        "TORCHELASTIC_RUN_ID": "tests",
    }


def _serve(connection: Connection, environment: dict[str, str], backend: str) -> None:
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device("cuda", int(environment["LOCAL_RANK"])) if backend == "nccl" else None
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, device_id=device)
    try:
        while (task := connection.recv()) is not None:
            function, args, kwargs = task
            try:
                connection.send((True, function(*args, **kwargs)))
            except BaseException:
                connection.send((False, traceback.format_exc()))
    finally:
        dist.destroy_process_group()


class Ranks:
    """Call a function on every rank at once: ``ranks(function, ...)`` returns the list of results, rank by rank.

    The function must be importable by name. After a failure the processes are replaced, since some may hang.
    """

    def __init__(
        self,
        world_size: int,
        backend: str = "gloo",
        *,
        nodes: int = 1,
        rank_environment: Callable[[int], dict[str, str]] = lambda rank: {},
    ) -> None:
        self.world_size = world_size
        self._backend, self._nodes, self._rank_environment = backend, nodes, rank_environment
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            environment = elastic_environment(rank, self.world_size, port, nodes=self._nodes)
            environment |= self._rank_environment(rank)
            process = context.Process(target=_serve, args=(theirs, environment, self._backend), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, args, kwargs))
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            pending = [c for rank, c in enumerate(self._connections) if rank not in results]
            for connection in wait(pending):
                rank = self._connections.index(connection)
                try:
                    worked, results[rank] = connection.recv()
                except EOFError:
                    worked, results[rank] = False, "the process died"
                if not worked:
                    message = results[rank]
                    self.close(kill=True)
                    raise RankError(f"rank {rank} of {self.world_size}:\n{message}")
        return [results[rank] for rank in range(self.world_size)]

    def close(self, *, kill: bool = False) -> None:
        for process, connection in zip(self._processes, self._connections, strict=True):
            if kill:
                process.kill()
            else:
                connection.send(None)
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()
        self._processes, self._connections = [], []


def nccl_ranks(world_size: int) -> Ranks:
    """Ranks over NCCL. Where there are fewer GPUs, they share the first, as hosts of their own joined by sockets."""
    import torch

    if torch.cuda.device_count() >= world_size:
        return Ranks(world_size, "nccl")
    # NCCL refuses two ranks on one GPU of one host; with host identities of their own they are two hosts to it.
    variables = {"NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo")}
    return Ranks(
        world_size,
        "nccl",
        nodes=world_size,
        rank_environment=lambda rank: variables | {"NCCL_HOSTID": f"host{rank}"},
    )

"""The launchers of a sweep's nodes: they meet, tell each other how every job ended, and notice when one is gone.

Without this, torchrun on a healthy node waits five minutes for the others and then calls the failed job done.

Plain sockets rather than a ``TCPStore``: an ended launcher is known at once by its closed connection, a sweep that
starts while the one before it ends cannot read what that one left, and the launching process needs no torch. The
launcher that can listen at the endpoint passes on what the others say. Jobs are not its business.
"""

import json
import select
import socket
import time
from contextlib import suppress
from typing import Any

_HELLO_S = 5  # for the first words of whoever connects
_SEND_S = 10
_RETRY_S = 0.2
_LINE_BYTES = 1 << 20
# The seconds after which a machine that was switched off, and so closes nothing, counts as gone: 30 + 3 * 10.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class Nodes:
    """One launcher's view of all of them. Every launcher makes it once, for all jobs of the sweep.

    All launchers call, for each job in the same order, :meth:`tell` and then :meth:`failure`, and while the job runs
    as often as they like :meth:`trouble`.
    """

    def __init__(self, names: list[str], own: int, peers: dict[int, "_Peer"]) -> None:
        self._names = names
        self._own = own
        self._peers = peers  # of the host, node 0: all others; of another: the host
        self._told: dict[int, dict[int, str | None]] = {}  # by job and node: None, or why it failed
        self._lost: set[int] = set()

    @classmethod
    def meet(cls, endpoint: str, nnodes: int, rdzv_id: str, wait_s: float) -> "Nodes":
        """Wait for all launchers of the sweep.

        Args:
            endpoint: HOST:PORT, the same on all nodes and an address of one of them.
            nnodes: how many launchers there are.
            rdzv_id: the sweep's name; launchers with another one are not let in.
            wait_s: seconds until it gives up.

        Raises:
            TimeoutError: not all came in time.

        """
        host, _, port = endpoint.rpartition(":")
        deadline = time.monotonic() + wait_s
        while True:
            try:
                server = _listen(host, int(port))
            except OSError as not_ours:  # the address is another machine's, or another launcher of this one was first
                why = str(not_ours)
            else:
                with server:  # closed when all are there, so that the next sweep cannot come in
                    return cls._host(server, nnodes, rdzv_id, deadline)
            try:
                return cls._join(host, int(port), nnodes, rdzv_id, deadline)
            except (OSError, ValueError) as error:
                why = f"{error}; to listen there: {why}"
            if time.monotonic() > deadline:
                raise TimeoutError(f"no meeting of {nnodes} launchers at {endpoint} within {wait_s:g} s ({why}). Start"
                                   " the same command on every node.")  # fmt: skip
            time.sleep(_RETRY_S)

    @classmethod
    def _host(cls, server: socket.socket, nnodes: int, rdzv_id: str, deadline: float) -> "Nodes":
        came: list[tuple[str, _Peer]] = []
        while len(came) < nnodes - 1:
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {len(came) + 1} of {nnodes} launchers came to the meeting in time. Start the"
                                   " same command on every node.")  # fmt: skip
            if select.select([server], [], [], 1)[0]:
                peer = _Peer(server.accept()[0])
                try:
                    hello = peer.line(time.monotonic() + _HELLO_S)
                    if hello["sweep"] != [rdzv_id, nnodes]:
                        raise ValueError("of another sweep")
                    came.append((str(hello["name"]), peer))
                except (OSError, ValueError, LookupError, TypeError):
                    peer.close()
            came = [(name, peer) for name, peer in came if not peer.is_closed()]
        names = [socket.gethostname(), *(name for name, _ in came)]
        nodes = cls(names, 0, {node: peer for node, (_, peer) in enumerate(came, 1)})
        for node in range(1, nnodes):
            nodes._send(node, {"names": names, "own": node})
        return nodes

    @classmethod
    def _join(cls, host: str, port: int, nnodes: int, rdzv_id: str, deadline: float) -> "Nodes":
        peer = _Peer(socket.create_connection((host, port), timeout=_SEND_S))
        try:
            peer.send({"sweep": [rdzv_id, nnodes], "name": socket.gethostname()})
            welcome = peer.line(deadline)
            return cls(list(welcome["names"]), int(welcome["own"]), {0: peer})
        except BaseException as error:
            peer.close()
            if isinstance(error, LookupError | TypeError):
                raise ValueError("who listens there is no launcher of this version") from error
            raise

    def tell(self, job: int, failure: str | None) -> None:
        """Tell all how ``job`` ended here: None, or why it failed. What another's trouble explains is told as such."""
        if failure is not None and self.trouble(job) is not None:
            failure = ""
        self._take({"job": job, "node": self._own, "failure": failure}, self._own)
        if self._own != 0:
            self._send(0, {"job": job, "node": self._own, "failure": failure})

    def trouble(self, job: int) -> str | None:
        """Why ``job`` has failed on some node, as far as is known now; each launcher then stops its ranks."""
        self._read(0)
        told = self._told.get(job, {})
        return "; ".join(
            [f"on {self._names[node]}: {why}" for node, why in sorted(told.items()) if why]
            + [f"the connection to the launcher on {self._names[node]} is lost (has it ended?)"
               for node in sorted(self._lost) if node not in told]
        ) or None  # fmt: skip

    def failure(self, job: int, wait_s: float) -> str | None:
        """Wait until all have told how ``job`` ended: None, or why it failed, in the same words on all nodes.

        A launcher that says nothing for ``wait_s`` seconds ends the sweep's meeting: later jobs fail at once.
        """
        deadline = time.monotonic() + wait_s
        while silent := set(range(len(self._names))) - self._lost - set(self._told.get(job, {})):
            if time.monotonic() > deadline:
                self.leave()
                names = ", ".join(self._names[node] for node in sorted(silent))
                return f"the launcher on {names} did not tell within {wait_s:g} s how the job ended"
            self._read(0.1)
        return self.trouble(job)

    def leave(self) -> None:
        """Let the others stop their ranks; all jobs that some node has not told of fail."""
        for node in list(self._peers):
            self._lose(node)

    def _read(self, wait_s: float) -> None:
        """Take what the others have said by now."""
        if not self._peers:
            return
        by_socket = {peer.socket: node for node, peer in self._peers.items()}
        for ready in select.select(list(by_socket), [], [], wait_s)[0]:
            node = by_socket[ready]
            if node not in self._peers:  # lost meanwhile
                continue
            try:
                for message in self._peers[node].receive():
                    self._take(message, node)
            except (OSError, ValueError, LookupError, TypeError):
                self._lose(node)

    def _take(self, message: dict[str, Any], sender: int) -> None:
        node = int(message["node"])
        if "lost" in message:
            self._lost.add(node)
        else:
            self._told.setdefault(int(message["job"]), {})[node] = message["failure"]
        if self._own == 0:
            for other in set(self._peers) - {sender}:
                self._send(other, message)

    def _send(self, node: int, message: dict[str, Any]) -> None:
        if node in self._peers:
            try:
                self._peers[node].send(message)
            except OSError:
                self._lose(node)

    def _lose(self, node: int) -> None:
        peer = self._peers.pop(node, None)
        if peer is None:
            return
        peer.close()
        if self._own == 0:
            self._take({"lost": True, "node": node}, node)
        else:  # nothing comes from the others either
            self._lost |= set(range(len(self._names))) - {self._own}


class _Peer:
    """A connection that carries JSON values, one a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._received = b""
        connection.settimeout(_SEND_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            with suppress(AttributeError, OSError):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, message: Any) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Any]:
        """What has arrived. Raises OSError when the connection has ended."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the other side closed the connection")
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > _LINE_BYTES:
            raise ValueError("no launcher talks that much")
        return [json.loads(line) for line in lines]

    def line(self, deadline: float) -> Any:
        """Wait for the one message that the other side sends at first."""
        while True:
            if not select.select([self.socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("no answer")
            if messages := self.receive():
                return messages[0]

    def is_closed(self) -> bool:
        """Whether the other side has gone while it should wait."""
        if not select.select([self.socket], [], [], 0)[0]:
            return False
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def close(self) -> None:
        self.socket.close()


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)

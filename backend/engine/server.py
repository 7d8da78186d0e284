"""EngineServer: lets several clients talk to one EngineLoop over a private AF_UNIX socket.

Each connection has a reader thread, which decodes commands into the loop's inbox, and a bounded backlog with a writer thread of
its own, so the engine's thread never waits for a socket. A client that does not read its responses is cut off; the requests of
a client that is gone are cancelled.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from backend.api.response import Response
from backend.api.stats import EngineStats
from backend.engine.ipc import (
    CLIENT_SHIFT,
    ClientGone,
    Command,
    Hello,
    Message,
    Responses,
    Stats,
    decode_command,
    encode_frame,
    receive_frame,
)
from backend.engine.outgoing import ClientTooSlow, Outgoing, hang_up

log = logging.getLogger("everbatch.engine")


class Connection:
    """One client. Its first message must be a Hello; the later ones are sent by the loop's thread."""

    def __init__(
        self,
        index: int,
        sock: socket.socket,
        post: Callable[[Command | ClientGone], None],
        on_closed: Callable[[int], None],
    ):
        self.index = index
        self._sock = sock
        self._post = post
        self._on_closed = on_closed
        self._outgoing = Outgoing(sock, f"engine-writer-{index}")

    def start(self) -> None:
        self._outgoing.start()
        threading.Thread(target=self._read, name=f"engine-reader-{self.index}", daemon=True).start()

    def send(self, message: Message) -> None:
        """Never blocks; a client that does not read is cut off."""
        try:
            self._outgoing.send(encode_frame(message))
        except ClientTooSlow:
            log.error("client %d does not read its responses; it is cut off", self.index)
            hang_up(self._sock)
        except OSError:
            pass  # the reader sees the same end and cleans up

    def finish(self) -> None:
        """End after what is queued."""
        self._outgoing.finish()

    def _read(self) -> None:
        try:
            while (frame := receive_frame(self._sock)) is not None:
                self._accept(decode_command(frame))
        except (OSError, msgspec.DecodeError) as error:
            log.warning("client %d: %s", self.index, type(error).__name__)
        finally:
            self._on_closed(self.index)
            self._post(ClientGone(self.index))
            self._outgoing.finish()

    def _accept(self, command: Command) -> None:
        if command.request_id >> CLIENT_SHIFT != self.index:
            log.warning("client %d uses a request id that is not its own; the command is dropped", self.index)
            return
        self._post(command)


class EngineServer:
    def __init__(self, socket_path: str, post: Callable[[Command | ClientGone], None], hello: Callable[[int], Hello]):
        """Listen at `socket_path` (its directory is made 0700; a stale socket is replaced)."""
        self._post = post
        self._hello = hello
        self._connections: dict[int, Connection] = {}
        self._next_index = itertools.count(1)
        self._lock = threading.Lock()
        Path(socket_path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        Path(socket_path).unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(socket_path)
        os.chmod(socket_path, 0o600)
        self._listener.listen()
        threading.Thread(target=self._accept, name="engine-accept", daemon=True).start()

    def deliver(self, responses: list[Response]) -> None:
        """Route the responses of one step: one message per client."""
        by_client: dict[int, list[Response]] = defaultdict(list)
        for response in responses:
            by_client[response.request_id >> CLIENT_SHIFT].append(response)
        for index, batch in by_client.items():
            connection = self._connections.get(index)
            if connection is not None:
                connection.send(Responses(batch))

    def publish_stats(self, stats: EngineStats) -> None:
        for connection in list(self._connections.values()):
            connection.send(Stats(stats))

    def close(self) -> None:
        """Stop listening; connections end once what is queued for them has been sent."""
        hang_up(self._listener)
        self._listener.close()
        for connection in list(self._connections.values()):
            connection.finish()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            if _peer_uid(sock) not in (os.getuid(), 0):
                log.warning("a connection of user %d was refused", _peer_uid(sock))
                sock.close()
                continue
            index = next(self._next_index)
            connection = Connection(index, sock, self._post, self._forget)
            connection.send(self._hello(index))
            with self._lock:
                self._connections[index] = connection
            connection.start()

    def _forget(self, index: int) -> None:
        with self._lock:
            self._connections.pop(index, None)


def _peer_uid(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]

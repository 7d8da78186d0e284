"""EngineServer: lets several clients talk to one EngineLoop over a private AF_UNIX socket.

Each connection has a reader thread (decodes commands into the loop's inbox) and a writer thread (sends frames from a bounded
queue), so the engine's own thread neither decodes nor waits for a socket. A client that does not read its responses is cut
off; the requests of a client that is gone are cancelled.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from backend.api.request import RequestId
from backend.api.response import Response
from backend.api.stats import EngineStats
from backend.engine.ipc import (
    CLIENT_SHIFT,
    Cancel,
    Command,
    Hello,
    Message,
    Responses,
    Stats,
    Submit,
    decode_command,
    encode_frame,
    receive_frame,
)

log = logging.getLogger("everbatch.engine")
MAX_QUEUED_FRAMES = 20_000  # of one connection; a reader that lags this far behind is gone


class Connection:
    """One client. Only the loop's thread calls `send`; `live` is shared between reader and loop and guarded by its lock."""

    def __init__(
        self, index: int, sock: socket.socket, post: Callable[[Command], None], on_closed: Callable[[int], None]
    ):
        self.index = index
        self._sock = sock
        self._post = post
        self._on_closed = on_closed
        self._outgoing: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED_FRAMES)
        self._live: set[RequestId] = set()
        self._lock = threading.Lock()

    def start(self, hello: Hello) -> None:
        self._outgoing.put(encode_frame(hello))
        threading.Thread(target=self._write, name=f"engine-writer-{self.index}", daemon=True).start()
        threading.Thread(target=self._read, name=f"engine-reader-{self.index}", daemon=True).start()

    def send(self, message: Message) -> None:
        """Queue a message; never blocks."""
        try:
            self._outgoing.put_nowait(encode_frame(message))
        except queue.Full:
            log.error("client %d does not read its responses; it is cut off", self.index)
            _hang_up(self._sock)

    def send_responses(self, responses: list[Response]) -> None:
        with self._lock:
            self._live.difference_update(response.request_id for response in responses if response.is_final)
        self.send(Responses(responses))

    def finish(self) -> None:
        """Let the writer end after what is queued."""
        self._outgoing.put(None)

    def _read(self) -> None:
        try:
            while (frame := receive_frame(self._sock)) is not None:
                self._accept(decode_command(frame))
        except (OSError, msgspec.DecodeError) as error:
            log.warning("client %d: %s", self.index, type(error).__name__)
        finally:
            self._on_closed(self.index)
            with self._lock:
                abandoned = list(self._live)
            for request_id in abandoned:
                self._post(Cancel(request_id))
            self._outgoing.put(None)

    def _accept(self, command: Command) -> None:
        if command.request_id >> CLIENT_SHIFT != self.index:
            log.warning("client %d uses a request id that is not its own; the command is dropped", self.index)
            return
        if isinstance(command, Submit):
            with self._lock:
                self._live.add(command.request_id)
        self._post(command)

    def _write(self) -> None:
        try:
            while (frame := self._outgoing.get()) is not None:
                self._sock.sendall(frame)
        except OSError:
            pass  # the reader sees the same end and cleans up
        finally:
            _hang_up(self._sock)
            self._sock.close()


class EngineServer:
    def __init__(self, socket_path: str, post: Callable[[Command], None], hello: Callable[[int], Hello]):
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
        by_client: dict[int, list[Response]] = {}
        for response in responses:
            by_client.setdefault(response.request_id >> CLIENT_SHIFT, []).append(response)
        for index, batch in by_client.items():
            connection = self._connections.get(index)
            if connection is not None:
                connection.send_responses(batch)

    def publish_stats(self, stats: EngineStats) -> None:
        for connection in list(self._connections.values()):
            connection.send(Stats(stats))

    def close(self) -> None:
        """Stop listening; connections end once what is queued for them has been sent."""
        _hang_up(self._listener)
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
            with self._lock:
                self._connections[index] = connection
            connection.start(self._hello(index))

    def _forget(self, index: int) -> None:
        with self._lock:
            self._connections.pop(index, None)


def _hang_up(sock: socket.socket) -> None:
    """Wake whoever blocks on a socket: closing alone would not."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other side was first


def _peer_uid(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]

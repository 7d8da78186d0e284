"""How an Executor reaches an engine: in this process, or over the engine process's socket.

A transport calls `on_message` from one thread, in order, and `on_lost` when the engine is gone; a SocketTransport then tries
to reach it again until it is closed. Neither callback may raise.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from backend.api.errors import EngineUnavailable, InvalidRequest
from backend.engine.core import EngineCore
from backend.engine.ipc import (
    Command,
    Hello,
    Message,
    Responses,
    Stats,
    Undecodable,
    decode_message,
    encode_frame,
    receive_frame,
)
from backend.engine.loop import EngineLoop
from backend.engine.outgoing import Outgoing, ReaderTooSlow, hang_up

log = logging.getLogger("everbatch.executor")
RECONNECT_S = 0.05


class Transport(Protocol):
    is_remote: bool  # the engine is another process, which sends heartbeats and may stop to

    def start(self, on_message: Callable[[Message], None], on_lost: Callable[[], None]) -> None: ...

    def send(self, command: Command) -> None:
        """Never blocks. Raises EngineUnavailable when there is no engine to send to, InvalidRequest when it cannot be sent."""
        ...

    def close(self, drain: bool) -> None:
        """End for good; returns when no more messages will come."""
        ...


class InProcessTransport:
    """An EngineLoop in a thread of this process."""

    is_remote = False

    def __init__(self, core: EngineCore, model_path: str = ""):
        self._core = core
        self._model_path = model_path

    def start(self, on_message: Callable[[Message], None], on_lost: Callable[[], None]) -> None:
        self._loop = EngineLoop(
            self._core,
            deliver=lambda responses: on_message(Responses(responses)),
            publish_stats=lambda stats: on_message(Stats(stats)),
        )
        self._thread = threading.Thread(target=self._loop.run, name="engine-loop", daemon=True)
        on_message(Hello(1, self._core.model, self._model_path, self._core.config))
        self._thread.start()

    def send(self, command: Command) -> None:
        if not self._thread.is_alive():
            raise EngineUnavailable("the engine has stopped; make a new Executor")
        self._loop.post(command)

    def close(self, drain: bool) -> None:
        self._loop.stop(drain)
        self._thread.join()
        self._core.workers.shutdown()


class SocketTransport:
    """A connection to an engine process. Survives its restarts, and does not block when it does not read."""

    is_remote = True

    def __init__(self, socket_path: str):
        self._path = socket_path
        self._sock: socket.socket | None = None
        self._outgoing: Outgoing | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def start(self, on_message: Callable[[Message], None], on_lost: Callable[[], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._thread = threading.Thread(target=self._run, name="engine-client", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        frame = encode_frame(command)
        outgoing = self._outgoing
        if outgoing is None:
            raise EngineUnavailable("the engine is not running at the moment; try again in a few seconds")
        try:
            outgoing.send(frame)
        except ReaderTooSlow:
            raise EngineUnavailable("the engine does not read its requests; try again in a few seconds") from None
        except OSError:
            raise EngineUnavailable("the connection to the engine broke; try again in a few seconds") from None

    def close(self, drain: bool) -> None:
        with self._lock:
            self._closed.set()
            if self._sock is not None:
                hang_up(self._sock)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._closed.is_set():
            sock = self._connect()
            if sock is not None:
                try:
                    self._receive(sock)
                except (OSError, Undecodable, InvalidRequest) as error:
                    log.warning("connection to the engine: %s", type(error).__name__)
                finally:
                    self._disconnect()
            self._closed.wait(RECONNECT_S)

    def _connect(self) -> socket.socket | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(self._path)
        except OSError:
            sock.close()
            return None
        with self._lock:
            if self._closed.is_set():
                sock.close()
                return None
            self._sock = sock
        outgoing = Outgoing(sock, "engine-client-writer")
        outgoing.start()
        self._outgoing = outgoing
        return sock

    def _disconnect(self) -> None:
        outgoing, self._outgoing = self._outgoing, None
        with self._lock:
            sock, self._sock = self._sock, None
        hang_up(sock)
        outgoing.finish()  # closes the socket
        self._on_lost()

    def _receive(self, sock: socket.socket) -> None:
        """Deliver messages until the stream ends. Commands may be sent once the Hello has been delivered."""
        while (frame := receive_frame(sock)) is not None:
            self._on_message(decode_message(frame))


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll a condition every 10 ms; True as soon as it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True

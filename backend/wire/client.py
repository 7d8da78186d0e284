"""SocketTransport: a client's end of the connection to the engine process. It reconnects until it is closed."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from backend.api.errors import EngineUnavailable, InvalidRequest
from backend.api.stats import EngineStats
from backend.core.messages import Command, Message
from backend.wire.address import Address, FileAddress, peer
from backend.wire.framing import Undecodable, decode_message, encode_frame, receive_frame
from backend.wire.outgoing import Outgoing, ReaderTooSlow, hang_up

log = logging.getLogger("everbatch.executor")
RECONNECT_S = 0.05


class SocketTransport:
    """A connection to an engine process. It survives restarts of the engine, and never blocks when the engine does not read."""

    is_remote = True

    def __init__(self, address: str | Address) -> None:
        """`address`: a text is the path of a socket."""
        self._address = FileAddress(address) if isinstance(address, str) else address
        self.engine_pid: int | None = None  # process id at the other end of the latest connection
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

    def ask_stats(self) -> EngineStats | None:
        return None

    def is_abandoned(self) -> bool:
        """True if its supervisor has given the engine up, or has removed the socket with its directory."""
        return not self._address.may_be_served()

    def reconnect(self) -> None:
        with self._lock:
            if self._sock is not None:
                hang_up(self._sock)

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
        try:
            sock = self._address.connect()
        except OSError:
            return None
        with self._lock:
            if self._closed.is_set():
                sock.close()
                return None
            self._sock = sock
        # None where it is in a container of its own, or on another machine
        self.engine_pid = (peer(sock).pid or None) if sock.family == socket.AF_UNIX else None
        outgoing = Outgoing(sock, "engine-client-writer")
        outgoing.start()
        self._outgoing = outgoing
        return sock

    def _disconnect(self) -> None:
        outgoing, self._outgoing = self._outgoing, None
        with self._lock:
            sock, self._sock = self._sock, None
        assert sock is not None and outgoing is not None  # _run calls this only after _connect
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

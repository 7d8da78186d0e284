"""Outgoing: frames on their way through one socket, sent without ever waiting for the other side."""

from __future__ import annotations

import socket
import threading
from collections import deque

MAX_BACKLOG = 20_000  # frames that the socket did not take; a reader that lags this far behind is gone
MAX_BACKLOG_BYTES = 256 << 20


class ReaderTooSlow(Exception):
    """The other side leaves what is sent to it unread."""


class Outgoing:
    """Sends a frame at once while the socket takes it, and leaves it to a thread when it does not. Both sides send with it.

    To wake a thread for every step would cost more than the sending does, on the cores that the model computes on.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._sock = sock
        self._backlog: deque[memoryview] = deque()  # the first one is being sent by the thread
        self._num_bytes = 0  # of the backlog
        self._lock = threading.Lock()
        self._to_do = threading.Semaphore(0)  # frames of the backlog, and one more for the end
        self._thread = threading.Thread(target=self._write, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, frame: bytes, droppable: bool = False) -> None:
        """Never blocks. `droppable`: not worth waiting in the backlog, for a newer one will say more.

        Raises OSError when the other side is gone, ReaderTooSlow when the backlog is full.
        """
        with self._lock:
            if droppable and self._backlog:
                return
            sent = 0 if self._backlog else self._try_to_send(frame)
            if sent == len(frame) or (droppable and not sent):
                return
            if len(self._backlog) >= MAX_BACKLOG or self._num_bytes >= MAX_BACKLOG_BYTES:
                raise ReaderTooSlow
            self._backlog.append(memoryview(frame)[sent:])
            self._num_bytes += len(frame) - sent
        self._to_do.release()

    @property
    def num_waiting_bytes(self) -> int:
        """What the other side has still to take."""
        return self._num_bytes

    def finish(self) -> None:
        """Let the thread end after what is queued, and hang up."""
        self._to_do.release()

    def _try_to_send(self, frame: bytes) -> int:
        try:
            return self._sock.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _write(self) -> None:
        try:
            while self._to_do.acquire() and self._backlog:
                self._sock.sendall(self._backlog[0])
                with self._lock:
                    self._num_bytes -= len(self._backlog.popleft())
        except OSError:
            pass  # the reader sees the same end and cleans up
        finally:
            hang_up(self._sock)
            self._sock.close()


def hang_up(sock: socket.socket) -> None:
    """Wake whoever blocks on a socket: closing alone would not."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other side was first

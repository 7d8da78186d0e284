"""Outgoing: sends frames through one socket without ever waiting for the receiver."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque

MAX_BACKLOG = 20_000  # frames; a receiver that is further behind is disconnected
MAX_BACKLOG_BYTES = 256 << 20


class ReaderTooSlow(Exception):
    """The receiver does not read its frames."""


class Outgoing:
    """Sends a frame directly while the socket accepts it, else through a thread. Used by both ends of a connection.

    Waking a thread for every step would cost more than the sending itself, on the cores that compute the model.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._sock = sock
        self._backlog: deque[memoryview] = deque()  # the thread is sending the first one
        self._num_bytes = 0  # bytes in the backlog
        self._lock = threading.Lock()
        self._to_do = threading.Semaphore(0)  # one for each frame in the backlog, and one for the end
        self._thread = threading.Thread(target=self._write, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, frame: bytes, droppable: bool = False) -> None:
        """Never blocks. `droppable`: skip the frame instead of queueing it, because a newer one replaces it.

        Raises OSError if the receiver is gone, ReaderTooSlow if the backlog is full.
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
        """Bytes in the backlog."""
        return self._num_bytes

    def finish(self) -> None:
        """Let the thread end after the queued frames, and close the socket."""
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
    """Shut a socket down, which wakes threads that block on it; closing alone would not."""
    with contextlib.suppress(OSError):  # the other end was first
        sock.shutdown(socket.SHUT_RDWR)

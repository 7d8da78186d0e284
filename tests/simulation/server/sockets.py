"""Local sockets of the simulated machine. They behave as Linux's do where it matters here.

A full socket takes a part or nothing. Closing a socket does not wake who waits for it, while shutting it down does. Bytes that
nobody has read when the other end closes make a reset of the connection.
"""

from __future__ import annotations

import errno
import socket as real_socket
import struct
from typing import Any

from tests.simulation.server.threads import here
from tests.simulation.server.world import Process, SimThread

USER = 1000
BACKLOG = 128


class Bytes:
    """Bytes on their way in one direction."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = bytearray()
        self.has_writer = self.has_reader = True
        self.is_reset = False
        self.readers: list[SimThread] = []
        self.writers: list[SimThread] = []

    @property
    def is_readable(self) -> bool:
        return bool(self.held) or not self.has_writer or self.is_reset

    def end(self) -> None:
        """Nobody writes any more."""
        self.has_writer = False
        here().wake(self.readers)
        here().wake(self.writers)

    def abandon(self) -> None:
        """Nobody reads any more."""
        self.has_reader = False
        here().wake(self.writers)
        here().wake(self.readers)

    def take(self, limit: int) -> bytes:
        world = here()
        size = min(limit, len(self.held))
        if size > 1 and world.short_io and world.rng.random() < world.short_io:
            world.reached["short read"] += 1
            size = world.rng.randint(1, size)
        taken = bytes(self.held[:size])
        del self.held[:size]
        if len(self.held) < self.capacity:
            world.wake(self.writers)
        return taken

    def put(self, data: Any) -> int:
        """As much as there is room for."""
        world = here()
        room = self.capacity - len(self.held)
        size = min(len(data), room)
        if size > 1 and world.short_io and world.rng.random() < world.short_io:
            size = world.rng.randint(1, size)
        if 0 < size < len(data):
            world.reached["part of a write"] += 1
        if size > 0:
            self.held += data[:size]
            world.wake(self.readers)
        return max(0, size)

    def read(self, limit: int) -> bytes:
        """Wait for bytes; b"" at the end."""
        world = here()
        world.wait_until(lambda: self.is_readable, self.readers, None, "bytes to read")
        if self.held:
            return self.take(limit)
        if self.is_reset:
            self.is_reset = False
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        return b""

    def write_some(self, data: Any) -> int:
        """Wait for room, and write as much as there is. Raises BrokenPipeError."""
        world = here()
        world.wait_until(
            lambda: len(self.held) < self.capacity or not (self.has_reader and self.has_writer),
            self.writers,
            None,
            "room to write",
        )
        if not (self.has_reader and self.has_writer):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        return self.put(data)


class Socket:
    """A local stream socket, connected or listening."""

    def __init__(self, family: int = real_socket.AF_UNIX, kind: int = real_socket.SOCK_STREAM) -> None:
        world = here()
        self.family, self.type = family, kind
        if world.failing_connects and world.current.name == "engine-client":
            world.failing_connects -= 1
            world.reached["no file for a connection"] += 1
            raise OSError(errno.EMFILE, "Too many open files")
        self._process: Process = world.current.process
        self._number = self._process.open(self)
        self._input: Bytes | None = None
        self._output: Bytes | None = None
        self._other: Process | None = None
        self._path = ""
        self._queue: list[Socket] = []  # of a listener: connections that nobody has accepted
        self._waiters: list[SimThread] = []
        self._is_listening = self._is_closed = self._is_shut = False
        self._num_users = 0  # threads that wait in it, for whom it stays open

    # ---- connections

    def bind(self, path: str) -> None:
        here().pause()
        self._path = path
        here().listeners[path] = self

    def listen(self, backlog: int = BACKLOG) -> None:
        self._is_listening = True

    def accept(self) -> tuple[Socket, str]:
        world = here()
        world.pause()
        self._check_open()
        self._num_users += 1
        try:
            world.wait_until(lambda: bool(self._queue) or self._is_shut, self._waiters, None, "a connection")
        finally:
            self._leave()
        if not self._queue:
            raise OSError(errno.EINVAL, "Invalid argument")
        return self._queue.pop(0), ""

    def connect(self, path: str) -> None:
        world = here()
        world.pause()
        listener = world.listeners.get(path)
        if listener is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        if not listener._accepts:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        there, back = Bytes(world.socket_bytes), Bytes(world.socket_bytes)
        other: Socket = Socket.__new__(Socket)
        other.__dict__ |= {
            **dict(family=self.family, type=self.type, _process=listener._process, _path="", _queue=[], _waiters=[]),
            **dict(_is_listening=False, _is_closed=False, _is_shut=False, _num_users=0),
            **dict(_input=there, _output=back, _other=self._process),
        }
        other._number = listener._process.open(other)
        self._input, self._output, self._other = back, there, listener._process
        listener._queue.append(other)
        world.wake(listener._waiters)
        world.pause()

    @property
    def _accepts(self) -> bool:
        return self._is_listening and not self._is_closed and not self._is_shut and self._process.is_alive

    # ---- data

    def recv(self, limit: int, flags: int = 0) -> bytes:
        here().pause()
        self._check_open()
        assert self._input is not None
        self._num_users += 1
        try:
            return self._input.read(limit)
        finally:
            self._leave()

    def send(self, data: Any, flags: int = 0) -> int:
        here().pause()
        self._check_open()
        output = self._output
        assert output is not None and flags & real_socket.MSG_DONTWAIT
        if not (output.has_reader and output.has_writer):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        size = output.put(data)
        here().pause()
        if not size and len(data):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return size

    def sendall(self, data: Any) -> None:
        here().pause()
        self._check_open()
        assert self._output is not None
        self._num_users += 1
        try:
            while len(data):
                data = data[self._output.write_some(data) :]
                here().pause()
        finally:
            self._leave()

    # ---- ends

    def shutdown(self, how: int) -> None:
        here().pause()
        self._check_open()
        if self._is_listening:
            self._is_shut = True
            here().wake(self._waiters)
            return
        if self._output is None or self._input is None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        self._output.end()
        self._input.has_writer = False
        self._input.abandon()

    def close(self) -> None:
        world = here()
        if not self._is_closed:
            self._is_closed = True
            self._process.files.pop(self._number, None)
            if not self._num_users:
                self.drop()
        world.pause()

    def drop(self) -> None:
        """The last reference to it is gone."""
        self._is_closed = True
        if self._is_listening:
            for waiting in self._queue:
                waiting._process.files.pop(waiting._number, None)
                waiting.drop()
            self._queue.clear()
            return
        if self._output is not None and self._input is not None:
            self._output.is_reset = bool(self._input.held)
            self._output.end()
            self._input.abandon()

    def _leave(self) -> None:
        self._num_users -= 1
        if self._is_closed and not self._num_users:
            self.drop()

    def _check_open(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, "Bad file descriptor")

    # ---- the rest

    def getsockopt(self, level: int, name: int, size: int = 0) -> bytes:
        self._check_open()
        assert name == real_socket.SO_PEERCRED and self._other is not None
        return struct.pack("3i", self._other.pid, USER, USER)

    def settimeout(self, seconds: float | None) -> None:
        if seconds is not None:
            here().fail("limits of time on sockets are not simulated")

    def fileno(self) -> int:
        return -1 if self._is_closed else self._number

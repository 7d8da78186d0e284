"""Processes of the simulated machine as others see them, with their pipes, their files without names, and signals."""

from __future__ import annotations

import errno
import signal as real_signal
import subprocess as real_subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from tests.simulation.server.sockets import Bytes
from tests.simulation.server.threads import here
from tests.simulation.server.world import Process

PIPE_BYTES = 65_536


class PipeEnd:
    """An open end of a pipe in a process."""

    def __init__(self, content: Bytes, writes: bool) -> None:
        self.content, self.writes = content, writes
        self.blocks = True

    def drop(self) -> None:
        if self.writes:
            self.content.end()
        else:
            self.content.abandon()


class MemoryFile:
    """A file without a name (memfd_create). A process that is killed while it writes leaves a part."""

    def __init__(self) -> None:
        self.data = bytearray()

    def drop(self) -> None:
        """Others may have it open as well."""

    def write(self, data: Any, at: int) -> int:
        world = here()
        world.pause()
        size = len(data)
        if size > 1 and world.rng.random() < 0.1:
            size = world.rng.randint(1, size)
        if len(self.data) < at:
            self.data += bytes(at - len(self.data))
        self.data[at : at + size] = data[:size]
        world.pause()
        return size

    def truncate(self, size: int) -> None:
        here().pause()
        del self.data[size:]
        self.data += bytes(size - len(self.data))


class PipeFile:
    """A file object over a pipe's end, as subprocess makes them."""

    def __init__(self, process: Process, content: Bytes, writes: bool) -> None:
        self._process, self._content = process, content
        self._number = process.open(PipeEnd(content, writes))

    def write(self, text: str) -> None:
        data = text.encode()
        while data:
            data = data[self._content.write_some(data) :]

    def flush(self) -> None:
        here().pause()

    def read(self, limit: int) -> bytes:
        return self._content.read(limit)

    def __iter__(self) -> Iterator[str]:
        line = bytearray()
        while chunk := self._content.read(4096):
            line += chunk
            while (end := line.find(b"\n")) >= 0:
                yield line[: end + 1].decode("utf-8", "replace")
                del line[: end + 1]
        if line:
            yield line.decode("utf-8", "replace")

    def close(self) -> None:
        end = self._process.files.pop(self._number, None)
        if end is not None:
            end.drop()

    def __del__(self) -> None:
        if here() is not None:
            self.close()


class Popen:
    """A process that runs one of the world's programs, with pipes for standard input and output."""

    @classmethod
    def __class_getitem__(cls, item: object) -> type[Popen]:
        return cls

    def __init__(self, args: Sequence[str], stdin: int, stdout: int, **others: Any) -> None:
        world = here()
        world.pause()
        if world.failing_starts:
            world.failing_starts -= 1
            world.reached["a process that cannot be started"] += 1
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        parent = world.current.process
        self._process = world.new_process(args[2].rpartition(".")[2], parent)
        self.pid = self._process.pid
        inward, outward = Bytes(PIPE_BYTES), Bytes(PIPE_BYTES)
        self.stdin, self.stdout = PipeFile(parent, inward, True), PipeFile(parent, outward, False)
        for number in others.get("pass_fds", ()):
            self._process.files[number] = parent.files[number]
            self._process.next_file = max(self._process.next_file, number + 1)
        self._process.stdin = PipeFile(self._process, inward, False)
        self._process.stdout = PipeFile(self._process, outward, True)
        world.start_process(self._process.name, world.programs(list(args)), self._process)

    @property
    def returncode(self) -> int | None:
        return self._process.code

    def poll(self) -> int | None:
        here().pause()
        return self._process.code

    def wait(self, timeout: float | None = None) -> int:
        here().pause()
        process = self._process
        if not here().wait_until(lambda: not process.is_alive, process.waiters, timeout, f"the end of {process.name}"):
            raise real_subprocess.TimeoutExpired("a simulated process", timeout or 0)
        assert process.code is not None
        return process.code

    def kill(self) -> None:
        here().pause()
        self._process.end(-real_signal.SIGKILL)

    def terminate(self) -> None:
        send_signal(self._process, real_signal.SIGTERM)


def send_signal(process: Process, number: int) -> None:
    """As kill(2). A handler runs in a thread of its own: the main thread could be anywhere in its code."""
    world = here()
    if not process.is_alive:
        return
    if process.wakeup is not None:
        process.files[process.wakeup].content.put(bytes([number]))
    handler = process.handlers.get(number)
    if handler is None:
        process.end(-number)
    elif handler is not real_signal.SIG_IGN:
        world.begin(world.new_thread(process, lambda: handler(number, None), f"signal-{number}"))

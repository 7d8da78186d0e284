"""A port of another process is closed to newcomers, while the connections that it has go on."""

from __future__ import annotations

import errno
import select
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from deploy import doors
from tests.descriptors import open_descriptors

ECHO = """
import socket, sys
listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(each.getsockname()[1] for each in listeners), flush=True)
while sys.stdin.readline():  # a line for each connection that it is to accept, and to answer for a while
    accepted, _ = listeners[0].accept()
    while (data := accepted.recv(100)) not in (b"", b"end"):
        accepted.sendall(data)
"""


class Other:
    """A process with two ports, of which the first answers."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.process, self.pid = process, process.pid
        self.port, self.other_port = map(int, process.stdout.readline().split())

    def accept(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()


@pytest.fixture
def other() -> Iterator[Other]:
    command = [sys.executable, "-S", "-c", ECHO]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield Other(process)
        process.kill()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def echoed(connection: socket.socket, text: bytes) -> bytes:
    connection.sendall(text)
    return connection.recv(100)


def test_newcomers_are_refused_and_who_is_in_goes_on(other: Other) -> None:
    other.accept()
    with connect(other.port) as connection:
        assert echoed(connection, b"before") == b"before"
        with doors.closing(other.pid, other.port) as closes:
            if not closes:
                pytest.skip("tracing a child is not allowed here")
        with pytest.raises(ConnectionRefusedError):
            connect(other.port)
        assert echoed(connection, b"after") == b"after"
        connect(other.other_port).close()


def test_who_has_knocked_is_let_in_and_who_knocks_meanwhile_is_refused_afterwards(other: Other) -> None:
    with connect(other.port) as waiting, socket.socket() as late:
        waiting.sendall(b"hello")  # nobody has accepted the connection yet
        with doors.closing(other.pid, other.port) as closes:
            if not closes:
                pytest.skip("tracing a child is not allowed here")
            late.setblocking(False)
            assert late.connect_ex(("127.0.0.1", other.port)) == errno.EINPROGRESS
            other.accept()
            waiting.settimeout(30)
            assert waiting.recv(100) == b"hello"
        late.setblocking(True)
        select.select([], [late], [], 30)  # its second knock, a second after the first
        assert late.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
        assert echoed(waiting, b"after") == b"after"


def test_a_port_that_the_process_does_not_have_is_not_closed(other: Other) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mine:
        with doors.closing(other.pid, mine.getsockname()[1]) as closes:
            assert not closes
        connect(mine.getsockname()[1]).close()


def test_a_process_that_has_ended_has_no_ports() -> None:
    with doors.closing(2**22 + 1, 80) as closes:
        assert not closes


def test_where_tracing_is_not_allowed_the_port_stays_open(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "_PIDFD_GETFD", -1)
    with doors.closing(other.pid, other.port) as closes:
        assert not closes
    connect(other.port).close()


def test_no_file_stays_open(other: Other) -> None:
    before = open_descriptors()
    for _ in range(2):
        with doors.closing(other.pid, other.port):
            pass
    assert not open_descriptors() - before

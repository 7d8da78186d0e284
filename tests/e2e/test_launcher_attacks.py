"""HTTP bodies that overflow the stack of a tritonserver 24.10 with the stacks it would have by itself (8 MB, or 256 MB)."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from deploy import memory
from deploy.supervisor import StopSignals, supervise
from deploy.triton_server import TritonServer
from tests.e2e.conftest import serve
from tests.e2e.starts import START_TIMEOUT_S, wait_ready
from tests.e2e.wire import post

PATH = "/v2/models/ensemble/generate"
NESTED = 4 << 20  # `[` of one body: 80 bytes of stack each
ONE_BYTE_CHUNKS = 1_200_000  # 16 bytes of stack each, and 1.2 KB of memory


def exchange(port: int, head: str, body: Iterator[bytes]) -> bytes:
    """Send a request piece by piece. Returns the first bytes of the answer; none if the connection was cut."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        try:
            connection.sendall(f"POST {PATH} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
            for piece in body:
                connection.sendall(piece)
            return connection.recv(4096)
        except ConnectionError:
            return b""


def canary(server: TritonServer) -> int:
    status, _ = post(f"{server.http_url}{PATH}", {"text_input": "a", "max_tokens": 2})
    return status


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[TritonServer]:
    """A server of its own: what an attack has made it occupy goes with it."""
    with serve(tmp_path) as server:
        wait_ready(server)
        yield server


@pytest.mark.skipif(memory.stack_bytes() < 3 << 30, reason="needs stacks of 3 GB: 6 GB of memory that nobody counts")
def test_bodies_nested_millions_deep_and_a_million_chunks_are_answered_and_the_server_lives(
    attacked: TritonServer,
) -> None:
    pid, port = attacked.pid, attacked.ports.http
    for size in [NESTED] * 8 + [4 * NESTED]:
        answer = exchange(port, f"Content-Length: {size}", (b"[" * (1 << 20) for _ in range(size >> 20)))
        assert answer.startswith(b"HTTP/1.1 ") and b"failed to parse the request JSON" in answer
        assert canary(attacked) == 200
    chunks = (b"1\r\n[\r\n" * 10_000 for _ in range(ONE_BYTE_CHUNKS // 10_000))
    body = (piece for part in (chunks, [b"0\r\n\r\n"]) for piece in part)
    assert exchange(port, "Transfer-Encoding: chunked", body).startswith(b"HTTP/1.1 ")
    assert canary(attacked) == 200
    assert attacked.running() and attacked.pid == pid


def test_a_server_that_a_body_makes_too_large_is_ended_and_started_again(
    attacked: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is lowered to half a gigabyte above what it has, which a body of 1.2 million chunks passes."""
    limit = memory.resident_bytes(attacked.pid) + (512 << 20)
    monkeypatch.setattr(memory, "limit_bytes", lambda pid: limit)
    attacked.stop()
    signals = StopSignals()
    told = Told(signals, attacked)
    with signals:
        assert supervise(attacked, told, signals, START_TIMEOUT_S) == 0
    assert len(told.problems) == 1 and "GB" in told.problems[0]
    assert told.canaries == [200, 200]


class Told:
    """A reporter that sends a canary at each readiness, the body after the first one, and ends it after the second."""

    def __init__(self, signals: StopSignals, server: TritonServer) -> None:
        self.problems: list[str] = []
        self.canaries: list[int] = []
        self._signals, self._server = signals, server

    def ready(self) -> None:
        self.canaries.append(canary(self._server))
        if len(self.canaries) == 2:
            self._signals.count = 1
            return
        chunks = (b"1\r\n[\r\n" * 10_000 for _ in range(ONE_BYTE_CHUNKS // 10_000))
        head = "Transfer-Encoding: chunked"
        Thread(target=exchange, args=(self._server.ports.http, head, chunks), daemon=True).start()

    def problem(self, text: str) -> None:
        self.problems.append(text)

    def phase(self, text: str) -> None: ...

    def stopping(self) -> None: ...

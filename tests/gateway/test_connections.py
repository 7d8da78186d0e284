"""Connections of those who send slowly, in tiny chunks, ambiguously, or without a key: they end, and hold up nobody."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from gateway import connection
from tests.gateway.conftest import Served
from tests.gateway.fake_triton import FakeTriton
from tests.gateway.test_keys import ALICE, LINES, Serve, keyed, write
from tests.gateway.test_limits import COMPLETION, connect, post

BODY = json.dumps(COMPLETION).encode()
HEAD = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{}\r\n"


def answer(sock: socket.socket) -> bytes:
    """Everything until the server has sent its last."""
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def status(data: bytes) -> int:
    return int(data.split(b" ", 2)[1])


def chunked(data: bytes, size: int) -> bytes:
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts, b""])


def no_places_taken(served: Served) -> bool:
    """Soon: a place is given back behind the last byte of an answer."""
    deadline = time.monotonic() + 10
    while served.gateway.requests.taken and time.monotonic() < deadline:
        time.sleep(0.01)
    return served.gateway.requests.taken == 0


@pytest.mark.parametrize("path", ["/health", "/openapi.json", "/v1/completions"])
def test_half_bodies_of_strangers_take_no_places(path: str, serve: Serve, tmp_path: Path) -> None:
    """More of them than there are places: each is answered at once, and its connection ends."""
    with serve(api_keys=write(tmp_path / "keys", LINES), max_requests=4) as served, ExitStack() as stack:
        strangers = [stack.enter_context(connect(served)) for _ in range(8)]
        for one in strangers:
            one.sendall(post(BODY, path)[:-5])
        assert served.request("POST", "/v1/completions", COMPLETION, keyed(ALICE))[0] == 200
        assert {status(answer(one)) for one in strangers} == {401 if path.startswith("/v1") else 405}
        assert no_places_taken(served)


def test_health_with_half_a_body_is_answered_and_the_connection_ends(served: Served) -> None:
    with connect(served) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nhalf")
        assert status(answer(sock)) == 200


def test_what_comes_behind_an_early_answer_is_no_request(served: Served) -> None:
    """The rest of the body, and a request that stands behind it."""
    with connect(served) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nhalf")
        assert status(answer(sock)) == 200
        before = served.gateway.counters.requests.copy()
        sock.sendall(b"a body" + b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert served.request("GET", "/health")[0] == 200
    added = served.gateway.counters.requests - before
    assert not any(route == "/v1/models" for route, _ in added), added


def test_who_is_refused_before_the_body_is_read_still_gets_the_answer(serve: Serve, tmp_path: Path) -> None:
    """Although it sends all of the body first."""
    with serve(api_keys=write(tmp_path / "keys", LINES)) as served:
        assert served.request("POST", "/v1/completions", b"x" * 4_000_000)[0] == 401


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost:"])
@pytest.mark.parametrize("second", [False, True])
def test_a_head_that_does_not_come_in_time_ends_the_connection(
    sent: bytes, second: bool, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one of a connection, and one behind an answer; nothing at all there is a connection that is kept alive."""
    if second and not sent:
        return
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    with connect(served) as sock:
        if second:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in sock.recv(1000)
        sock.sendall(sent)
        assert answer(sock).count(b"HTTP/1.1") == 0


def test_a_reply_may_take_longer_than_a_head(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    with connect(served) as sock:
        sock.sendall(post(json.dumps({**COMPLETION, "prompt": "hold", "stream": True}).encode()))
        assert b" 200 " in sock.recv(1000)
        sock.settimeout(0.6)
        with pytest.raises(TimeoutError):
            while sock.recv(1000):
                pass


@pytest.mark.parametrize(
    ("headers", "sentence"),
    [
        ("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", "Content-Length beside Transfer-Encoding"),
        ("Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", "Content-Length beside Transfer-Encoding"),
        ("Content-Length: 5\r\nContent-Length: 6\r\n", "the request cannot be read"),
        ("Transfer-Encoding: gzip\r\n", "the request cannot be read"),
        ("no header\r\n", "the request cannot be read"),
    ],
)
def test_a_body_whose_end_is_ambiguous_is_refused_and_the_connection_ends(
    headers: str, sentence: str, served: Served, triton: FakeTriton
) -> None:
    """What follows is no second request."""
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(served) as sock:
        sock.sendall(HEAD.format("/v1/completions", headers).encode() + b"0\r\n\r\n" + smuggled)
        data = answer(sock)
    head, _, body = data.partition(b"\r\n\r\n")
    assert status(head) == 400 and b"connection: close" in head.lower() and data.count(b"HTTP/1.1") == 1
    assert json.loads(body)["error"]["message"].startswith(sentence) and not triton.requests


def test_transfer_encoding_in_http_1_0_is_refused(served: Served) -> None:
    with connect(served) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
        assert b"not part of HTTP/1.0" in answer(sock)


def test_a_body_in_many_tiny_chunks_is_refused_and_one_in_few_is_read(
    served: Served, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MOST_CHUNKS", len(BODY))
    head = HEAD.format("/v1/completions", "Transfer-Encoding: chunked\r\nConnection: close\r\n").encode()
    for body, expected in ((BODY, 200), (BODY + b" ", 400)):
        with connect(served) as sock:
            sock.sendall(head + chunked(body, 1))
            data = answer(sock)
        assert status(data) == expected
    assert f"more than {len(BODY)} chunks, the limit; send larger ones".encode() in data and len(triton.requests) == 1
    assert no_places_taken(served)


def test_each_request_of_a_connection_has_its_own_number_of_chunks(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MOST_CHUNKS", 20)
    head = HEAD.format("/v1/completions", "Transfer-Encoding: chunked\r\n").encode()
    with connect(served) as sock, sock.makefile("rb") as file:
        for _ in range(3):
            sock.sendall(head + chunked(BODY, 3))
            assert b" 200 " in file.readline()
            lines = list(iter(file.readline, b"\r\n"))
            (length,) = (int(line.split()[1]) for line in lines if line.lower().startswith(b"content-length"))
            file.read(length)


def test_the_longest_idle_connection_makes_room_for_a_new_one(
    serve: Serve, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with a reply under way does not."""
    monkeypatch.setattr(connection, "most_connections", lambda: 4)
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 1000)
    with serve() as served, ExitStack() as stack:
        busy = stack.enter_context(connect(served))
        busy.sendall(post(json.dumps({**COMPLETION, "prompt": "hold", "stream": True}).encode()))
        assert b" 200 " in busy.recv(1000)
        idle = [stack.enter_context(connect(served)) for _ in range(6)]
        assert served.request("POST", "/v1/completions", COMPLETION)[0] == 200
        for one in idle[:4]:
            assert one.recv(1) == b""
        assert not triton.requests[0].ended.is_set()


def test_ended_connections_are_gone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those whose clients never close: they have the time to read the answer, and no more."""
    monkeypatch.setattr(connection, "LINGER_S", 0.05)
    before = len(served.server.server_state.connections)
    with ExitStack() as stack:
        for data in (b"nonsense\r\n\r\n", post(b"x" * 10, "/health")[:-5]):
            sock = stack.enter_context(connect(served))
            sock.sendall(data)
            answer(sock)
        deadline = time.monotonic() + 10
        while len(served.server.server_state.connections) > before:
            assert time.monotonic() < deadline, "the connections stay"
            time.sleep(0.01)

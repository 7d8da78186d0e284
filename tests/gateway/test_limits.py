"""Bounds: of bodies, of requests and replies at once, of what waits for a client that reads slowly."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import openai
import pytest

from tests.gateway.conftest import Served
from tests.gateway.fake_triton import FakeTriton

Serve = Callable[..., AbstractContextManager[Served]]
COMPLETION = {"model": "everbatch", "prompt": "hi"}
HOLD = json.dumps({"model": "everbatch", "prompt": "hold", "stream": True}).encode()


def connect(served: Served) -> socket.socket:
    host, _, port = served.address.partition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def post(body: bytes, path: str = "/v1/completions", headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def test_a_body_over_the_limit_is_413_with_or_without_a_length(serve: Serve) -> None:
    with serve(max_body_bytes=1000) as served:
        status, body, _ = served.request("POST", "/v1/completions", {**COMPLETION, "user": "x" * 1000})
        assert (status, body["error"]["code"]) == (413, "body_too_large") and "1000 bytes" in body["error"]["message"]
        host, _, port = served.address.partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=20)
        chunks = iter([b"x" * 600] * 2)
        connection.request("POST", "/v1/completions", chunks, {"Content-Type": "application/json"}, encode_chunked=True)
        assert connection.getresponse().status == 413
        connection.close()
        assert served.request("POST", "/v1/completions", {**COMPLETION, "user": "x" * 800})[0] == 200


def test_a_body_that_does_not_arrive_is_408(serve: Serve) -> None:
    with serve(body_timeout_s=0.1) as served, connect(served) as connection:
        connection.sendall(post(b"x" * 10)[:-5])
        assert b" 408 " in connection.recv(1000).split(b"\r\n")[0]


def test_more_requests_than_the_limit_get_429_and_when_to_try_again(serve: Serve, triton: FakeTriton) -> None:
    with serve(max_requests=2) as served, connect(served) as first, connect(served) as second:
        for connection in (first, second):
            connection.sendall(post(HOLD))
            assert b" 200 " in connection.recv(1000)
        status, body, headers = served.request("POST", "/v1/completions", COMPLETION)
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded") and headers["retry-after"] == "1"
        assert served.request("GET", "/health")[0] == 200, "what takes no time is always answered"
        first.close()
        triton.requests[0].ended.wait(10)
        assert eventually_200(served)


def test_more_replies_at_once_than_the_limit_get_429(serve: Serve, triton: FakeTriton) -> None:
    with serve(max_choices=4) as served, connect(served) as connection:
        connection.sendall(post(HOLD))
        assert b" 200 " in connection.recv(1000)
        status, body, headers = served.request("POST", "/v1/completions", {**COMPLETION, "n": 4})
        assert (status, headers["retry-after"]) == (429, "1") and "the limit is 4; try later" in body["error"][
            "message"
        ]
        assert served.request("POST", "/v1/completions", {**COMPLETION, "n": 3})[0] == 200
        deadline = time.monotonic() + 10
        while served.gateway.running.choices != 1:
            assert time.monotonic() < deadline, "the places of the three replies are not given back"
            time.sleep(0.01)


def test_a_request_for_more_replies_than_there_ever_are_places_is_a_400(serve: Serve, triton: FakeTriton) -> None:
    """To try it again would never help."""
    with serve(max_choices=4) as served:
        status, body, _ = served.request("POST", "/v1/completions", {**COMPLETION, "n": 2, "best_of": 5})
        assert (status, body["error"]["param"]) == (400, "n") and "is 5, the limit is 4" in body["error"]["message"]
        assert not triton.requests


def eventually_200(served: Served) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if served.request("POST", "/v1/completions", COMPLETION)[0] == 200:
            return True
    return False


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_reads_nothing_holds_its_replies_back(prompts: int, served: Served, triton: FakeTriton) -> None:
    """40 MB each would be written otherwise: what is under way are buffers of sockets, not of the gateway."""
    body = {"model": "everbatch", "prompt": ["flood 40000"] * prompts, "stream": True}
    with connect(served) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(post(json.dumps(body).encode()))
        assert b" 200 " in connection.recv(100)
        seen = triton.wait_for(prompts)
        said = -1
        while said != (said := sum(one.said for one in seen)):  # until nothing moves any more
            time.sleep(0.3)
        assert said < 20_000
    assert all(one.ended.wait(10) for one in seen)


def test_a_client_that_reads_slowly_gets_everything(served: Served) -> None:
    with connect(served) as connection:
        body = {"model": "everbatch", "prompt": "flood 3000", "stream": True}
        connection.sendall(post(json.dumps(body).encode(), headers="Connection: close\r\n"))
        data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert data.count(b"x" * 1024) == 3000 and b"data: [DONE]" in data


def test_the_counters_are_on_the_metrics_page_behind_tritons(serve: Serve) -> None:
    with serve() as inner:
        with serve(metrics_url=f"{inner.url}/openapi.json") as served:  # any page that answers with text
            served.request("POST", "/v1/completions", {**COMPLETION, "max_tokens": 9})
            text = served.request("GET", "/metrics")[1]
        assert text.startswith('{"openapi"') and "everbatch_gateway_completion_tokens_total 4\n" in text
        assert 'everbatch_gateway_requests_total{route="/v1/completions",status="200"} 1\n' in text
        assert "everbatch_gateway_requests_in_flight 0\n" in text
    with serve(metrics_url="http://127.0.0.1:9/metrics") as served:
        status, text, _ = served.request("GET", "/metrics")
        assert status == 200 and "# Triton's metrics page does not answer\n" in text


def test_thirty_two_clients_at_once_get_their_own_replies(served: Served, triton: FakeTriton) -> None:
    texts: dict[int, str] = {}

    def one(i: int, client: openai.OpenAI) -> None:
        reply = client.completions.create(model="everbatch", prompt=f"p{i} ", echo=True)
        texts[i] = reply.choices[0].text.split()[0]

    with served.client() as client:
        threads = [threading.Thread(target=one, args=(i, client)) for i in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert {i: text.removesuffix("Hello") for i, text in texts.items()} == {i: f"p{i}" for i in range(32)}


def test_the_counted_tokens_are_those_that_the_usage_of_the_replies_says(serve: Serve) -> None:
    with serve() as served, served.client() as client:
        usages = [
            client.completions.create(model="everbatch", prompt=["a", "b"], n=2, max_tokens=9).usage,
            client.chat.completions.create(model="everbatch", messages=[{"role": "user", "content": "a"}], n=3).usage,
        ]
        text = served.request("GET", "/metrics")[1]
    for name in ("prompt_tokens", "completion_tokens"):
        told = sum(getattr(usage, name) for usage in usages)
        assert f"everbatch_gateway_{name}_total {told}\n" in text


def test_triton_hears_one_question_about_its_readiness_however_many_ask(served: Served, triton: FakeTriton) -> None:
    triton.may_answer.clear()
    before, statuses = triton.readiness_asked, []
    threads = [threading.Thread(target=lambda: statuses.append(served.request("GET", "/health")[0])) for _ in range(12)]
    connections = served.server.server_state.connections
    held = len(connections)
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while len(connections) < held + len(threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    with connect(served) as connection:  # it has been read when its answer comes, and so have those before it
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in connection.recv(1000)
    triton.may_answer.set()
    for thread in threads:
        thread.join(20)
    assert statuses == [200] * len(threads) and triton.readiness_asked - before < 6
    assert served.request("GET", "/health")[0] == 200 and triton.readiness_asked - before >= 2

"""Both transports against servers that follow a script, over real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from client import http_transport
from client.client import EverbatchClient
from client.errors import ClientError
from client.http_transport import HttpTransport
from client.messages import GenerateRequest
from tests.client.servers import GrpcServer, grpc_answer, grpc_server, http_server
from tests.client.test_terminal import Ticks

WHOLE = {"text_output": "hi", "finish_reason": "stop"}


def whole(server: GrpcServer) -> Iterator[Any]:
    yield grpc_answer("h")
    yield grpc_answer("i", final=True)


def silence(server: GrpcServer) -> Iterator[Any]:
    """Nothing, until the client has gone (or, in vain, for ten seconds)."""
    server.left.wait(10)
    yield from ()


# ---- the namespace ---------------------------------------------------------------------------------------------------


def salt_over_grpc(of_client: str, **options: Any) -> str | None:
    """`cache_salt` as a server received it."""
    with grpc_server(whole) as server, EverbatchClient(server.url, "grpc", namespace=of_client) as client:
        assert client.generate("x", **options).text == "hi"
    parameters = server.requests[0].parameters
    return parameters["cache_salt"].string_param if "cache_salt" in parameters else None


def salt_over_http(of_client: str, **options: Any) -> str | None:
    with http_server(WHOLE) as server, EverbatchClient(server.url, "http", namespace=of_client) as client:
        assert "".join(chunk.text for chunk in client.stream("x", **options)) == "hi"
    return server.requests[0][1].get("cache_salt")


@pytest.mark.parametrize("salt", [salt_over_grpc, salt_over_http])
def test_the_clients_namespace_goes_with_every_request_that_names_none(salt: Callable[..., str | None]) -> None:
    assert salt("alice") == "alice"
    assert salt("alice", namespace="böb") == "böb"
    assert salt("alice", namespace="") is None  # this request is anonymous
    assert salt("") is None


# ---- gRPC ------------------------------------------------------------------------------------------------------------


def test_a_server_that_says_nothing_ends_with_the_deadline() -> None:
    with grpc_server(silence) as server, EverbatchClient(server.url) as client:
        with pytest.raises(ClientError, match=r"within 0\.3 s") as caught:
            client.generate("x", timeout_s=0.3)
    assert caught.value.code == "DEADLINE_EXCEEDED"


def test_a_stream_that_ends_without_a_final_response_is_an_error() -> None:
    with grpc_server(lambda server: iter([grpc_answer("h")])) as server, EverbatchClient(server.url) as client:
        stream = client.stream("x")
        assert next(stream).text == "h"
        with pytest.raises(ClientError, match="without a final response") as caught:
            next(stream)
    assert caught.value.code == "UNAVAILABLE"


def test_an_error_response_raises_its_text() -> None:
    answers = [grpc_answer("h"), grpc_answer(error="[UNAVAILABLE] queue full")]
    with grpc_server(lambda server: iter(answers)) as server, EverbatchClient(server.url) as client:
        with pytest.raises(ClientError, match="queue full"):
            list(client.stream("x"))


def test_what_follows_the_final_response_is_not_waited_for() -> None:
    def answers(server: GrpcServer) -> Iterator[Any]:
        yield grpc_answer("h", final=True)
        yield from silence(server)
        yield grpc_answer("late")

    with grpc_server(answers) as server, EverbatchClient(server.url) as client:
        assert [chunk.text for chunk in client.stream("x")] == ["h"]


# ---- HTTP ------------------------------------------------------------------------------------------------------------


def test_path_request_id_and_deadline_are_sent() -> None:
    with http_server(WHOLE) as server, EverbatchClient(server.url, "http", "other model") as client:
        list(client.stream("x", request_id="r1", timeout_s=2.5))
    (path, body) = server.requests[0]
    assert path == "/v2/models/other%20model/generate_stream"
    assert body["id"] == "r1" and body["timeout"] == 2_500_000


def test_the_deadline_is_that_of_the_whole_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks()
    monkeypatch.setattr(http_transport, "time", SimpleNamespace(monotonic=ticks))
    with http_server({"text_output": "h"}, WHOLE) as server:
        stream = HttpTransport(server.url, "ensemble").stream(GenerateRequest("x"), 10.0, "")
        assert next(stream).text == "h"
        ticks.now = 10.5
        with pytest.raises(ClientError, match="within 10 s") as caught:
            next(stream)
    assert caught.value.code == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize(("status", "code"), [(404, "NOT_FOUND"), (503, "UNAVAILABLE")])
def test_a_status_that_is_no_success_raises_the_servers_reason(status: int, code: str) -> None:
    with http_server({"error": "[UNAVAILABLE] no"}, status=status) as server:
        with EverbatchClient(server.url, "http") as client, pytest.raises(ClientError, match="no") as caught:
            list(client.stream("x"))
    assert caught.value.code == code

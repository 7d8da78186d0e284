"""Both transports against servers that follow a script, over real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from client import http_messages, http_transport
from client.client import EverbatchClient
from client.errors import Cancelled, ClientError
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


# ---- the key of a gateway --------------------------------------------------------------------------------------------

KEY = "5f1c09a7e2b84d63905fb7c1aa3e4d22"


def key_over_grpc(api_key: str | None) -> object:
    """The metadata `authorization` as a server received it."""
    with grpc_server(whole) as server, EverbatchClient(server.url, "grpc", api_key=api_key) as client:
        list(client.stream("x"))
    return server.keys[0]


def key_over_http(api_key: str | None) -> object:
    with http_server(WHOLE) as server, EverbatchClient(server.url, "http", api_key=api_key) as client:
        list(client.stream("x"))
    return server.keys[0]


@pytest.mark.parametrize("key_of", [key_over_grpc, key_over_http])
def test_a_key_goes_with_every_request_and_may_come_from_the_environment(
    key_of: Callable[[str | None], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EVERBATCH_API_KEY", raising=False)
    assert key_of(None) is None
    assert key_of(KEY) == f"Bearer {KEY}"
    monkeypatch.setenv("EVERBATCH_API_KEY", "of-the-environment")
    assert key_of(None) == "Bearer of-the-environment"
    assert key_of("") is None


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match="API key holds") as caught:
        EverbatchClient(api_key=key)
    assert key not in str(caught.value)


@pytest.mark.parametrize(("key", "words"), [("", "asks for a key"), (KEY, "does not take the key that was sent")])
def test_a_gateway_that_lets_nobody_in_is_told_with_the_remedy_and_without_the_key(key: str, words: str) -> None:
    def refuse(server: GrpcServer) -> Iterator[Any]:
        server.context.abort(grpc.StatusCode.UNAUTHENTICATED, "a key is needed: authorization: Bearer KEY")
        yield from ()

    with grpc_server(refuse) as over_grpc, http_server({"error": "no"}, status=401) as over_http:
        for client in (
            EverbatchClient(over_grpc.url, api_key=key),
            EverbatchClient(over_http.url, "http", api_key=key),
        ):
            with client, pytest.raises(ClientError, match=words) as caught:
                list(client.stream("x"))
            assert caught.value.code == "UNAUTHENTICATED"
            assert "EVERBATCH_API_KEY" in str(caught.value) and KEY not in str(caught.value)


# ---- the ports confused ----------------------------------------------------------------------------------------------


def test_http_spoken_to_the_grpc_port_is_explained_and_no_raw_bytes_are_shown() -> None:
    with grpc_server(whole) as server, EverbatchClient(f"http://{server.url}", "http") as client:
        with pytest.raises(ClientError, match="does not speak HTTP/1; if this is the gRPC port") as caught:
            list(client.stream("x"))
    assert str(caught.value).isprintable() and server.url in str(caught.value)


def test_grpc_spoken_to_the_http_port_is_explained() -> None:
    with http_server(WHOLE) as server:
        assert_no_grpc(server.url.removeprefix("http://"))


def test_grpc_spoken_to_a_server_that_hangs_up_at_once_is_explained_too() -> None:
    """As Triton's HTTP port does, which knows no request PRI."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)

        thread = threading.Thread(target=hang_up)
        thread.start()
        assert_no_grpc(f"127.0.0.1:{listening.getsockname()[1]}")
        thread.join()


def assert_no_grpc(address: str) -> None:
    with EverbatchClient(address) as client:
        with pytest.raises(ClientError, match="does not speak gRPC; if this is the HTTP port") as caught:
            list(client.stream("x"))
    assert caught.value.code == "UNREACHABLE"


# ---- closing ---------------------------------------------------------------------------------------------------------


@contextmanager
def endless_grpc() -> Iterator[str]:
    """The URL of a server that sends one chunk and nothing more."""

    def answers(server: GrpcServer) -> Iterator[Any]:
        yield grpc_answer("h")
        yield from silence(server)

    with grpc_server(answers) as server:
        yield server.url


@contextmanager
def endless_http() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b'HTTP/1.1 200 OK\r\n\r\ndata: {"text_output": "h"}\n\n')
                while connection.recv(4096):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("serve", [endless_grpc, endless_http])
def test_closing_the_client_ends_streams_that_other_threads_wait_for(
    serve: Callable[[], AbstractContextManager[str]],
) -> None:
    with serve() as url:
        client = EverbatchClient(url)
        stream = client.stream("x")
        assert next(stream).text == "h"
        closing = threading.Timer(0.05, client.close)
        closing.start()
        with pytest.raises(Cancelled, match="was cancelled"):
            next(stream)
        closing.join()
    with pytest.raises(Cancelled, match="the client is closed"):
        client.generate("x")


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
        stream = EverbatchClient(server.url).stream("x", timeout_s=10.0)
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


def test_the_page_of_a_gateway_is_not_shown() -> None:
    assert http_messages._error_text("<html><body>413 Request Entity Too Large</body></html>") == ""

"""The client for asyncio, over gRPC and HTTP, against servers that follow a script over real sockets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from client.async_client import AsyncEverbatchClient
from client.errors import Cancelled, ClientError, DeadlineExceeded, NotFound, Unauthenticated, Unavailable, Unreachable
from client.retry import NEVER
from tests.client.servers import GrpcServer, HttpServer, grpc_answer, grpc_server, http_server

MESSAGES = [{"role": "user", "content": "x"}]


def run(main: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(30):
            return await main

    return asyncio.run(bounded())


def two_chunks(server: GrpcServer) -> Iterator[Any]:
    yield grpc_answer("h")
    yield grpc_answer("i", final=True)


def endless(server: GrpcServer) -> Iterator[Any]:
    """One chunk, then nothing until the client has gone (or, in vain, for 40 seconds)."""
    yield grpc_answer("h")
    server.left.wait(40)


def over_grpc() -> AbstractContextManager[GrpcServer | HttpServer]:
    return grpc_server(two_chunks)


def over_http() -> AbstractContextManager[GrpcServer | HttpServer]:
    return http_server({"text_output": "h"}, {"text_output": "i", "finish_reason": "stop"})


class Endless(BaseHTTPRequestHandler):
    """Sends one event, then blank lines until the client has gone."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        try:
            self.wfile.write(b'data: {"text_output": "h"}\n\n')
            while True:
                self.wfile.write(b"\n")
                self.pause.wait(0.01)
        except OSError:
            self.left.set()

    left = threading.Event()
    pause = threading.Event()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing on standard error."""


@pytest.fixture(params=["grpc", "http"])
def endless_server(request: pytest.FixtureRequest) -> Iterator[tuple[str, threading.Event]]:
    """Its URL, and what is set when the client has gone."""
    if request.param == "grpc":
        with grpc_server(endless) as server:
            yield server.url, server.left
        return
    Endless.left.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", Endless.left
        http.shutdown()
        thread.join()


@pytest.mark.parametrize("serve", [over_grpc, over_http])
def test_text_streams_and_the_last_chunk_is_final(serve: Callable[[], Any]) -> None:
    async def main(url: str) -> list[tuple[str, bool]]:
        async with AsyncEverbatchClient(url) as client:
            return [(chunk.text, chunk.final) async for chunk in client.stream("x")]

    with serve() as server:
        assert run(main(server.url)) == [("h", False), ("i", True)]


def test_one_client_serves_many_tasks_at_once() -> None:
    async def main(url: str) -> list[str]:
        async with AsyncEverbatchClient(url) as client:
            return [answer.text for answer in await asyncio.gather(*(client.generate("x") for _ in range(8)))]

    with grpc_server(two_chunks, threads=8) as server:
        assert run(main(server.url)) == ["hi"] * 8


@pytest.mark.parametrize("serve", [over_grpc, over_http])
def test_a_chat_sends_its_messages_the_key_and_the_namespace(serve: Callable[[], Any]) -> None:
    async def main(url: str) -> None:
        async with AsyncEverbatchClient(url, namespace="alice", api_key="k3y") as client:
            await client.chat(MESSAGES, timeout_s=2, request_id="r1", max_tokens=7)

    with serve() as server:
        run(main(server.url))
    assert server.keys == ["Bearer k3y"]
    (request,) = server.requests
    if isinstance(request, tuple):
        path, body = request
        assert path == "/v2/models/ensemble/generate" and body["cache_salt"] == "alice" and body["id"] == "r1"
        assert json.loads(body["messages"]) == MESSAGES and body["text_input"] == "" and body["timeout"] == 2_000_000
    else:
        assert request.id == "r1" and request.parameters["cache_salt"].string_param == "alice"


def test_leaving_the_loop_cancels(endless_server: tuple[str, threading.Event]) -> None:
    url, left = endless_server

    async def main() -> bool:
        async with AsyncEverbatchClient(url) as client:
            async for chunk in client.stream("x"):
                assert chunk.text == "h"
                break
            return await asyncio.to_thread(left.wait, 20)  # the client is still open

    assert run(main())


def test_cancelling_the_task_cancels(endless_server: tuple[str, threading.Event]) -> None:
    url, left = endless_server

    async def main() -> bool:
        async with AsyncEverbatchClient(url) as client:
            began = asyncio.Event()

            async def read() -> None:
                async for _ in client.stream("x"):
                    began.set()

            task = asyncio.create_task(read())
            await began.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await asyncio.to_thread(left.wait, 20)

    assert run(main())


def test_closing_the_client_ends_its_streams(endless_server: tuple[str, threading.Event]) -> None:
    url, left = endless_server

    async def main() -> None:
        client = AsyncEverbatchClient(url, retry=NEVER)
        with pytest.raises(ClientError):
            async for _ in client.stream("x"):
                await client.close()
        with pytest.raises(Cancelled, match="the client is closed"):
            await client.generate("x")

    run(main())
    assert left.wait(20)


def test_a_server_that_says_no_more_ends_with_the_deadline(endless_server: tuple[str, threading.Event]) -> None:
    async def main() -> None:
        async with AsyncEverbatchClient(endless_server[0], timeout_s=0.3) as client:
            await client.generate("x", stream=True)

    with pytest.raises(DeadlineExceeded, match=r"within 0\.3 s"):
        run(main())


async def failing(url: str, **settings: Any) -> None:
    async with AsyncEverbatchClient(url, retry=NEVER, **settings) as client:
        await client.generate("x", timeout_s=20)


@pytest.mark.parametrize("url", ["127.0.0.1:9", "http://127.0.0.1:9"])
def test_nobody_there_is_told_with_the_address(url: str) -> None:
    with pytest.raises(Unreachable, match=f"no server answers at {url}"):
        run(failing(url))


def test_the_ports_confused_are_explained() -> None:
    with grpc_server(two_chunks) as grpc, pytest.raises(Unreachable, match="does not speak HTTP/1"):
        run(failing(f"http://{grpc.url}"))
    with http_server({}) as http, pytest.raises(Unreachable, match="does not speak gRPC"):
        run(failing(http.url.removeprefix("http://")))


UNKNOWN_MODEL = "Request for unknown model: 'x' is not found"


@pytest.mark.parametrize("status", [400, 404])
def test_an_unknown_model_has_one_code_over_both_protocols(status: int) -> None:
    refuse = [grpc_answer(error=UNKNOWN_MODEL)]
    with grpc_server(lambda server: iter(refuse)) as grpc, http_server({"error": UNKNOWN_MODEL}, status=status) as http:
        for url in (grpc.url, http.url):
            with pytest.raises(NotFound, match="unknown model") as caught:
                run(failing(url))
            assert caught.value.code == "NOT_FOUND"


def test_a_gateway_that_lets_nobody_in_is_told_without_the_key() -> None:
    with http_server({"error": "no"}, status=401) as http:
        with pytest.raises(Unauthenticated, match="does not take the key") as caught:
            run(failing(http.url, api_key="k3y"))
    assert "k3y" not in str(caught.value)


def test_a_stream_that_is_cut_short_is_an_error() -> None:
    with grpc_server(lambda server: iter([grpc_answer("h")])) as server:
        with pytest.raises(Unavailable, match="without a final response"):
            run(failing(server.url))


def test_a_conversation_keeps_its_history_and_ends_its_session() -> None:
    async def main(url: str) -> list[str]:
        async with AsyncEverbatchClient(url) as client:
            talk = client.conversation("be brief", max_tokens=5)
            for text in ("one", "two"):
                assert "".join([chunk.text async for chunk in talk.say(text)]) == "hi"
            await talk.end()
            return [message["content"] for message in talk.messages]

    with over_http() as server:
        assert run(main(server.url)) == ["be brief", "one", "hi", "two", "hi"]
    bodies = [body for _, body in server.requests]  # type: ignore[misc]
    assert [(body["START"], body["STOP"], body["END"]) for body in bodies] == [(1, 0, 0), (0, 0, 0), (0, 1, 1)]
    assert len({body["CORRID"] for body in bodies}) == 1


def test_a_turn_left_in_the_middle_keeps_what_was_shown(endless_server: tuple[str, threading.Event]) -> None:
    async def main() -> list[Any]:
        async with AsyncEverbatchClient(endless_server[0]) as client:
            talk = client.conversation()
            stream = talk.say("one")
            await anext(stream)
            await stream.aclose()
            return talk.messages

    assert [message["content"] for message in run(main())] == ["one", "h"]

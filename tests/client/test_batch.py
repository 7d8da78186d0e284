"""Many prompts at once: order, concurrency, errors, cancelling and the bar, with both clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from client.async_client import AsyncEverbatchClient
from client.client import EverbatchClient
from client.errors import ClientError, InvalidArgument
from client.grpc_messages import decode_values
from tests.client.servers import GrpcServer, grpc_answer, grpc_server, http_server

Map = Callable[..., list[Any]]


def mapped(url: str, prompts: Any, **options: Any) -> list[Any]:
    with EverbatchClient(url) as client:
        return list(client.map(prompts, **options))


def mapped_async(url: str, prompts: Any, **options: Any) -> list[Any]:
    async def main() -> list[Any]:
        async with AsyncEverbatchClient(url) as client:
            return list(await client.map(prompts, **options))

    return asyncio.run(main())


@pytest.fixture(params=[mapped, mapped_async])
def map_of(request: pytest.FixtureRequest) -> Map:
    found: Map = request.param
    return found


def prompt_of(server: GrpcServer) -> str:
    """Of the request that is being answered, in its own thread."""
    request = threading.local()
    request.message = server.requests[-1]
    text: str = decode_values("BYTES", request.message.raw_input_contents[0])[0]
    return text


class Echo:
    """Answers with the prompt; refuses the prompt `bad`; counts how many requests run at the same time."""

    def __init__(self, meet: int = 1) -> None:
        self.lock = threading.Lock()
        self.running = self.most = 0
        self.met = threading.Barrier(meet)

    def __call__(self, server: GrpcServer) -> Iterator[Any]:
        text = prompt_of(server)
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self.met.wait(10)
        with self.lock:
            self.running -= 1
        yield grpc_answer(error="[INVALID_ARGUMENT] bad") if text == "bad" else grpc_answer(text, final=True)


def test_answers_have_the_order_of_the_prompts(map_of: Map) -> None:
    texts = {"text_output": "hi", "finish_reason": "stop"}
    with http_server(texts) as server:
        answers = map_of(server.url, (f"p{index}" for index in range(20)), concurrency=1, max_tokens=3)
    assert [answer.text for answer in answers] == ["hi"] * 20
    assert [body["text_input"] for _, body in server.requests] == [f"p{index}" for index in range(20)]
    assert {body["max_tokens"] for _, body in server.requests} == {3}


def test_as_many_requests_run_at_once_as_was_said_and_no_more(map_of: Map) -> None:
    with grpc_server(echo := Echo(meet=4), threads=8) as server:
        answers = map_of(server.url, ["a"] * 12, concurrency=4)
    assert echo.most == 4 and len(answers) == 12


def test_lists_of_messages_are_chats(map_of: Map) -> None:
    with http_server({"text_output": "hi", "finish_reason": "stop"}) as server:
        map_of(server.url, [[{"role": "user", "content": "x"}]], concurrency=1)
    assert '"content": "x"' in server.requests[0][1]["messages"]


def test_the_first_error_is_raised_and_what_waits_is_not_sent(map_of: Map) -> None:
    with grpc_server(Echo(), threads=1) as server, pytest.raises(InvalidArgument, match="bad"):
        map_of(server.url, ["a", "bad", *["b"] * 200], concurrency=1)
    assert len(server.requests) < 50


def test_an_error_cancels_the_requests_that_run(map_of: Map) -> None:
    running, gone, held_out = threading.Event(), threading.Event(), threading.Event()

    def answers(server: GrpcServer) -> Iterator[Any]:
        if prompt_of(server) == "bad":
            running.wait(10)
            yield grpc_answer(error="[INVALID_ARGUMENT] bad")
            return
        server.context.add_callback(gone.set)
        running.set()
        yield grpc_answer("a")
        if not gone.wait(20):
            held_out.set()

    with grpc_server(answers, threads=2) as server:
        with pytest.raises(InvalidArgument):
            map_of(server.url, ["bad", "endless"], concurrency=2)
        assert gone.wait(20) and not held_out.is_set(), "cancelled while the server still runs"


def test_errors_may_be_returned_in_the_place_of_answers(map_of: Map) -> None:
    with grpc_server(Echo(), threads=1) as server:
        first, second, third = map_of(server.url, ["a", "bad", "b"], concurrency=1, on_error="return")
    assert (first.text, third.text) == ("a", "b")
    assert isinstance(second, ClientError) and second.code == "INVALID_ARGUMENT"


def test_the_bar_goes_to_standard_error_and_counts_tokens_and_errors(
    map_of: Map, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {"text_output": "hi", "finish_reason": "stop", "num_output_tokens": 3}
    with http_server(answer) as server:
        map_of(server.url, ["a", "b"], concurrency=1, progress=True)
    shown = capsys.readouterr()
    assert shown.out == "" and "2/2" in shown.err and "6 tokens" in shown.err
    with http_server({"error": "[INVALID_ARGUMENT] no"}, status=400) as server:
        map_of(server.url, ["a"], progress=True, on_error="return")
    assert "1 errors" in capsys.readouterr().err


def test_without_the_bar_nothing_is_shown(map_of: Map, capfd: pytest.CaptureFixture[str]) -> None:
    with http_server({"text_output": "hi", "finish_reason": "stop"}) as server:
        map_of(server.url, ["a"])
    assert capfd.readouterr() == ("", "")


def test_no_prompts_are_no_answers(map_of: Map) -> None:
    assert map_of("127.0.0.1:9", []) == []


@pytest.mark.parametrize(
    ("prompts", "options", "error", "words"),
    [
        ("text", {}, TypeError, "prompts is a str, a list of texts"),
        (5, {}, TypeError, "prompts is an int, a list of texts"),
        (["a", 5], {}, TypeError, r"prompts\[1\]: messages is an int"),
        (["a", "\ud800"], {}, ValueError, r"prompts\[1\]: prompt holds half"),
        (["a"], {"concurrency": 0}, ValueError, "concurrency is 0, at least 1 is expected"),
        (["a"], {"concurrency": "2"}, TypeError, "concurrency is a str, an int is expected"),
        (["a"], {"on_error": "skip"}, ValueError, "on_error is 'skip'"),
        (["a"], {"max_token": 5}, TypeError, "'max_token' is no option; did you mean max_tokens"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_sent(
    map_of: Map, prompts: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        map_of("127.0.0.1:9", prompts, **options)

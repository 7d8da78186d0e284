"""What is sent again, when, and how often: the synchronous client and the one for asyncio, over gRPC and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from client import async_client, client
from client.async_client import AsyncEverbatchClient
from client.client import EverbatchClient
from client.errors import ClientError, InvalidArgument, Unavailable
from client.messages import GenerateRequest, Session, TextChunk
from client.retry import Retry
from tests.client.servers import NO_STREAMS, GrpcServer, grpc_answer, grpc_server, http_server

FAST = Retry(attempts=4, first_pause_s=0.001)
FULL = "[UNAVAILABLE] queue full"
Ask = Callable[..., str]


def ask(url: str, retry: Retry = FAST, **options: Any) -> str:
    with EverbatchClient(url, retry=retry) as client:
        return "".join(chunk.text for chunk in client.stream("x", **options))


def ask_async(url: str, retry: Retry = FAST, **options: Any) -> str:
    async def main() -> str:
        async with AsyncEverbatchClient(url, retry=retry) as client:
            return "".join([chunk.text async for chunk in client.stream("x", **options)])

    return asyncio.run(main())


@pytest.fixture(params=[ask, ask_async])
def asking(request: pytest.FixtureRequest) -> Ask:
    found: Ask = request.param
    return found


def scripted(*answers: list[Any]) -> Callable[[GrpcServer], Iterator[Any]]:
    """The n-th request gets the n-th answers."""
    left = list(answers)
    return lambda server: iter(left.pop(0))


REFUSED = [grpc_answer(error=FULL)]
WHOLE = [grpc_answer("h"), grpc_answer("i", final=True)]


def test_an_unavailable_server_is_asked_again_until_it_answers(asking: Ask) -> None:
    with grpc_server(scripted(REFUSED, REFUSED, WHOLE)) as server:
        assert asking(server.url) == "hi"
    assert len(server.requests) == 3


def test_over_http_too(asking: Ask) -> None:
    with http_server({"error": FULL}, status=503) as server, pytest.raises(Unavailable, match="queue full"):
        asking(server.url)
    assert len(server.requests) == FAST.attempts


def test_the_last_error_is_raised_when_the_attempts_are_used_up(asking: Ask) -> None:
    with grpc_server(scripted(*[REFUSED] * 5)) as server, pytest.raises(Unavailable, match="queue full"):
        asking(server.url)
    assert len(server.requests) == 4


def test_nothing_is_sent_again_once_a_token_has_come(asking: Ask) -> None:
    with grpc_server(scripted([grpc_answer("h"), *REFUSED], WHOLE)) as server, pytest.raises(Unavailable):
        asking(server.url)
    assert len(server.requests) == 1


@pytest.mark.parametrize("error", ["[INVALID_ARGUMENT] no", "[INTERNAL] no", "no", "[CANCELLED] no"])
def test_no_other_error_is_asked_again(asking: Ask, error: str) -> None:
    with grpc_server(scripted([grpc_answer(error=error)], WHOLE)) as server, pytest.raises(ClientError):
        asking(server.url)
    assert len(server.requests) == 1


def test_nothing_is_sent_again_when_the_pause_would_end_after_the_deadline(asking: Ask) -> None:
    with grpc_server(scripted(REFUSED, WHOLE)) as server, pytest.raises(Unavailable):
        asking(server.url, Retry(first_pause_s=60, longest_pause_s=60), timeout_s=20)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("session", "times"),
    [(Session(7), 2), (Session(7, start=True, full_history=False), 2), (Session(7, full_history=False), 1)],
)
def test_a_turn_that_would_be_added_twice_is_not_sent_again(asking: Ask, session: Session, times: int) -> None:
    with grpc_server(scripted(REFUSED, WHOLE)) as server:
        with contextlib.suppress(Unavailable):
            asking(server.url, session=session)
    assert len(server.requests) == times


def test_pauses_double_up_to_the_longest_and_are_spread() -> None:
    retry = Retry(attempts=8, first_pause_s=1, longest_pause_s=5)
    for attempt, longest in enumerate([1, 2, 4, 5, 5, 5, 5]):
        pauses = [retry.pause_s(attempt, Unavailable("no")) or 0 for _ in range(50)]
        assert longest / 2 <= min(pauses) < max(pauses) <= longest
    assert retry.pause_s(7, Unavailable("no")) is None


def test_a_retry_without_an_attempt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 attempt"):
        Retry(attempts=0)


# ---- a server that does not stream -----------------------------------------------------------------------------------


def test_a_server_that_does_not_stream_is_asked_for_the_whole_answer(asking: Ask) -> None:
    with grpc_server(scripted([grpc_answer(error=NO_STREAMS)], [grpc_answer("hi", final=True)])) as server:
        assert asking(server.url, Retry(attempts=1)) == "hi"
    assert [streamed(request) for request in server.requests] == [True, False]


def test_and_over_http_through_generate(asking: Ask) -> None:
    with http_server({"text_output": "hi", "finish_reason": "stop"}) as server:
        server.refuses_streams = True
        assert asking(server.url, Retry(attempts=1), session=Session(7, full_history=False)) == "hi"
    assert [path.rpartition("/")[2] for path, _ in server.requests] == ["generate_stream", "generate"]
    assert [body["stream"] for _, body in server.requests] == [True, False]


def test_one_that_refuses_the_whole_answer_too_is_not_asked_for_ever(asking: Ask) -> None:
    with grpc_server(scripted(*[[grpc_answer(error=NO_STREAMS)]] * 9)) as server:
        with pytest.raises(InvalidArgument, match="decoupled mode"):
            asking(server.url)
    assert len(server.requests) == 2


def streamed(request: Any) -> bool:
    """What the input `stream` of a ModelInferRequest says."""
    place = [tensor.name for tensor in request.inputs].index("stream")
    return bool(request.raw_input_contents[place] == b"\x01")


class Refusing:
    """A transport that refuses every request and remembers how long each might have taken."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.given = clock, []

    def refuse(self, timeout_s: float) -> None:
        self.given.append(timeout_s)
        self.clock[0] += 1.0  # the time of an attempt
        raise Unavailable(FULL)

    def stream(self, request: GenerateRequest, timeout_s: float, request_id: str) -> Iterator[TextChunk]:
        self.refuse(timeout_s)
        yield TextChunk("")


class AsyncRefusing(Refusing):
    async def stream(self, request: GenerateRequest, timeout_s: float, request_id: str) -> AsyncIterator[TextChunk]:  # type: ignore[override]
        self.refuse(timeout_s)
        yield TextChunk("")


@pytest.mark.parametrize("module", [client, async_client], ids=["in threads", "with asyncio"])
def test_all_attempts_together_have_the_time_of_one_request(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    async def sleep_async(seconds: float) -> None:
        sleep(seconds)

    async def read_all(chunks: Any) -> None:
        async for _ in chunks:
            pass

    retry = Retry(attempts=10, first_pause_s=2.0, longest_pause_s=2.0)
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    with pytest.raises(Unavailable):
        if module is client:
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
            transport = Refusing(clock)
            list(client.repeated(transport, retry, GenerateRequest("x"), 10.0, ""))
        else:
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
            monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep_async))
            transport = AsyncRefusing(clock)
            asyncio.run(read_all(async_client.repeated(transport, retry, GenerateRequest("x"), 10.0, "")))
    assert transport.given == [
        10.0,
        7.0,
        4.0,
        1.0,
    ]  # attempts of a second, with pauses of two; none after the tenth second

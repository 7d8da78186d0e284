"""The Python client against a real server: both protocols, both kinds of client, and every example of docs/client.md."""

from __future__ import annotations

import asyncio
import contextlib
import io

import pytest

from client import (
    AsyncEverbatchClient,
    DeadlineExceeded,
    EverbatchClient,
    InvalidArgument,
    NotFound,
    Session,
    Unavailable,
)
from deploy.triton_server import TritonServer
from tests.docs.pages import examples
from tests.e2e.wire import CANCELLED, num_cancelled, reaches

EXAMPLES = examples("client.md")
PROMPT = "def main("
LONG = {"max_tokens": 1800, "min_tokens": 1800}  # so that none ends by itself before it is cancelled


@pytest.fixture(params=["grpc", "http"])
def url(request: pytest.FixtureRequest, server: TritonServer) -> str:
    return server.grpc_url if request.param == "grpc" else server.http_url


def test_both_clients_say_the_same_over_both_protocols_streamed_or_whole(server: TritonServer) -> None:
    async def with_asyncio(url: str) -> list[str]:
        async with AsyncEverbatchClient(url) as client:
            streamed = [chunk async for chunk in client.stream(PROMPT, max_tokens=16)]
            whole = await client.generate(PROMPT, max_tokens=16)
            mapped = await client.map([PROMPT] * 3, concurrency=2, max_tokens=16)
        assert [chunk.final for chunk in streamed].count(True) == 1 and streamed[-1].final
        return ["".join(chunk.text for chunk in streamed), whole.text, *(answer.text for answer in mapped)]

    texts = []
    for url in (server.grpc_url, server.http_url):
        with EverbatchClient(url) as client:
            streamed = list(client.stream(PROMPT, max_tokens=16))
            texts += ["".join(chunk.text for chunk in streamed), client.generate(PROMPT, max_tokens=16).text]
            texts += [answer.text for answer in client.map([PROMPT] * 3, concurrency=2, max_tokens=16)]
            assert sum(chunk.num_output_tokens or 0 for chunk in streamed) == 16
        texts += asyncio.run(with_asyncio(url))
    assert len(texts) == 20 and len(set(texts)) == 1 and texts[0]


def test_log_probs_come_one_for_each_token(url: str) -> None:
    with EverbatchClient(url) as client:
        answer = client.generate(PROMPT, max_tokens=5, return_log_probs=True)
        chunks = list(client.stream(PROMPT, max_tokens=5, return_log_probs=True))
    assert answer.log_probs is not None and len(answer.log_probs) == 5 and max(answer.log_probs) <= 0
    assert [value for chunk in chunks for value in chunk.log_probs or ()] == answer.log_probs


def test_leaving_the_iterator_cancels(server: TritonServer, url: str) -> None:
    before = num_cancelled(server.metrics_url)
    with EverbatchClient(url) as client:
        for _ in client.stream(PROMPT, **LONG):  # type: ignore[arg-type]
            break
        assert reaches(server.metrics_url, CANCELLED, before + 1)


def test_leaving_the_async_iterator_or_cancelling_the_task_cancels(server: TritonServer, url: str) -> None:
    before = num_cancelled(server.metrics_url)

    async def main() -> None:
        async with AsyncEverbatchClient(url) as client:
            async for _ in client.stream(PROMPT, **LONG):  # type: ignore[arg-type]
                break
            assert await asyncio.to_thread(reaches, server.metrics_url, CANCELLED, before + 1)
            began = asyncio.Event()

            async def read() -> None:
                async for _ in client.stream(PROMPT, **LONG):  # type: ignore[arg-type]
                    began.set()

            task = asyncio.create_task(read())
            await began.wait()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(reaches, server.metrics_url, CANCELLED, before + 2)

    asyncio.run(main())


def test_an_unknown_model_has_one_code(url: str) -> None:
    with EverbatchClient(url, model="no_such_model") as client:
        for ask in (client.generate, lambda text: list(client.stream(text))):
            with pytest.raises(NotFound, match="no_such_model") as caught:
                ask(PROMPT)
            assert caught.value.code == "NOT_FOUND"


def test_what_the_server_refuses_is_an_invalid_argument(url: str) -> None:
    with EverbatchClient(url) as client:
        with pytest.raises(InvalidArgument, match="temperature is -1"):
            client.generate(PROMPT, temperature=-1.0)
        with pytest.raises(InvalidArgument) as caught:
            client.generate(PROMPT, session=Session(71))
        assert caught.value.session_error == 1
        with pytest.raises(InvalidArgument) as caught:
            client.generate("x = 1\n" * 20_000)
        assert caught.value.is_too_long


def test_a_deadline_ends_a_request(url: str) -> None:
    with EverbatchClient(url) as client, pytest.raises((DeadlineExceeded, Unavailable)) as caught:
        list(client.stream(PROMPT, timeout_s=0.05, **LONG))  # type: ignore[arg-type]
    assert caught.value.code == "DEADLINE_EXCEEDED"


def test_a_conversation_that_no_longer_fits_goes_on_without_its_oldest_turns(url: str) -> None:
    """The turns are so long that the context of the default model holds a few of them."""
    turn = "x = 1\n" * 120
    with EverbatchClient(url) as client:
        talk = client.conversation("You write Python.", max_tokens=2)
        for number in range(8):
            assert list(talk.say(f"{number}\n{turn}"))[-1].final
        assert talk.left_out > 0 and talk.messages[0]["content"] == "You write Python."
        talk.end()


def test_a_turn_with_asyncio_reuses_the_kv_of_those_before(url: str) -> None:
    async def main() -> tuple[int, int]:
        async with AsyncEverbatchClient(url) as client:
            talk = client.conversation(max_tokens=12)
            first = [chunk async for chunk in talk.say("Write the function read_lines.")]
            second = [chunk async for chunk in talk.say("And one that writes them.")]
            await talk.end()
        return first[-1].num_input_tokens or 0, second[-1].num_cached_tokens or 0

    of_first, reused = asyncio.run(main())
    assert reused > of_first, "the first reply is in the cache too"


def test_the_first_example_prints_text_that_can_be_seen(server: TritonServer) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(EXAMPLES[0].replace("127.0.0.1:8001", server.grpc_url), "docs/client.md", "exec"), names := {})
    assert names["answer"].text.strip() and names["reply"].text.strip()
    assert f"\n{names['answer'].text!r} " in printed.getvalue(), "on a line of its own"


@pytest.mark.parametrize("source", EXAMPLES, ids=range(len(EXAMPLES)))
def test_every_example_of_the_page_runs(server: TritonServer, source: str) -> None:
    source = source.replace("http://127.0.0.1:8000", server.http_url).replace("127.0.0.1:8001", server.grpc_url)
    assert server.grpc_url in source or server.http_url in source
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, "docs/client.md", "exec"), {"__name__": "example"})
    assert len(printed.getvalue()) > 5


def test_the_page_has_an_example_of_everything() -> None:
    text = "\n".join(EXAMPLES)
    for name in ("EverbatchClient", "AsyncEverbatchClient", "conversation", "map", "NotFound", "tritonclient"):
        assert name in text

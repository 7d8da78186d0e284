"""The driver in Python: OpenAI's completions, and Triton's generate_stream and gRPC stream, over one loop of users.

Each user sends the next request as soon as its last one has been answered, until all are sent or the time is over.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from benchmarks.harness.answers import Answer, Stream
from benchmarks.harness.work import Ask
from benchmarks.served.servers import Start

NAME = "python"
REQUEST_S = 600.0  # the most that one request may take
TRITON_MODEL = "tensorrt_llm"  # takes token ids
LONGEST_LINE = 1 << 20


class Piece(NamedTuple):
    """A part of an answer that has come, with its tokens; or the number of all tokens, which is said at the end."""

    tokens: int = 0
    total: int | None = None


Pieces = AsyncIterator[Piece]
Open = Callable[[Ask], Pieces]


def run(start: Start, wire: str, asks: Sequence[Ask], users: int, seconds: float) -> list[Answer]:
    """Send the requests. Returns an answer for each that was sent, failed ones with an error."""
    return asyncio.run(_run(start, wire, asks, users, seconds))


async def _run(start: Start, wire: str, asks: Sequence[Ask], users: int, seconds: float) -> list[Answer]:
    async with _opened(start, wire, users) as open_:
        waiting = iter(asks)
        until = time.perf_counter() + seconds
        answers: list[list[Answer]] = await asyncio.gather(*(_user(open_, waiting, until) for _ in range(users)))
    return [answer for several in answers for answer in several]


async def _user(open_: Open, waiting: Iterator[Ask], until: float) -> list[Answer]:
    answers: list[Answer] = []
    for ask in waiting:  # shared by all users
        answers.append(await _answer(open_, ask))
        if time.perf_counter() > until:
            break
    return answers


async def _answer(open_: Open, ask: Ask) -> Answer:
    stream = Stream(ask.turn)
    try:
        async with asyncio.timeout(REQUEST_S):
            async for piece in open_(ask):
                if piece.total is not None:
                    stream.tokens = piece.total
                else:
                    stream.add(piece.tokens)
    except TimeoutError:
        stream.error = f"no whole answer within {REQUEST_S:g} s"
    except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as failure:
        stream.error = f"{type(failure).__name__}: {failure}"[:300]
    return stream.answer()


class _opened:
    """The wire as a function from a request to the pieces of its answer, with its connections."""

    def __init__(self, start: Start, wire: str, users: int) -> None:
        self._start, self._wire, self._users = start, wire, users
        self._session: aiohttp.ClientSession | None = None
        self._clients: list[Any] = []

    async def __aenter__(self) -> Open:
        if self._wire == "grpc":
            return self._grpc
        timeout = aiohttp.ClientTimeout(total=None, sock_read=REQUEST_S)
        connector = aiohttp.TCPConnector(limit=self._users, force_close=True)  # some servers close them unannounced
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=LONGEST_LINE)
        return self._openai if self._wire == "openai" else self._generate

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
        for client in self._clients:
            await client.close()

    async def _openai(self, ask: Ask) -> Pieces:
        """A piece is a chunk with text. The last chunk has the number of tokens."""
        body = {**completion(ask), "model": self._start.model, "stream_options": {"include_usage": True}}
        async for event in self._events(f"{self._start.url}/v1/completions", {**body, "stream": True}):
            if event.get("choices") and event["choices"][0].get("text"):
                yield Piece(1)
            if usage := event.get("usage"):
                yield Piece(total=usage["completion_tokens"])

    async def _generate(self, ask: Ask) -> Pieces:
        """A piece is an event; it says how many tokens it has."""
        body = {
            "input_ids": ask.prompt,
            "input_lengths": len(ask.prompt),
            "request_output_len": ask.new,
            "streaming": True,
        }
        url = f"{self._start.http}/v2/models/{TRITON_MODEL}/generate_stream"
        async for event in self._events(url, body):
            if error := event.get("error"):
                raise ValueError(error)
            if length := event.get("sequence_length"):
                yield Piece(int(length))

    async def _events(self, url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        assert self._session is not None
        async with self._session.post(url, json=body) as response:
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    yield json.loads(line[6:])

    async def _grpc(self, ask: Ask) -> Pieces:
        """A piece is a response of the stream."""
        import tritonclient.grpc.aio as triton

        client = self._clients.pop() if self._clients else triton.InferenceServerClient(self._start.grpc)

        async def asked() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": TRITON_MODEL, "inputs": _inputs(ask)}

        try:
            async for result, error in client.stream_infer(asked(), stream_timeout=REQUEST_S):
                if error is not None:
                    raise ValueError(str(error))
                length = result.as_numpy("sequence_length")
                if length is not None and length.size:
                    yield Piece(int(length.flat[0]))
        finally:
            self._clients.append(client)


def completion(ask: Ask) -> dict[str, Any]:
    """The fields that every request to /v1/completions has, whichever server it goes to."""
    return {"prompt": ask.prompt, "max_tokens": ask.new, "ignore_eos": True, "temperature": 0}


def _inputs(ask: Ask) -> list[Any]:
    import tritonclient.grpc as triton

    values = {"input_ids": ask.prompt, "input_lengths": [len(ask.prompt)], "request_output_len": [ask.new]}
    made = []
    for name, value in values.items():
        made.append(triton.InferInput(name, [1, len(value)], "INT32"))
        made[-1].set_data_from_numpy(np.array([value], dtype=np.int32))
    made.append(triton.InferInput("streaming", [1, 1], "BOOL"))
    made[-1].set_data_from_numpy(np.array([[True]]))
    return made

"""AsyncEverbatchClient: EverbatchClient for asyncio.

async with AsyncEverbatchClient("127.0.0.1:8001") as client:
    async for chunk in client.stream("def main(", max_tokens=64):
        print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self, Unpack, overload

from client.address import ProtocolName
from client.client import next_attempt, prepared
from client.errors import ClientError
from client.messages import Completion, GenerateRequest, Message, TextChunk
from client.options import GenerateOptions, make_request
from client.resuming import Progress
from client.retry import Retry
from client.settings import DEFAULT_MODEL, DEFAULT_TIMEOUT_S, Settings, make_settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from client.async_conversation import AsyncConversation


class AsyncTransport(Protocol):
    """A protocol by which requests reach a server."""

    def stream(
        self, request: GenerateRequest, timeout_s: float, request_id: str
    ) -> AsyncGenerator[TextChunk, None]: ...
    async def close(self) -> None: ...


class AsyncEverbatchClient:
    """A connection to one text model of one server, for the tasks of one event loop."""

    def __init__(
        self,
        url: str | None = None,
        protocol: ProtocolName | None = None,
        model: str = DEFAULT_MODEL,
        namespace: str = "",
        api_key: str | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: Retry | None = None,
        ca_file: str | os.PathLike[str] | None = None,
    ) -> None:
        """Arguments and errors as for EverbatchClient. It may be made before the event loop runs."""
        self._settings = make_settings(
            url, protocol, model, namespace, api_key, timeout_s=timeout_s, retry=retry, ca_file=ca_file
        )
        self._transport = open_async_transport(self._settings)

    @property
    def url(self) -> str:
        return self._settings.address.url

    @property
    def namespace(self) -> str:
        """The namespace of requests that name none."""
        return self._settings.namespace

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """The whole answer at once; arguments as for stream(). Cancelling the task cancels the request. Raises
        ClientError.
        """
        request = make_request(prompt, messages, options, stream=False)
        return await self.complete(request, timeout_s=timeout_s, request_id=request_id)

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        timeout_s: float | None = None,
        request_id: str = "",
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """The whole reply to `messages`, by the model's chat template. Raises ClientError."""
        return await self.generate(messages=messages, timeout_s=timeout_s, request_id=request_id, **options)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[TextChunk, None]:
        """Yield pieces of text as they are generated; the last has `final` set. Not a coroutine: `async for` takes it.

        Leaving the loop cancels the request, at the next turn of the event loop; `contextlib.aclosing` does it at once. A
        server that does not stream (`triton.decoupled=false`) sends all of its answer as one piece.
        Raises TypeError and ValueError before anything is sent, and ClientError from the iterator, also in mid-stream.
        """
        request = make_request(prompt, messages, options)
        return self.send(request, timeout_s=timeout_s, request_id=request_id)

    def send(
        self, request: GenerateRequest, *, timeout_s: float | None = None, request_id: str = ""
    ) -> AsyncGenerator[TextChunk, None]:
        """stream() for a request that is already a value."""
        request, patience = prepared(self._settings, request, timeout_s, request_id)
        return repeated(self._transport, self._settings.retry, request, patience, request_id)

    async def complete(
        self, request: GenerateRequest, *, timeout_s: float | None = None, request_id: str = ""
    ) -> Completion:
        """generate() for a request that is already a value."""
        async with aclosing(self.send(request, timeout_s=timeout_s, request_id=request_id)) as chunks:
            return Completion.from_chunks([chunk async for chunk in chunks])

    async def embed(
        self,
        texts: Iterable[str],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        timeout_s: float | None = None,
    ) -> NDArray[np.float32]:
        """EverbatchClient.embed, in a thread and on a connection of its own, which a task that is cancelled ends."""
        from client.client import open_transport
        from client.embedding import embed

        with closing(open_transport(self._settings)) as transport:
            return await asyncio.to_thread(embed, transport, self._settings, texts, dimensions, normalize, timeout_s)

    def conversation(self, system: str | None = None, **options: Unpack[GenerateOptions]) -> AsyncConversation:
        """A conversation of several turns in a session of the server; `options` hold for every turn."""
        from client.async_conversation import AsyncConversation

        return AsyncConversation(self, system, **options)

    @overload
    async def map(
        self,
        prompts: Iterable[str | Sequence[Message]],
        *,
        concurrency: int = ...,
        progress: bool = ...,
        on_error: Literal["raise"] = ...,
        timeout_s: float | None = ...,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]: ...

    @overload
    async def map(
        self,
        prompts: Iterable[str | Sequence[Message]],
        *,
        concurrency: int = ...,
        progress: bool = ...,
        on_error: Literal["return"],
        timeout_s: float | None = ...,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion | ClientError]: ...

    async def map(
        self,
        prompts: Iterable[str | Sequence[Message]],
        *,
        concurrency: int = 8,
        progress: bool = False,
        on_error: Literal["raise", "return"] = "raise",
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion] | list[Completion | ClientError]:
        """Whole answers to many prompts (texts, or lists of messages), in their order; `concurrency` at the same time.

        `timeout_s`: for each. `progress`: a bar on standard error. `on_error`: "raise" cancels the rest at the first
        ClientError and raises it, "return" puts it in the place of the answer. Cancelling the task cancels all.
        """
        from client.batch import run_batch_async

        return await run_batch_async(self, prompts, concurrency, progress, on_error, timeout_s, options)

    async def close(self) -> None:
        """End the connection; streams that still run on it are cancelled."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def open_async_transport(settings: Settings) -> AsyncTransport:
    if settings.address.protocol == "grpc":
        from client.async_grpc_transport import AsyncGrpcTransport  # These imports take half a second.

        return AsyncGrpcTransport(settings)
    from client.async_http_transport import AsyncHttpTransport

    return AsyncHttpTransport(settings)


async def repeated(
    transport: AsyncTransport, retry: Retry, request: GenerateRequest, timeout_s: float, request_id: str
) -> AsyncGenerator[TextChunk, None]:
    """The chunks of a request, each once. It is sent again as `next_attempt` says, as long as time is left."""
    deadline = time.monotonic() + timeout_s
    attempt, progress = 0, Progress()
    while True:
        progress.begin()
        try:
            remaining_s = deadline - time.monotonic() if attempt else timeout_s
            async with aclosing(transport.stream(request, remaining_s, request_id)) as chunks:
                async for chunk in chunks:
                    if (new := progress.take(chunk)) is not None:
                        yield new if request.seed is None else replace(new, seed=request.seed)
            return
        except ClientError as error:
            now = time.monotonic()
            again = next_attempt(request, retry, attempt, error, progress, now)
            if again is None or now + again.pause_s >= deadline:
                raise
        await asyncio.sleep(again.pause_s)
        request = again.request
        attempt += 1

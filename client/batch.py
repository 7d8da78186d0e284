"""Many prompts at once: `map` of both clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from client.checks import check_type, kind_of
from client.client import open_transport, prepared, repeated
from client.errors import ClientError
from client.messages import Completion, GenerateRequest, Message
from client.options import make_request
from client.progress import BatchProgress
from client.settings import Settings

if TYPE_CHECKING:
    from client.async_client import AsyncEverbatchClient

Prompts = Iterable[str | Sequence[Message]]


def run_batch(
    settings: Settings,
    prompts: Prompts,
    concurrency: int,
    progress: bool,
    on_error: str,
    timeout_s: float | None,
    options: Mapping[str, Any],
) -> list[Any]:
    """One thread for each request that runs, over a transport of their own: closing it cancels them all."""
    requests = batch_requests(prompts, concurrency, on_error, options)
    transport = open_transport(settings)

    def answer(request: GenerateRequest) -> Completion | ClientError:
        ready, patience = prepared(settings, request, timeout_s, "")
        try:
            return Completion.from_chunks(repeated(transport, settings.retry, ready, patience, ""))
        except ClientError as error:
            if on_error == "raise":
                raise
            return error

    answers: list[Completion | ClientError | None] = [None] * len(requests)
    with BatchProgress(len(requests), shown=progress) as bar, ThreadPoolExecutor(concurrency) as pool:
        try:
            places = {pool.submit(answer, request): index for index, request in enumerate(requests)}
            for future in as_completed(places):
                answers[places[future]] = found = future.result()
                bar.add(found)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            transport.close()
    return answers


async def run_batch_async(
    client: AsyncEverbatchClient,
    prompts: Prompts,
    concurrency: int,
    progress: bool,
    on_error: str,
    timeout_s: float | None,
    options: Mapping[str, Any],
) -> list[Any]:
    """One task for each request that runs."""
    requests = batch_requests(prompts, concurrency, on_error, options)
    answers: list[Completion | ClientError | None] = [None] * len(requests)
    waiting = iter(enumerate(requests))

    async def work(bar: BatchProgress) -> None:
        for index, request in waiting:
            found: Completion | ClientError
            try:
                found = await client.complete(request, timeout_s=timeout_s)
            except ClientError as error:
                if on_error == "raise":
                    raise
                found = error
            answers[index] = found
            bar.add(found)

    with BatchProgress(len(requests), shown=progress) as bar:
        tasks = [asyncio.create_task(work(bar)) for _ in range(min(concurrency, len(requests)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return answers


def batch_requests(
    prompts: Prompts, concurrency: int, on_error: str, options: Mapping[str, Any]
) -> list[GenerateRequest]:
    """All requests, checked before the first is sent. Raises TypeError and ValueError that name the argument."""
    check_type("concurrency", concurrency, int, "an int")
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}, at least 1 is expected")
    if on_error not in ("raise", "return"):
        raise ValueError(f"on_error is {on_error!r}, 'raise' or 'return' is expected")
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts is {kind_of(prompts)}, a list of texts or of lists of messages is expected")
    requests = []
    for index, prompt in enumerate(prompts):
        with naming(f"prompts[{index}]"):
            text, messages = (prompt, None) if isinstance(prompt, str) else (None, prompt)
            requests.append(make_request(text, messages, options, stream=False))
    return requests


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Put the place before the sentence of a TypeError or ValueError."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{place}: {error}") from None

"""The replies of one request, side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from gateway.errors import GatewayError
from gateway.triton_client import Job, Piece, TritonLink, Usage
from gateway.visit import Visit

READ_AHEAD = 4  # pieces that wait for the client when there are several choices


async def pieces(link: TritonLink, jobs: list[Job], visit: Visit) -> AsyncGenerator[tuple[int, Piece], None]:
    """Yield (choice, piece) as they come, until each choice has had its last. Raises GatewayError.

    Leaving early cancels all of them. The order within a choice is kept.
    """
    source = _one(link, jobs[0]) if len(jobs) == 1 else _merged(link, jobs)
    async with aclosing(source):
        async for index, piece in source:
            visit.count(piece, jobs[index].counts_prompt)
            yield index, piece


async def _one(link: TritonLink, job: Job) -> AsyncGenerator[tuple[int, Piece], None]:
    async with aclosing(link.stream(job)) as source:
        async for piece in source:
            yield 0, piece


async def _merged(link: TritonLink, jobs: list[Job]) -> AsyncGenerator[tuple[int, Piece], None]:
    waiting: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue(READ_AHEAD)
    workers = [asyncio.ensure_future(_feed(waiting, link, index, job)) for index, job in enumerate(jobs)]
    open_choices = len(jobs)
    try:
        while open_choices:
            index, piece = await waiting.get()
            if isinstance(piece, Exception):
                raise piece
            open_choices -= piece.finish_reason is not None
            yield index, piece
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _feed(waiting: asyncio.Queue[tuple[int, Piece | Exception]], link: TritonLink, index: int, job: Job) -> None:
    try:
        async with aclosing(link.stream(job)) as source:
            async for piece in source:
                await waiting.put((index, piece))
    except Exception as error:  # Whoever reads the queue raises it again.
        await waiting.put((index, error))


async def whole(link: TritonLink, jobs: list[Job], visit: Visit) -> list[Piece]:
    """The complete replies, in the order of the jobs. Raises GatewayError."""
    found: list[Piece | None] = [None] * len(jobs)
    async with aclosing(pieces(link, jobs, visit)) as source:
        async for index, piece in source:
            found[index] = joined(found[index], piece)
    replies = [piece for piece in found if piece is not None]
    if len(replies) != len(jobs):
        raise GatewayError(500, "a reply is missing", code="internal_error")
    return replies


def joined(before: Piece | None, piece: Piece) -> Piece:
    """Two pieces of one choice as one."""
    if before is None:
        return piece
    logprobs = None if piece.logprobs is None else [*(before.logprobs or []), *piece.logprobs]
    return Piece(
        before.text + piece.text,
        before.token_ids + piece.token_ids,
        logprobs,
        piece.finish_reason,
        piece.stop_reason,
        piece.usage,
    )


def total_usage(usages: list[Usage], choices_per_prompt: int) -> dict[str, object]:
    """OpenAI's usage: each prompt is counted once, whatever its choices."""
    prompts = usages[::choices_per_prompt]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
    }

"""The replies of one request, side by side."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from gateway.errors import GatewayError
from gateway.logprobs import TextTokens
from gateway.request_context import RequestContext
from gateway.resuming import OnWait, nothing, replies
from gateway.triton_client import Job, Piece, TritonLink, Usage

READ_AHEAD = 4  # pieces that wait for the client when there are several prompts


async def pieces(
    link: TritonLink, jobs: list[Job], context: RequestContext, on_wait: OnWait = nothing
) -> AsyncGenerator[tuple[int, Piece], None]:
    """Yield (choice, piece) as they come, until each choice has had its last. Raises GatewayError. `on_wait`: see `replies`.

    The choices are those of the first job, then those of the second, and so on; each job has as many. Leaving early cancels all
    of them. The order within a choice is kept.
    """
    source = _one(link, jobs[0], on_wait) if len(jobs) == 1 else _merged(link, jobs, on_wait)
    shown: defaultdict[int, TextTokens] = defaultdict(TextTokens)
    async with aclosing(source):
        async for index, piece in source:
            context.count(piece)
            piece.echoes = bool(jobs[index].request.get("echo"))
            choice = index * jobs[0].choices + piece.index
            if piece.logprobs is not None:
                is_last, ended_by_last = piece.finish_reason is not None, _ended_by_last(jobs[index], piece)
                piece.logprobs = shown[choice].push(piece.logprobs, is_last, ended_by_last)
            yield choice, piece


def _ended_by_last(job: Job, piece: Piece) -> bool:
    """True if the last token of a piece has ended the answer and is no part of its text."""
    ended = isinstance(piece.stop_reason, int) and piece.token_ids[-1:] == [piece.stop_reason]
    return ended and not job.request.get("include_stop_in_output")


async def _one(link: TritonLink, job: Job, on_wait: OnWait) -> AsyncGenerator[tuple[int, Piece], None]:
    async with aclosing(replies(link, job, on_wait)) as source:
        async for piece in source:
            yield 0, piece


async def _merged(link: TritonLink, jobs: list[Job], on_wait: OnWait) -> AsyncGenerator[tuple[int, Piece], None]:
    waiting: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(READ_AHEAD)
    workers = [asyncio.ensure_future(_feed(waiting, link, index, job, on_wait)) for index, job in enumerate(jobs)]
    open_jobs = len(jobs)
    try:
        while open_jobs:
            index, piece = await waiting.get()
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                open_jobs -= 1
            else:
                yield index, piece
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _feed(
    waiting: asyncio.Queue[tuple[int, Piece | Exception | None]],
    link: TritonLink,
    index: int,
    job: Job,
    on_wait: OnWait,
) -> None:
    """Put what comes of a job into the queue, and None behind it."""
    try:
        async with aclosing(replies(link, job, on_wait)) as source:
            async for piece in source:
                await waiting.put((index, piece))
        await waiting.put((index, None))
    except Exception as error:  # Whoever reads the queue raises it again.
        await waiting.put((index, error))


class Reply:
    """The pieces of one reply so far."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.logprobs: list[msgspec.Raw] | None = None
        self.finish_reason: str | None = None
        self.usage = Usage()
        self.token_ids: list[int] = []
        self.prompt_token_ids: list[int] | None = None  # where they are asked for
        self.prompt_logprobs: list[msgspec.Raw] | None = None  # one for each token of the prompt

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def add(self, piece: Piece) -> None:
        self._texts.append(piece.text)
        if (logprobs := piece.shown_logprobs) is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(logprobs)
        self.token_ids += piece.token_ids
        self.prompt_logprobs = piece.prompt_logprobs or self.prompt_logprobs
        if piece.prompt is not None:
            self.prompt_token_ids = piece.prompt.token_ids
        self.finish_reason = piece.finish_reason
        self.usage = piece.usage or self.usage


async def each_last(
    link: TritonLink,
    jobs: list[Job],
    context: RequestContext,
    at_once: int,
    named: Callable[[GatewayError, int], GatewayError],
) -> list[Piece]:
    """The last piece of each job, `at_once` of which run together. Raises GatewayError: that of a job, which ends the others.

    `named`: makes the error to raise of that of a job and its index.
    """
    free = asyncio.Semaphore(at_once)

    async def last(index: int, job: Job) -> Piece:
        try:
            async with free, aclosing(replies(link, job)) as source:
                async for piece in source:
                    context.count(piece)
                    found = piece
        except GatewayError as error:
            raise named(error, index) from None
        return found

    workers = [asyncio.ensure_future(last(index, job)) for index, job in enumerate(jobs)]
    try:
        return await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def whole(link: TritonLink, jobs: list[Job], context: RequestContext) -> list[Reply]:
    """The complete replies, in the order of the choices. Raises GatewayError."""
    replies = [Reply() for job in jobs for _ in range(job.choices)]
    async with aclosing(pieces(link, jobs, context)) as source:
        async for index, piece in source:
            replies[index].add(piece)
    if any(reply.finish_reason is None for reply in replies):
        raise GatewayError(500, "a reply is missing", code="internal_error")
    return replies


def total_usage(usages: list[Usage], choices_per_prompt: int) -> dict[str, object]:
    """OpenAI's usage: each prompt is counted once, whatever its choices, and each token that was generated.

    Of a prompt only what was there before counts as cached, not what its first choice has computed for the others.
    """
    prompts = [usages[i : i + choices_per_prompt] for i in range(0, len(usages), choices_per_prompt)]
    prompt_tokens = sum(choices[0].prompt_tokens for choices in prompts)
    completion_tokens = sum(usage.completion_tokens + usage.discarded_tokens for usage in usages)
    cached_tokens = sum(min(usage.cached_tokens for usage in choices) for choices in prompts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning_tokens for usage in usages)},
    }

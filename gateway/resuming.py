"""Replies whose server has ended: they are asked for again when it is back, and go on where they were.

    pieces of a job -> connection lost -> wait until Triton is ready -> the request once more, with what has come of it -> pieces

A stream goes on from its middle: the Triton model takes the token ids that have come (docs/replay.md). Of a request that does not
stream nothing has come, so it is sent as it was. A request in whose midst the server was lost MOST_LOSSES times is not sent any
more: it may be the cause.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

from gateway.errors import ConnectionLost, GatewayError, ServerLost
from gateway.triton_client import Job, Piece, TritonLink

MOST_LOSSES = 2
POLL_S = 0.25
KEEP_ALIVE_S = 5.0  # between two signs of life to a client that waits; proxies often end what is silent for a minute

OnWait = Callable[[], Awaitable[None]]


async def nothing() -> None:
    """The default: the client is not notified while it waits."""


class Progress:
    """The output so far of a job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._seed: int | None = None
        self._token_ids: list[list[int]] = [[] for _ in range(job.choices)]
        self._ended = [False] * job.choices
        self._knows_prompt: set[int] = set()  # replies that have told what the prompt is
        self._told_prompt = 0  # replies that have brought the prompt's log-probabilities

    def note(self, piece: Piece) -> None:
        """Add a piece to the output so far. Facts about the prompt that its reply has told before are removed from the piece."""
        if piece.prompt is not None and piece.index in self._knows_prompt:
            piece.prompt = None
        elif piece.prompt is not None:
            self._knows_prompt.add(piece.index)
        self._seed = piece.seed if self._seed is None else self._seed
        self._token_ids[piece.index] += piece.token_ids
        self._ended[piece.index] |= piece.finish_reason is not None
        self._told_prompt += piece.prompt_logprobs is not None

    def rest(self) -> Job | None:
        """The job for what has not come; None where that cannot be asked for."""
        job = self._job
        if not any(self._token_ids):
            return None if self._told_prompt or any(self._ended) else job
        if not job.request.get("stream") or self._told_prompt not in (0, job.choices):
            return None
        had = [{"token_ids": ids, "ended": ended} for ids, ended in zip(self._token_ids, self._ended, strict=True)]
        request = job.request | {"resume": had}
        if self._told_prompt:
            del request["prompt_logprobs"]
        if self._seed is not None:
            request["seed"] = self._seed
        return replace(job, request=request, resumed=sum(self._ended))


async def replies(link: TritonLink, job: Job, on_wait: OnWait = nothing) -> AsyncGenerator[Piece, None]:
    """Yield what comes of a job, over ends of the server if it is back within `link.patience_s`. `on_wait`: called every few
    seconds meanwhile. Raises GatewayError.
    """
    progress, losses = Progress(job), 0
    asked: Job | None = job
    until = 0.0  # the end of the present wait
    while asked is not None:
        try:
            async with aclosing(link.stream(asked)) as source:
                async for piece in source:
                    progress.note(piece)
                    yield piece
            return
        except GatewayError as error:
            if isinstance(error, ConnectionLost) and error.was_taken:
                losses += 1
                until = time.monotonic() + link.patience_s
                asked = progress.rest()
            if not (link.patience_s and losses and error.status in (429, 503)) or asked is None:
                raise
            if losses >= MOST_LOSSES:
                raise ServerLost(losses) from None
            await _back(link, until, error, on_wait)


async def _back(link: TritonLink, until: float, error: GatewayError, on_wait: OnWait) -> None:
    """Return when Triton is ready. Raises the error if it is not until then."""
    tell_at = 0.0
    while (now := time.monotonic()) < until:
        if now >= tell_at:
            tell_at = now + KEEP_ALIVE_S
            await on_wait()
        await asyncio.sleep(POLL_S)
        if await link.is_ready():
            return
    raise error

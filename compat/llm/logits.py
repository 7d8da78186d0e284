"""Logits processors of the LLM API, as the post-processors that the engine calls (backend/worker/post_processors.py).

On a CPU a processor gets None as its stream, where the engine passes 0. The request id that it gets is the client id, which
the caller knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from compat.llm.errors import ParameterError


def in_order(processors: Any) -> Callable[..., Any]:
    """One function for a processor, or for a list of processors that run one after the other. Raises ParameterError.

    Each changes the logits [1, beams, vocab] in place, or returns others.
    """
    each = list(processors) if isinstance(processors, Sequence) else [processors]
    for processor in each:
        if not callable(processor):
            raise ParameterError(
                f"logits_processor holds a {type(processor).__name__}, which cannot be called; give a LogitsProcessor"
            )

    def run(request_id: int, logits: Any, token_ids: list[list[int]], stream: int, client_id: int | None) -> Any:
        known_id = request_id if client_id is None else client_id
        for processor in each:
            returned = processor(known_id, logits, token_ids, _stream(logits, stream), client_id)
            logits = logits if returned is None else returned
        return logits

    return run


def batched(processor: Callable[..., Any]) -> Callable[..., Any]:
    """One function for a BatchedLogitsProcessor, which takes a list of each argument."""

    def run(
        request_ids: list[int],
        logits: list[Any],
        token_ids: list[list[list[int]]],
        stream: int,
        client_ids: list[int | None],
    ) -> Any:
        known_ids = [mine if client is None else client for mine, client in zip(request_ids, client_ids)]
        return processor(known_ids, logits, token_ids, _stream(logits[0], stream), client_ids)

    return run


def _stream(logits: Any, stream: int) -> int | None:
    return stream if logits.is_cuda else None

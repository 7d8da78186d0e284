"""The dim line under an answer: tokens, speed, time to the first token, and what was reused of the KV cache."""

from __future__ import annotations

import time
from collections.abc import Callable

from client.messages import Completion, TextChunk


class AnswerClock:
    """Collects the chunks of one answer and when they came."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._first: float | None = None
        self._last = self._began
        self.chunks: list[TextChunk] = []

    def add(self, chunk: TextChunk) -> None:
        self._last = self._clock()
        if self._first is None and (chunk.text or chunk.num_output_tokens):
            self._first = self._last
        self.chunks.append(chunk)

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    def completion(self) -> Completion:
        """The answer so far, put together."""
        return Completion.from_chunks(self.chunks)

    def summary(self) -> str:
        """For example: 64 tokens, 81.3 tokens/s, first after 25 ms, reused 212 of 230 prompt tokens, length, seed 7."""
        whole = self.completion()
        parts = [f"{whole.num_output_tokens} token{'s' * (whole.num_output_tokens != 1)}"]
        if self._first is not None:
            # The server's clock is used where the server tells it, because chunks may reach a busy client in a bunch.
            seconds = self._last - self._first if whole.generation_s is None else whole.generation_s
            if whole.num_output_tokens > 1 and seconds > 0:
                parts.append(f"{(whole.num_output_tokens - 1) / seconds:.1f} tokens/s")
            parts.append(f"first after {(self._first - self._began) * 1000:.0f} ms")
        parts += [text for text in (reuse(whole), whole.finish_reason) if text]
        if whole.seed is not None:
            parts.append(f"seed {whole.seed}")
        return ", ".join(parts)


def reuse(whole: Completion) -> str:
    """`reused 212 of 230 prompt tokens`, with what had to be recomputed after an eviction; empty if the server did not
    say.
    """
    if whole.num_cached_tokens is None or whole.num_input_tokens is None:
        return ""
    text = f"reused {whole.num_cached_tokens} of {whole.num_input_tokens} prompt tokens"
    return f"{text} ({whole.num_recomputed_tokens} recomputed)" if whole.num_recomputed_tokens else text

"""Streams whose server has ended: the request is sent again when it is back, and what has come of it is left out.

The answer has the same bytes again, because a request that samples has a seed. The server computes it from its beginning. (The
model `everbatch` takes back what has come, and goes on from there: docs/replay.md. The text models tell no token ids.)
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from client.errors import ClientError
from client.messages import TextChunk

MOST_LOSSES = 2  # a request in whose midst the server has ended so often is not sent again: it may be the cause
PAUSE_S = 0.5  # between two looks for the server
_AWAY = ("UNAVAILABLE", "UNREACHABLE")
_LOST = re.compile("^the connection to .* broke|without a final response")


class Progress:
    """The output so far of a request, over all its attempts."""

    def __init__(self) -> None:
        self._characters: Counter[int] = Counter()  # by sequence
        self._tokens: Counter[int] = Counter()
        self._num_chunks = self._num_here = 0  # in all, and in this attempt, of those without beams
        self._characters_here: Counter[int] = Counter()
        self._tokens_here: Counter[int] = Counter()
        self._losses = 0
        self._lost_at_s = 0.0

    @property
    def has_begun(self) -> bool:
        return self._num_chunks > 0

    def begin(self) -> None:
        """The request is sent."""
        self._num_here = 0
        self._characters_here.clear()
        self._tokens_here.clear()

    def take(self, chunk: TextChunk) -> TextChunk | None:
        """The new part of a chunk; None if there is none."""
        index, num_tokens = chunk.sequence, chunk.num_output_tokens or 0
        self._num_here += 1
        if chunk.texts:  # beams, from their beginnings
            is_new = chunk.final or self._num_here > self._num_chunks
            self._num_chunks = max(self._num_chunks, self._num_here)
            return chunk if is_new else None
        self._num_chunks += 1
        known = max(0, self._characters[index] - self._characters_here[index])
        known_tokens = min(num_tokens, max(0, self._tokens[index] - self._tokens_here[index]))
        self._characters_here[index] += len(chunk.text)
        self._tokens_here[index] += num_tokens
        self._characters[index] = max(self._characters[index], self._characters_here[index])
        self._tokens[index] = max(self._tokens[index], self._tokens_here[index])
        if not (known or known_tokens):
            return chunk
        text, is_end = chunk.text[known:], chunk.final or chunk.finish_reason is not None
        if not (text or is_end or num_tokens > known_tokens):
            return None
        probs = None if chunk.log_probs is None else chunk.log_probs[known_tokens:]
        count = None if chunk.num_output_tokens is None else num_tokens - known_tokens
        return replace(chunk, text=text, log_probs=probs, num_output_tokens=count)

    def pause_s(self, error: ClientError, resume_s: float, now_s: float) -> float | None:
        """Seconds until the request is sent again, of which something has come; None if it is not. `now_s`: monotonic."""
        if not resume_s or error.code not in _AWAY:
            return None
        if self._num_here or _LOST.search(str(error)):
            self._losses, self._lost_at_s = self._losses + 1, now_s
        is_over = self._losses >= MOST_LOSSES or now_s - self._lost_at_s + PAUSE_S > resume_s
        return None if is_over else PAUSE_S

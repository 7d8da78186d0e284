"""How long the parts of an answer took, as the endpoint sees them: for wires that tell it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from gateway.triton_client import Piece, Usage


@dataclass
class Stopwatch:
    """Starts when it is made; `take` each piece as it comes. Times are in seconds.

    The prompt's time ends with the first piece, so that it has the wait in the queue and the first token in it.
    """

    began: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None
    usage: Usage = field(default_factory=Usage)
    files_left_out: int = 0

    def take(self, piece: Piece) -> None:
        self.last = time.perf_counter()
        self.first = self.last if self.first is None else self.first
        if piece.prompt is not None:
            self.usage.prompt_tokens, self.usage.cached_tokens = piece.prompt.prompt_tokens, piece.prompt.cached_tokens
            self.files_left_out = piece.prompt.files_left_out
        self.usage.completion_tokens += len(piece.token_ids)
        self.usage = piece.usage or self.usage

    @property
    def prompt_s(self) -> float:
        return 0.0 if self.first is None else self.first - self.began

    @property
    def output_s(self) -> float:
        return 0.0 if self.first is None or self.last is None else self.last - self.first

    @property
    def total_s(self) -> float:
        return time.perf_counter() - self.began

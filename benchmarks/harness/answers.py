"""The one collector of streams: what came back for each request, and the figures of a cell."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field


class DriverFailed(Exception):
    """A driver gave no figures for a cell; the message is one sentence."""


@dataclass(frozen=True)
class Limits:
    """A request is good if it meets both, in milliseconds."""

    first_token_ms: float = 2000
    inter_token_ms: float = 100


@dataclass(frozen=True)
class Answer:
    """One request. Times in seconds on one clock of the driver; `gaps_s`: from each piece of the answer to the next.

    `recomputed`: tokens that were computed again because their KV had been evicted, where the driver learns of them.
    """

    started_s: float
    first_s: float
    ended_s: float
    tokens: int
    gaps_s: list[float] = field(default_factory=list)
    turn: int = 0
    error: str = ""
    recomputed: int | None = None

    @property
    def first_token_ms(self) -> float:
        """From the request to the first piece of the answer."""
        return (self.first_s - self.started_s) * 1e3

    @property
    def inter_token_ms(self) -> float:
        """Mean time from one token to the next: from the first piece to the last, over the tokens but one (as AIPerf has it)."""
        return (self.ended_s - self.first_s) * 1e3 / max(1, self.tokens - 1)


class Stream:
    """Notes the pieces of one answer as they come. Its clock runs from when it is made."""

    def __init__(self, turn: int = 0) -> None:
        self.tokens = 0
        self.error = ""
        self.recomputed: int | None = None
        self._turn = turn
        self._started = time.perf_counter()
        self._times: list[float] = []

    def add(self, tokens: int) -> None:
        """A piece with so many tokens has come just now."""
        self._times.append(time.perf_counter())
        self.tokens += tokens

    def answer(self) -> Answer:
        """What has come until now; an answer without a piece is an error."""
        error = self.error or ("" if self._times else "the answer was empty")
        now = time.perf_counter()
        first, last = (self._times[0], self._times[-1]) if self._times else (self._started, now)
        gaps = [after - before for before, after in zip(self._times, self._times[1:])]
        return Answer(self._started, first, last, self.tokens, gaps, self._turn, error, self.recomputed)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed: one of the values themselves."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def figures_of(answers: Sequence[Answer], limits: Limits) -> dict[str, float]:
    """The figures of one measurement of one cell. Raises DriverFailed when no request succeeded."""
    good = [answer for answer in answers if not answer.error]
    if not good:
        raise DriverFailed(f"no request succeeded; {answers[0].error if answers else 'none was sent'}")
    took_s = max(answer.ended_s for answer in answers) - min(answer.started_s for answer in answers)
    within = [
        answer
        for answer in good
        if answer.first_token_ms <= limits.first_token_ms and answer.inter_token_ms <= limits.inter_token_ms
    ]
    tokens = sum(answer.tokens for answer in good)
    figures: dict[str, float] = {
        "requests": len(good),
        "failed": len(answers) - len(good),
        "seconds": took_s,
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / took_s,
        "goodput_per_s": len(within) / took_s,
    }
    figures |= _percentiles("first_token_ms", [answer.first_token_ms for answer in good])
    figures |= _percentiles("inter_token_ms", [answer.inter_token_ms for answer in good if answer.tokens > 1])
    figures |= _percentiles("gap_ms", [gap * 1e3 for answer in good for gap in answer.gaps_s])
    figures |= _percentiles("returning_first_token_ms", [answer.first_token_ms for answer in good if answer.turn])
    recomputed = [answer.recomputed for answer in good if answer.turn and answer.recomputed is not None]
    return figures | ({"recomputed_per_turn": sum(recomputed) / len(recomputed)} if recomputed else {})


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}_p50": percentile(values, 0.5), f"{name}_p99": percentile(values, 0.99)}

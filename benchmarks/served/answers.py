"""What came back for each request, and the figures of a cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.served.options import Limits


class DriverFailed(Exception):
    """A driver gave no figures for a cell; the message is one sentence."""


@dataclass(frozen=True)
class Answer:
    """One request. Times in seconds on one clock of the driver; `gaps_s`: from each piece of the answer to the next."""

    started_s: float
    first_s: float
    ended_s: float
    tokens: int
    gaps_s: list[float] = field(default_factory=list)
    turn: int = 0
    error: str = ""

    @property
    def first_token_ms(self) -> float:
        """From the request to the first piece of the answer."""
        return (self.first_s - self.started_s) * 1e3

    @property
    def inter_token_ms(self) -> float:
        """Mean time from one token to the next: from the first piece to the last, over the tokens but one (as AIPerf has it)."""
        return (self.ended_s - self.first_s) * 1e3 / max(1, self.tokens - 1)


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
    return figures


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}_p50": percentile(values, 0.5), f"{name}_p99": percentile(values, 0.99)}

"""Histograms that the engine counts. Their bounds are vLLM's (vllm/v1/metrics/loggers.py), so that its dashboards fit."""

from __future__ import annotations

from bisect import bisect_left

import msgspec
from msgspec import Struct

_SECONDS_TO_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_SECONDS_BETWEEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_SECONDS_OF_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_LENGTHS = tuple(float(digit * 10**power) for power in range(8) for digit in (1, 2, 5))
_STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))

# Upper bounds of the buckets, by name of the distribution.
BOUNDS: dict[str, tuple[float, ...]] = {
    "first_token_s": _SECONDS_TO_TOKEN,  # from arrival in the engine to the first token
    "between_tokens_s": _SECONDS_BETWEEN,  # between two steps that brought tokens of a sequence
    "per_token_s": _SECONDS_BETWEEN,  # the mean of the same of a whole sequence
    "total_s": _SECONDS_OF_REQUEST,  # from arrival to the end
    "queue_s": _SECONDS_OF_REQUEST,  # from arrival to the first admission
    "context_s": _SECONDS_OF_REQUEST,  # from the first admission to the first token
    "generation_s": _SECONDS_OF_REQUEST,  # from the first token to the last one
    "run_s": _SECONDS_OF_REQUEST,  # from the first admission to the last token
    "prompt_tokens": _LENGTHS,
    "computed_prompt_tokens": _LENGTHS,  # without those whose KV was found
    "output_tokens": _LENGTHS,  # output tokens of one sequence
    "longest_output_tokens": _LENGTHS,  # output tokens of a request's longest sequence
    "max_tokens": _LENGTHS,  # as the request has them
    "num_sequences": (1.0, 2.0, 5.0, 10.0, 20.0),  # sequences that a request returns
    "step_tokens": _STEP_TOKENS,  # that a step ran
}


class Histogram(Struct):
    """`counts`: values in each bucket, not added up; the last one is of those above all bounds."""

    counts: list[int]
    total: float = 0.0  # sum of all values


class Distributions(Struct):
    """All histograms of an engine, since it was started."""

    histograms: dict[str, Histogram] = msgspec.field(
        default_factory=lambda: {name: Histogram([0] * (len(bounds) + 1)) for name, bounds in BOUNDS.items()}
    )

    def add(self, name: str, value: float, times: int = 1) -> None:
        """Count `value`, `times` times. KeyError for a name that is not in BOUNDS."""
        histogram = self.histograms[name]
        histogram.counts[bisect_left(BOUNDS[name], value)] += times
        histogram.total += value * times

    def copy(self) -> Distributions:
        return Distributions({name: Histogram(list(of.counts), of.total) for name, of in self.histograms.items()})

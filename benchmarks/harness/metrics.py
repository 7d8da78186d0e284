"""The figures that are shown and compared: their names, units, and which way is better."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """`key`: in the results. `more_is_better`: as with tokens/s."""

    key: str
    title: str
    unit: str
    more_is_better: bool = False


METRICS = (
    Metric("output_tokens_per_s", "output", "tokens/s", more_is_better=True),
    Metric("goodput_per_s", "goodput", "requests/s", more_is_better=True),
    Metric("first_token_ms_p50", "first token, median", "ms"),
    Metric("first_token_ms_p99", "first token, p99", "ms"),
    Metric("inter_token_ms_p50", "inter-token latency, median", "ms"),
    Metric("inter_token_ms_p99", "inter-token latency, p99", "ms"),
    Metric("gap_ms_p99", "longest gaps, p99", "ms"),
    Metric("returning_first_token_ms_p50", "first token when returning, median", "ms"),
    Metric("recomputed_per_turn", "computed again in a turn", "tokens"),
    Metric("speed_up", "speed-up", "times", more_is_better=True),
)
SHOWN = ("output_tokens_per_s", "first_token_ms_p50", "inter_token_ms_p50", "inter_token_ms_p99", "goodput_per_s")
BY_KEY = {metric.key: metric for metric in METRICS}


def written(value: float) -> str:
    """Three digits: `1,234`, `56.7`, `0.123`."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 and value % 1 else f"{value:.3g}"

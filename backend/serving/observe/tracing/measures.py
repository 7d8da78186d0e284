"""OpenTelemetry's metrics of a generative AI server, counted from requests that have ended."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from backend.serving.observe.ended import EndedRow
from backend.serving.observe.tracing.spans import FAILED

# Names and bounds: semantic conventions for generative AI, "GenAI metrics", in seconds.
_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
BOUNDS = {
    "gen_ai.server.request.duration": _DURATION,
    "gen_ai.server.time_to_first_token": _FIRST_TOKEN,
    "gen_ai.server.time_per_output_token": _PER_TOKEN,
}


class MeasureKey(NamedTuple):
    name: str
    error_type: str  # empty: it did not fail


class Points:
    """One histogram. `counts`: values in each bucket; the last one is of those above all bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Measures:
    """The histograms since the model was loaded. One thread uses it."""

    def __init__(self) -> None:
        self.points: dict[MeasureKey, Points] = {}

    def add(self, row: EndedRow) -> None:
        failed = row.reason in FAILED
        self._add(MeasureKey("gen_ai.server.request.duration", (row.code or row.reason) if failed else ""), row.total_s)
        if failed:
            return
        if row.first_token_s is not None:
            self._add(MeasureKey("gen_ai.server.time_to_first_token", ""), row.first_token_s)
        if row.inter_token_s is not None:
            self._add(MeasureKey("gen_ai.server.time_per_output_token", ""), row.inter_token_s)

    def _add(self, key: MeasureKey, value: float) -> None:
        if key not in self.points:
            self.points[key] = Points(BOUNDS[key.name])
        self.points[key].add(value)

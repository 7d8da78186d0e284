"""The statistics of several replicas as those of one engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from backend.api.stats import EngineStats

_GREATEST = {"iter", "timestamp_ns", "iter_latency_ms", "started_ns", "tokens_per_block", "secondary_block_bytes"}
_LEAST = {"uptime_s"}


def total_stats(replicas: Sequence[EngineStats]) -> EngineStats:
    """Sums of counts and of memory; of times, and of numbers that all replicas share, the greatest; the shortest uptime."""
    total: EngineStats = _total(list(replicas))
    return total


def _total(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Struct):
        fields = {name: [getattr(each, name) for each in values] for name in first.__struct_fields__}
        return type(first)(**{name: _combined(name, of) for name, of in fields.items()})
    if isinstance(first, dict):
        keys = dict.fromkeys(key for each in values for key in each)
        return {key: _total([each[key] for each in values if key in each]) for key in keys}
    if isinstance(first, list):
        return [sum(of) for of in zip(*values, strict=True)]
    return sum(values)


def _combined(name: str, values: list[Any]) -> Any:
    if name in _GREATEST:
        return max(values)
    return min(values) if name in _LEAST else _total(values)

"""What a guide costs in decoding: steps of the same number of rows with and without one, in turns within one process."""

from __future__ import annotations

import json
import statistics
import time

from backend.api import Request, SamplingConfig
from backend.api.guide import Guide, GuideType
from benchmarks.guides.engine import Bench

PROMPT = list(range(10, 42))
STEPS = 64
# An object of free text that does not end within the steps: as a mask it is neither the cheapest nor the dearest.
SCHEMA = {
    "type": "object",
    "properties": {"items": {"type": "array", "minItems": 1000, "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 24}, "count": {"type": "integer", "minimum": 0, "maximum": 9999},
                       "kind": {"enum": ["red", "green", "blue"]}, "ok": {"type": "boolean"}},
        "required": ["name", "count", "kind", "ok"], "additionalProperties": False,
    }}},
    "required": ["items"],
    "additionalProperties": False,
}  # fmt: skip


def measure(model: str, rows: int, rounds: int) -> str:
    bench = Bench(model, rows, rows * (len(PROMPT) + 2 * STEPS + 64))
    guide = Guide(GuideType.JSON_SCHEMA, json.dumps(SCHEMA))
    _steps_per_s(bench, rows, guide)  # warm
    _steps_per_s(bench, rows, None)
    with_guide, without = [], []
    for _ in range(rounds):
        with_guide.append(_steps_per_s(bench, rows, guide))
        without.append(_steps_per_s(bench, rows, None))
    ratio = statistics.median(a / b for a, b in zip(with_guide, without))
    bench.core.workers.shutdown()
    return (
        f"{rows} rows, {rounds} rounds of {STEPS} steps, medians: with a guide {rows * statistics.median(with_guide):,.0f} "
        f"tokens/s, without {rows * statistics.median(without):,.0f}, ratio of neighbours {ratio:.3f}"
    )


def _steps_per_s(bench: Bench, rows: int, guide: Guide | None) -> float:
    """Of steps in which all rows generate. Every row samples with its own seed, so that they differ."""
    ids = [
        bench.send(
            Request(
                [*PROMPT, 50 + row],
                2 * STEPS,
                sampling_config=SamplingConfig(temperature=1.0, seed=row),
                end_ids=bench.core.model.eos_ids if guide else (),
                guide=guide,
            )
        )
        for row in range(rows)
    ]
    bench.settle()
    while any(seq.num_output_tokens < 2 for seq in [*bench.core.scheduler.running, *bench.core.scheduler.waiting]):
        bench.turn()
    started = time.perf_counter()
    for _ in range(STEPS):
        bench.turn()
    elapsed = time.perf_counter() - started
    assert len(bench.core.scheduler.running) == rows, "rows have ended while they were timed"
    for request_id in ids:
        bench.core.cancel(request_id)
    bench.turn()
    return STEPS / elapsed

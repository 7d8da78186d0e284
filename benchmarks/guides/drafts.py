"""What lookup wins under a guide: the same requests with `speculation.mode` lookup and none, in turns within one process."""

from __future__ import annotations

import json
import statistics
import time

from backend.api import OutputConfig, Request, SamplingConfig
from backend.api.config.schema import SpeculationConfig
from backend.api.guide import Guide, GuideType
from backend.scheduler.drafting import Drafter
from benchmarks.guides.decode import PROMPT, SCHEMA
from benchmarks.guides.engine import Bench

MAX_TOKENS = 256


def measure(model: str, rows: int, rounds: int) -> str:
    """Objects of one schema, one after the other, as a list of records has them. Sampled, so that their values differ."""
    bench = Bench(model, rows, rows * (len(PROMPT) + MAX_TOKENS + 64))
    guide = Guide(GuideType.JSON_SCHEMA, json.dumps(SCHEMA))
    ratios, steps, drafter = list[float](), 0, Drafter(SpeculationConfig(mode="lookup"))
    _run(bench, rows, guide, drafter)  # learns what steps cost
    for number in range(rounds):
        seconds, texts, cost = {}, {}, drafter.cost
        drafter = Drafter(SpeculationConfig(mode="lookup"))
        drafter.cost = cost
        for is_on in ((False, True), (True, False))[number % 2]:
            texts[is_on], seconds[is_on], num_steps = _run(bench, rows, guide, drafter if is_on else None)
            steps += num_steps * is_on
        assert texts[True] == texts[False], "lookup has changed a text"
        ratios.append(seconds[False] / seconds[True])
    counters = bench.core.counters
    bench.core.workers.shutdown()
    return (
        f"{rows} rows under a guide, {rounds} rounds of {MAX_TOKENS} tokens: lookup on : off {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} - {max(ratios):.2f}), {rounds * MAX_TOKENS / steps:.2f} tokens a step; of the drafts "
        f"{counters.accepted_draft_tokens_total / max(1, counters.draft_tokens_total):.2f} were right; texts are equal"
    )


def _run(bench: Bench, rows: int, guide: Guide, drafter: Drafter | None) -> tuple[list[list[int]], float, int]:
    """Texts, seconds from the first step to the last, and the number of steps."""
    core = bench.core
    core.scheduler._drafter = drafter
    ids = [
        bench.send(
            Request(
                [*PROMPT, 50 + row],
                MAX_TOKENS,
                sampling_config=SamplingConfig(temperature=0.7, seed=row),
                output_config=OutputConfig(exclude_input_from_output=True),
                end_ids=core.model.eos_ids,
                guide=guide,
            )
        )
        for row in range(rows)
    ]
    bench.settle()
    texts, num_steps, started = dict[int, list[int]](), 0, time.perf_counter()
    while core.has_work:
        num_steps += 1
        for response in bench.turn():
            texts[response.request_id] = response.result.output_token_ids[0]
    return [texts[request_id] for request_id in ids], time.perf_counter() - started, num_steps

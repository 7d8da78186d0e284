"""Of several ranks one keeps the account: statistics, and the post-processors of logits, are rank 0's, once for each step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
from msgspec.structs import replace
from torch import Tensor

from backend.api import EngineConfig
from backend.api.stats import IterationStats
from backend.executor.load import workers_of
from backend.worker.rank_messages import Failed, FromRank, Loaded, Measured, Progress, Ready
from tests.parity.scenario import RecordingEngine
from tests.ranks.harness import PROMPTS, engine_config

pytestmark = pytest.mark.usefixtures("ranks_in_threads")
Checkpoint = Callable[..., Path]
NUM_TOKENS = 8
FORCED = 3  # tokens that the post-processor decides
WAYS = [dict(size=2), dict(size=1, stages=2), dict(size=2, stages=2)]


class Account(NamedTuple):
    tokens: list[list[int]]
    stats: list[IterationStats]  # of each step, without times and bytes
    calls: list[int]  # how many tokens were known at each call of the post-processor


def account(config: EngineConfig, post_processor: str | None = None) -> Account:
    """Run all prompts; the first request names the post-processor."""
    calls = list[int]()

    def force_first(request_id: int, logits: Tensor, token_ids: list[list[int]], stream: int, client: Any) -> None:
        calls.append(len(token_ids[0]))
        if len(token_ids[0]) < len(PROMPTS[0]) + FORCED:
            logits.fill_(-1e9)
            logits[..., 42] = 0.0

    workers = workers_of(config, {"force": force_first})
    try:
        engine = RecordingEngine(config, workers)
        names = [post_processor, *[None] * (len(PROMPTS) - 1)]
        recordings = [
            engine.start(each, NUM_TOKENS, logits_post_processor=name)
            for name, each in zip(names, PROMPTS, strict=True)
        ]
        stats = list[IterationStats]()
        while engine.core.has_work:
            for response in engine.core.step():
                recordings[response.request_id - 1].tokens += response.result.output_token_ids[0]
            stats.append(engine.core.stats().latest)
    finally:
        workers.shutdown()
    times = dict(timestamp_ns=0, iter_latency_ms=0.0, new_active_requests_queue_latency_ms=0.0)
    return Account(
        [each.tokens for each in recordings], [replace(each, cpu_memory_bytes=0, **times) for each in stats], calls
    )


@pytest.mark.feature("001-63")
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_each_step_has_one_record_and_it_is_that_of_one_rank(checkpoint: Checkpoint, way: dict[str, int]) -> None:
    directory = checkpoint("llama", eos_token_id=None)
    alone, several = account(engine_config(directory, 1)), account(engine_config(directory, **way))
    assert [each.iter for each in several.stats] == list(range(len(several.stats)))
    assert several.stats == alone.stats and max(each.num_scheduled_requests for each in several.stats) == len(PROMPTS)
    assert list(map(len, several.tokens)) == [NUM_TOKENS] * len(PROMPTS)
    if way["size"] == 1:  # the sums of several parts are rounded otherwise
        assert several.tokens == alone.tokens
    assert set(get_args(FromRank)) == {Progress, Loaded, Measured, Ready, Failed}, "other ranks have no word for it"


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_post_processor_is_called_once_a_step_and_its_tokens_reach_every_rank(
    checkpoint: Checkpoint, way: dict[str, int]
) -> None:
    """A rank that had another token would write another key, and what follows would be another text."""
    directory = checkpoint("llama", eos_token_id=None)
    config = engine_config(directory, **way)
    found = account(config, "force")
    assert found.calls == [len(PROMPTS[0]) + n for n in range(NUM_TOKENS)]
    assert found.tokens[0][:FORCED] == [42] * FORCED
    assert found.tokens[1:] == account(config).tokens[1:], "the others do not notice"
    assert found.tokens[0][FORCED:] == after_prompt(config, [*PROMPTS[0], *[42] * FORCED])


def after_prompt(config: EngineConfig, prompt: list[int]) -> list[int]:
    workers = workers_of(config)
    try:
        engine = RecordingEngine(config, workers)
        recording = engine.start(prompt, NUM_TOKENS - FORCED)
        engine.run()
        return recording.tokens
    finally:
        workers.shutdown()

"""The second level of KV over real checkpoints: the same bits with it and without, and after restarts of the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backend.api import EngineConfig, OutputConfig, Request, SamplingConfig, SessionConfig
from backend.api.config.kv_bits import KV_TYPES, named
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.api.response import Result
from backend.executor import Executor
from tests.model.tiers import TierCase

SAMPLING = SamplingConfig(temperature=0.9, top_p=0.95, seed=5, repetition_penalty=1.1)
NUM_SESSIONS = 5


def settings(tier: TierCase, kv: str, directory: Path | None) -> EngineConfig:
    return EngineConfig(
        ModelConfigSection(
            dtype="float32", kernels=tier.kernels, device="cpu", num_threads=1, gather_generation_logits=True
        ),
        KvCacheConfig(
            block_size=tier.block, max_tokens=256, **named(kv), directory=str(directory or ""), directory_bytes=1 << 24
        ),
        SchedulerConfig(max_batch_size=2, max_num_tokens=64),
    )


@contextmanager
def engine(model: Path, tier: TierCase, kv: str, directory: Path | None) -> Iterator[Executor]:
    with Executor.from_directory(model, settings(tier, kv, directory)) as executor:
        yield executor


def ask(executor: Executor, prompt: list[int], session: SessionConfig | None = None) -> Result:
    output = OutputConfig(exclude_input_from_output=True, return_log_probs=True, return_generation_logits=True)
    request = Request(prompt, 6, output_config=output, sampling_config=SAMPLING, session=session)
    (response,) = executor.await_responses(executor.enqueue_request(request))
    return response.result


def bits(result: Result) -> tuple[object, ...]:
    return result.output_token_ids, result.log_probs, result.generation_logits


def prompt_of(number: int) -> list[int]:
    return [(7 * n + number) % 90 + 1 for n in range(70)]


def conversations(executor: Executor) -> list[tuple[object, ...]]:
    """Two turns of several sessions in turn, of which the pool holds three."""
    found = [bits(ask(executor, prompt_of(n), SessionConfig(n, start=True))) for n in range(NUM_SESSIONS)]
    return [*found, *(bits(ask(executor, [5, 6, 7], SessionConfig(n))) for n in range(NUM_SESSIONS))]


def returns(executor: Executor) -> list[tuple[object, ...]]:
    """The same conversations come back as prompts."""
    return [bits(ask(executor, [*prompt_of(n), 8])) for n in range(NUM_SESSIONS)]


def assert_same(found: list[tuple[object, ...]], expected: list[tuple[object, ...]], tier: TierCase) -> None:
    assert [each[0] for each in found] == [each[0] for each in expected]
    if tier.kernels == "native":  # torch's sums depend on the number of rows
        assert found == expected


def num_onboarded(executor: Executor) -> int:
    return executor.latest_stats().latest.second_level.onboarded_blocks_total


def wait_until_written(executor: Executor, count: int) -> None:
    until = time.monotonic() + 30
    while executor.latest_stats().latest.second_level.offloaded_blocks_total < count:
        assert time.monotonic() < until, executor.latest_stats().latest.second_level
        time.sleep(0.01)


@pytest.mark.parametrize("kv", KV_TYPES)
def test_replies_have_the_same_bits_with_a_level_without_and_after_a_restart(
    checkpoint: Callable[[str], Path], tier: TierCase, kv: str, tmp_path: Path
) -> None:
    model = checkpoint("qwen3")
    with engine(model, tier, kv, None) as executor:
        expected = conversations(executor)
        first_turns = returns(executor)
    with engine(model, tier, kv, tmp_path) as executor:
        assert_same(conversations(executor), expected, tier)
        wait_until_written(executor, NUM_SESSIONS * (64 // tier.block))
    with engine(model, tier, kv, tmp_path) as executor:
        until = time.monotonic() + 60
        while not num_onboarded(executor):  # a busy machine may find it quicker to compute all
            assert time.monotonic() < until, executor.latest_stats().latest.second_level
            assert_same(returns(executor), first_turns, tier)


def test_another_format_of_kv_or_weights_finds_nothing(
    checkpoint: Callable[[str], Path], native_kernels: None, tmp_path: Path
) -> None:
    tier = TierCase("native", 32)
    with engine(checkpoint("qwen3"), tier, "auto", tmp_path) as executor:
        conversations(executor)
        wait_until_written(executor, NUM_SESSIONS * 2)
    for model, kv in (("qwen3", "int8"), ("llama2", "auto")):
        with engine(checkpoint(model), tier, kv, tmp_path) as executor:
            ask(executor, [*prompt_of(0), 8])
            assert num_onboarded(executor) == 0

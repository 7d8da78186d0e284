"""The KV pool of a real checkpoint outlives its engine: the same bits go on from it, in every format of KV."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backend.api import EngineConfig, OutputConfig, Request, RequestId, Response, SamplingConfig
from backend.api.config.kv_bits import KV_TYPES, named
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.core.messages import Delivered, Resume
from backend.engine.core import EngineCore
from backend.executor.load import workers_of

PROMPT = [(7 * n) % 90 + 1 for n in range(150)]  # 4 blocks of 32 and a part of one
NUM_TOKENS = 30
SAMPLING = SamplingConfig(temperature=0.9, top_p=0.95, seed=5, repetition_penalty=1.1)


@pytest.fixture
def pool() -> Iterator[int]:
    descriptor = os.memfd_create("test-pool")
    yield descriptor
    os.close(descriptor)


def engine(model: Path, pool: int | None, kv: str = "auto") -> EngineCore:
    config = EngineConfig(
        ModelConfigSection(path=str(model), dtype="float32", kernels="native", device="cpu", num_threads=1),
        KvCacheConfig(block_size=32, max_tokens=1024, **named(kv)),
        SchedulerConfig(max_batch_size=2, max_num_tokens=64),
    )
    return EngineCore(config, workers_of(config, keeps_pool=pool is not None), pool_descriptor=pool)


def begin(core: EngineCore, delivered: list[int] | None = None) -> None:
    output = OutputConfig(return_log_probs=True)
    request = Request(PROMPT, NUM_TOKENS, streaming=True, output_config=output, sampling_config=SAMPLING)
    resume = Resume([Delivered(delivered, 0.0)], is_again=True) if delivered else None
    core.enqueue(RequestId(1), request, resume=resume)


def run(core: EngineCore, count: int = NUM_TOKENS) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities until there are so many, or the request has ended."""
    tokens: list[int] = []
    log_probs: list[float] = []
    responses: list[Response] = []
    while len(tokens) < count and not (responses and responses[-1].is_final):
        responses = core.step()
        for response in responses:
            assert not response.has_error(), response.error_msg
            tokens += response.result.output_token_ids[0]
            log_probs += (response.result.log_probs or [[]])[0]
    return tokens, log_probs


def settle(core: EngineCore) -> None:
    core.admit()
    core.cache.keeper.settle()


@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_a_stream_goes_on_with_the_same_bits(
    checkpoint: Callable[[str], Path], native_kernels: None, pool: int, family: str, kv: str
) -> None:
    model = checkpoint(family)
    undisturbed = engine(model, None, kv)
    begin(undisturbed)
    tokens, log_probs = run(undisturbed)
    first = engine(model, pool, kv)
    begin(first)
    had, _ = run(first, 15)
    settle(first)
    del first  # as a process that is killed: nothing of it is closed
    second = engine(model, pool, kv)
    begin(second, had)
    rest, rest_log_probs = run(second)
    assert [*had, *rest] == tokens and rest_log_probs == log_probs[len(had) :]
    assert second.kv.stats().adopted_blocks_total == 5
    assert second.counters.context_tokens_total + second.counters.recomputed_tokens_total < 32
    second.close()


def test_a_damaged_block_is_computed_again(checkpoint: Callable[[str], Path], native_kernels: None, pool: int) -> None:
    model = checkpoint("qwen3")
    first = engine(model, pool)
    begin(first)
    tokens, log_probs = run(first)
    settle(first)
    (block,) = (handle.block_id for handle in first.kv.state.trie.match("", PROMPT, 96, False)[0][2:3])
    runner = first.workers.runner  # type: ignore[attr-defined]
    pools = runner.storage.pools
    pools[-1][block].view(-1)[7] += 0.5
    del first
    second = engine(model, pool)
    begin(second)
    assert run(second) == (tokens, log_probs)
    stats = second.kv.stats()
    assert (stats.adopted_blocks_total, stats.dropped_blocks_total) == (2, 1)
    second.close()


def test_another_format_of_kv_or_other_weights_find_nothing(
    checkpoint: Callable[[str], Path], native_kernels: None, pool: int
) -> None:
    for family, kv in (("qwen3", "auto"), ("qwen3", "int8"), ("qwen3", "k8v4"), ("llama2", "int8"), ("qwen3", "auto")):
        core = engine(checkpoint(family), pool, kv)
        begin(core)
        run(core)
        settle(core)
        assert core.kv.stats().adopted_blocks_total == 0
        core.close()

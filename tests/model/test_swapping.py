"""Preemption by swapping over a real checkpoint: the bits of an engine whose pool is large enough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backend.api import EngineConfig, OutputConfig, Request, SamplingConfig
from backend.api.config.kv_bits import named
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.executor import Executor


@pytest.mark.feature("003-33")
@pytest.mark.parametrize("kv", ["auto", "int4", "k8v4"])
def test_replies_of_a_real_model_have_the_same_bits(
    checkpoint: Callable[[str], Path], native_kernels: None, kv: str
) -> None:
    def replies(max_tokens: int, preemption: str) -> tuple[list[Any], Any]:
        settings = EngineConfig(
            ModelConfigSection(dtype="float32", kernels="native", device="cpu", num_threads=1),
            KvCacheConfig(max_tokens=max_tokens, **named(kv), swap_bytes=1 << 24, watermark=0.0),
            SchedulerConfig(max_batch_size=3, max_num_tokens=64, policy="max_utilization", preemption=preemption),
        )
        with Executor.from_directory(checkpoint("qwen3"), settings) as executor:
            output = OutputConfig(return_log_probs=True)
            sampling = SamplingConfig(temperature=0.9, seed=5)
            asked = [
                executor.enqueue_request(
                    Request([n + 1, 2, 3, 4, 5], 100, output_config=output, sampling_config=sampling)
                )
                for n in range(3)
            ]
            results = [executor.await_responses(each)[0].result for each in asked]
            return [(each.output_token_ids, each.log_probs) for each in results], executor.latest_stats().counters

    expected, _ = replies(1024, "recompute")
    found, counters = replies(192, "swap")
    assert found == expected
    assert counters.pauses_total > 0 and counters.recomputed_tokens_total == 0

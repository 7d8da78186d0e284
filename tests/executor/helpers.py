"""Executors over the model-free worker group, and what its tests ask of responses."""

from __future__ import annotations

from datetime import timedelta

from backend.api import EngineConfig, Response
from backend.api.config import KvCacheConfig, SchedulerConfig
from backend.engine.core import EngineCore
from backend.executor import Executor
from tests.fakes.hash_worker import HashWorkerGroup

CONFIG = EngineConfig(
    kv_cache=KvCacheConfig(block_size=4, max_tokens=4 * 64),
    scheduler=SchedulerConfig(max_batch_size=4, max_num_tokens=64),
)


def make_core(config: EngineConfig = CONFIG, **worker: object) -> EngineCore:
    return EngineCore(config, HashWorkerGroup(**worker))


def make_executor(config: EngineConfig = CONFIG, **worker: object) -> Executor:
    return Executor.in_process(config, HashWorkerGroup(**worker))


def drain(executor: Executor, ids: list[int]) -> dict[int, list[Response]]:
    """Collect responses until each of `ids` has had its final one."""
    got: dict[int, list[Response]] = {i: [] for i in ids}
    while not all(responses and responses[-1].is_final for responses in got.values()):
        for response in executor.await_responses(timedelta(seconds=5)):
            got[response.request_id].append(response)
    return got


def tokens_of(responses: list[Response]) -> list[int]:
    return [token for response in responses for token in response.result.output_token_ids[0]]

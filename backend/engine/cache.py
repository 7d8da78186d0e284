"""make_cache: the KV cache of an engine, as large as configuration, model and free memory say."""

from __future__ import annotations

from backend.api.config import EngineConfig
from backend.core.clock import Clock
from backend.core.kv_events import KvEventSink
from backend.core.step import ModelInfo, WorkerGroup
from backend.engine.level_traffic import LevelTraffic, NoLevel
from backend.engine.make_level import MakeLevelIo, make_level
from backend.kvcache.manager import KVCacheManager
from backend.kvcache.sizing import num_pool_blocks, num_swap_blocks

MAX_STEP_EVENTS = (
    100_000  # KV events kept from step to step where they are published; more are made up for by a full list
)


def make_cache(
    config: EngineConfig,
    model: ModelInfo,
    workers: WorkerGroup,
    free_bytes: int,
    kv_events: KvEventSink | None,
    make_io: MakeLevelIo | None,
    clock: Clock,
) -> tuple[KVCacheManager, LevelTraffic | NoLevel]:
    """Also prepares the workers' pool. `kv_events`: gets all events.
    `make_io`: makes what reads and writes the blocks of a second level.

    Raises ConfigError where `free_bytes` are too few, and for a second level that cannot be used.
    """
    kept = make_level(config.kv_cache, model)
    num_blocks = num_pool_blocks(config, model, free_bytes)
    max_events = max(config.records.max_kv_events, MAX_STEP_EVENTS if kv_events is not None else 0)
    kv = KVCacheManager(
        *(config.kv_cache, num_blocks, config.scheduler.max_batch_size, model.sliding_window),
        *(config.scheduler.max_num_tokens, max_events, None if kept is None else kept.level),
        *(num_swap_blocks(config, model),),
    )
    workers.initialize_kv_cache(num_blocks, config.kv_cache.block_size, kv.num_backed_blocks)
    return kv, NoLevel() if kept is None else kept.traffic(make_io, kv, workers, clock)

"""make_cache: the KV cache of an engine, as large as configuration, model and free memory say."""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from backend.api.config.schema import EngineConfig
from backend.api.errors import ConfigError
from backend.core.clock import Clock
from backend.core.step import ModelInfo, WorkerGroup
from backend.engine.level_traffic import LevelTraffic, NoLevel
from backend.engine.make_level import MakeLevelIo, make_level
from backend.engine.pool_keeper import NoKeeper, PoolKeeper, open_pool_file
from backend.engine.recorder import KvEventSink
from backend.kvcache.manager import KVCacheManager
from backend.kvcache.pool_records import PoolRecords
from backend.kvcache.sizing import (
    block_bytes,
    num_pool_blocks,
    num_snapshots,
    num_swap_blocks,
    snapshot_interval,
)
from backend.kvcache.states import StatePool
from backend.storage.pool_file import PoolFile

MAX_STEP_EVENTS = (
    100_000  # KV events kept from step to step where they are published; more are made up for by a full list
)


class Cache(NamedTuple):
    """The KV cache and what stands beside it."""

    kv: KVCacheManager
    level: LevelTraffic | NoLevel
    keeper: PoolKeeper | NoKeeper
    free_bytes: int  # free memory after the weights and the pool at its full size

    def advance(self, is_busy: bool) -> None:
        """Move KV beside the steps. Called before each, when the steps that had been collected have been booked."""
        self.keeper.advance()
        self.level.advance(is_busy)

    def close(self, flushes: bool) -> None:
        """`flushes`: write what is due for the second level. No step may be in flight then."""
        self.keeper.close()
        self.level.close(flushes)


def make_cache(
    config: EngineConfig,
    model: ModelInfo,
    workers: WorkerGroup,
    kv_events: KvEventSink | None,
    make_io: MakeLevelIo | None,
    clock: Clock,
    pool_descriptor: int | None = None,
) -> Cache:
    """Also prepares the workers' pool. `kv_events`: gets all events.
    `make_io`: makes what reads and writes the blocks of a second level.
    `pool_descriptor`: of memory that outlives this process, for the pool to lie in; it may hold that of an engine before.

    Raises ConfigError where free memory is too little, and for a second level that cannot be used.
    """
    kept = make_level(config.kv_cache, model)
    file = open_pool_file(config, model, pool_descriptor)
    free_bytes = workers.free_memory_bytes() + (0 if file is None else file.resident_bytes)
    snapshots, slots = num_snapshots(config, model, free_bytes), config.scheduler.max_batch_size
    free_bytes -= (slots + snapshots) * model.state_bytes
    num_blocks = _num_blocks(config, model, free_bytes, file)
    size = config.kv_cache.block_size
    states = StatePool(slots, snapshots, size, snapshot_interval(config, model)) if model.state_bytes else None
    max_events = max(config.records.max_kv_events, MAX_STEP_EVENTS if kv_events is not None else 0)
    records = _records_of(file, num_blocks, model)
    kv = KVCacheManager(
        *(config.kv_cache, num_blocks, slots, model.sliding_window),
        *(config.scheduler.max_num_tokens, max_events, None if kept is None else kept.level),
        *(num_swap_blocks(config, model), records, states),
    )
    keeper = NoKeeper() if records is None else PoolKeeper(records)
    layers = None if file is None else file.layers
    workers.initialize_kv_cache(num_blocks, size, kv.num_backed_blocks, layers, snapshots)
    level = NoLevel() if kept is None else kept.traffic(make_io, kv, workers, clock)
    return Cache(kv, level, keeper, max(0, free_bytes - num_blocks * block_bytes(config, model)))


def _num_blocks(config: EngineConfig, model: ModelInfo, free_bytes: int, file: PoolFile | None) -> int:
    """The size of the pool: that of the engine before this one, if its pool is there and still has room. Raises ConfigError."""
    inherited = 0 if file is None else file.num_inherited_blocks
    if inherited and inherited * block_bytes(config, model) <= free_bytes:
        return inherited
    return num_pool_blocks(config, model, free_bytes)


def _records_of(file: PoolFile | None, num_blocks: int, model: ModelInfo) -> PoolRecords | None:
    """Map the pool's memory. Raises ConfigError where there is no room for it."""
    if file is None:
        return None
    try:
        file.map(num_blocks)
    except OSError as error:
        raise ConfigError(
            f"{num_blocks} KV blocks cannot be had in memory that outlives the engine ({error.strerror}); lower "
            f"kv_cache.max_tokens, or use --set kv_cache.survives_engine=false"
        ) from None
    return PoolRecords(file, model.kv_fingerprint)


def with_whole_texts(config: EngineConfig, model: ModelInfo) -> EngineConfig:
    """The configuration for a model that reads each text as a whole (an encoder); for any other model it stays as it is.

    A token attends to what is behind it as well. So a text runs whole in one step, nothing of it can be computed before the rest
    is known, and the KV of a common prefix is of no use to another text: there are no chunks, KV is not reused, and there are
    blocks for as many texts as there are slots.
    """
    if not model.reads_whole_texts:
        return config
    scheduler = replace(config.scheduler, enable_chunked_context=False, enable_max_num_tokens_tuning=False)
    slots = scheduler.max_batch_size
    kv_cache = replace(config.kv_cache, enable_block_reuse=False, watermark=0.0)
    kv_cache = replace(kv_cache, max_tokens=None, free_memory_fraction=None, num_slots=slots)
    return replace(config, scheduler=scheduler, kv_cache=kv_cache)

"""make_level: the second level of the KV cache, where the configuration asks for one and the workers move blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from backend.api.config.schema import KvCacheConfig
from backend.api.errors import ConfigError
from backend.core.clock import Clock
from backend.core.kept_block import BlockStore, HostBlocks, RecordFormat
from backend.core.step import ModelInfo, WorkerGroup
from backend.engine.level_threads import LevelIo, LevelThreads
from backend.engine.level_traffic import LevelTraffic
from backend.kvcache.manager import KVCacheManager
from backend.kvcache.second_level import SecondLevel
from backend.storage.block_file import BlockFile

log = logging.getLogger("everbatch.engine")
MakeLevelIo = Callable[[BlockStore, RecordFormat], LevelIo]


@dataclass(frozen=True, slots=True)
class Kept:
    """The parts of a second level before there is a pool."""

    level: SecondLevel
    store: BlockStore
    form: RecordFormat
    onboards: bool

    def traffic(
        self, make_io: MakeLevelIo | None, kv: KVCacheManager, workers: WorkerGroup, clock: Clock
    ) -> LevelTraffic:
        """`make_io`: None for threads."""
        io = (make_io or LevelThreads)(self.store, self.form)
        return LevelTraffic(self.level, self.form, io, kv, workers, clock, self.onboards)


def make_level(config: KvCacheConfig, model: ModelInfo) -> Kept | None:
    """None without a second level. Raises ConfigError for a directory that cannot be used, or too few bytes for one block."""
    if not (config.directory or config.host_cache_bytes):
        return None
    name = "kv_cache.directory" if config.directory else "kv_cache.host_cache_bytes"
    if not config.has_second_level or not model.kv_fingerprint:
        why = (
            "this model runs in several ranks, or in transformers"
            if config.has_second_level
            else "blocks are not reused"
        )
        log.warning("%s has no effect: %s", name, why)
        return None
    form = RecordFormat(config.block_size, model.kv_block_bytes)
    store = _store(config, model.kv_fingerprint, form)
    level = SecondLevel(model.kv_fingerprint, store.num_places, config.secondary_offload_min_priority)
    log.info("second level of KV: room for %d blocks of %d tokens", store.num_places, form.block_size)
    return Kept(level, store, form, config.onboard_blocks)


def _store(config: KvCacheConfig, fingerprint: str, form: RecordFormat) -> BlockStore:
    if config.directory:
        return BlockFile(config.directory, config.directory_bytes, fingerprint, form)
    num_places = config.host_cache_bytes // form.place_bytes
    if not num_places:
        raise ConfigError(
            f"kv_cache.host_cache_bytes is {config.host_cache_bytes}, and one block takes {form.place_bytes}; raise it"
        )
    return HostBlocks(num_places)

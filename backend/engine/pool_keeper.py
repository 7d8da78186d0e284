"""PoolKeeper: the KV pool in memory that outlives the engine, where there is such memory and the workers can use it.

A thread beside the engine's computes checksums and writes the records of blocks (kvcache/pool_records.py); so a step does not
wait for them. Blocks that have no record yet when the engine is killed are computed again.
"""

from __future__ import annotations

import logging
import queue
import threading
from contextlib import suppress

from backend.api.config.schema import EngineConfig
from backend.core.kept_block import RecordFormat
from backend.core.step import ModelInfo
from backend.kvcache.pool_records import MAX_DUE, Due, PoolRecords
from backend.storage.pool_file import PoolFile

log = logging.getLogger("everbatch.engine")
CLOSE_S = 0.5  # how long an end waits for the record that is being written


def open_pool_file(config: EngineConfig, model: ModelInfo, descriptor: int | None) -> PoolFile | None:
    """The file of this descriptor as the memory of the pool; None if there is none, or the pool cannot lie in it.

    The configuration has the block size in force.
    """
    if descriptor is None or not (config.kv_cache.keeps_pool and model.kv_layers and model.kv_fingerprint):
        return None
    form = RecordFormat(config.kv_cache.block_size, model.kv_block_bytes)
    return PoolFile(descriptor, model.kv_fingerprint, form, model.kv_layers)


class PoolKeeper:
    def __init__(self, records: PoolRecords) -> None:
        self._records = records
        self._waiting: queue.Queue[Due | None] = queue.Queue(MAX_DUE)
        self._is_closed = False
        self._thread = threading.Thread(target=self._write_all, name="everbatch-pool-keeper", daemon=True)
        self._thread.start()

    def advance(self) -> None:
        """Hand over the blocks that have become whole. Called before each step: the steps that have filled them have landed."""
        for due in self._records.take_due():
            try:
                self._waiting.put_nowait(due)
            except queue.Full:
                break  # these blocks have no record, and are computed again after a death

    def settle(self) -> None:
        """Wait until all blocks that were handed over have their records."""
        self._waiting.join()

    def close(self) -> None:
        """End the thread. Blocks that wait get no record."""
        self._is_closed = True
        with suppress(queue.Full):  # then the thread is awake
            self._waiting.put_nowait(None)
        self._thread.join(CLOSE_S)

    def _write_all(self) -> None:
        while not self._is_closed:
            due = self._waiting.get()
            if due is not None:
                self._records.record(due)
            self._waiting.task_done()


class NoKeeper:
    """In place of PoolKeeper, where the pool ends with the engine."""

    def advance(self) -> None: ...

    def settle(self) -> None: ...

    def close(self) -> None: ...

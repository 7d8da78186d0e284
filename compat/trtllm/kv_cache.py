"""KV cache events: changes of the set of blocks that requests can find."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from compat.trtllm.kinds import ANY, INT32, UINT64, list_of, of, optional
from compat.trtllm.record import Record, constant, field


class UniqueToken(Record):
    """A token, and the extra id that separates prefixes with different prompt tuning (0: none)."""

    token_id: int = constant(INT32)
    token_extra_id: int = constant(UINT64, default=0)


class KVCacheCreatedData(Record):
    """The pool was made: numbers of blocks on the device and on the host."""

    num_blocks_per_cache_level: list[int] = constant(list_of(INT32))


class KVCacheStoredBlockData(Record):
    """A full block that requests can find from now on."""

    block_hash: int = constant(UINT64)
    tokens: list[UniqueToken] = constant(list_of(of(UniqueToken)))
    lora_id: int | None = constant(optional(UINT64), default=None)
    cache_level: int = constant(INT32, default=0)
    priority: int = constant(INT32, default=35)


class KVCacheStoredData(Record):
    """Blocks that can be found from now on, each the child of the one before. `parent_hash`: of the parent of the first."""

    parent_hash: int | None = constant(optional(UINT64), default=None)
    blocks: list[KVCacheStoredBlockData] = field(list_of(of(KVCacheStoredBlockData)), factory=list, read_only=True)


class KVCacheRemovedData(Record):
    """Blocks that cannot be found any more."""

    block_hashes: list[int] = field(list_of(UINT64), factory=list, read_only=True)


class KVCacheEventDiffInt(Record):
    """A value after a change, and before it: None where that is not known."""

    old_value: Any = constant(ANY)
    new_value: Any = constant(ANY)


class KVCacheUpdatedData(Record):
    """A block that moved to another level of the cache, or got another priority."""

    block_hash: int = constant(UINT64)
    cache_level: KVCacheEventDiffInt | None = constant(optional(of(KVCacheEventDiffInt)), default=None)
    priority: KVCacheEventDiffInt | None = constant(optional(of(KVCacheEventDiffInt)), default=None)


EventData = KVCacheCreatedData | KVCacheStoredData | KVCacheRemovedData | KVCacheUpdatedData


class KVCacheEvent(Record):
    """One change. Ids rise by one; `window_size`: the attention window of the layers that the blocks belong to."""

    event_id: int = constant(UINT64)
    data: EventData = constant(ANY)
    window_size: int = constant(INT32, default=0)


class KVCacheEventManager:
    """Hands out the events of one Executor. Each event is handed out once."""

    def __init__(self, take: Callable[[float | None], list[KVCacheEvent]]) -> None:
        """`take(timeout in seconds)` waits for at least one event, and returns all events so far."""
        self._take = take

    def get_latest_events(self, timeout_ms: timedelta | None = None) -> list[KVCacheEvent]:
        """All events since the last call. Waits up to `timeout` for the first (None: without limit)."""
        return self._take(None if timeout_ms is None else timeout_ms.total_seconds())

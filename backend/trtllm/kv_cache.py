"""KV cache events: which blocks can be found in the cache, as a stream of changes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from backend.trtllm.kinds import ANY, INT32, UINT64, list_of, of, optional
from backend.trtllm.record import Record, field


class UniqueToken(Record):
    """A token, and the extra id that keeps prefixes with prompt tuning apart (0: none)."""

    token_id: int = field(INT32, read_only=True)
    token_extra_id: int = field(UINT64, 0, read_only=True)


class KVCacheCreatedData(Record):
    """The pool was made: blocks on the device, and on the host."""

    num_blocks_per_cache_level: list[int] = field(list_of(INT32), read_only=True)


class KVCacheStoredBlockData(Record):
    """A full block that requests can find from now on."""

    block_hash: int = field(UINT64, read_only=True)
    tokens: list[UniqueToken] = field(list_of(of(UniqueToken)), read_only=True)
    lora_id: int | None = field(optional(UINT64), None, read_only=True)
    cache_level: int = field(INT32, 0, read_only=True)
    priority: int = field(INT32, 35, read_only=True)


class KVCacheStoredData(Record):
    """Blocks that can be found from now on, each the child of the one before. `parent_hash`: of the first one's parent."""

    parent_hash: int | None = field(optional(UINT64), None, read_only=True)
    blocks: list[KVCacheStoredBlockData] = field(list_of(of(KVCacheStoredBlockData)), factory=list, read_only=True)


class KVCacheRemovedData(Record):
    """Blocks that cannot be found any more."""

    block_hashes: list[int] = field(list_of(UINT64), factory=list, read_only=True)


class KVCacheEventDiff(Record):
    """A value before and after."""

    old_value: Any = field(ANY, read_only=True)
    new_value: Any = field(ANY, read_only=True)


class KVCacheUpdatedData(Record):
    """A block that moved to another level of the cache, or got another priority."""

    block_hash: int = field(UINT64, read_only=True)
    cache_level: KVCacheEventDiff | None = field(optional(of(KVCacheEventDiff)), None, read_only=True)
    priority: KVCacheEventDiff | None = field(optional(of(KVCacheEventDiff)), None, read_only=True)


class KVCacheEvent(Record):
    """One change. Ids rise by one; `window_size`: the attention window of the layers that the blocks belong to."""

    event_id: int = field(UINT64, read_only=True)
    data: KVCacheCreatedData | KVCacheStoredData | KVCacheRemovedData | KVCacheUpdatedData = field(ANY, read_only=True)
    window_size: int = field(INT32, 0, read_only=True)


class KVCacheEventManager:
    """Hands out the events of one Executor. Each event is handed out once."""

    def __init__(self, take: Callable[[float | None], list[KVCacheEvent]]) -> None:
        """`take(timeout in seconds)` waits for at least one event, and gives all that there are."""
        self._take = take

    def get_latest_events(self, timeout_ms: timedelta | None = None) -> list[KVCacheEvent]:
        """All events since the last call, waiting at most so long for the first (None: as long as it takes)."""
        return self._take(None if timeout_ms is None else timeout_ms.total_seconds())

"""KvEventLog: records which prefixes are cached, for routers that send a request to the engine that has its prefix.

The hash of a block covers its tokens and the hash of its parent, so equal prefixes have equal hashes in every engine. After
TensorRT-LLM's KVCacheEventManager.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable

from backend.api.images import packed_ids
from backend.api.stats import BlocksCreated, BlocksRemoved, BlocksStored, BlockUpdated, KvEvent


class KvEventLog:
    """Keeps at most `max_events` until they are taken; the oldest are dropped."""

    def __init__(self, max_events: int, num_blocks: int) -> None:
        self._events: deque[KvEvent] = deque(maxlen=max_events)
        self._next_id = 0
        self._add(BlocksCreated(num_blocks))

    def stored(self, data: BlocksStored) -> None:
        """Blocks were inserted into the trie."""
        self._add(data)

    def removed(self, block_hashes: list[int]) -> None:
        self._add(BlocksRemoved(block_hashes))

    def updated(self, block_hash: int, priority: int) -> None:
        self._add(BlockUpdated(block_hash, priority))

    def take(self) -> list[KvEvent]:
        """Return the events since the last call, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

    def _add(self, data: BlocksCreated | BlocksStored | BlocksRemoved | BlockUpdated) -> None:
        self._events.append(KvEvent(self._next_id, data))
        self._next_id += 1


def root_hash(namespace: str) -> int:
    """The parent hash of the first blocks of a namespace."""
    return _number(namespace.encode())


def block_hash(parent_hash: int, token_ids: Iterable[int]) -> int:
    """BLAKE2b, 64 bits, over the parent's hash and the tokens as 32-bit integers."""
    return _number(parent_hash.to_bytes(8, "little") + packed_ids(token_ids).tobytes())


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

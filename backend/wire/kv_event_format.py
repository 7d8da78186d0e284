"""KV events in the form in which vLLM publishes them: one msgpack document for the events of a step.

After vllm/distributed/kv_events.py of vLLM 0.33.0. The document is an array [seconds since 1970, events, data-parallel rank]. An
event is a map with its class in `type`, fields that have their default left out. Readers that were written for vLLM's releases of
2025 expect it as an array: the class, then the fields in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from backend.api.stats import BlocksRemoved, BlocksStored, KvEvent

MEDIUM = "GPU"  # vLLM's word for the level of the cache that attention reads, which is the only one here, also on a CPU
CLEARED = {"type": "AllBlocksCleared"}


class KvEventEncoder:
    """Knows which blocks it has told of, because vLLM tells only of full blocks: others are left out, also when they go."""

    def __init__(self, block_size: int, layout: Literal["map", "array"], rank: int = 0) -> None:
        """`rank`: the data-parallel rank of all messages."""
        self._block_size, self._rank = block_size, rank
        self._as_array = layout == "array"
        self._known: set[int] = set()

    def encode(self, events: Iterable[KvEvent], seconds: float) -> bytes | None:
        """The message for `events`; None if there is nothing to tell."""
        told = [each for event in events if (each := self._told(event.data)) is not None]
        return self._message(told, seconds) if told else None

    def encode_anew(self, cached: Iterable[BlocksStored], seconds: float) -> bytes:
        """The message that all blocks told of before are gone and `cached` are there, parents before their children."""
        self._known.clear()
        return self._message([CLEARED, *(each for data in cached if (each := self._stored(data)) is not None)], seconds)

    def _told(self, data: object) -> dict[str, Any] | None:
        if isinstance(data, BlocksStored):
            return self._stored(data)
        if isinstance(data, BlocksRemoved):
            return self._removed(data)
        return None  # the pool was made, or a priority has changed

    def _stored(self, data: BlocksStored) -> dict[str, Any] | None:
        blocks = [block for block in data.blocks if len(block.token_ids) == self._block_size]
        if not blocks:
            return None
        self._known.update(block.block_hash for block in blocks)
        origin = data.origin
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": [block.block_hash for block in blocks],
            "parent_block_hash": data.parent_hash,
            "token_ids": [token_id for block in blocks for token_id in block.token_ids],
            "block_size": self._block_size,
            "lora_id": origin.lora_id,
            "medium": MEDIUM,
            "lora_name": origin.lora_name or None,
        }
        keys = _extra_keys(data, len(blocks))
        return event if keys is None else {**event, "extra_keys": keys}

    def _removed(self, data: BlocksRemoved) -> dict[str, Any] | None:
        gone = [each for each in data.block_hashes if each in self._known]
        self._known.difference_update(gone)
        return {"type": "BlockRemoved", "block_hashes": gone, "medium": MEDIUM} if gone else None

    def _message(self, events: list[dict[str, Any]], seconds: float) -> bytes:
        shaped = [list(event.values()) for event in events] if self._as_array else events
        return msgspec.msgpack.encode([seconds, shaped, self._rank])


def _extra_keys(data: BlocksStored, num_blocks: int) -> list[list[str] | None] | None:
    """The adapter, the salt (with the first block of a prompt only) and other inputs of each block; None where tokens are all."""
    origin = data.origin
    every = [origin.lora_name] if origin.lora_name else []
    others = [origin.digest] if origin.has_inputs else []
    salt = [origin.cache_salt] if origin.cache_salt and data.parent_hash is None else []
    keys = [[*every, *(salt if index == 0 else []), *others] or None for index in range(num_blocks)]
    return keys if any(keys) else None

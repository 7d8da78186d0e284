"""Retention: sets the priorities of blocks in the order of eviction as requests ask for (`RetentionConfig`)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from backend.api.request import DEFAULT_RETENTION_PRIORITY, RetentionConfig
from backend.core.sequence import Sequence
from backend.kvcache.block import DROPPED, BlockHandle
from backend.kvcache.block_manager import BlockManager
from backend.kvcache.eviction import Retained
from backend.kvcache.prefix_trie import PrefixTrie


class Retention:
    def __init__(self, blocks: BlockManager, trie: PrefixTrie, block_size: int) -> None:
        """`trie` tells routers of changes. `block_size`: tokens."""
        self._blocks, self._trie, self._block_size = blocks, trie, block_size
        self._now_ns = 0

    def tick(self, now_ns: int) -> None:
        """Reset the priorities that lapse until `now_ns`. Durations count from the latest tick."""
        self._now_ns = now_ns
        for block_id in self._blocks.lapse(now_ns):
            self._trie.tell_updated(block_id, self._blocks.blocks[block_id].priority)

    def retain(self, seq: Sequence, handles: Seq[BlockHandle]) -> None:
        """Set the priorities of a running sequence's blocks as its request asks, tail first, in the order of their release.

        A block is kept at least as long as the blocks behind it, which are useless without it. A request without `retention`
        leaves priorities unchanged, except that this rule may raise them to the default.
        """
        retention = seq.request.retention
        if retention is None and not self._blocks.has_priorities:
            return
        keep = Retained(0, None)
        for index in reversed(range(len(handles))):
            if handles[index] is DROPPED:
                continue
            block = self._blocks.blocks[handles[index].block_id]
            before = Retained(block.priority, block.lapse[0] if block.lapse else None)
            keep = keep.before(self._asked_for(retention, index, seq.num_prompt_tokens) if retention else before)
            if keep != before or keep.until_ns is not None:  # set again: lapses come in the order of the latest use
                self._blocks.retain(block.block_id, keep.priority, keep.until_ns)
            if keep.priority != before.priority:
                self._trie.tell_updated(block.block_id, keep.priority)

    def _asked_for(self, retention: RetentionConfig, index: int, num_prompt_tokens: int) -> Retained:
        priority, duration_s = retention.of_token(index * self._block_size, num_prompt_tokens)
        if duration_s is None or priority <= DEFAULT_RETENTION_PRIORITY:
            return Retained(priority, None)
        return Retained(priority, self._now_ns + int(duration_s * 1e9))

"""CacheState: everything that is known of the cache. Plans read it; the KVCacheManager alone changes it.

Who may find whose KV (`KvCacheConfig.sharing`): a namespace's requests find all that the namespace has, per token. Requests
without one find each other's whole blocks, so that nobody can tell a stranger's prompt token by token, and are told only of
what is their own. A session always finds its own KV, per token.
"""

from __future__ import annotations

from backend.api.config import KvCacheConfig
from backend.core.sequence import Sequence
from backend.core.step import SequenceId
from backend.kvcache.block import BlockHandle
from backend.kvcache.block_manager import BlockManager
from backend.kvcache.events import KvEventLog
from backend.kvcache.geometry import Geometry
from backend.kvcache.prefix_trie import PrefixTrie
from backend.kvcache.slots import SlotManager
from backend.kvcache.tables import BlockTable


class CacheState:
    def __init__(
        self, config: KvCacheConfig, num_blocks: int, num_slots: int, geometry: Geometry, max_events: int = 0
    ) -> None:
        self.geometry = geometry
        self.events = KvEventLog(max_events, num_blocks) if max_events else None
        self.trie = PrefixTrie(config.block_size, self.events)
        self.blocks = BlockManager(num_blocks, config.chunk_blocks, on_evict=self.trie.forget)
        self.slots = SlotManager(num_slots)
        self.tables: dict[SequenceId, BlockTable] = {}
        self.watermark_blocks = int(config.watermark * num_blocks)
        self.enable_block_reuse = config.enable_block_reuse and config.sharing != "none"
        self._enable_partial_reuse = config.enable_partial_reuse
        self._sharing = config.sharing

    @property
    def usable_blocks(self) -> int:
        """What one sequence can ever get: the pool less the watermark."""
        return self.blocks.num_blocks - self.watermark_blocks

    def trusts(self, seq: Sequence) -> bool:
        """Whether the sequence may know how much of its prompt others have computed."""
        return self._sharing == "all" or not seq.is_anonymous

    def match(self, seq: Sequence, limit: int) -> tuple[list[BlockHandle], BlockHandle | None, int]:
        """KV known of the sequence's first `limit` tokens: (whole blocks, a block whose head is right, tokens of that head)."""
        if not self.enable_block_reuse:
            return [], None, 0
        return self.trie.match(seq.namespace, seq.token_ids, limit, self._finds_heads(seq))

    def tail(self, seq: Sequence, table: BlockTable) -> BlockHandle | None:
        """The last block of a sequence that leaves, if it is not full and others may find it; None otherwise.

        Others may not find what stands behind a full block that the trie does not know, what somebody goes on to write, and,
        as with full blocks, the output of a beam search.
        """
        num_full, num_tail_tokens = divmod(seq.num_computed_tokens, self.geometry.block_size)
        is_known = self.enable_block_reuse and table.depth == num_full
        if not (is_known and num_tail_tokens and self._finds_heads(seq) and seq.beam_width == 1):
            return None
        handle = table.handles[num_full]
        return handle if self.blocks.ref_count(handle.block_id) == 1 else None

    def _finds_heads(self, seq: Sequence) -> bool:
        """Whether the sequence finds blocks of which only the head is right."""
        return self._enable_partial_reuse and self.trusts(seq)

    def survivors(self, seq: Sequence, limit: int) -> tuple[list[BlockHandle], int]:
        """What is left of a sequence's own KV: (blocks, tokens they hold right, at most `limit`)."""
        table = self.tables.get(seq.seq_id)
        if table is None:
            return [], 0
        num_blocks = self.blocks.verify(table.handles)
        computed = min(seq.num_computed_tokens, num_blocks * self.geometry.block_size, limit)
        kept = table.handles[: self.geometry.blocks_for(computed)]
        return (kept, computed) if self.geometry.window_is_whole(kept, computed) else ([], 0)

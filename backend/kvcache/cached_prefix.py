"""Enters blocks whose KV did not come from a step into the trie, as cached blocks."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from backend.core.sequence import Sequence
from backend.kvcache.block import BlockHandle
from backend.kvcache.block_manager import BlockManager
from backend.kvcache.prefix_trie import PrefixTrie


def enter_cached(
    blocks: BlockManager, trie: PrefixTrie, seq: Sequence, known: Seq[BlockHandle], new: Seq[BlockHandle]
) -> None:
    """Enter blocks with the first tokens of a sequence: the trie knows `known`, and `new` follow. All have a reference of the
    caller's, which is dropped: they are cached, the head as the most recently used.
    """
    handles = [*known, *new]
    blocks.mark_shareable(new)
    trie.insert(seq.namespace, None, 0, seq.token_ids, handles, len(handles), seq.kv_origin)
    for handle in reversed(handles):
        blocks.release(handle.block_id, keep=True)

"""PrefixTrie: finds cached blocks for a prefix of the given tokens.

A node stands for one block. Its key in the parent's `children` is the tuple of the block's token ids, so a lookup compares the
tokens themselves along the whole path; hashes only make the comparison fast. A block that was not full when its sequence ended
is a leaf with a shorter key. Each namespace (cache salt and adapter) has a root of its own. A node is valid as long as its block
keeps its content: on eviction the BlockManager calls `forget`, which removes the node and everything below it.

The cost of a lookup does not depend on the number of continuations of a prefix. The next whole block is found in a dictionary.
The block that shares the longest head with the rest of the prompt is a neighbour of that rest in the sorted keys: in
lexicographic order the two neighbours of a string share the longest prefixes with it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as Seq
from typing import Protocol

from backend.api.request import KvOrigin
from backend.api.stats import BlocksStored, StoredBlock
from backend.core.sequence import Sequence
from backend.core.step import BlockId
from backend.kvcache.block import DROPPED, BlockHandle
from backend.kvcache.block_manager import BlockManager
from backend.kvcache.events import KvEventLog, block_hash, root_hash
from backend.kvcache.evicted import EvictedPrefixes

Key = tuple[int, ...]
NO_ORIGIN = KvOrigin()
ROOT = BlockHandle(BlockId(-1), -1)  # the handle of a namespace's root, which stands for no block


class BlockRecords(Protocol):
    """Hears which whole blocks can be found (kvcache/pool_records.py)."""

    def entered(self, namespace: str, parent: BlockHandle | None, entered: Seq[tuple[BlockHandle, Key]]) -> None: ...

    def forget(self, block_id: BlockId) -> None: ...


class TrieNode:
    __slots__ = ("children", "handle", "hash", "key", "namespace", "ordered_keys", "origin", "parent")

    def __init__(
        self,
        parent: TrieNode | None,
        key: Key,
        handle: BlockHandle,
        namespace: str = "",
        origin: KvOrigin = NO_ORIGIN,
    ) -> None:
        self.parent = parent  # None for roots and for removed nodes
        self.key = key
        self.handle = handle  # ROOT for roots
        self.namespace, self.origin = namespace, origin  # set for roots only
        self.children: dict[Key, TrieNode] = {}
        self.ordered_keys: list[Key] = []  # the keys of `children`, ascending
        self.hash: int = root_hash(namespace) if parent is None else block_hash(parent.hash, key)

    def add(self, child: TrieNode) -> None:
        self.children[child.key] = child
        insort(self.ordered_keys, child.key)

    def remove(self, child: TrieNode) -> None:
        del self.children[child.key]
        del self.ordered_keys[bisect_left(self.ordered_keys, child.key)]


class PrefixTrie:
    def __init__(self, block_size: int, evicted: EvictedPrefixes, events: KvEventLog | None = None) -> None:
        """`evicted` and `events` are notified when blocks are inserted and removed."""
        self._block_size = block_size
        self._evicted = evicted
        self._events = events
        self.records: BlockRecords | None = None  # where the pool outlives the engine: which blocks hold what
        self._roots: dict[str, TrieNode] = {}
        self._nodes: dict[BlockId, TrieNode] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def holds(self, block_id: BlockId) -> bool:
        """True if the trie has a node for the block."""
        return block_id in self._nodes

    def root(self, namespace: str, origin: KvOrigin = NO_ORIGIN) -> TrieNode:
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = TrieNode(None, (), ROOT, namespace, origin)
        return node

    def is_attached(self, node: TrieNode) -> bool:
        return node.handle is ROOT or self._nodes.get(node.handle.block_id) is node

    def match(
        self, namespace: str, token_ids: Seq[int], max_tokens: int, partial: bool = True
    ) -> tuple[list[BlockHandle], BlockHandle | None, int]:
        """Find the longest known prefix of token_ids[:max_tokens] (a prefix hit): whole blocks and, if `partial`, the
        head of one more.

        Returns (full blocks in order, the block that continues them in part or None, tokens of it that match).
        """
        node = self._roots.get(namespace)
        handles: list[BlockHandle] = []
        if node is None:
            return handles, None, 0
        size = self._block_size
        start = 0
        while start + size <= max_tokens:
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            handles.append(child.handle)
            node, start = child, start + size
        if not partial:
            return handles, None, 0
        head_of, matched = _longest_head(node, tuple(token_ids[start : min(start + size, max_tokens)]))
        return handles, head_of, matched

    def num_lost_blocks(self, namespace: str, token_ids: Seq[int], max_tokens: int, handles: Seq[BlockHandle]) -> int:
        """The number of evicted blocks of token_ids[:max_tokens] that follow the blocks `handles`, which matched."""
        node = self._nodes.get(handles[-1].block_id) if handles else None
        parent_hash = root_hash(namespace) if node is None else node.hash
        start = len(handles) * self._block_size
        return self._evicted.num_blocks_after(parent_hash, token_ids, start, max_tokens, self._block_size)

    def insert(
        self,
        namespace: str,
        node: TrieNode | None,
        depth: int,
        token_ids: Seq[int],
        handles: Seq[BlockHandle],
        num_blocks: int,
        origin: KvOrigin = NO_ORIGIN,
    ) -> tuple[TrieNode | None, int]:
        """Insert blocks `depth` .. `num_blocks` of a sequence below `node` (its block depth-1; None = start at the root).

        A block is not inserted if there is a node for its tokens already. Returns the node and depth at which the next insert
        continues; (None, depth) if the sliding window has released a block in between. `origin` is part of
        the events, and has the namespace.
        """
        if node is None or not self.is_attached(node):
            node, depth = self.root(namespace, origin), 0
        size = self._block_size
        entered: list[TrieNode] = []
        for index in range(depth, num_blocks):
            key = tuple(token_ids[index * size : (index + 1) * size])
            child = node.children.get(key)
            if child is None:
                if handles[index] is DROPPED or handles[index].block_id in self._nodes:
                    self._drop_empty_root(node)
                    self._tell_entered(namespace, entered, origin)
                    return None, index
                child = TrieNode(node, key, handles[index])
                node.add(child)
                self._nodes[handles[index].block_id] = child
                self._evicted.discard(child.hash)
                entered.append(child)
            node = child
        self._tell_entered(namespace, entered, origin)
        return node, max(depth, num_blocks)

    def insert_tail(
        self,
        namespace: str,
        node: TrieNode | None,
        depth: int,
        token_ids: Seq[int],
        handles: Seq[BlockHandle],
        num_tokens: int,
        origin: KvOrigin = NO_ORIGIN,
    ) -> None:
        """Insert the full blocks of `num_tokens` tokens, and the last block, which is filled in part, as a leaf.

        The leaf is not inserted if another block begins with its tokens.
        """
        num_full = num_tokens // self._block_size
        node, _ = self.insert(namespace, node, depth, token_ids, handles, num_full, origin)
        tail = tuple(token_ids[num_full * self._block_size : num_tokens])
        if node is None or _longest_head(node, tail)[1] == len(tail):
            return
        leaf = TrieNode(node, tail, handles[num_full])
        node.add(leaf)
        self._nodes[leaf.handle.block_id] = leaf
        self._tell_stored([leaf], origin)

    def forget(self, block_id: BlockId) -> None:
        """Remove the block's node and all nodes below it. Unknown blocks are ignored."""
        if self.records is not None:
            self.records.forget(block_id)  # also one that is inherited, and that the trie does not know yet
        node = self._nodes.get(block_id)
        if node is None:
            return
        if node.parent is not None:
            node.parent.remove(node)
            self._drop_empty_root(node.parent)
        stack = [node]
        removed: list[int] = []
        while stack:
            cut = stack.pop()
            del self._nodes[cut.handle.block_id]
            cut.parent = None
            removed.append(cut.hash)
            if self.records is not None:
                self.records.forget(cut.handle.block_id)
            stack.extend(cut.children.values())
            cut.children, cut.ordered_keys = {}, []
        self._evicted.add(removed)
        if self._events is not None:
            self._events.removed(removed)

    def tell_updated(self, block_id: BlockId, priority: int) -> None:
        """Record an event: the block's priority has changed. Unknown blocks are ignored."""
        node = self._nodes.get(block_id)
        if node is not None and self._events is not None:
            self._events.updated(node.hash, priority)

    def check_integrity(self) -> None:
        for block_id, node in self._nodes.items():
            assert node.handle.block_id == block_id and node.parent is not None, (
                f"trie: block {block_id} is cut off but kept"
            )
            assert node.parent.children[node.key] is node, f"trie: block {block_id} is not its parent's child"
            assert node.ordered_keys == sorted(node.children), f"trie: the keys below block {block_id} are out of order"
            assert len(node.key) == self._block_size or not node.children, (
                f"trie: below block {block_id}, which is not full"
            )
        for namespace, root in self._roots.items():
            assert root.ordered_keys == sorted(root.children), (
                f"trie: the keys of namespace {namespace!r} are out of order"
            )
            assert root.children, f"trie: the root of namespace {namespace!r} is empty"

    def cached_prefixes(self) -> list[BlocksStored]:
        """All blocks that can be found, as the events that store them, parents before their children."""
        found: list[BlocksStored] = []
        for root in self._roots.values():
            starts = list(root.children.values())
            while starts:
                chain = [starts.pop()]
                while len(chain[-1].children) == 1:
                    chain.extend(chain[-1].children.values())
                starts.extend(chain[-1].children.values())
                found.append(_stored(chain, root.origin))
        return found

    def _tell_entered(self, namespace: str, entered: list[TrieNode], origin: KvOrigin) -> None:
        """Tell of whole blocks. Each node of `entered` is the child of the one before it."""
        if self.records is not None and entered:
            parent = entered[0].parent
            assert parent is not None  # it is in the trie
            above = None if parent.handle is ROOT else parent.handle
            self.records.entered(namespace, above, [(node.handle, node.key) for node in entered])
        self._tell_stored(entered, origin)

    def _tell_stored(self, entered: list[TrieNode], origin: KvOrigin) -> None:
        """Record an event. Each node of `entered` is the child of the one before it."""
        if self._events is not None and entered:
            self._events.stored(_stored(entered, origin))

    def _drop_empty_root(self, node: TrieNode) -> None:
        """Forget a namespace without blocks: clients choose the names, so there may be any number of them."""
        if node.handle is ROOT and not node.children:
            self._roots.pop(node.namespace, None)


def _stored(chain: list[TrieNode], origin: KvOrigin) -> BlocksStored:
    """The event that stores the blocks of `chain`, each the child of the one before it."""
    parent = chain[0].parent
    assert parent is not None  # it is in the trie
    parent_hash = None if parent.handle is ROOT else parent.hash
    return BlocksStored(parent_hash, [StoredBlock(node.hash, list(node.key)) for node in chain], origin)


def _longest_head(node: TrieNode, tail: Key) -> tuple[BlockHandle | None, int]:
    """The child that shares the most leading tokens with `tail`, and their number; (None, 0) if no child shares any."""
    position = bisect_left(node.ordered_keys, tail)
    best, length = None, 0
    for key in node.ordered_keys[max(0, position - 1) : position + 1]:
        common = _num_common(key, tail)
        if common > length:
            best, length = node.children[key].handle, common
    return best, length


def _num_common(key: Key, tail: Key) -> int:
    """The number of equal leading tokens. The lengths may differ."""
    return next((i for i, (a, b) in enumerate(zip(key, tail, strict=False)) if a != b), min(len(key), len(tail)))


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

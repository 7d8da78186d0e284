"""PoolRecords: which blocks hold which tokens in a pool that outlives the engine, and what this engine inherits of one.

    entered, forget    of each whole block that the trie knows there is a record in the PoolFile, and of no other
    take_due, record   the record follows a little later, with a checksum of the KV, which another thread computes
    inherit            at the start: blocks with a record, and with all blocks before them, are cached, though no trie knows them:
                       of a namespace only a hash is written
    find               a sequence arrives: blocks with its tokens are checked, and entered into the trie

From there on they are cached blocks like others, under the same rules of sharing. A block that is not exactly what its record
says is free, and its KV is computed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from backend.core.kept_block import BlockRecord, KeptRecord, chain, digest_of, root_of
from backend.core.sequence import Sequence as EngineSequence
from backend.core.step import BlockId
from backend.kvcache.block import BlockHandle
from backend.kvcache.block_manager import BlockManager
from backend.kvcache.prefix_trie import PrefixTrie, enter_cached
from backend.storage.pool_file import PoolFile

MAX_DUE = 4096  # blocks that wait for their record; the KV of others is computed again after a death


class Due(NamedTuple):
    """A block that is to have a record."""

    handle: BlockHandle
    record: BlockRecord
    key: bytes


class _Inherited(NamedTuple):
    handle: BlockHandle
    record: KeptRecord


class PoolRecords:
    def __init__(self, file: PoolFile, fingerprint: str) -> None:
        """`fingerprint`: of the model."""
        self._file, self._fingerprint = file, digest_of(fingerprint)
        self._keys: dict[BlockId, bytes] = {}  # the keys of blocks that the trie knows, and of inherited ones
        self._inherited: dict[bytes, _Inherited] = {}  # key -> a block that no sequence has asked for yet
        self._due: list[Due] = []
        self._lock = threading.Lock()  # held to write a record, or to forget one
        self.num_adopted = 0  # inherited blocks that sequences have found
        self.num_dropped = (
            0  # blocks of the engine before that were of no use: torn, damaged, or without those before them
        )

    def bind(self, blocks: BlockManager, trie: PrefixTrie) -> None:
        """The pool, and where its blocks are found. Takes what the engine before has left."""
        self._blocks, self._trie = blocks, trie
        trie.records = self
        self._inherit()

    # ---- what is written ---------------------------------------------------------------------------------------------

    def entered(
        self, namespace: str, parent: BlockHandle | None, entered: Sequence[tuple[BlockHandle, Iterable[int]]]
    ) -> None:
        """The trie knows these whole blocks from now on, each the child of the one before. `parent`: of the first."""
        origin = digest_of(namespace)
        prefix = root_of(self._fingerprint, origin) if parent is None else self._keys[parent.block_id]
        for handle, token_ids in entered:
            record = BlockRecord(self._fingerprint, origin, prefix, tuple(token_ids))
            prefix = record.key
            if self._keys.get(handle.block_id) == prefix:
                continue  # inherited
            if prefix in self._inherited:  # the same KV has been computed once more
                self._blocks.discard(self._inherited[prefix].handle.block_id)
            self._keys[handle.block_id] = prefix
            if len(self._due) < MAX_DUE:
                self._due.append(Due(handle, record, prefix))

    def take_due(self) -> list[Due]:
        """Blocks that are to have a record. All steps that write to them have ended when the next step begins."""
        due, self._due = self._due, []
        return due

    def record(self, due: Due) -> None:
        """Write the record of a block, unless it has been forgotten meanwhile. Any thread may call it."""
        content = self._file.form.encode_record(due.record, self._file.checksum(due.handle.block_id), stamp=0)
        with self._lock:
            if self._keys.get(due.handle.block_id) == due.key and self._blocks.is_current(due.handle):
                self._file.write(due.handle.block_id, content)

    def forget(self, block_id: BlockId) -> None:
        """The trie no longer knows the block, or the block is about to get other KV. Unknown blocks are ignored."""
        with self._lock:
            key = self._keys.pop(block_id, None)
            if key is None:
                return
            self._file.erase(block_id)
        inherited = self._inherited.get(key)
        if inherited is not None and inherited.handle.block_id == block_id:
            del self._inherited[key]

    # ---- what is inherited -------------------------------------------------------------------------------------------

    def find(self, seq: EngineSequence, block_size: int) -> None:
        """Enter inherited blocks with the sequence's tokens into the trie, as far as a request may reuse them."""
        if not self._inherited:
            return
        stop = seq.max_found_tokens // block_size
        known = self._trie.match(seq.namespace, seq.token_ids, stop * block_size, False)[0]
        found: list[BlockHandle] = []
        for record in islice(
            chain(self._fingerprint, seq.namespace, seq.token_ids, block_size, stop), len(known), None
        ):
            inherited = self._inherited.get(record.key)
            if inherited is None:
                break
            if not self._is_whole(inherited, record):
                self.num_dropped += 1
                self._blocks.discard(inherited.handle.block_id)
                break
            del self._inherited[record.key]
            found.append(inherited.handle)
        if found:
            self.num_adopted += len(found)
            for handle in (*known, *found):
                self._blocks.lock(handle.block_id)
            enter_cached(self._blocks, self._trie, seq, known, found)

    def _is_whole(self, inherited: _Inherited, wanted: BlockRecord) -> bool:
        kept = inherited.record
        return kept.block == wanted and self._file.checksum(inherited.handle.block_id) == kept.checksum

    def _inherit(self) -> None:
        """Hold the blocks of the engine before this one that can be found: those with all blocks before them."""
        found: dict[bytes, tuple[BlockId, KeptRecord]] = {}
        written = []
        for block_id, kept in self._file.records():
            written.append(BlockId(block_id))
            if kept is not None:
                found[kept.block.key] = BlockId(block_id), kept
        usable = self._reachable(found)
        handles = self._blocks.inherit([block_id for _, block_id, _ in reversed(usable)])
        for key, block_id, kept in usable:
            self._keys[block_id] = key
            self._inherited[key] = _Inherited(handles[block_id], kept)
        self.num_dropped = len(written) - len(usable)
        for block_id in written:
            if block_id not in self._keys:
                self._file.erase(block_id)

    def _reachable(self, found: dict[bytes, tuple[BlockId, KeptRecord]]) -> list[tuple[bytes, BlockId, KeptRecord]]:
        """The blocks that follow from a first one, each behind the block before it."""
        followers: dict[bytes, list[bytes]] = {}
        for key, (_, kept) in found.items():
            if kept.block.fingerprint == self._fingerprint:
                followers.setdefault(kept.block.prefix, []).append(key)
        origins = {kept.block.namespace for _, kept in found.values()}
        waiting = [root_of(self._fingerprint, origin) for origin in origins]
        usable: list[tuple[bytes, BlockId, KeptRecord]] = []
        while waiting:
            following = [key for prefix in waiting for key in followers.pop(prefix, ())]
            usable.extend((key, *found[key]) for key in following)
            waiting = following
        return usable

"""PoolFile: the KV pool of an engine in memory that outlives its process, with a record of each block that is whole.

The file is memory without a name (memfd), which the supervisor holds and the engine maps. The next engine finds the blocks there.

    header    MAGIC | fingerprint | tokens and bytes of a block | layers | blocks | checksum, filled up to HEADER_BYTES
    records   of each block, RecordFormat.num_bytes; zeros: nothing is known of the block
    pool      of each layer all blocks, each layer at a multiple of PAGE

A record is written when the KV of its block is whole, and erased before the block gets other KV. A torn record has a wrong
checksum, and is none. So whatever the moment at which a process was killed: a record says which tokens a block holds, and the
checksum in it whether the block still does.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator

from backend.core.kept_block import KeptRecord, RecordFormat, checksum_of, digest_of

MAGIC = b"everbatch-pool-1"
HEADER_BYTES = PAGE = 4096
_HEADER = struct.Struct("<16s32sQQQQ")


class PoolFile:
    def __init__(self, descriptor: int, fingerprint: str, form: RecordFormat, num_layers: int) -> None:
        """`fingerprint`: of all that the bits of KV depend on besides tokens. `form`: of blocks of all layers together.

        A file that an engine with another model or form has left, or that is damaged, is emptied.
        """
        self.form, self._descriptor, self._num_layers = form, descriptor, num_layers
        self._fingerprint = digest_of(fingerprint)
        self._layer_block_bytes = form.block_bytes // num_layers
        self.num_inherited_blocks = (
            self._find()
        )  # the size of the pool that an engine before this one has left; 0: none
        if not self.num_inherited_blocks:
            os.ftruncate(descriptor, 0)

    @property
    def resident_bytes(self) -> int:
        """Memory that the file takes at present."""
        return os.fstat(self._descriptor).st_blocks * 512

    def map(self, num_blocks: int) -> None:
        """Map a pool of so many blocks. One of another size is emptied. Raises OSError where there is no room for it."""
        if num_blocks != self.num_inherited_blocks:
            self.num_inherited_blocks = 0
            os.ftruncate(self._descriptor, 0)
            os.ftruncate(self._descriptor, self._size(num_blocks))
            os.pwrite(self._descriptor, self._header(num_blocks), 0)
        mapping = mmap.mmap(self._descriptor, self._size(num_blocks))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without large pages
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self._whole = memoryview(mapping)
        start, size = self._pool_start(num_blocks), num_blocks * self._layer_block_bytes
        starts = range(start, len(mapping), self._layer_stride(num_blocks))
        self.layers = [self._whole[at : at + size] for at in starts]  # where the KV of each layer lies

    def records(self) -> Iterator[tuple[int, KeptRecord | None]]:
        """Yield each block of which something was written, with its record, or None if that is torn."""
        empty = bytes(self.form.num_bytes)
        for block_id in range(self.num_inherited_blocks):
            record = bytes(self._record(block_id))
            if record != empty:
                yield block_id, self.form.decode(record)

    def write(self, block_id: int, record: bytes) -> None:
        self._record(block_id)[:] = record

    def erase(self, block_id: int) -> None:
        """Forget what was known of a block."""
        self._record(block_id)[:] = bytes(self.form.num_bytes)

    def checksum(self, block_id: int) -> bytes:
        """The checksum of the KV that the block holds now. Any thread may ask."""
        size = self._layer_block_bytes
        return checksum_of(*(layer[block_id * size : (block_id + 1) * size] for layer in self.layers))

    def _record(self, block_id: int) -> memoryview:
        start = HEADER_BYTES + block_id * self.form.num_bytes
        return self._whole[start : start + self.form.num_bytes]

    def _pool_start(self, num_blocks: int) -> int:
        return _whole_pages(HEADER_BYTES + num_blocks * self.form.num_bytes)

    def _layer_stride(self, num_blocks: int) -> int:
        return _whole_pages(num_blocks * self._layer_block_bytes)

    def _size(self, num_blocks: int) -> int:
        return self._pool_start(num_blocks) + self._num_layers * self._layer_stride(num_blocks)

    def _header(self, num_blocks: int) -> bytes:
        form = self.form
        body = _HEADER.pack(MAGIC, self._fingerprint, form.block_size, form.block_bytes, self._num_layers, num_blocks)
        return (body + checksum_of(body)).ljust(HEADER_BYTES, b"\0")

    def _find(self) -> int:
        """The number of blocks of a pool with this model and form in the file; 0 if there is none."""
        header = os.pread(self._descriptor, HEADER_BYTES, 0)
        if len(header) < HEADER_BYTES:
            return 0
        num_blocks = int(_HEADER.unpack_from(header)[-1])
        is_own = header == self._header(num_blocks) and os.fstat(self._descriptor).st_size == self._size(num_blocks)
        return num_blocks if is_own else 0


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE

"""Geometry: arithmetic of KV positions and block table entries. It knows no blocks and no sequences.

position    0 ...... 31 | 32 ...... 63 | 64 ...... 95 | 96 ......127 | 128 ...
table           [0]            [1]            [2]            [3]         [4]
            |<-sink->|                               |<-- sliding window -->|
                               ^ outside the window of a token at position 128, and without a sink token: the blocks of
                                 entries 1 and 2 may be released. They form one gap behind the entries of sink tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.kvcache.block import DROPPED, BlockHandle


@dataclass(frozen=True, slots=True)
class Geometry:
    block_size: int  # KV positions of one block
    window: int | None = (
        None  # tokens that a token attends to, itself included, in the layer with the widest window; None = all
    )
    max_chunk_tokens: int = 1 << 30  # prompt tokens of one sequence in one step
    sink_tokens: int = 0  # tokens at the start of a sequence that every token attends to, also from outside its window

    @property
    def sink_blocks(self) -> int:
        """Table entries at the front whose blocks are never released, because they hold sink tokens."""
        return self.blocks_for(self.sink_tokens)

    def blocks_for(self, num_cells: int) -> int:
        """Table entries that cover KV positions [0, num_cells)."""
        return -(-num_cells // self.block_size)

    def blocks_needed(self, num_cells: int) -> int:
        """The most blocks held at once while KV grows to `num_cells` positions; a sliding window bounds it."""
        whole = self.blocks_for(num_cells)
        if self.window is None:
            return whole
        return min(whole, self.sink_blocks + self.blocks_for(self.window + self.max_chunk_tokens) + 2)

    def cells_at_admission(self, num_tokens: int, computed: int) -> int:
        """KV positions to allocate when a sequence of `num_tokens` known tokens is admitted: all, with a window one chunk."""
        return num_tokens if self.window is None else min(num_tokens, computed + self.max_chunk_tokens)

    def gap(self, position: int) -> range:
        """Table entries that no token from `position` on reads.

        A token attends to (position - window, position] and to [0, sink_tokens).
        """
        if self.window is None:
            return range(0)
        first = self.sink_blocks
        return range(first, max(first, (position - self.window + 1) // self.block_size))

    def gap_grows_at(self, num_dropped: int) -> int:
        """The position at which a gap of `num_dropped` entries grows by one. There must be a window."""
        assert self.window is not None
        return (self.sink_blocks + num_dropped + 1) * self.block_size + self.window - 1

    def window_is_whole(self, kept: list[BlockHandle], computed: int) -> bool:
        """True if all blocks that the token at position `computed` attends to are present."""
        if self.window is None:
            return True
        return sum(handle is DROPPED for handle in kept) <= len(self.gap(computed))

    def inside_window(self, handles: list[BlockHandle]) -> list[BlockHandle]:
        """The blocks of a prefix, with DROPPED for those that the token behind the prefix no longer attends to."""
        gap = self.gap(len(handles) * self.block_size)
        return [*handles[: gap.start], *[DROPPED] * len(gap), *handles[gap.stop :]] if gap else handles

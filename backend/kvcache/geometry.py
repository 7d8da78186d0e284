"""Geometry: arithmetic of KV positions and table entries. It knows no blocks and no sequences.

position    0 ...... 31 | 32 ...... 63 | 64 ...... 95 | 96 ...
table           [0]            [1]            [2]          [3]
                              |<--- sliding window --->|
                 ^ outside the window of a token at position 96: entry 0 may be let go
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.kvcache.block import DROPPED, BlockHandle


@dataclass(frozen=True, slots=True)
class Geometry:
    block_size: int  # KV positions of one block
    window: int | None = None  # tokens that each token attends to, itself included; None = all before it
    max_chunk_tokens: int = 1 << 30  # of one sequence in one step

    def blocks_for(self, num_cells: int) -> int:
        """Table entries that cover KV positions [0, num_cells)."""
        return -(-num_cells // self.block_size)

    def blocks_needed(self, num_cells: int) -> int:
        """Blocks held at once while KV grows to `num_cells` positions; a sliding window bounds it."""
        whole = self.blocks_for(num_cells)
        if self.window is None:
            return whole
        return min(whole, self.blocks_for(self.window + self.max_chunk_tokens) + 2)

    def cells_at_admission(self, num_tokens: int, computed: int) -> int:
        """KV positions to allocate when a sequence of `num_tokens` known tokens is admitted: all, or a chunk under a window."""
        return num_tokens if self.window is None else min(num_tokens, computed + self.max_chunk_tokens)

    def num_outside_window(self, position: int) -> int:
        """Table entries that no token from `position` on reads: a token attends to (position - window, position]."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.block_size

    def window_is_whole(self, kept: list[BlockHandle], computed: int) -> bool:
        """Whether the blocks that the token at position `computed` attends to are all there."""
        if self.window is None:
            return True
        return sum(handle is DROPPED for handle in kept) <= self.num_outside_window(computed)

    def inside_window(self, handles: list[BlockHandle]) -> list[BlockHandle]:
        """A prefix of whole blocks without those that the token behind them no longer attends to."""
        if self.window is None:
            return handles
        outside = self.num_outside_window(len(handles) * self.block_size)
        return [DROPPED] * outside + handles[outside:]

"""The map of the KV pool for people who watch it (api/live_view.py)."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from backend.api.live_view import CACHED, FREE
from backend.core.sequence import Sequence
from backend.kvcache.block import DROPPED
from backend.kvcache.state import CacheState

MAX_CELLS = 2048


def block_map(state: CacheState, owners: Iterable[Sequence]) -> tuple[list[int], int]:
    """The states of the pool's blocks in runs, and how many blocks a cell stands for. See LiveView.blocks.

    `owners`: the sequences whose blocks carry their index. A block that several sequences share carries the index of the first.
    The cost is that of MAX_CELLS blocks and of the owners' block tables, whatever the size of the pool.
    """
    blocks = state.blocks
    step = -(-blocks.num_blocks // MAX_CELLS)
    cells = [FREE] * -(-blocks.num_blocks // step)
    for cell, block in enumerate(blocks.blocks[::step]):
        if block.unique_id:
            cells[cell] = CACHED
    for index, seq in enumerate(owners):
        table = state.tables.get(seq.seq_id)
        for handle in table.handles if table is not None else ():
            cell, rest = divmod(handle.block_id, step)
            if not rest and handle is not DROPPED and cells[cell] == CACHED and blocks.is_current(handle):
                cells[cell] = index
    return _runs(cells), step


def _runs(cells: Seq[int]) -> list[int]:
    """State, length, state, length ..."""
    runs: list[int] = []
    for state in cells:
        if runs and runs[-2] == state:
            runs[-1] += 1
        else:
            runs += (state, 1)
    return runs

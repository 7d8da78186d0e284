"""DraftModel: a second, smaller model that guesses the next tokens of rows, before the step verifies them.

Its KV lies in the blocks of the model's own: a block id stands for cells of both. So a sequence's KV of both is found by a common
prefix, copied, let go and evicted together, and the pool's size counts both (ModelInfo.kv_bytes_per_token). The model that
verifies writes each cell; the draft model follows it in prompts, chunk by chunk, and else only when it is asked for guesses.
How many cells of each block it has filled is known here:

    tokens of a row     0 ........... first cell without its KV ........... newest | guess 1 | guess 2
    first pass                        |  run, and behind the newest comes guess 1  |
    second pass                                                                    |  run, guess 2 comes

A cell that the step writes anew holds another token from then on, so it does not count as filled. Guesses change no token of the
output: KV that were wrong here would make them worse, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from backend.core.step import Row, SlotId, StepInput
from backend.worker.input_batch import InputBatch
from backend.worker.kv_storage import KVStorage
from backend.worker.tier import Tier


class DraftModel:
    def __init__(self, tier: Tier, storage: KVStorage, batch: InputBatch, block_size: int, max_num_tokens: int) -> None:
        """`batch`: the model's, whose token ids and block tables hold for both. max_num_tokens: of one pass."""
        self._tier, self._storage, self._batch = tier, storage, batch
        self._block_size, self._max_num_tokens = block_size, max_num_tokens
        self._filled: NDArray[np.int64] = np.zeros(storage.num_blocks, dtype=np.int64)  # cells from each block's start
        self._embedded: set[SlotId] = set()  # their prompts have ids beyond the vocabulary

    def guess(self, step: StepInput) -> StepInput:
        """The step with guesses as drafts of the rows that ask for some. What the step brings has been stored in the batch."""
        self._follow(step)
        rows = [row for row in step.rows if row.slot not in self._embedded and (row.num_guesses or _is_context(row))]
        if not rows:
            return step
        asking = {row.slot: row for row in rows if row.num_guesses}
        guesses: dict[SlotId, list[int]] = {slot: [] for slot in asking}
        for some in self._passes(rows):
            self._run(some, guesses)
        for count in range(1, max((row.num_guesses for row in asking.values()), default=0)):
            going = [row for row in asking.values() if row.num_guesses > count]
            drafted = [Row(row.slot, _known(row) + count - 1, 1, True, [], guesses[row.slot]) for row in going]
            for row in drafted:
                self._batch.put_drafts(row)
            self._run(drafted, guesses)
        if not asking:
            return step
        guessed = [_with_drafts(row, guesses[row.slot]) if row.slot in asking else row for row in step.rows]
        for row in guessed:
            if row.drafts:
                self._batch.put_drafts(row)
        return msgspec.structs.replace(step, rows=guessed)

    def forget(self, block_ids: Sequence[int]) -> None:
        """Note that blocks hold KV of tokens that the draft model has not seen."""
        self._filled[[block_id for block_id in block_ids if block_id < len(self._filled)]] = 0

    def _follow(self, step: StepInput) -> None:
        """Grow, copy, and forget what the step writes anew."""
        self._storage.grow(step.num_blocks)
        self._storage.copy_blocks(step.copies)
        if self._storage.num_blocks > len(self._filled):
            num_more = self._storage.num_blocks - len(self._filled)
            self._filled = np.concatenate((self._filled, np.zeros(num_more, dtype=np.int64)))
        self.forget([block for block, _ in step.swap_in])
        for source, destination in step.copies:
            self._filled[destination] = self._filled[source]
        for new in step.new_rows:
            (self._embedded.discard if new.prompt_embeddings is None else self._embedded.add)(new.slot)
        for row in step.rows:
            blocks, offset = self._blocks(row.slot, row.num_computed, row.num_computed + row.num_tokens)
            self._filled[blocks[0]] = min(self._filled[blocks[0]], offset)
            self._filled[blocks[1:]] = 0

    def _passes(self, rows: list[Row]) -> Iterable[list[Row]]:
        """Rows of the draft model that fill all cells of known tokens, in passes of up to max_num_tokens."""
        some: list[Row] = []
        room = self._max_num_tokens
        for row in rows:
            end = _known(row)
            start = self._first_missing(row.slot, end)
            while start < end:
                count = min(end - start, room)
                some.append(Row(row.slot, start, count, bool(row.num_guesses) and start + count == end))
                start, room = start + count, room - count
                if not room:
                    yield some
                    some, room = [], self._max_num_tokens
        if some:
            yield some

    def _run(self, rows: list[Row], guesses: dict[SlotId, list[int]]) -> None:
        """One pass; adds to the guesses of rows that sample."""
        greedy, logits = self._tier.run(
            self._batch, rows, [int(row.samples) for row in rows], self._storage.pools, False
        )
        for row in rows:
            end = row.num_computed + row.num_tokens
            blocks, _ = self._blocks(row.slot, row.num_computed, end)
            self._filled[blocks[:-1]] = self._block_size
            self._filled[blocks[-1]] = (end - 1) % self._block_size + 1
        sampling = [row.slot for row in rows if row.samples]
        if sampling:
            if greedy is None:
                assert logits is not None  # a tier computes one of the two
                greedy = logits.argmax(dim=-1).cpu().numpy()
            for slot, token_id in zip(sampling, greedy.tolist(), strict=True):
                guesses[slot].append(token_id)

    def _blocks(self, slot: SlotId, start: int, end: int) -> tuple[NDArray[np.int32], int]:
        """The block ids of positions [start, end), and the first one's place in its block."""
        first, offset = divmod(start, self._block_size)
        return self._batch.block_tables[slot, first : -(-end // self._block_size)], offset

    def _first_missing(self, slot: SlotId, end: int) -> int:
        """The first of the positions [0, end) without the draft model's KV; `end` if there is none."""
        blocks, _ = self._blocks(slot, 0, end)
        filled = self._filled[blocks]
        short = (filled < self._block_size).nonzero()[0]
        return end if not len(short) else min(end, int(short[0] * self._block_size + filled[short[0]]))


def _known(row: Row) -> int:
    """Tokens of the row's sequence up to the last one that this step runs and the slot knows."""
    return row.num_computed + row.num_tokens - len(row.drafts) - row.num_guesses


def _is_context(row: Row) -> bool:
    return not row.samples or row.num_tokens > 1 + len(row.drafts) + row.num_guesses


def _with_drafts(row: Row, drafts: list[int]) -> Row:
    return Row(row.slot, row.num_computed, row.num_tokens, row.samples, row.new_block_ids, drafts, saves=row.saves)

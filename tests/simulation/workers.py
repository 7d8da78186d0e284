"""The shadow-KV worker of tests/fakes, made stricter: penalties see the output's start, and each step is checked.

Rows with guides go through the real worker/guided_rows.py: its masks say which tokens may follow.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable

import msgspec
import torch

from backend.core.step import Row, SampledToken, SlotId, StepInput, StepOutput
from backend.worker.guided_rows import GuidedRows
from tests.fakes.hash_worker import HashWorkerGroup, mix, next_token
from tests.simulation.guides import EOS_IDS, SlowGuides, choose, top_allowed
from tests.simulation.setups import MAX_SEQ_LEN, VOCAB, Setup

GARBAGE = 0xDEAD


def penalised_seed(seed: int, outputs: list[int], penalty: float | None) -> int:
    """With a penalty the choice depends on the outputs so far, as a real sampler's does: the boundary must be right."""
    return seed if penalty is None else mix(seed, *outputs)


class CheckedWorkers(HashWorkerGroup):
    """Raises AssertionError for a step that breaks the rules of the batch; `digest` is the hash of all steps so far."""

    def __init__(self, setup: Setup) -> None:
        self.slow_guides = SlowGuides()
        options = dict(keep_trace=False, looks_ahead=setup.looks_ahead, sink_tokens=setup.sink_tokens)
        options["kv_block_size"] = setup.config.kv_cache.block_size
        options["is_recurrent"] = setup.is_recurrent
        super().__init__(VOCAB, MAX_SEQ_LEN, setup.window, eos_ids=EOS_IDS, guides=self.slow_guides, **options)
        self._guided = GuidedRows(self.slow_guides, setup.config.scheduler.max_batch_size, VOCAB)
        self._allowed: deque[list[bool]] = deque()  # what the guide of the row that runs allows for its next samples
        self._setup = setup
        self.digest = hashlib.blake2b()
        self.steps: list[StepInput] = []  # the steps of the current event; the simulator clears them
        self.has_failed = False
        self.num_copies = self.num_swapped_in = 0
        self.on_submit: Callable[[], None] = lambda: None

    def submit(self, step: StepInput) -> None:
        self.digest.update(msgspec.msgpack.encode(step))
        self.steps.append(step)
        self._check(step)
        self.on_submit()
        self.num_copies += len(step.copies)
        self.num_swapped_in += len(step.swap_in)
        super().submit(step)

    def collect(self) -> StepOutput:
        self.has_failed = isinstance(self._in_flight[0], Exception)
        return super().collect()

    def scramble(self, block_id: int) -> None:
        """Overwrite a block that nobody may read."""
        if block_id < len(self.cells):
            self.cells[block_id] = [GARBAGE] * self.block_size

    def _check(self, step: StepInput) -> None:
        scheduler = self._setup.config.scheduler
        slots = [row.slot for row in step.rows]
        num_tokens = sum(row.num_tokens for row in step.rows)
        assert len(set(slots)) == len(slots) <= scheduler.max_batch_size, f"slots {slots} of {scheduler.max_batch_size}"
        assert num_tokens <= scheduler.max_num_tokens, (
            f"{num_tokens} tokens > max_num_tokens {scheduler.max_num_tokens}"
        )
        assert all(row.num_tokens > 0 for row in step.rows), "a row without tokens"
        assert step.num_blocks <= self._setup.num_blocks, f"{step.num_blocks} blocks of {self._setup.num_blocks}"
        assert not (step.swap_out and step.swap_in), "KV moves both ways in one step"
        kept = [(row.slot, number) for row in step.rows for _, number in row.saves]
        assert len({number for _, number in kept}) == len(set(kept)), "two rows keep their states in one place"
        assert all(number >= scheduler.max_batch_size for _, number in kept), (
            "a snapshot in the place of a slot's state"
        )
        assert len({slot for _, slot in step.state_copies}) == len(step.state_copies), "two states for one slot"
        tables = [row.block_ids for row in step.new_rows] + [row.new_block_ids for row in step.rows]
        for table in tables:
            held = [block for block in table if block >= 0]
            assert len(set(held)) == len(held) and max(held, default=0) < step.num_blocks, f"block table {table}"

    def _execute(self, step: StepInput) -> StepOutput:
        if self.fail_next is None:
            for row in step.new_rows:
                self._guided.set_row(row)
        return super()._execute(step)

    def _run_with_drafts(self, row: Row, further: dict[SlotId, list[SampledToken]]) -> SampledToken | None:
        """Under a guide the draft model's guesses are made ahead, at random, for the masks behind them depend on them."""
        if self._slots[row.slot].guide is not None and row.num_guesses:
            drafts = [mix(row.slot, row.num_computed, index) % VOCAB for index in range(row.num_guesses)]
            row = Row(
                row.slot, row.num_computed, row.num_tokens, row.samples, row.new_block_ids, drafts, saves=row.saves
            )
        guided = self._guided.of_step([row])
        if not guided:
            return super()._run_with_drafts(row, further)
        self._allowed.extend(guided.mask(torch.zeros(row.num_samples, VOCAB)).isfinite().tolist())
        first = super()._run_with_drafts(row, further)
        assert first is not None and not self._allowed, "a mask for a token that is not sampled"
        assert guided.accept([first], further) == [], "a guide that allows a token does not take it"
        return first

    def _run(self, row: Row) -> SampledToken | None:
        sampled = super()._run(row)
        state, penalty = self._slots[row.slot], self._slots[row.slot].sampling.presence_penalty
        if sampled is None or (penalty is None and state.guide is None):
            return sampled
        end = row.num_computed + row.num_tokens
        cells = self._cells(state, end)
        seed = penalised_seed(state.sampling.seed or 0, state.token_ids[state.num_prompt_tokens : end], penalty)
        counter = state.num_sampled_before + end - state.num_prompt_tokens
        if state.guide is None:
            token, top = next_token(cells, seed, counter, VOCAB), []
        else:
            allowed = self._allowed.popleft().__getitem__
            top = top_allowed(cells, counter, state.top_log_probs, allowed) if state.top_log_probs else []
            token = top[0][0] if top else choose(cells, seed, counter, allowed)
        state.token_ids[end] = token
        return SampledToken(row.slot, token, float(token) if state.return_log_probs else None, top)

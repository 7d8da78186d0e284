"""The stages of a step that are the same on every device. Both runners are one sequence of them:

    prepare        release and upload adapters, grow the KV pool, copy blocks, store new rows, append blocks, run the draft model
    forward        run the model, in several passes where prompts want many rows of logits (extra_outputs.py)
    post-process   let the post-processors that requests name change logits
    mask           set the logits of tokens that a guide forbids to -inf (guided_rows.py)
    choose         choose a token behind the newest token of each row, and behind each of its drafts
    accept         keep the tokens that follow accepted drafts; advance the guides
    append         append the tokens to the ids of their slots

A stage does nothing where no row asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from backend.core.step import NewRow, Row, SampledToken, SlotId, StepInput, StepOutput
from backend.worker.adapters import DeviceAdapters
from backend.worker.draft_model import DraftModel
from backend.worker.extra_outputs import ExtraOutputs, FetchedRows, fetch_all
from backend.worker.guided_rows import GuidedRows, GuidedStep
from backend.worker.input_batch import InputBatch
from backend.worker.kv_storage import KVStorage
from backend.worker.post_processors import Failure
from backend.worker.state_storage import StateStorage


class Pending(Protocol):
    """A step in flight."""

    def wait(self) -> StepOutput: ...


class Done(NamedTuple):
    output: StepOutput

    def wait(self) -> StepOutput:
        return self.output


class Samples(NamedTuple):
    """The tokens that a step samples: one behind the newest token of each row that samples, and one behind each draft."""

    slots: list[SlotId]
    num_tokens: list[int]  # tokens ahead of each: those that its slot knows, and drafts
    has_drafts: bool


def samples_of(rows: Sequence[Row], num_tokens: Sequence[int]) -> Samples:
    """`num_tokens`: known tokens of each slot, all of which run before a row samples."""
    slots, ahead, has_drafts = [], [], False
    for row in rows:
        if row.samples:
            slots.append(row.slot)
            ahead.append(num_tokens[row.slot])
            for index in range(1, row.num_samples):
                has_drafts = True
                slots.append(row.slot)
                ahead.append(num_tokens[row.slot] + index)
    return Samples(slots, ahead, has_drafts)


def accept_drafts(
    rows: Sequence[Row], samples: list[SampledToken]
) -> tuple[list[SampledToken], dict[SlotId, list[SampledToken]]]:
    """Return StepOutput's `sampled`, the first sample of each row, and `further`: the samples behind each accepted draft.

    A draft is accepted if it and every draft ahead of it equals what was sampled in its place.
    """
    sampled, further, start = [], {}, 0
    for row in rows:
        mine = samples[start : start + row.num_samples]
        start += len(mine)
        sampled += mine[:1]
        num_accepted = 0
        while num_accepted < len(row.drafts) and mine[num_accepted].token_id == row.drafts[num_accepted]:
            num_accepted += 1
        if num_accepted:
            further[row.slot] = mine[1 : 1 + num_accepted]
    return sampled, further


def output_of(
    step: StepInput,
    samples: list[SampledToken],
    has_drafts: bool,
    guided: GuidedStep,
    gathered: Sequence[FetchedRows],
    failed: list[Failure],
) -> StepOutput:
    """Accept drafts, advance the guides, and wait for the rows that clients want.

    gathered: those of each pass; debug tensors come with the last. failed: rows whose post-processor failed.
    """
    further: dict[SlotId, list[SampledToken]] = {}
    if has_drafts:
        samples, further = accept_drafts(step.rows, samples)
    if guided:
        failed = failed + guided.accept(samples, further)
        samples = guided.published(samples, further)
    debug_tensors = gathered[-1].wait_for_debug() if gathered else {}
    return StepOutput(step.step_id, samples, fetch_all(gathered), failed, debug_tensors, further)


class Runner:
    """The state that both runners have: KV storage, slots, and the wishes of their sequences."""

    def __init__(
        self,
        storage: KVStorage,
        batch: InputBatch,
        adapters: DeviceAdapters[Any],
        set_sampling: Callable[[NewRow], None],
        extras: ExtraOutputs | None,
        guided: GuidedRows | None,
        draft_model: DraftModel | None,
        states: StateStorage | None = None,
    ) -> None:
        """`set_sampling`: remembers the sampling parameters of the sequence that takes a slot. states: of recurrent layers."""
        self.storage, self.batch, self.adapters, self.states = storage, batch, adapters, states
        self.extras, self.guided = extras or ExtraOutputs(), guided or GuidedRows(None, 0, 0)
        self.draft_model = draft_model
        self._set_sampling = set_sampling

    def prepare(self, step: StepInput) -> StepInput:
        """Bring adapters, KV storage and slots up to date. Returns the step, with the draft model's guesses as drafts."""
        self.adapters.update(step)
        self.storage.swap_out(step.swap_out)
        self.grow(step.num_blocks)
        self.storage.swap_in(step.swap_in)
        self.storage.copy_blocks(step.copies)
        if self.states is not None:
            self.states.copy(step.state_copies)
        self.batch.take_in(step.new_rows)
        for new_row in step.new_rows:
            self._set_sampling(new_row)
            self.extras.set_row(new_row)
            self.guided.set_row(new_row)
        for row in step.rows:
            if row.new_block_ids:
                self.batch.append_blocks(row.slot, row.new_block_ids)
            if row.drafts:
                self.batch.put_drafts(row)
        return step if self.draft_model is None else self.draft_model.guess(step)

    def grow(self, num_blocks: int) -> None:
        """Back so many blocks by memory, where there are fewer."""
        if num_blocks > self.storage.num_blocks:
            self._grow(num_blocks)

    def _grow(self, num_blocks: int) -> None:
        self.storage.grow(num_blocks)

    def _append(self, output: StepOutput) -> None:
        """Append a step's tokens to the ids of their slots."""
        self.batch.append_tokens(output.sampled)
        for run in output.further.values():
            for sample in run:
                self.batch.append_tokens([sample])

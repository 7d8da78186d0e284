"""Planted bugs of requests with guides, which the simulator must notice. See mutants.py."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from backend.api.errors import EverbatchError
from backend.api.request import Request, RequestId
from backend.core.sequence import BeamSequence, Sequence
from backend.core.step import NewRow
from backend.engine.core import EngineCore
from backend.engine.preparation import Preparation
from backend.kvcache.manager import KVCacheManager
from backend.scheduler import scheduler, step_rows
from backend.worker.guided_rows import GuidedRow, GuidedRows, GuidedStep

SetAttribute = Callable[[object, str, object], None]


def _change_rows_with_guides(set_attribute: SetAttribute, **fields: Callable[[NewRow], object]) -> None:
    original = GuidedRows.set_row

    def set_row(self: GuidedRows, row: NewRow) -> None:
        changes = {name: value(row) for name, value in fields.items()} if row.guide is not None else {}
        original(self, msgspec.structs.replace(row, **changes))

    set_attribute(GuidedRows, "set_row", set_row)


def the_output_so_far_is_forgotten(set_attribute: SetAttribute) -> None:
    _change_rows_with_guides(set_attribute, num_prompt_tokens=lambda row: len(row.token_ids))


def the_prompt_is_taken_for_output(set_attribute: SetAttribute) -> None:
    _change_rows_with_guides(set_attribute, num_prompt_tokens=lambda row: 0)


def the_newest_token_is_not_replayed(set_attribute: SetAttribute) -> None:
    _change_rows_with_guides(
        set_attribute, token_ids=lambda row: row.token_ids[: max(row.num_prompt_tokens, len(row.token_ids) - 1)]
    )


def no_end_ids_beside_a_guide(set_attribute: SetAttribute) -> None:
    _change_rows_with_guides(set_attribute, end_ids=lambda row: ())


def a_slot_keeps_the_guide_of_who_left(set_attribute: SetAttribute) -> None:
    original = GuidedRows.set_row
    set_attribute(GuidedRows, "set_row", lambda self, row: None if row.guide is None else original(self, row))


def beams_go_without_a_guide(set_attribute: SetAttribute) -> None:
    original = step_rows._new_beam_row

    def new_row(seq: BeamSequence, kv: KVCacheManager) -> NewRow:
        return msgspec.structs.replace(original(seq, kv), guide=None)

    set_attribute(step_rows, "_new_beam_row", new_row)


def further_sequences_go_without_a_guide(set_attribute: SetAttribute) -> None:
    original = scheduler.new_row

    def new_row(seq: Sequence, kv: KVCacheManager) -> NewRow:
        row = original(seq, kv)
        return msgspec.structs.replace(row, guide=None) if seq.sequence_index else row

    set_attribute(scheduler, "new_row", new_row)


def a_guide_is_let_go_when_its_request_is_accepted(set_attribute: SetAttribute) -> None:
    original = EngineCore._accept

    def accept(self: EngineCore, request_id: RequestId, request: Request, now_ns: int) -> None:
        original(self, request_id, request, now_ns)
        if self.workers.guides is not None:
            self.workers.guides.end(request_id)

    set_attribute(EngineCore, "_accept", accept)


def a_guide_is_let_go_when_its_sequence_is_paused(set_attribute: SetAttribute) -> None:
    original = EngineCore._schedule

    def schedule(self: EngineCore, started_ns: int) -> object:
        flight = original(self, started_ns)
        for seq in flight.plan.paused if flight is not None else ():
            self.workers.guides.end(seq.request_id)
        return flight

    set_attribute(EngineCore, "_schedule", schedule)


def the_guide_of_a_refused_request_is_kept(set_attribute: SetAttribute) -> None:
    original = EngineCore._give_up

    def give_up(self: EngineCore, request_id: RequestId, request: Request | None, error: Exception) -> None:
        guides, was_known = self.workers.guides, dict(self.workers.guides.users)
        original(self, request_id, request, error)
        if request_id not in self._live and request_id in was_known:
            guides.users[request_id] = was_known[request_id]

    set_attribute(EngineCore, "_give_up", give_up)


def time_begins_when_the_guide_is_compiled(set_attribute: SetAttribute) -> None:
    original = EngineCore._accept

    def accept(self: EngineCore, request_id: RequestId, request: Request, now_ns: int) -> None:
        original(self, request_id, request, self.clock.monotonic_ns())

    set_attribute(EngineCore, "_accept", accept)


def a_cancelled_sequence_takes_a_held_request_on(set_attribute: SetAttribute) -> None:
    original = EngineCore.cancel

    def cancel(self: EngineCore, request_id: RequestId, keep: int | None = None, index: int | None = None) -> None:
        original(self, request_id, keep, None if request_id in self.preparation else index)

    set_attribute(EngineCore, "cancel", cancel)


def a_guide_that_cannot_be_used_is_used(set_attribute: SetAttribute) -> None:
    original = Preparation._note_guide
    set_attribute(Preparation, "_note_guide", lambda self, request_id, error: original(self, request_id, None))


def a_request_is_refused_though_it_runs(set_attribute: SetAttribute) -> None:
    note_it, admit_them = Preparation._note_guide, EngineCore.admit
    told: list[RequestId] = []

    def note(self: Preparation, request_id: RequestId, error: EverbatchError | None) -> None:
        told.extend([request_id] if error is not None else [])
        note_it(self, request_id, error)

    def admit(self: EngineCore) -> None:
        admit_them(self)
        while told:
            self.cancel(told.pop())

    set_attribute(Preparation, "_note_guide", note)
    set_attribute(EngineCore, "admit", admit)


def a_turn_that_waits_is_not_stopped(set_attribute: SetAttribute) -> None:
    set_attribute(Preparation, "waiting_turn", lambda self, key: None)


def a_session_has_two_turns_that_wait(set_attribute: SetAttribute) -> None:
    set_attribute(Preparation, "_check_alone", lambda self, key: None)


def who_waits_has_all_the_time(set_attribute: SetAttribute) -> None:
    set_attribute(Preparation, "late", lambda self, now_ns: [])


def the_drafts_are_output(set_attribute: SetAttribute) -> None:
    original = GuidedRow.fill_ahead

    def fill_ahead(self: GuidedRow, masks: NDArray[np.int32], row: int, drafts: list[int]) -> None:
        original(self, masks, row, drafts)
        for token_id in drafts[:1]:
            self._matcher.accept(token_id)

    set_attribute(GuidedRow, "fill_ahead", fill_ahead)


def drafts_are_chosen_under_the_first_mask(set_attribute: SetAttribute) -> None:
    def fill_ahead(self: GuidedRow, masks: NDArray[np.int32], row: int, drafts: list[int]) -> None:
        for index in range(1 + len(drafts)):
            self.fill(masks, row + index)

    set_attribute(GuidedRow, "fill_ahead", fill_ahead)


def tokens_behind_right_drafts_are_not_replayed(set_attribute: SetAttribute) -> None:
    original = GuidedStep.accept
    set_attribute(GuidedStep, "accept", lambda self, samples, further=None: original(self, samples))


MUTANTS: dict[str, Callable[[SetAttribute], None]] = {
    name: value
    for name, value in list(globals().items())
    if getattr(value, "__module__", "") == __name__ and callable(value) and not name.startswith("_")
}

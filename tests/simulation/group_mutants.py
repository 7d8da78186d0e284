"""Planted bugs of requests that have several sequences: n outputs of their own, or the rows of a beam search. See mutants.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from backend.api import Response
from backend.core.sequence import BeamSequence, Sequence
from backend.core.step import NewRow
from backend.engine import beams, core, groups, publish
from backend.kvcache.manager import KVCacheManager
from backend.kvcache.plan import KVPlan
from backend.scheduler import capacity, step_rows
from backend.scheduler.scheduler import Scheduler

SetAttribute = Callable[[object, str, object], None]


def all_sequences_of_a_request_draw_the_same(set_attribute: SetAttribute) -> None:
    set_attribute(groups, "stream_seed", lambda seed, sequence_index: seed)


def each_sequence_ends_the_request(set_attribute: SetAttribute) -> None:
    original = publish.result_response

    def result_response(seq: Sequence, iteration: int) -> Response:
        response = original(seq, iteration)
        result = response.result
        final = msgspec.structs.replace(result, is_final=result.is_sequence_final)
        return msgspec.structs.replace(response, result_or_none=final)

    set_attribute(core.publish, "result_response", result_response)


def a_cancel_ends_one_sequence_only(set_attribute: SetAttribute) -> None:
    original = groups.members
    set_attribute(core.groups, "members", lambda seq, index=None: original(seq, index)[:1])


def the_blocks_of_a_prompt_are_shared_before_it_is_computed(set_attribute: SetAttribute) -> None:
    original = KVCacheManager.share

    def share(self: KVCacheManager, seq: Sequence, waiting_siblings: Iterable[Sequence]) -> None:
        waiting_siblings = list(waiting_siblings)
        original(self, seq, waiting_siblings)
        for sibling in waiting_siblings:
            sibling.num_computed_tokens = sibling.num_prompt_tokens

    def share_at_once(seq: Sequence, kv: KVCacheManager) -> None:
        if not seq.group.has_prompt and seq is seq.group.members[0]:
            seq.group.has_prompt = True
            kv.share(seq, seq.group.members[1:])

    set_attribute(KVCacheManager, "share", share)
    set_attribute(core.groups, "share_prompt", share_at_once)


def shared_prompt_is_not_copied_before_it_is_written_on(set_attribute: SetAttribute) -> None:
    original = KVPlan._must_not_write
    set_attribute(
        KVPlan,
        "_must_not_write",
        lambda self, block_id: original(self, block_id) and self._state.trie.holds(block_id),
    )


def beams_do_not_lock_what_they_share(set_attribute: SetAttribute) -> None:
    original = KVCacheManager.fork

    def fork(self: KVCacheManager, child: Sequence, parent: Sequence) -> None:
        original(self, child, parent)
        table = self.state.tables[parent.seq_id]
        if table.num_held > 1:
            self.state.blocks.blocks[table.handles[-1].block_id].ref_count -= 1

    set_attribute(KVCacheManager, "fork", fork)


def a_row_that_is_given_another_hypothesis_is_not_renewed(set_attribute: SetAttribute) -> None:
    set_attribute(Scheduler, "renew", lambda self, seq: None)


def a_row_is_renewed_only_for_another_hypothesis(set_attribute: SetAttribute) -> None:
    """Not when it goes on with another token than the worker has appended."""
    original = beams._append

    def append(row: BeamSequence, candidate: object, scheduler: Scheduler, now_ns: int) -> None:
        if row is candidate.parent:
            scheduler = None
            row.candidates = msgspec.structs.replace(row.candidates, token_id=candidate.token_id)
        original(row, candidate, scheduler, now_ns)

    set_attribute(beams, "_append", append)


def beams_are_ranked_without_their_past(set_attribute: SetAttribute) -> None:
    original = beams._append

    def append(row: BeamSequence, *rest: object) -> None:
        original(row, *rest)
        row.cum_log_prob = row.log_probs[-1]

    set_attribute(beams, "_append", append)


def beams_are_paused_one_by_one(set_attribute: SetAttribute) -> None:
    set_attribute(capacity, "_pop_youngest", lambda kept: [kept.pop()])


def grants_of_paused_beams_are_kept(set_attribute: SetAttribute) -> None:
    set_attribute(KVPlan, "retract", lambda self, seq: None)


def beams_are_admitted_one_by_one(set_attribute: SetAttribute) -> None:
    set_attribute(KVPlan, "rollback", lambda self, mark: None)


def widths_are_mixed(set_attribute: SetAttribute) -> None:
    original = Scheduler._admit

    def admit(self: Scheduler, plan: object, *rest: object) -> None:
        head = self.waiting.head
        if head is not None:
            plan.beam_width = head.beam_width
        original(self, plan, *rest)

    set_attribute(Scheduler, "_admit", admit)


def one_candidate_too_few(set_attribute: SetAttribute) -> None:
    original = step_rows._new_beam_row

    def new_row(seq: BeamSequence, kv: KVCacheManager) -> NewRow:
        row = original(seq, kv)
        return msgspec.structs.replace(row, top_log_probs=seq.search.beam_width // 2)

    set_attribute(step_rows, "_new_beam_row", new_row)


def output_of_beams_is_not_promised_its_blocks(set_attribute: SetAttribute) -> None:
    set_attribute(capacity.GuaranteedNoEvict, "_growth_of_beam", lambda self, grant, seq: 0)


MUTANTS: dict[str, Callable[[SetAttribute], None]] = {
    name: value
    for name, value in list(globals().items())
    if getattr(value, "__module__", "") == __name__ and callable(value)
}

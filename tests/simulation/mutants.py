"""Planted bugs: each is a small change of the engine that the simulator must notice.

`python -m tests.simulation.mutants` lists after how many seeds it does.

A mutant replaces attributes through `set_attribute(owner, name, value)`: pytest's monkeypatch.setattr.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from backend.api import Response
from backend.api.request import Request
from backend.api.response import FinishReason
from backend.core.sequence import Sequence, SessionKey, Status
from backend.core.step import NewRow, SlotId, StepOutput
from backend.engine import core, publish, update
from backend.engine.core import EngineCore
from backend.engine.deadlines import Deadlines
from backend.engine.sessions import SessionTable, stays
from backend.engine.steps_in_flight import StepInFlight
from backend.kvcache.block import DROPPED, BlockHandle
from backend.kvcache.block_manager import BlockManager
from backend.kvcache.geometry import Geometry
from backend.kvcache.manager import KVCacheManager
from backend.kvcache.plan import KVCommit, KVPlan
from backend.kvcache.prefix_trie import PrefixTrie
from backend.kvcache.state import SlotManager
from backend.kvcache.tables import BlockTable
from backend.scheduler import scheduler
from backend.scheduler.capacity import GuaranteedNoEvict
from backend.scheduler.micro_batch import MicroBatchScheduler
from backend.scheduler.plan import StepPlan
from backend.scheduler.queue import WaitingQueue
from tests.simulation import group_mutants, guide_mutants, level_mutants, state_mutants, trie_mutants

SetAttribute = Callable[[object, str, object], None]


def stale_handle_not_verified(set_attribute: SetAttribute) -> None:
    set_attribute(BlockManager, "verify", lambda self, handles: len(list(handles)))


def copy_on_write_omitted(set_attribute: SetAttribute) -> None:
    set_attribute(KVPlan, "_must_not_write", lambda self, block_id: False)


def copies_dropped(set_attribute: SetAttribute) -> None:
    commit = KVCacheManager.commit
    set_attribute(KVCacheManager, "commit", lambda self, plan: KVCommit(commit(self, plan).changes, []))


def shared_block_released_twice(set_attribute: SetAttribute) -> None:
    original = BlockManager.release

    def release(self: BlockManager, block_id: int, keep: bool) -> None:
        original(self, block_id, keep)
        if self.blocks[block_id].ref_count:
            original(self, block_id, keep)

    set_attribute(BlockManager, "release", release)


def not_released_when_cancelled_while_paused(set_attribute: SetAttribute) -> None:
    original = EngineCore._leave

    def leave(self: EngineCore, seq: Sequence) -> None:
        release = self.kv.release
        if seq.status is Status.PAUSED:
            self.kv.release = lambda seq, keep, has_waiting_siblings=False: None
        original(self, seq)
        self.kv.release = release

    set_attribute(EngineCore, "_leave", leave)


def not_released_when_timed_out(set_attribute: SetAttribute) -> None:
    original = EngineCore._leave

    def leave(self: EngineCore, seq: Sequence) -> None:
        release = self.kv.release
        if seq.finish_reason is FinishReason.TIMED_OUT:
            self.kv.release = lambda seq, keep, has_waiting_siblings=False: self.kv._release_slot(seq)
        original(self, seq)
        self.kv.release = release

    set_attribute(EngineCore, "_leave", leave)


def one_block_short_at_a_block_edge(set_attribute: SetAttribute) -> None:
    set_attribute(Geometry, "blocks_for", lambda self, num_cells: -(-(num_cells - 1) // self.block_size))


def last_cell_not_extended(set_attribute: SetAttribute) -> None:
    extend = KVPlan.extend
    set_attribute(KVPlan, "extend", lambda self, seq, num_cells: extend(self, seq, num_cells - 1))


def random_stream_restarts_with_a_turn(set_attribute: SetAttribute) -> None:
    original = Sequence.end_turn

    def end_turn(self: Sequence) -> None:
        original(self)
        self.num_sampled_before = 0

    set_attribute(Sequence, "end_turn", end_turn)


def random_stream_restarts_with_a_readmission(set_attribute: SetAttribute) -> None:
    original = scheduler.new_row
    set_attribute(
        scheduler,
        "new_row",
        lambda seq, kv: msgspec.structs.replace(original(seq, kv), num_sampled_before=-seq.num_output_tokens),
    )


def penalty_boundary_lost_on_resume(set_attribute: SetAttribute) -> None:
    original = scheduler.new_row

    def new_row(seq: Sequence, kv: KVCacheManager) -> NewRow:
        row = original(seq, kv)
        return msgspec.structs.replace(row, num_prompt_tokens=seq.num_tokens, num_sampled_before=seq.num_sampled_tokens)

    set_attribute(scheduler, "new_row", new_row)


def final_response_twice(set_attribute: SetAttribute) -> None:
    original = EngineCore._finish

    def finish(self: EngineCore, seq: Sequence, reason: FinishReason, keep_output_tokens: int | None = None) -> None:
        original(self, seq, reason, keep_output_tokens)
        self.outbox.put(self.outbox._ready[-1])

    set_attribute(EngineCore, "_finish", finish)


def cancel_answers_nothing(set_attribute: SetAttribute) -> None:
    original = EngineCore.cancel

    def cancel(
        self: EngineCore, request_id: int, keep_output_tokens: int | None = None, sequence_index: int | None = None
    ) -> None:
        original(self, request_id, keep_output_tokens, sequence_index)
        self.outbox.take()

    set_attribute(EngineCore, "cancel", cancel)


def deadlines_ignored(set_attribute: SetAttribute) -> None:
    set_attribute(Deadlines, "pop_due", lambda self, now_ns, live: [])


def unlocked_head_first(set_attribute: SetAttribute) -> None:
    def unlock(self: KVCacheManager, table: BlockTable, keep: bool) -> None:
        for handle in table.held():
            self.state.blocks.release(handle.block_id, keep or self.state.trie.holds(handle.block_id))
        table.is_locked = False

    set_attribute(KVCacheManager, "_unlock", unlock)


def window_drops_a_block_too_early(set_attribute: SetAttribute) -> None:
    original = Geometry.gap
    set_attribute(Geometry, "gap", lambda self, position: original(self, position + 1))


def sink_blocks_are_let_go(set_attribute: SetAttribute) -> None:
    set_attribute(Geometry, "sink_blocks", 0)


def a_block_with_the_last_sink_token_is_let_go(set_attribute: SetAttribute) -> None:
    set_attribute(Geometry, "sink_blocks", property(lambda self: self.sink_tokens // self.block_size))


def a_prefix_that_is_found_loses_its_sink_blocks(set_attribute: SetAttribute) -> None:
    def inside_window(self: Geometry, handles: list[BlockHandle]) -> list[BlockHandle]:
        gone = self.gap(len(handles) * self.block_size).stop
        return [DROPPED] * gone + handles[gone:]

    set_attribute(Geometry, "inside_window", inside_window)


def keep_flag_lost(set_attribute: SetAttribute) -> None:
    release = KVCacheManager.release
    set_attribute(
        KVCacheManager, "release", lambda self, seq, keep, has_waiting_siblings=False: release(self, seq, False)
    )


def truncation_keeps_the_kv_counter(set_attribute: SetAttribute) -> None:
    def truncate(self: Sequence, num_tokens: int) -> None:
        del self.token_ids[num_tokens:]

    set_attribute(Sequence, "truncate", truncate)


def kv_trusted_after_a_failed_step(set_attribute: SetAttribute) -> None:
    set_attribute(KVCacheManager, "lose_everything", lambda self: None)


def undone_turn_keeps_its_random_state(set_attribute: SetAttribute) -> None:
    set_attribute(Sequence, "undo_turn", lambda self: self.truncate(self.num_history_tokens))


def failed_turn_is_remembered(set_attribute: SetAttribute) -> None:
    original = SessionTable.settle

    def settle(
        self: SessionTable, seq: Sequence, kv: KVCacheManager, now_ns: int, keep: int | None = None, undo: bool = False
    ) -> None:
        original(self, seq, kv, now_ns, 0 if undo else keep)

    set_attribute(SessionTable, "settle", settle)


def published_tokens_forgotten(set_attribute: SetAttribute) -> None:
    original = publish.result_response

    def result_response(seq: Sequence, iteration: int) -> Response:
        before = seq.num_published_tokens
        response = original(seq, iteration)
        if seq.num_pauses:
            seq.num_published_tokens = before
        return response

    set_attribute(core.publish, "result_response", result_response)


def stop_word_matched_by_its_last_token(set_attribute: SetAttribute) -> None:
    set_attribute(update, "_ends_with", lambda seq, word: seq.token_ids[-1] == word[-1])


def min_tokens_ignored(set_attribute: SetAttribute) -> None:
    original = update.finish_reason

    def finish_reason(seq: Sequence) -> FinishReason:
        if seq.num_output_tokens and seq.token_ids[-1] in seq.request.end_ids:
            return FinishReason.END_ID
        return original(seq)

    set_attribute(core.update, "finish_reason", finish_reason)


def paused_goes_last_in_line(set_attribute: SetAttribute) -> None:
    def put_back(self: WaitingQueue, seq: Sequence) -> None:
        self._paused.append(seq)
        self._count(seq, 1)

    set_attribute(WaitingQueue, "put_back", put_back)


def the_oldest_is_paused(set_attribute: SetAttribute) -> None:
    def extend_or_pause(plan: KVPlan, running: list[Sequence], num_tokens: dict[int, int]) -> list[Sequence]:
        return original(plan, running[::-1], num_tokens)

    original = scheduler.extend_or_pause
    set_attribute(scheduler, "extend_or_pause", extend_or_pause)


def growth_of_others_not_promised(set_attribute: SetAttribute) -> None:
    set_attribute(GuaranteedNoEvict, "_growth", lambda self, plan, seq: 0)


def nothing_left_to_run(set_attribute: SetAttribute) -> None:
    match = PrefixTrie.match
    set_attribute(PrefixTrie, "match", lambda self, space, ids, limit, *rest: match(self, space, ids, limit + 1, *rest))


def one_token_over_the_budget(set_attribute: SetAttribute) -> None:
    cut = MicroBatchScheduler.cut
    set_attribute(MicroBatchScheduler, "cut", lambda self, wants, budget: cut(self, wants, budget + 1))


def context_holds_up_generation(set_attribute: SetAttribute) -> None:
    budget = MicroBatchScheduler.context_budget
    set_attribute(
        MicroBatchScheduler, "context_budget", lambda self, rows, waiting, most: budget(self, 0, waiting, most) - rows
    )


def context_starves_beside_generation(set_attribute: SetAttribute) -> None:
    set_attribute(MicroBatchScheduler, "context_budget", lambda self, rows, waiting, most: 0 if rows else most)


def a_block_too_many_is_taken_for_writable(set_attribute: SetAttribute) -> None:
    def writable(self: KVCacheManager, seq: Sequence) -> int:
        return (len(self.state.tables[seq.seq_id].handles) + 1) * self.block_size

    set_attribute(KVCacheManager, "num_writable_cells", writable)


def slot_given_out_twice(set_attribute: SetAttribute) -> None:
    acquire = SlotManager.acquire

    def acquire_low(self: SlotManager, seq_id: int) -> SlotId:
        return SlotId(max(0, acquire(self, seq_id) - 1))

    set_attribute(SlotManager, "acquire", acquire_low)


def busy_session_takes_a_second_turn(set_attribute: SetAttribute) -> None:
    def check_nothing(self: SessionTable, request: Request) -> Sequence | None:
        return self._sessions.get(SessionKey(request.cache_salt, request.session.id))

    set_attribute(SessionTable, "check_turn", check_nothing)


def retired_session_comes_back(set_attribute: SetAttribute) -> None:
    set_attribute(core, "stays", lambda seq: seq.session_key is not None and (stays(seq) or seq.num_pauses > 0))


def pause_of_what_is_in_flight(set_attribute: SetAttribute) -> None:
    set_attribute(StepPlan, "must_wait", False)


def rows_of_those_that_left_are_booked(set_attribute: SetAttribute) -> None:
    def update_all(self: EngineCore, flight: StepInFlight, output: StepOutput) -> None:
        flight.dropped.clear()
        original(self, flight, output)

    original = EngineCore._update
    set_attribute(EngineCore, "_update", update_all)


def scheduled_beyond_its_end(set_attribute: SetAttribute) -> None:
    set_attribute(Sequence, "is_awaited", property(lambda seq: seq.num_uncomputed_tokens == 0))


def has_work_forgets_what_is_in_flight(set_attribute: SetAttribute) -> None:
    set_attribute(EngineCore, "has_work", property(lambda self: self.scheduler.has_work))


MUTANTS: dict[str, Callable[[SetAttribute], None]] = {
    name: value
    for name, value in list(globals().items())
    if getattr(value, "__module__", "") == __name__ and callable(value)
}
MUTANTS |= group_mutants.MUTANTS | trie_mutants.MUTANTS | guide_mutants.MUTANTS | level_mutants.MUTANTS
MUTANTS |= state_mutants.MUTANTS


def main() -> None:
    """Print, for each mutant, the first seed that kills it."""
    from pytest import MonkeyPatch

    from tests.simulation.shrink import first_failure

    logging.getLogger("everbatch.engine").setLevel(logging.CRITICAL)
    for name, plant in MUTANTS.items():
        with MonkeyPatch.context() as patch:
            plant(patch.setattr)
            seed = first_failure(range(2000))
        print(f"{name}: {'survives 2000 seeds' if seed is None else f'killed by seed {seed}'}", flush=True)


if __name__ == "__main__":
    main()

"""Bugs planted in drafts: their proposal, their verification, their books."""

from __future__ import annotations

from backend.api import draft_limits
from backend.core.sequence import Sequence
from backend.engine import update
from backend.kvcache.plan import KVPlan
from backend.scheduler import drafting, scheduler
from backend.scheduler.acceptance import Acceptance
from backend.scheduler.drafting import Drafter
from backend.scheduler.lookup import Lookup, OtherOutputs
from backend.scheduler.model_drafting import ModelDrafter
from backend.scheduler.step_cost import StepCost
from backend.worker import group, pipeline
from backend.worker.draft_model import DraftModel
from backend.worker.group import InProcessWorkerGroup
from tests.mutants.changes import change, change_everywhere

ENGINE = ["tests/engine/test_drafts.py"]
DRAFTING = [f"tests/scheduler/test_{name}.py" for name in ("drafting", "lookup", "step_cost", "acceptance")]
MODEL = ["tests/model/test_speculation.py"]
ISOLATION = ["tests/model/test_speculation_isolation.py"]
DRAFT_MODEL = ["tests/model/test_draft_model.py"]

MUTANTS = {
    "given_drafts_take_no_room": (
        change(Drafter, "propose", ("room -= draft.num_tokens", "room -= 0")),
        ["tests/scheduler/test_drafting.py"],
    ),
    "ended_sequences_are_remembered": (
        change(Drafter, "end", ("self._known.pop(seq.seq_id, None)", "self._known.get(seq.seq_id)")),
        ["tests/scheduler/test_drafting.py"],
    ),
    "given_drafts_teach_the_cost_of_passes": (
        change(ModelDrafter, "note", ("if any(draft.is_given for draft in drafts):", "if False:")),
        ["tests/scheduler/test_model_drafting.py"],
    ),
    "guessing_never_rests": (change(Drafter, "_settle", ("if self._won_s <", "if False and self._won_s <")), DRAFTING),
    "a_rest_never_ends": (change(Drafter, "guess", ("max(0, self._num_resting - 1)", "self._num_resting")), DRAFTING),
    "a_backlog_is_looked_at_token_by_token": (change(Lookup, "see", ("(2 * MAX_LENGTH if", "(1e9 if")), DRAFTING),
    "a_size_is_never_worked_out_anew": (change(StepCost, "note", ("self._estimates.clear()", "pass")), DRAFTING),
    "a_place_that_was_left_is_never_forgotten": (
        change(Lookup, "_near", ("self._num_since_left > NEAR", "False")),
        DRAFTING,
    ),
    "a_place_is_near_wherever_it_is": (change(Lookup, "_near", ("min(end, left.next_at + NEAR)", "end")), DRAFTING),
    "a_match_of_one_token_is_come_back_to": (
        change(Lookup, "_see_next", ("elif place.length >= NGRAMS[-1]:", "else:")),
        DRAFTING,
    ),
    "the_last_token_of_an_output_is_followed": (
        change(Lookup, "_near", ("len(left.output) - 1)", "len(left.output))")),
        DRAFTING,
    ),
    "a_wrong_draft_is_kept": (change(pipeline, "accept_drafts", ("mine[1 : 1 + num_accepted]", "mine[1:]")), MODEL),
    "what_follows_right_drafts_is_dropped": (
        change(pipeline, "accept_drafts", ("mine[1 : 1 + num_accepted]", "mine[1:num_accepted]")),
        MODEL,
    ),
    "drafts_are_sampled_as_one_position": (
        change_everywhere(pipeline.samples_of, ("[row.slot] + index)", "[row.slot])")),
        MODEL,
    ),
    "a_run_goes_on_behind_the_end": (change(update, "append_run", ("            break", "            pass")), ENGINE),
    "kv_of_wrong_drafts_counts": (
        change(update, "append_run", ("    reason = Fin", "    seq.num_computed_tokens += 1\n    reason = Fin")),
        ENGINE,
    ),
    "tokens_in_flight_stay": (
        change(
            update, "append_run", ("seq.num_inflight_tokens = seq.num_inflight_samples", "seq.num_inflight_samples")
        ),
        ENGINE,
    ),
    "the_request_s_own_drafts_count_twice": (change(update, "append_run", ("not is_given", "True")), ENGINE),
    "accepted_is_what_was_tried": (
        change(update, "append_run", ("= len(samples) - 1", "= seq.num_inflight_drafts")),
        ENGINE,
    ),
    "drafts_go_beyond_the_longest_end": (
        change(drafting, "_left", ("seq.num_output_tokens - 1", "seq.num_output_tokens")),
        ENGINE,
    ),
    "a_script_is_followed_when_it_was_wrong": (
        change(drafting, "_follows_script", (" and seq.token_ids", " or seq.token_ids")),
        ENGINE,
    ),
    "a_request_cannot_do_without": (change(drafting, "may_guess", ("seq.request.speculation and ", "")), ENGINE),
    "all_anonymous_learn_from_each_other": (
        change(Drafter, "_shares", ('self._sharing == "all" or not seq.is_anonymous', "True")),
        DRAFTING,
    ),
    "drafts_take_blocks_that_do_not_exist": (
        change(KVPlan, "widen", ("return False", "return True")),
        ["tests/simulation/test_simulation.py"],
    ),
    "widen_forgets_what_extend_has_planned": (
        change(KVPlan, "widen", ("num_planned += ", "num_planned += 0 * ")),
        ["tests/kvcache/test_tables.py"],
    ),
    "widen_counts_the_copy_of_a_block_as_room": (
        change(KVPlan, "widen", (" - (grant.replaces is not None)", "")),
        ["tests/kvcache/test_copy_on_write.py"],
    ),
    "rows_with_drafts_are_planned_ahead": (
        change(scheduler.Scheduler, "_waits_for_tokens", ("self._drafter.waits(in_flight)", "False")),
        ENGINE,
    ),
    "who_has_no_drafts_goes_ahead": (
        change(
            drafting.Drafter, "waits", ("rows)) or", "rows[:1])) or"), ("self.expects(rows)", "self.expects(rows[1:])")
        ),
        ENGINE,
    ),
    "rows_in_flight_are_guessed_at": (
        change(Drafter, "guess", ("if not seq.num_inflight_samples]", "if True]")),
        DRAFTING,
    ),
    "a_step_that_tells_nothing_ends_waiting": (change(Drafter, "guess", ("if tells:", "if True:")), DRAFTING),
    "trials_are_not_planned_ahead": (
        change(Drafter, "expects", (" or self.cost.is_trial(self._speed)", "")),
        DRAFTING,
    ),
    "hashes_are_believed": (change(Lookup, "_compared", ("if length >= size", "if True")), DRAFTING),
    "the_short_match_is_taken": (
        change(Lookup, "_see_next", ("in zip(NGRAMS, self._next)", "in list(zip(NGRAMS, self._next))[::-1]")),
        DRAFTING,
    ),
    "others_of_any_namespace_are_found": (
        change(OtherOutputs, "find", ("self._places.get(namespace, {})", "next(iter(self._places.values()), {})")),
        DRAFTING,
    ),
    "strangers_learn_step_by_step": (
        change(Drafter, "_shares", ('self._sharing == "all" or not seq.is_anonymous', "True")),
        ISOLATION,
    ),
    "namespaces_learn_of_each_other": (
        change(OtherOutputs, "find", ("self._places.get(namespace, {})", "next(iter(self._places.values()), {})")),
        ISOLATION,
    ),
    "all_steps_bring_one_token": (change(update, "append_run", ("seq.num_extra_tokens += num_extra", "pass")), ENGINE),
    "nothing_is_forgotten": (
        change(OtherOutputs, "add", ("while self._num_tokens", "while False and self._num_tokens")),
        DRAFTING,
    ),
    "what_is_skipped_is_not_known": (change(Lookup, "_skip_to", ("known.update(", "tuple(")), DRAFTING),
    "nothing_is_ever_forgotten": (change(StepCost, "_known", ("> 5 * PERIOD", "> 1e9")), DRAFTING),
    "there_are_no_trials": (change(StepCost, "is_trial", ("== between - 1", "== -1")), DRAFTING),
    "all_sizes_are_on_the_line": (change(StepCost, "_expected", ("self._known(num_tokens) or", "None or")), DRAFTING),
    "guesses_behind_a_wrong_one_count": (
        change(Acceptance, "see", ("if num_guessed > num_right:", "for _ in range(num_guessed - num_right):")),
        DRAFTING,
    ),
    "what_is_known_of_guesses_stays": (change(Acceptance, "see", ("if not num_guessed:", "if False:")), DRAFTING),
    "cells_written_anew_count_as_filled": (
        change(DraftModel, "_follow", ("self._filled[blocks[1:]] = 0", "pass"), ("offset)", "self._block_size)")),
        DRAFT_MODEL,
    ),
    "kv_of_both_is_copied_for_one": (
        change(DraftModel, "_follow", ("self._storage.copy_blocks(step.copies)", "pass")),
        DRAFT_MODEL,
    ),
    "the_draft_model_begins_where_the_step_does": (
        change(DraftModel, "_passes", ("self._first_missing(row.slot, end)", "row.num_computed")),
        DRAFT_MODEL,
    ),
    "a_pass_is_cut_and_nobody_goes_on": (
        change(DraftModel, "_passes", ("while start < end", "if start < end")),
        DRAFT_MODEL,
    ),
    "guesses_are_not_put_behind_each_other": (
        change(DraftModel, "guess", ("_known(row) + count - 1", "_known(row) - 1")),
        DRAFT_MODEL,
    ),
    "any_vocabulary_will_do": (
        change(group, "load_draft_model", ("config.vocab_size != model.config.vocab_size", "False")),
        DRAFT_MODEL,
    ),
    "the_pool_forgets_the_draft_model": (
        change(InProcessWorkerGroup, "load", ("models.append(self._draft)", "pass")),
        DRAFT_MODEL,
    ),
    "a_request_cannot_bound_its_guesses": (
        change(Drafter, "_most", ("if asked is None", "if True")),
        ENGINE,
    ),
    "outliers_count": (change(StepCost, "note", ("min(seconds, 2 * self._expected(num_tokens))", "seconds")), DRAFTING),
    "a_decaying_top_p_is_drafted": (
        change(draft_limits, "what_forbids_drafts", ('"top_p_decay": sampling.decays_top_p', '"top_p_decay": False')),
        ENGINE,
    ),
    "accepted_counts_what_comes_behind_a_wrong_one": (
        change(
            Sequence,
            "num_accepted_draft_tokens",
            ("takewhile(lambda pair: pair[0] == pair[1], pairs)", "(pair for pair in pairs if pair[0] == pair[1])"),
        ),
        ENGINE,
    ),
}

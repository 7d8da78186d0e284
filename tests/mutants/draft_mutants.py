"""Bugs planted in drafts: their proposal, their limits, their verification, their books, and the ways to ask for them."""

from __future__ import annotations

from backend.api import draft_limits
from backend.core.sequence import Sequence
from backend.engine import update
from backend.kvcache.plan import KVPlan
from backend.scheduler import drafting, scheduler
from backend.scheduler.drafting import Drafter
from backend.scheduler.lookup import Lookup, OtherOutputs
from backend.scheduler.model_drafting import Acceptance, ModelDrafter
from backend.scheduler.step_cost import StepCost
from backend.serving.wires import trtllm_inputs
from backend.worker import draft_model, pipeline
from backend.worker.draft_model import DraftModel
from compat.llm import speculative
from compat.trtllm import to_core
from tests.mutants.changes import Plant, change, change_everywhere

PASSES = ["tests/scheduler/test_model_drafting.py"]
LIMITS = ["tests/api/test_draft_limits.py"]
DRAFTING = [f"tests/scheduler/test_{name}.py" for name in ("drafting", "lookup", "step_cost", "acceptance")]
MODEL = ["tests/model/test_speculation.py"]
DRAFT_MODEL = ["tests/model/test_draft_model.py"]
ARGUMENTS = ["tests/llm/test_arguments.py"]
CONVERSION = ["tests/trtllm/test_conversion.py"]
INPUTS = ["tests/serving/test_token_requests.py"]


def _accept(old: str, new: str) -> Plant:
    return change_everywhere(pipeline.accept_drafts, (old, new))


def _check(old: str, new: str) -> Plant:
    return change_everywhere(draft_limits.check_drafts, (old, new))


def _fields(old: str, new: str) -> Plant:
    return change_everywhere(speculative.speculation_fields, (old, new))


ENGINE = ["tests/engine/test_drafts.py"]
ISOLATION = ["tests/model/test_speculation_isolation.py"]

MUTANTS = {
    "rows_and_passes_are_one_number": (
        change(StepCost, "note", ("group_of(num_tokens), {})", "group_of(num_tokens + num_tokens * num_passes), {})")),
        PASSES,
    ),
    "the_draft_model_guesses_at_rows_in_flight": (
        change(ModelDrafter, "guess", ("if not seq.num_inflight_samples]", "if True]")),
        PASSES,
    ),
    "the_next_row_begins_at_the_second_sample": (_accept("start += len(mine)", "start += row.samples"), MODEL),
    "a_draft_is_compared_with_what_is_behind_it": (
        _accept("mine[num_accepted].token_id", "mine[num_accepted + 1].token_id"),
        MODEL,
    ),
    "a_draft_may_be_right_at_any_place": (_accept("== row.drafts[num_accepted]", "in row.drafts"), MODEL),
    "rows_with_drafts_are_taken_for_plain_ones": (
        change_everywhere(pipeline.samples_of, ("has_drafts = True", "pass")),
        MODEL,
    ),
    "guesses_are_bounded_where_there_are_none": (_check("not guesses", "False"), LIMITS),
    "no_guesses_need_no_guessing_engine": (
        _check("max_draft_tokens is not None and not guesses", "max_draft_tokens and not guesses"),
        LIMITS,
    ),
    "steps_all_right_count_as_wrong": (
        change(Acceptance, "see", ("if num_guessed > num_right:", "if num_guessed:")),
        DRAFTING,
    ),
    "a_step_fades_as_much_as_a_token": (change(Acceptance, "see", (" ** num_tokens", "")), DRAFTING),
    "former_turns_count": (
        change(
            Acceptance,
            "__init__",
            ("seq.num_tokens, seq.num_guessed_tokens, seq.num_right_guesses", "seq.num_tokens, 0, 0"),
        ),
        DRAFTING,
    ),
    "right_guesses_count_once_a_step": (
        change(Acceptance, "see", ("range(num_right)", "range(min(num_right, 1))")),
        DRAFTING,
    ),
    "prompts_are_run_when_guesses_are_asked_for": (
        change_everywhere(
            draft_model._is_context, ("return not row.samples or row.num_tokens > ", "return row.num_tokens < 0 * ")
        ),
        DRAFT_MODEL,
    ),
    "a_full_block_counts_as_an_empty_one": (
        change(DraftModel, "_run", ("(end - 1) % self._block_size + 1", "end % self._block_size")),
        DRAFT_MODEL,
    ),
    "a_copied_block_is_an_empty_one": (
        change(
            DraftModel, "_follow", ("self._filled[destination] = self._filled[source]", "self._filled[destination] = 0")
        ),
        DRAFT_MODEL,
    ),
    "all_rows_guess_as_long_as_one_does": (
        change(DraftModel, "guess", ("row.num_guesses > count", "row.num_guesses")),
        DRAFT_MODEL,
    ),
    "pools_are_private_unless_they_are_public": (_fields("is False", "is not True"), ARGUMENTS),
    "classes_have_no_type": (_fields("type(given).__name__.removesuffix", "str().removesuffix"), ARGUMENTS),
    "the_draft_model_has_one_name": (_fields("in DRAFT_MODEL_FIELDS", "in DRAFT_MODEL_FIELDS[:1]"), ARGUMENTS),
    "a_size_of_0_is_left_out": (
        change_everywhere(speculative.lookahead_drafts, ("if size is None", "if not size")),
        ARGUMENTS,
    ),
    "the_window_is_the_n_gram": (
        change_everywhere(
            to_core._drafts,
            (
                "lookahead.max_window_size, lookahead.max_ngram_size",
                "lookahead.max_ngram_size, lookahead.max_window_size",
            ),
        ),
        CONVERSION,
    ),
    "sizes_of_0_are_sizes": (
        change_everywhere(trtllm_inputs.read_lookahead, ("not any(sizes)", "sizes == [None] * 3")),
        INPUTS,
    ),
    "given_drafts_take_no_room": (
        change(Drafter, "propose", ("room -= draft.num_tokens", "room -= 0")),
        ["tests/scheduler/test_drafting.py"],
    ),
    "ended_sequences_are_remembered": (
        change(Drafter, "end", ("self._known.pop(seq.seq_id, None)", "self._known.get(seq.seq_id)")),
        ["tests/scheduler/test_drafting.py"],
    ),
    "a_rest_never_ends": (change(Drafter, "guess", ("max(0, self._num_resting - 1)", "self._num_resting")), DRAFTING),
    "a_backlog_is_looked_at_token_by_token": (change(Lookup, "see", ("(2 * MAX_LENGTH if", "(1e9 if")), DRAFTING),
    "a_match_of_one_token_is_come_back_to": (
        change(Lookup, "_see_next", ("elif place.length >= NGRAMS[-1]:", "else:")),
        DRAFTING,
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
    "accepted_is_what_was_tried": (
        change(update, "append_run", ("= len(samples) - 1", "= seq.num_inflight_drafts")),
        ENGINE,
    ),
    "widen_forgets_what_extend_has_planned": (
        change(KVPlan, "widen", ("num_planned += ", "num_planned += 0 * ")),
        ["tests/kvcache/test_tables.py"],
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
    "what_is_skipped_is_not_known": (change(Lookup, "_skip_to", ("known.update(", "tuple(")), DRAFTING),
    "nothing_is_ever_forgotten": (change(StepCost, "_known", ("> 5 * PERIOD", "> 1e9")), DRAFTING),
    "there_are_no_trials": (change(StepCost, "is_trial", ("== between - 1", "== -1")), DRAFTING),
    "all_sizes_are_on_the_line": (change(StepCost, "_expected", ("self._known(num_tokens) or", "None or")), DRAFTING),
    "guesses_behind_a_wrong_one_count": (
        change(Acceptance, "see", ("if num_guessed > num_right:", "for _ in range(num_guessed - num_right):")),
        DRAFTING,
    ),
    "cells_written_anew_count_as_filled": (
        change(DraftModel, "_follow", ("self._filled[blocks[1:]] = 0", "pass"), ("offset)", "self._block_size)")),
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

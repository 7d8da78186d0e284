"""Bugs planted in what limits drafts, in the draft model and how often it is right, and in the ways to ask for speculation."""

from __future__ import annotations

from backend.api import draft_limits
from backend.scheduler.acceptance import Acceptance
from backend.scheduler.model_drafting import ModelDrafter
from backend.scheduler.step_cost import StepCost
from backend.serving import upstream_parameters
from backend.serving.fronts import trtllm_inputs
from backend.worker import draft_model, loaded_model, pipeline
from backend.worker.draft_model import DraftModel
from compat.llm import speculative
from compat.trtllm import parameters, request_configs, to_core
from tests.mutants.changes import Plant, change, change_everywhere

PASSES = ["tests/scheduler/test_model_drafting.py"]
LIMITS = ["tests/api/test_draft_limits.py"]
DRAFTING = [f"tests/scheduler/test_{name}.py" for name in ("drafting", "lookup", "step_cost", "acceptance")]
MODEL = ["tests/model/test_speculation.py"]
DRAFT_MODEL = ["tests/model/test_draft_model.py"]
ARGUMENTS = ["tests/llm/test_arguments.py"]
CONVERSION = ["tests/trtllm/test_conversion.py"]
NAMES = ["tests/trtllm/test_names.py"]
INPUTS = ["tests/serving/test_token_requests.py"]
PARAMETERS = ["tests/serving/test_upstream_parameters.py"]


def _accept(old: str, new: str) -> Plant:
    return change_everywhere(pipeline.accept_drafts, (old, new))


def _check(old: str, new: str) -> Plant:
    return change_everywhere(draft_limits.check_drafts, (old, new))


def _fields(old: str, new: str) -> Plant:
    return change_everywhere(speculative.speculation_fields, (old, new))


MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "the_first_step_with_passes_counts": (change(StepCost, "note", ("if is_first:", "if False:")), PASSES),
    "rows_and_passes_are_one_number": (
        change(StepCost, "note", ("group_of(num_tokens), {})", "group_of(num_tokens + num_tokens * num_passes), {})")),
        PASSES,
    ),
    "an_outlier_of_passes_counts_in_full": (
        change(StepCost, "note", ("min(seconds, 2 * known.seconds)", "seconds")),
        PASSES,
    ),
    "plain_steps_are_forgotten_too": (change(StepCost, "forget_passes", ("if each]", "]")), PASSES),
    "the_draft_model_guesses_at_rows_in_flight": (
        change(ModelDrafter, "guess", ("if not seq.num_inflight_samples]", "if True]")),
        PASSES,
    ),
    "a_pass_is_for_one_row": (change(ModelDrafter, "_count", ("room // len(shares)", "room")), PASSES),
    "all_guesses_are_as_probable_as_the_first": (
        change(ModelDrafter, "_count", ("chance * share for", "chance for")),
        PASSES,
    ),
    "tries_are_as_frequent_as_ever": (change(ModelDrafter, "note", ("2 * self._wait", "self._wait")), PASSES),
    "no_step_goes_without_guesses": (change(ModelDrafter, "_count", ("or is_plain or", "or")), PASSES),
    "nobody_learns_from_others_guesses": (change(ModelDrafter, "_acceptance", ("if num_wrong:", "if False:")), PASSES),
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
    "the_first_token_of_an_n_gram_is_a_guess": (
        change_everywhere(draft_limits.drafts_of_lookahead, ("return ngram_size - 1", "return ngram_size")),
        LIMITS,
    ),
    "lookahead_must_verify": (
        change_everywhere(draft_limits.drafts_of_lookahead, ("verification_set_size < 0", "verification_set_size < 1")),
        LIMITS,
    ),
    "lookahead_may_have_no_window": (
        change_everywhere(draft_limits.drafts_of_lookahead, ("window_size < 1", "window_size < 0")),
        LIMITS,
    ),
    "lookahead_may_have_empty_n_grams": (
        change_everywhere(draft_limits.drafts_of_lookahead, ("ngram_size < 1", "ngram_size < 0")),
        LIMITS,
    ),
    "no_guesses_are_too_few": (_check("request.max_draft_tokens < 0", "request.max_draft_tokens <= 0"), LIMITS),
    "guesses_are_bounded_where_there_are_none": (_check("not guesses", "False"), LIMITS),
    "no_guesses_need_no_guessing_engine": (
        _check("max_draft_tokens is not None and not guesses", "max_draft_tokens and not guesses"),
        LIMITS,
    ),
    "drafts_that_cannot_be_verified_are_taken": (_check("not takes_drafts", "False"), LIMITS),
    "as_many_drafts_as_tokens_are_too_many": (
        _check("len(request.draft_tokens) > max_seq_len", "len(request.draft_tokens) >= max_seq_len"),
        LIMITS,
    ),
    "drafts_come_with_what_forbids_them": (_check("if forbidden_by:", "if False:"), LIMITS),
    "logits_of_prompts_forbid_nothing": (
        change_everywhere(draft_limits.what_forbids_drafts, ("output.return_context_logits or ", "")),
        LIMITS,
    ),
    "beams_are_drafted": (
        change_everywhere(draft_limits.what_forbids_drafts, ("beam_width > 1", "beam_width > 2")),
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
    "what_was_seen_is_seen_again": (change(Acceptance, "see", ("self._seen = now", "pass")), DRAFTING),
    "right_guesses_count_once_a_step": (
        change(Acceptance, "see", ("range(num_right)", "range(min(num_right, 1))")),
        DRAFTING,
    ),
    "the_draft_model_runs_embeddings": (
        change(DraftModel, "guess", ("row.slot not in self._embedded and ", "")),
        DRAFT_MODEL,
    ),
    "a_slot_once_embedded_stays_so": (
        change(DraftModel, "_follow", ("self._embedded.discard if new.prompt_embeddings is None else ", "")),
        DRAFT_MODEL,
    ),
    "prompts_are_run_when_guesses_are_asked_for": (
        change_everywhere(
            draft_model._is_context, ("return not row.samples or row.num_tokens > ", "return row.num_tokens < 0 * ")
        ),
        DRAFT_MODEL,
    ),
    "the_end_of_a_prompt_is_run_late": (
        change_everywhere(draft_model._is_context, (" or row.num_tokens > 1 + len(row.drafts) + row.num_guesses", "")),
        DRAFT_MODEL,
    ),
    "a_full_block_counts_as_an_empty_one": (
        change(DraftModel, "_run", ("(end - 1) % self._block_size + 1", "end % self._block_size")),
        DRAFT_MODEL,
    ),
    "blocks_within_a_pass_are_not_filled": (
        change(DraftModel, "_run", ("self._filled[blocks[:-1]] = self._block_size", "pass")),
        DRAFT_MODEL,
    ),
    "a_copied_block_is_an_empty_one": (
        change(
            DraftModel, "_follow", ("self._filled[destination] = self._filled[source]", "self._filled[destination] = 0")
        ),
        DRAFT_MODEL,
    ),
    "what_a_block_held_before_a_copy_counts": (
        change(DraftModel, "_follow", ("self._filled[destination] = self._filled[source]", "pass")),
        DRAFT_MODEL,
    ),
    "the_last_guess_is_not_stored": (
        change(DraftModel, "guess", ("if row.drafts:", "if False:")),
        DRAFT_MODEL,
    ),
    "the_pool_of_the_draft_model_stays_small": (
        change(DraftModel, "_follow", ("self._storage.grow(step.num_blocks)", "pass")),
        DRAFT_MODEL,
    ),
    "all_rows_guess_as_long_as_one_does": (
        change(DraftModel, "guess", ("row.num_guesses > count", "row.num_guesses")),
        DRAFT_MODEL,
    ),
    "shorter_draft_models_will_do": (
        change_everywhere(loaded_model.load_draft_model, ("config.max_position < model.max_seq_len", "False")),
        DRAFT_MODEL,
    ),
    "windows_let_kv_of_the_draft_model_go": (
        change_everywhere(loaded_model.load_draft_model, ("model.config.sliding_window is not None", "False")),
        DRAFT_MODEL,
    ),
    "an_n_gram_of_one_turns_guesses_off": (
        _fields("max(1, lookahead_drafts(given))", "lookahead_drafts(given)"),
        ARGUMENTS,
    ),
    "pools_are_private_unless_they_are_public": (_fields("is False", "is not True"), ARGUMENTS),
    "underscores_make_another_type": (_fields('.replace("_", "")', ""), ARGUMENTS),
    "classes_have_no_type": (_fields("type(given).__name__.removesuffix", "str().removesuffix"), ARGUMENTS),
    "the_draft_model_has_one_name": (_fields("in DRAFT_MODEL_FIELDS", "in DRAFT_MODEL_FIELDS[:1]"), ARGUMENTS),
    "draft_lengths_are_ignored": (_fields('_field(given, "max_draft_len") is not None', "False"), ARGUMENTS),
    "a_size_of_0_is_left_out": (
        change_everywhere(speculative.lookahead_drafts, ("if size is None", "if not size")),
        ARGUMENTS,
    ),
    "every_mode_looks_up": (change_everywhere(parameters._mode, ("and mode.isLookahead()", "")), CONVERSION),
    "lookahead_guesses_more_than_a_step_takes": (
        change_everywhere(
            parameters._max_draft_tokens,
            ("min(max(1, lookahead.max_ngram_size - 1), MAX_DRAFT_TOKENS)", "max(1, lookahead.max_ngram_size - 1)"),
        ),
        CONVERSION,
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
    "a_request_s_lookahead_is_ignored": (
        change_everywhere(
            to_core.to_core,
            ("None if request.lookahead_config is None else _drafts(request.lookahead_config)", "None"),
        ),
        CONVERSION,
    ),
    "the_client_s_drafts_are_ignored": (
        change_everywhere(to_core.to_core, ("[] if drafts is None else drafts.tokens", "[]")),
        CONVERSION,
    ),
    "impossible_sizes_make_an_object": (
        change(
            request_configs.LookaheadDecodingConfig, "_made", ("self.max_ngram_size < 1", "self.max_ngram_size < 0")
        ),
        NAMES,
    ),
    "some_sizes_of_lookahead_will_do": (
        change_everywhere(trtllm_inputs.read_lookahead, ("if None in sizes:", "if False:")),
        INPUTS,
    ),
    "sizes_of_0_are_sizes": (
        change_everywhere(trtllm_inputs.read_lookahead, ("not any(sizes)", "sizes == [None] * 3")),
        INPUTS,
    ),
    "an_n_gram_of_one_in_config_pbtxt_turns_guesses_off": (
        change_everywhere(upstream_parameters._drafts_of_ngram, ("max(1, _whole(text) - 1)", "_whole(text) - 1")),
        PARAMETERS,
    ),
}

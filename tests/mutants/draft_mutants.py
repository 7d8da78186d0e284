"""Bugs planted in what limits drafts, in the draft model and how often it is right, and in the ways to ask for speculation."""

from __future__ import annotations

from backend.api import draft_limits
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


MUTANTS: dict[str, tuple[Plant, list[str]]] = {
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
}

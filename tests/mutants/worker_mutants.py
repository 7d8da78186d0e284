"""Bugs planted in sampling and in the worker: two rows at once, slots that are used again, and what must be gone afterwards."""

from __future__ import annotations

from backend.sampling import slots, torch_choice
from backend.worker import adapters, draft_model, input_batch, post_processors
from tests.mutants.changes import Plant, change

_RULES = "tests/sampling/test_sampler_rules.py::"
_NGRAMS = (
    _RULES + "test_no_repeat_ngram_masks_exactly_what_would_repeat_whatever_lies_in_other_slots_and_behind_the_row"
)
_MODEL = "tests/model/"

# name -> (what plants it, tests that must fail)
MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "repeats_are_looked_for_behind_the_row": (
        change(torch_choice, "add_sparse", ("token_ids[slot, :known], row.ngram", "token_ids[slot], row.ngram")),
        [_NGRAMS],
    ),
    "repeats_are_looked_for_in_another_slot": (
        change(torch_choice, "add_sparse", ("token_ids[slot, :known], row.ngram", "token_ids[i, :known], row.ngram")),
        [_NGRAMS],
    ),
    "as_many_tokens_as_a_run_are_too_few": (
        change(torch_choice, "add_sparse", ("0 < row.ngram <= known", "0 < row.ngram < known")),
        [_NGRAMS],
    ),
    "bad_words_are_those_of_another_slot": (
        change(torch_choice, "add_sparse", ("token_ids[slot], known))", "token_ids[i], known))")),
        [
            "tests/sampling/test_rows_beside_rows.py::test_bad_words_of_several_lengths_are_masked_by_the_row_s_own_tokens"
        ],
    ),
    "additions_go_to_the_first_row": (
        change(torch_choice, "add_sparse", ("where += [i] * len(part_ids)", "where += [0] * len(part_ids)")),
        ["tests/sampling/test_sampler_rules.py"],
    ),
    "bad_words_are_aligned_to_the_left": (
        change(
            slots.SlotParameters, "_words", ("[0] * (width - len(word)) + word", "word + [0] * (width - len(word))")
        ),
        [
            "tests/sampling/test_rows_beside_rows.py::test_bad_words_of_several_lengths_are_masked_by_the_row_s_own_tokens"
        ],
    ),
    "adapters_stay_on_the_device": (
        change(adapters.DeviceAdapters, "update", ("self._held.pop(content)", "self._held[content]")),
        [_MODEL + "test_what_is_gone.py::test_an_adapter_that_left_is_released_once_and_held_by_nobody"],
    ),
    "an_adapter_stays_with_the_slot": (
        change(
            input_batch.InputBatch,
            "take_in",
            (
                "self.adapters[row.slot] = row.adapter",
                "self.adapters[row.slot] = row.adapter or self.adapters[row.slot]",
            ),
        ),
        [_MODEL + "test_lora.py"],
    ),
    "embedded_prompts_stay_with_the_slot": (
        change(draft_model.DraftModel, "_follow", ("self._embedded.discard if", "(lambda slot: None) if")),
        [_MODEL + "test_draft_model.py"],
    ),
    "the_first_row_s_client_is_told_for_all": (
        change(
            post_processors.PostProcessors,
            "_run_batch",
            ("[row.client_id for row in rows]", "[rows[0].client_id for row in rows]"),
        ),
        [_MODEL + "test_post_processors.py"],
    ),
}

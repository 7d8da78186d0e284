"""Bugs planted in sampling and in the worker: two rows at once, slots that are used again, and what must be gone afterwards."""

from __future__ import annotations

from backend.sampling import prompt_log_probs, slots, torch_choice
from backend.worker import adapters, debug_tensors, draft_model, extras, group, input_batch, post_processors
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
    "alternatives_are_as_many_as_another_row_s": (
        change(torch_choice.TorchChoice, "_with_log_probs", ("[: rows[i].top_log_probs]", "")),
        ["tests/sampling/test_sampler_rules.py"],
    ),
    "top_log_probs_bring_the_token_s_own": (
        change(
            torch_choice.TorchChoice,
            "_with_log_probs",
            ("own_value if rows[i].return_log_probs else None", "own_value"),
        ),
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
    "more_alternatives_than_tokens": (
        change(slots.SlotParameters, "set_row", ("min(row.top_log_probs, self.vocab_size)", "row.top_log_probs")),
        ["tests/sampling/test_rows_beside_rows.py::test_no_more_alternatives_are_told_than_there_are_tokens"],
    ),
    "equal_tokens_have_their_worst_rank": (
        change(prompt_log_probs, "packed_rows", ("log_probs > own", "log_probs >= own")),
        ["tests/sampling/test_rows_beside_rows.py::test_tokens_that_are_equally_likely_share_the_best_rank"],
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
    "what_a_sequence_wants_stays_with_the_slot": (
        change(extras.Extras, "set_row", ("self._slots.pop(row.slot, None)", "pass")),
        [_MODEL + "test_post_processors.py", _MODEL + "test_gathered_logits.py"],
    ),
    "copied_blocks_are_unknown_to_the_draft_model": (
        change(draft_model.DraftModel, "_follow", ("self._filled[destination] = self._filled[source]", "pass")),
        [_MODEL + "test_draft_model.py"],
    ),
    "embedded_prompts_stay_with_the_slot": (
        change(draft_model.DraftModel, "_follow", ("self._embedded.discard if", "(lambda slot: None) if")),
        [_MODEL + "test_draft_model.py"],
    ),
    "each_debug_tensor_has_all_the_room": (
        change(debug_tensors.DebugFetch, "begin", ("tensor, left - num_bytes", "tensor, left")),
        [_MODEL + "test_what_is_gone.py::test_debug_tensors_of_a_step_share_the_room_that_it_has"],
    ),
    "the_batched_processor_is_forgotten": (
        change(
            post_processors.PostProcessors, "with_configured", ("both._batched = self._batched", "both._batched = None")
        ),
        [_MODEL + "test_post_processors.py"],
    ),
    "the_first_row_s_client_is_told_for_all": (
        change(
            post_processors.PostProcessors,
            "_run_batch",
            ("[row.client_id for row in rows]", "[rows[0].client_id for row in rows]"),
        ),
        [_MODEL + "test_post_processors.py"],
    ),
    "weights_stay_after_the_shutdown": (
        change(group.InProcessWorkerGroup, "shutdown", ("self._loaded = self._draft = None", "pass")),
        [_MODEL + "test_what_is_gone.py::test_the_pool_and_the_weights_are_gone_after_a_shutdown"],
    ),
    "the_pool_stays_after_the_shutdown": (
        change(group.InProcessWorkerGroup, "shutdown", ("self.runner = None", "pass")),
        [_MODEL + "test_what_is_gone.py::test_the_pool_and_the_weights_are_gone_after_a_shutdown"],
    ),
}

"""Bugs planted in sampling and in the worker: rows that meet, slots that are used again, the runner of a GPU with its drafts.

The tests of the GPU's runner run in Triton's interpreter.
"""

from __future__ import annotations

from backend.sampling import slots, torch_choice
from backend.worker import adapters, draft_model, input_batch, pipeline, post_processors
from backend.worker.device_runner import DeviceRunner, QueuedStep
from backend.worker.extra_outputs import GatheringPass, Pass
from backend.worker.pipeline import Runner
from tests.mutants.changes import change, change_everywhere

_RULES = "tests/sampling/test_sampler_rules.py::"
_NGRAMS = (
    _RULES + "test_no_repeat_ngram_masks_exactly_what_would_repeat_whatever_lies_in_other_slots_and_behind_the_row"
)
_MODEL = "tests/model/"

DRAFTS = "tests/kernels/interpreted/test_drafts.py::"
TOKENS = [DRAFTS + "test_drafts_change_no_token"]
PROCESSORS = [DRAFTS + "test_beside_rows_with_a_post_processor"]
GUIDES = [DRAFTS + "test_beside_rows_with_guides"]
FAILURES = [DRAFTS + "test_a_post_processor_that_fails_beside_drafts_ends_its_own_request"]
OWN = [DRAFTS + "test_a_request_brings_its_own"]
RUNNER = "tests/kernels/interpreted/test_device_runner.py::"
STEPS = [RUNNER + "test_tokens_and_log_probabilities_are_those_of_the_torch_tier_whatever_is_asked"]
KINDS = [RUNNER + "test_steps_of_greedy_rows_and_of_random_ones_have_the_torch_tier_s_tokens"]


DRAFT_MODEL = ["tests/kernels/interpreted/test_draft_model.py::test_who_was_paused_is_computed_again_by_both_models"]

MUTANTS = {
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
    "drafts_run_as_if_there_were_none": (
        change_everywhere(pipeline.samples_of, ("has_drafts = True", "pass")),
        TOKENS,
    ),
    "what_is_behind_a_wrong_draft_stays": (
        change(pipeline, "accept_drafts", ("mine[1 : 1 + num_accepted]", "mine[1:]")),
        TOKENS,
    ),
    "accepted_drafts_are_not_appended": (change(Runner, "_append", ("output.further.values()", "()")), TOKENS),
    "accepted_drafts_are_not_published": (
        change_everywhere(pipeline.output_of, ("debug_tensors, further)", "debug_tensors)")),
        OWN,
    ),
    "all_logits_are_of_the_last_token": (
        change(Pass, "__init__", ("row.num_samples for", "int(row.samples) for")),
        TOKENS,
    ),
    "logits_of_prompts_are_sampled": (
        change(GatheringPass, "sampled", ("values[self.sampling_rows]", "values[: len(self.sampling_rows)]")),
        ["tests/model/test_gathered_logits.py"],
    ),
    "neighbours_are_not_processed": (
        change(
            DeviceRunner,
            "launch",
            ("passes[-1].process(ran.logits, self.batch.token_ids, self.batch.num_tokens)", "[]"),
        ),
        PROCESSORS,
    ),
    "who_fails_beside_drafts_goes_on": (
        change(QueuedStep, "wait", ("self.gathered, self.failed", "self.gathered, []")),
        FAILURES,
    ),
    "guides_do_not_see_drafts_by": (
        change(DeviceRunner, "launch", ("self._mask(ran.logits, guided)", "ran.logits")),
        GUIDES,
    ),
    "graphs_of_all_kinds_are_one": (
        change(DeviceRunner, "_generation_step", ("(inputs.key, kind)", "inputs.key")),
        STEPS,
    ),
    "graphs_of_all_sizes_are_one": (
        change(DeviceRunner, "_generation_step", ("(inputs.key, kind)", "kind")),
        STEPS,
    ),
    "all_kinds_are_greedy": (
        change(DeviceRunner, "_generation_step", ("kind=kind", "kind=Kind.GREEDY")),
        KINDS,
    ),
    "each_graph_keeps_its_logits": (
        change(
            DeviceRunner,
            "_shared_logits",
            ("self._kept_logits[: inputs.rows].copy_(logits)", "logits[:1].expand_as(logits)"),
        ),
        STEPS,
    ),
    "the_draft_model_guesses_in_vain": (
        change(
            Runner, "prepare", ("else self.draft_model.guess(step)", "else [self.draft_model.guess(step), step][1]")
        ),
        DRAFT_MODEL,
    ),
}

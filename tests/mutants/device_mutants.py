"""Bugs planted in the runner of a GPU: its drafts, and its steps that only generate. Their tests run in Triton's interpreter."""

from __future__ import annotations

from backend.worker import pipeline
from backend.worker.device_runner import DeviceRunner, QueuedStep
from backend.worker.extra_outputs import GatheringPass, Pass
from backend.worker.pipeline import Runner
from tests.mutants.changes import Plant, change, change_everywhere

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

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
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

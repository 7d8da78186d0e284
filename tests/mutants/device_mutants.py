"""Bugs planted in the runner of a GPU: its drafts, and its steps that only generate. Their tests run in Triton's interpreter."""

from __future__ import annotations

from backend.worker import device_runner
from backend.worker.device_runner import DeviceRunner
from backend.worker.group import InProcessWorkerGroup
from tests.mutants.changes import Plant, change

DRAFTS = "tests/kernels/interpreted/test_drafts.py::"
TOKENS = [DRAFTS + "test_drafts_change_no_token"]
LOGITS = [DRAFTS + "test_beside_rows_that_want_more_than_tokens"]
PROCESSORS = [DRAFTS + "test_beside_rows_with_a_post_processor"]
GUIDES = [DRAFTS + "test_beside_rows_with_guides"]
FAILURES = [DRAFTS + "test_a_post_processor_that_fails_beside_drafts_ends_its_own_request"]
OWN = [DRAFTS + "test_a_request_brings_its_own"]
RUNNER = "tests/kernels/interpreted/test_device_runner.py::"
STEPS = [RUNNER + "test_tokens_and_log_probabilities_are_those_of_the_torch_tier_whatever_is_asked"]
KINDS = [RUNNER + "test_steps_of_greedy_rows_and_of_random_ones_have_the_torch_tier_s_tokens"]


def _drafts(*replacements: tuple[str, str]) -> Plant:
    return change(DeviceRunner, "_run_with_drafts", *replacements)


DRAFT_MODEL = ["tests/kernels/interpreted/test_draft_model.py::test_who_was_paused_is_computed_again_by_both_models"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "rows_with_positions_of_their_own_replay_a_graph": (
        change(DeviceRunner, "launch", ("not self.batch.brings_inputs(step.rows) and ", "")),
        ["tests/kernels/interpreted/test_prompt_inputs.py"],
    ),
    "drafts_run_as_if_there_were_none": (
        change(DeviceRunner, "launch", ("if any(row.drafts", "if not any(row")),
        TOKENS,
    ),
    "what_is_behind_a_wrong_draft_stays": (
        change(device_runner, "right_samples", ("mine[1 : 1 + num_right]", "mine[1:]")),
        TOKENS,
    ),
    "each_draft_is_chosen_as_the_first": (
        _drafts(("num_tokens[row.slot] + index for", "num_tokens[row.slot] for")),
        TOKENS,
    ),
    "right_drafts_are_not_appended": (_drafts(("(sampled, *further.values())", "(sampled,)")), TOKENS),
    "right_drafts_are_not_told": (_drafts(("debug_tensors, further)", "debug_tensors)")), OWN),
    "all_logits_are_of_the_last_token": (
        _drafts(("self._forward(rows, wanted)", "self._forward(rows, [int(row.samples) for row in rows])")),
        TOKENS,
    ),
    "logits_of_prompts_are_sampled": (
        _drafts(("logits[work.sampling_rows]", "logits[: len(work.sampling_rows)]")),
        LOGITS,
    ),
    "what_neighbours_gather_is_dropped": (_drafts(("gathered.append(fetched)", "pass")), LOGITS),
    "neighbours_are_not_processed": (
        _drafts(("failed = work.process(logits, self.batch.token_ids, self.batch.num_tokens)", "pass")),
        PROCESSORS,
    ),
    "who_fails_beside_drafts_goes_on": (
        _drafts(("fetch_all(gathered), failed,", "fetch_all(gathered), [],")),
        FAILURES,
    ),
    "guides_do_not_see_drafts_by": (_drafts(("logits = self._masked(logits, guided)", "pass")), GUIDES),
    "guides_do_not_go_on_beside_drafts": (_drafts(("failed += guided.accept(sampled, further)", "pass")), GUIDES),
    "graphs_of_all_kinds_are_one": (
        change(DeviceRunner, "_generation_step", ("(inputs.key, kind)", "inputs.key")),
        STEPS,
    ),
    "graphs_of_all_sizes_are_one": (
        change(DeviceRunner, "_generation_step", ("(inputs.key, kind)", "kind")),
        STEPS,
    ),
    "special_rows_are_chosen_in_the_graph": (
        change(DeviceRunner, "_generation_step", ("kind is Kind.SPECIAL", "False")),
        STEPS,
    ),
    "all_kinds_are_greedy": (
        change(DeviceRunner, "_generation_step", ("kind=kind", "kind=Kind.GREEDY")),
        KINDS,
    ),
    "tokens_of_the_graph_are_not_appended": (
        change(DeviceRunner, "_tokens", ("self._append(inputs.device_numbers, tokens)", "pass")),
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
        change(DeviceRunner, "launch", ("step = self.draft_model.guess(step)", "self.draft_model.guess(step)")),
        DRAFT_MODEL,
    ),
    "the_draft_model_of_a_gpu_is_left_out": (
        change(InProcessWorkerGroup, "_make_draft_model", ("if self._draft is None:", "if True:")),
        DRAFT_MODEL,
    ),
}

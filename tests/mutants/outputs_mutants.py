"""Bugs planted in what requests get besides tokens, in logits post-processors, and in sampling that looks back at its output."""

from __future__ import annotations

from backend.api.request import Request
from backend.core.gathered import Gathered
from backend.core.sequence import BeamSequence
from backend.engine import gathered
from backend.models.decoder import Decoder
from backend.sampling.slots import SlotParameters
from backend.serving.wires import vectors
from backend.worker import extra_outputs
from backend.worker.extra_outputs import GatheringPass, RowPart, SlotWants
from backend.worker.post_processors import PostProcessors
from kernels import sampling
from tests.mutants.changes import change, change_everywhere

LOGITS = "tests/model/test_gathered_logits.py::"
PROCESSORS = "tests/model/test_post_processors.py::"
ROWS = [LOGITS + "test_batches_chunks_and_evictions_leave_every_row_as_it_was_and_give_it_once"]
STREAM = [LOGITS + "test_a_stream_gives_context_rows_first_and_then_a_row_for_each_token"]
CAPS = [LOGITS + "test_tensors_beyond_the_caps_are_refused_with_the_figures"]
RAISES = [PROCESSORS + "test_one_that_raises_ends_its_requests_and_nobody_else"]
PROMPT_LOG_PROBS = "tests/model/test_prompt_log_probs.py::"
OUTPUTS = "tests/model/test_prompt_outputs.py::"
DEBUG = "tests/model/test_debug_tensors.py::"
RULES = "tests/sampling/test_sampler_rules.py::"
BEAMS = "tests/model/test_beam_outputs.py::"
OF_EACH = [BEAMS + "test_generation_logits_are_those_of_each_hypothesis"]
WITH_BEAMS = [BEAMS + "test_a_post_processor_is_called_once_a_step_with_the_tokens_of_each_beam"]

MUTANTS = {
    "a_fork_and_its_parent_share_their_rows": (
        change(Gathered, "fork", ("list(rows) for name, rows in self._gen", "rows for name, rows in self._gen")),
        OF_EACH,
    ),
    "rows_of_candidates_that_were_lost_stay": (
        change(Gathered, "keep_generation", ("del rows[num_tokens:]", "pass")),
        [BEAMS + "test_a_paused_row_gives_back_the_logits_of_candidates_that_it_loses"],
    ),
    "a_fork_has_the_rows_of_its_own_past": (
        change(BeamSequence, "become", ("parent.gathered.fork()", "self.gathered")),
        OF_EACH,
    ),
    "each_beam_is_a_call_of_its_own": (
        change(GatheringPass, "process", ("part.want.num_beams > 1", "part.want.num_beams > 99")),
        WITH_BEAMS,
    ),
    "what_is_done_to_the_logits_of_beams_is_lost": (
        change(GatheringPass, "process", ("if len(call) > 1:", "if not call:")),
        WITH_BEAMS,
    ),
    "of_a_search_whose_processor_fails_one_row_ends": (
        change_everywhere(gathered.apply, ("for member in members(seq)", "for member in [seq]")),
        [BEAMS + "test_a_post_processor_that_fails_for_beams_ends_their_request_alone"],
    ),
    "a_processor_that_exits_ends_the_engine": (
        change(PostProcessors, "_run_one", ("(Exception, SystemExit)", "Exception")),
        RAISES,
    ),
    "kv_is_reused_where_all_hidden_states_are_wanted": (
        change(Gathered, "needed_from", ("for name in PROMPT_OUTPUTS", "for name in PROMPT_OUTPUTS[:1]")),
        [OUTPUTS + "test_batches_chunks_evictions_and_found_kv_change_no_bit"],
    ),
    "hidden_states_of_the_last_token_are_of_the_first": (
        change(Gathered, "__init__", ("num_prompt_tokens - 1 if", "first_position if")),
        [OUTPUTS + "test_they_equal_a_plain_forward"],
    ),
    "logits_behind_a_prompt_are_those_of_the_first_tokens": (
        change(GatheringPass, "gather", ("list(asked.columns)", "list(range(len(asked.columns)))")),
        [OUTPUTS + "test_they_equal_a_plain_forward"],
    ),
    "vectors_are_normalised_and_then_cut": (
        change(vectors, "embedding_of", ("(vector * vector)", "(rows[-1] * rows[-1])")),
        ["tests/serving/test_embedding_model.py::test_the_command_embed_gives_the_same_in_base64"],
    ),
    "the_score_is_the_share_of_no": (
        change(vectors, "relevance_of", ("no - yes", "yes - no")),
        ["tests/serving/test_embedding_model.py::test_the_score_is_the_share_of_yes"],
    ),
    "debug_logits_are_of_every_row": (
        change(GatheringPass, "_fetch_debug", ("given[name][self.sampling_rows]", "given[name]")),
        [DEBUG + "test_the_logits_are_there_beside_those_of_a_prompt_that_a_request_gets"],
    ),
    "debug_inputs_are_of_the_last_pass": (
        change(GatheringPass, "_fetch_debug", ("begin(self._debug.rows,", "begin(self.rows,")),
        [DEBUG + "test_the_logits_are_there_beside_those_of_a_prompt_that_a_request_gets"],
    ),
    "context_rows_are_one_off": (
        change(GatheringPass, "gather", ("(last - positions[0])", "(last - positions[0] - 1)")),
        ROWS,
    ),
    "context_rows_go_on_into_the_output": (
        change(SlotWants, "context_rows", ("min(end, row", "min(1 << 40, row")),
        ROWS,
    ),
    "prompt_log_probs_are_of_the_token_behind": (
        change(GatheringPass, "gather", ("positions[0] + 1 : positions[-1] + 2", "positions[0] : positions[-1] + 1")),
        [PROMPT_LOG_PROBS + "test_they_equal_log_softmax_and_topk_of_a_plain_forward"],
    ),
    "a_pass_has_as_many_rows_as_the_prompt": (
        change(extra_outputs, "passes", ("<= MAX_ROWS", "<= 1 << 40")),
        [PROMPT_LOG_PROBS + "test_a_long_prompt_runs_in_passes_of_few_rows_with_the_same_outcome"],
    ),
    "a_prompt_in_passes_loses_a_token": (
        change(
            RowPart, "cut", ("range(row.num_computed, last, MAX_ROWS)", "range(row.num_computed + 1, last, MAX_ROWS)")
        ),
        [PROMPT_LOG_PROBS + "test_a_long_prompt_runs_in_passes_of_few_rows_with_the_same_outcome"],
    ),
    "rows_come_twice": (
        change(Gathered, "take", ("self._tensor(name, self._generation", "self._tensor(name, dict(self._generation)")),
        STREAM,
    ),
    "a_response_may_be_of_any_size": (change(gathered, "promise", ("largest > ", "0 > ")), CAPS),
    "a_failure_is_swallowed": (
        change(PostProcessors, "_run_one", ("return [_failure(row, error)]", "return []")),
        RAISES,
    ),
    "hidden_states_are_not_normed": (
        change(Decoder, "logits_and", ("compute(normed, logits)", "compute(hidden, logits)")),
        [
            "tests/model/test_additional_outputs.py::test_hidden_states_equal_a_plain_forward_with_context_rows_only_if_asked_for"
        ],
    ),
    "extra_ids_share_kv": (
        change(Request, "kv_origin", ("items()), extra_ids, self", "items()), self")),
        ["tests/trtllm/test_prompt_inputs.py"],
    ),
    "top_p_never_decays": (
        change(SlotParameters, "decay_top_p", (".decay is not None", ".decay is False")),
        [RULES + "test_top_p_falls_to_its_least_and_is_set_back_by_a_token"],
    ),
    "repeats_need_one_token_less": (
        change(sampling, "repeated", ("tokens[len(tokens) - size + 1 :]", "grams[-1, :-1]")),
        [RULES + "test_no_repeat_ngram_equals_hugging_face"],
    ),
}

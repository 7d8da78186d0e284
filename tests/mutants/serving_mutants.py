"""Planted bugs of the stub, each one line of it changed, with the test that must notice it."""

from __future__ import annotations

# This one goes first: it brings the triton_python_backend_utils that backend.serving needs.
from tests.serving import conftest  # noqa: F401

# isort: split

from backend.serving import cancellation, environment, families, request_log, requests, sequence_output
from backend.serving.assembly import ToolsLoader
from backend.serving.cancellation import CancellationPoller
from backend.serving.dialect import Dialect
from backend.serving.environment import RunDirectory
from backend.serving.fronts import llmapi, named_sampling, token_ids, trtllm_fields, trtllm_tokens, vllm_engine_args
from backend.serving.fronts.trtllm_outputs import _SoFar
from backend.serving.housekeeper import Housekeeper
from backend.serving.metrics import MetricsPublisher
from backend.serving.model_server import ModelServer
from backend.serving.outputs import BeamsOutput, JointOutput, SeparateOutput
from backend.serving.pump import ResponsePump
from backend.serving.text_pool import TextPool
from backend.text.accumulator import OutputAccumulator
from tests.mutants.changes import Plant, change, change_everywhere

DETAILS = "tests/serving/test_stub_details.py::"
INPUTS = "tests/serving/test_trtllm_inputs.py::"
SEVERAL = "tests/serving/test_several_sequences.py::"
RACES = "tests/serving/test_pump_races.py::"

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "a_stream_tells_the_newest_log_probabilities_only": (
        change(_SoFar, "log_probs", ("if not self._repeats:", "if True:")),
        [INPUTS + "test_each_response_of_a_stream_has_the_log_probabilities_of_all_tokens_so_far"],
    ),
    "context_logits_are_repeated_without_end": (
        change(_SoFar, "context_logits", ("self._room -= known.nbytes", "pass")),
        [INPUTS + "test_each_response_of_a_stream_has_the_log_probabilities_of_all_tokens_so_far"],
    ),
    "the_last_response_has_no_context_logits": (
        change(_SoFar, "context_logits", ("if delta.finish is not None or self._room", "if self._room")),
        [INPUTS + "test_each_response_of_a_stream_has_the_log_probabilities_of_all_tokens_so_far"],
    ),
    "ids_are_clamped_though_nobody_has_asked": (
        change_everywhere(token_ids.read_prompt, ("if context.config.triton.clamp_token_ids:", "if True:")),
        ["tests/serving/test_token_requests.py"],
    ),
    "clamped_ids_are_one_too_great": (
        change_everywhere(
            token_ids.read_prompt, ("clip(max=vocab_size + num_virtual - 1)", "clip(max=vocab_size + num_virtual)")
        ),
        ["tests/serving/test_token_requests.py"],
    ),
    "the_wire_reads_sampling_without_upstreams_rule": (
        change_everywhere(trtllm_fields.read_sampling, ("return tensorrt_llm_sampling(", "return SamplingConfig(")),
        ["tests/serving/test_token_requests.py"],
    ),
    "the_launcher_is_not_told_why": (
        change(ModelServer, "_give_sign", ('self._why_unavailable() if state == "unavailable" else ""', '""')),
        ["tests/serving/test_health.py"],
    ),
    "the_operators_template_does_not_reach_the_stub": (
        change(ToolsLoader, "prepare", (", self._chat_template)", ")")),
        ["tests/serving/test_text_server.py"],
    ),
    "the_models_do_not_hear_of_adapters_names": (
        change(ModelServer, "_context", ("self._executor.adapters", "config.lora.directories")),
        ["tests/serving/test_adapter_commands.py"],
    ),
    "the_draft_model_is_not_told": (
        change(vllm_engine_args, "_of_speculation", ('if method == "draft_model":', "if False:")),
        ["tests/serving/test_vllm_backend.py"],
    ),
    "of_what_may_stand_there_nothing_is_told": (
        change(named_sampling, "_sentence", ("if place else", "if not place else")),
        ["tests/serving/test_everbatch_model.py"],
    ),
    "sweeps_take_all_the_time": (
        change(cancellation, "pause_s", ("min(sweep_s / SHARE - sweep_s, MAX_PAUSE_S), ", "")),
        ["tests/serving/test_cancellation_gate.py"],
    ),
    "an_interval_joins_nothing_that_waits": (
        change(Dialect, "coalesces", ("settings.stream_interval_ms > 0 or ", "")),
        [DETAILS + "test_tokens_that_wait_for_a_sender_share_a_response_where_that_is_asked_for"],
    ),
    "sweeps_stay_away": (
        change(cancellation, "pause_s", ("min(sweep_s / SHARE - sweep_s, MAX_PAUSE_S)", "sweep_s / SHARE - sweep_s")),
        ["tests/serving/test_cancellation_gate.py"],
    ),
    "an_empty_answer_is_queued_without_the_lock": (
        change(
            ResponsePump,
            "finish_empty",
            ("with stream.lock:\n        stream.answers_nothing", "if True:\n        stream.answers_nothing"),
        ),
        [RACES + "test_whoever_queues_a_stream_holds_its_lock"],
    ),
    "a_sender_ends_what_was_refused_already": (
        change(ResponsePump, "refuse", ("stream.queued = True if is_new else stream.queued", "pass")),
        [RACES + "test_what_is_being_refused_is_not_ended_by_a_sender_as_well"],
    ),
    "sessions_of_other_namespaces_wait_in_the_same_line": (
        change(ModelServer, "_text_job", ("(parameters.namespace, session_id)", '("", session_id)')),
        [DETAILS + "test_the_same_session_number_of_another_namespace_waits_for_nobody"],
    ),
    "a_stop_of_a_session_makes_room_that_is_not_there": (
        change(ModelServer, "_submit", (" and isinstance(work.request, Request)", "")),
        [DETAILS + "test_a_stop_of_a_session_makes_no_room_in_the_engine"],
    ),
    "stuck_text_threads_look_ready": (
        change(ModelServer, "_health", (" and not self._text.is_stuck", "")),
        [DETAILS + "test_a_model_whose_text_threads_are_all_stuck_is_not_ready"],
    ),
    "what_waited_too_long_stays_in_its_line": (
        change(TextPool, "expire", ("            self._leave_lines(job)\n", "")),
        ["tests/serving/test_text_pool.py::test_a_turn_that_waited_too_long_does_not_hold_up_the_next_of_its_session"],
    ),
    "the_longest_namespace_is_refused": (
        change(requests, "_namespace", ("len(value) > MAX_NAMESPACE", "len(value) >= MAX_NAMESPACE")),
        [DETAILS + "test_a_namespace_may_have_as_many_characters_as_the_limit_says"],
    ),
    "text_that_was_sent_still_counts_as_fresh": (
        change(OutputAccumulator, "take", ("    self.has_new_text = False\n", "")),
        [DETAILS + "test_text_that_is_held_back_makes_no_empty_response"],
    ),
    "a_client_that_left_is_reported_with_every_sweep": (
        change(CancellationPoller, "sweep", (" and not stream.abandoned", "")),
        [DETAILS + "test_a_client_that_left_is_reported_once"],
    ),
    "growth_that_could_not_be_sent_is_lost": (
        change(
            MetricsPublisher,
            "_send",
            ("    if family.kind ==", "    self._sent[key] = value\n    if family.kind =="),
        ),
        [DETAILS + "test_growth_that_could_not_be_sent_is_sent_with_the_next"],
    ),
    "signals_are_written_to_a_pipe_that_was_closed": (
        change(Housekeeper, "stop", ("        signal.set_wakeup_fd(-1)\n", "")),
        [DETAILS + "test_a_housekeeper_that_has_stopped_leaves_no_pipe_for_signals_behind"],
    ),
    "each_sign_of_life_leaves_a_file_open": (
        change(RunDirectory, "report_health", ("os.close(pipe)", "pass")),
        ["tests/deploy/test_signs.py"],
    ),
    "a_stub_waits_for_a_reader_of_its_signs": (
        change(RunDirectory, "report_health", ("(BlockingIOError, BrokenPipeError)", "BrokenPipeError")),
        ["tests/deploy/test_signs.py"],
    ),
    "a_drain_does_not_know_its_streams": (
        change(ModelServer, "_give_sign", ("self.num_live_streams", "0")),
        ["tests/serving/test_health.py"],
    ),
    "metrics_of_requests_exchanged": (
        change(families, "_scheduled", ("stats.latest.num_scheduled_requests", "stats.latest.num_context_requests")),
        ["tests/serving/test_metrics.py"],
    ),
    "a_path_of_another_alphabet_is_not_found": (
        change(
            environment,
            "local_path",
            ('os.fsdecode(path.encode("utf-8", "surrogateescape"))', 'path.encode().decode("latin-1")'),
        ),
        [DETAILS + "test_a_path_with_letters_that_are_not_ascii_is_opened_by_an_interpreter_that_knows_ascii_only"],
    ),
    "a_full_disk_fails_the_requests_that_are_logged": (
        change(request_log, "_to_stderr", ("except OSError:", "except ZeroDivisionError:")),
        ["tests/serving/test_request_log.py"],
    ),
    "every_sequence_is_told_of_with_every_response": (
        change(SeparateOutput, "render", (" if sequence.is_due", "")),
        [SEVERAL + "test_each_sequence_streams_for_itself_and_its_end_is_told_once"],
    ),
    "an_end_is_told_again": (
        change(OutputAccumulator, "take", ("self.end_is_taken = self.has_ended", "pass")),
        [SEVERAL + "test_each_sequence_streams_for_itself_and_its_end_is_told_once"],
    ),
    "a_joint_answer_goes_with_the_first_end": (
        change(JointOutput, "render", ("all(", "any(")),
        [SEVERAL + "test_a_joint_answer_waits_for_the_last_sequence"],
    ),
    "beams_that_were_told_are_told_again": (
        change(BeamsOutput, "render", ("    self._is_fresh = False\n", "")),
        [SEVERAL + "test_beams_are_told_from_their_beginning_in_one_response"],
    ),
    "a_stop_string_stops_the_first_sequence": (
        change(ResponsePump, "_feed", ("response.result.sequence_index", "0")),
        [SEVERAL + "test_a_stop_string_stops_its_sequence_in_the_engine_and_the_last_end_is_final"],
    ),
    "logits_of_what_was_cut_off_stay": (
        change(sequence_output, "generation_logits", ("[0, :num_kept]", "[0]")),
        [SEVERAL + "test_logits_come_with_the_tokens_that_they_belong_to"],
    ),
    "lengths_count_the_padding": (
        change(trtllm_tokens, "token_output", ("[len(beam) for beam in ids]", "[max(map(len, ids))] * len(ids)")),
        [INPUTS + "test_beams_are_rows_of_one_response_padded_with_minus_one"],
    ),
    "the_least_likely_sequence_is_the_best": (
        change(llmapi, "_most_likely", ("max(", "min(")),
        ["tests/serving/test_llmapi_model.py::test_the_most_likely_of_several_sequences_is_the_answer"],
    ),
    "ranges_of_retention_keep_the_clients_order": (
        change(trtllm_tokens, "read_retention", ("sorted(ranges, key=lambda each: each.token_start)", "ranges")),
        [INPUTS + "test_retention_ranges_are_put_in_order_and_minus_one_means_no_end"],
    ),
}

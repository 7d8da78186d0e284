"""Planted bugs of the stub, of its text processing, of metrics under vLLM's names, and of traces."""

from __future__ import annotations

from backend.api.config import telemetry
from backend.api.distributions import Distributions
from backend.engine import distributions, update
from backend.replicas import totals
from backend.scheduler import admission
from backend.serving.assembly import ToolsLoader
from backend.serving.delivery import cancellation, sequence_output
from backend.serving.delivery.pump import ResponsePump
from backend.serving.intake.intake import RequestIntake
from backend.serving.lifecycle import environment
from backend.serving.lifecycle.environment import RunDirectory
from backend.serving.lifecycle.health import StubHealth
from backend.serving.observe import families, request_log, trace_context
from backend.serving.observe.metrics import MetricsPublisher
from backend.serving.observe.tracing import otlp, spans
from backend.serving.observe.tracing.export import Exporter
from backend.serving.wires import named_sampling, trtllm_fields, trtllm_tokens
from backend.text import decoding
from backend.text.accumulator import OutputAccumulator
from gateway import metrics
from tests.mutants.changes import change, change_everywhere
from tests.serving import conftest  # noqa: F401

DETAILS = "tests/serving/test_stub_details.py::"
INPUTS = "tests/serving/test_trtllm_inputs.py::"
SEVERAL = "tests/serving/test_several_sequences.py::"
RACES = "tests/serving/test_pump_races.py::"

EDGES = "tests/text/test_text_edges.py::"

COUNTS = ["tests/engine/test_distributions.py"]
PAGE = ["tests/serving/test_vllm_page.py"]
CONTEXT = ["tests/serving/test_trace_context.py"]
TRACES = ["tests/serving/test_traces.py"]
GATEWAY = ["tests/gateway/test_metrics.py"]

MUTANTS = {
    "the_wire_reads_sampling_without_upstreams_rule": (
        change_everywhere(trtllm_fields.read_sampling, ("return tensorrt_llm_sampling(", "return SamplingConfig(")),
        ["tests/serving/test_token_requests.py"],
    ),
    "the_operators_template_does_not_reach_the_stub": (
        change(ToolsLoader, "prepare", ("self._chat_template, self", '"", self')),
        ["tests/serving/test_text_server.py"],
    ),
    "the_models_do_not_hear_of_adapters_names": (
        change(RequestIntake, "_context", ("self._executor.adapters", "config.lora.directories")),
        ["tests/serving/test_adapter_commands.py"],
    ),
    "of_what_may_stand_there_nothing_is_told": (
        change(named_sampling, "_sentence", ("if place else", "if not place else")),
        ["tests/serving/test_everbatch_model.py"],
    ),
    "sweeps_take_all_the_time": (
        change(cancellation, "pause_s", ("min(sweep_s / SHARE - sweep_s, MAX_PAUSE_S), ", "")),
        ["tests/serving/test_cancellation_gate.py"],
    ),
    "an_empty_answer_is_queued_without_the_lock": (
        change(
            ResponsePump,
            "answer_stop",
            ("with stream.lock:\n        stream.answers_nothing", "if True:\n        stream.answers_nothing"),
        ),
        [RACES + "test_whoever_queues_a_stream_holds_its_lock"],
    ),
    "sessions_of_other_namespaces_wait_in_the_same_line": (
        change(RequestIntake, "_text_job", ("(parameters.namespace, session_id)", '("", session_id)')),
        [DETAILS + "test_the_same_session_number_of_another_namespace_waits_for_nobody"],
    ),
    "text_that_was_sent_still_counts_as_fresh": (
        change(OutputAccumulator, "take", ("    self.has_new_text = False\n", "")),
        [DETAILS + "test_text_that_is_held_back_makes_no_empty_response"],
    ),
    "growth_that_could_not_be_sent_is_lost": (
        change(
            MetricsPublisher,
            "_send",
            ("    if family.kind ==", "    self._sent[key] = value\n    if family.kind =="),
        ),
        [DETAILS + "test_growth_that_could_not_be_sent_is_sent_with_the_next"],
    ),
    "a_stub_waits_for_a_reader_of_its_signs": (
        change(RunDirectory, "report_health", ("(BlockingIOError, BrokenPipeError)", "BrokenPipeError")),
        ["tests/deploy/test_signs.py"],
    ),
    "a_drain_does_not_know_its_streams": (
        change(StubHealth, "give_sign", ("self._num_live()", "0")),
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
    "a_stop_string_stops_the_first_sequence": (
        change(ResponsePump, "_feed", ("response.result.sequence_index", "0")),
        [SEVERAL + "test_a_stop_string_stops_its_sequence_in_the_engine_and_the_last_end_is_final"],
    ),
    "logits_of_what_was_cut_off_stay": (
        change(sequence_output, "generation_logits", ("[beam, :num_kept]", "[0]")),
        [SEVERAL + "test_logits_come_with_the_tokens_that_they_belong_to"],
    ),
    "lengths_count_the_padding": (
        change(trtllm_tokens, "token_output", ("[len(beam) for beam in ids]", "[max(map(len, ids))] * len(ids)")),
        [INPUTS + "test_beams_are_rows_of_one_response_padded_with_minus_one"],
    ),
    "any_token_of_that_form_is_a_byte": (
        change(decoding, "fallback_byte", ("_BYTE_TOKEN.fullmatch(token)", 're.fullmatch("<0x(..)>", token)')),
        [EDGES + "test_a_token_is_a_byte_exactly_where_the_library_says_so"],
    ),
    "first_tokens_are_measured_in_milliseconds": (
        change_everywhere(distributions.note_first_token, ("/ 1e9", "/ 1e6")),
        COUNTS,
    ),
    "a_group_of_gaps_counts_once": (change(Distributions, "add", ("+= times", "+= 1")), COUNTS),
    "the_longest_sequence_is_the_last_one": (
        change_everywhere(distributions.note_sequence, ("max(seq.group.most_output_tokens, num_output)", "0")),
        COUNTS,
    ),
    "histograms_that_were_taken_go_on_changing": (
        change(Distributions, "copy", ("list(of.counts)", "of.counts")),
        COUNTS,
    ),
    "histograms_of_replicas_are_those_of_the_first": (
        change_everywhere(totals._total, ("[sum(of) for of in zip(*values, strict=True)]", "values[0]")),
        COUNTS,
    ),
    "a_pause_has_no_end": (
        change_everywhere(
            admission._note_return, ("replace(earlier[-1], returned_ns=now_ns", "replace(earlier[-1], returned_ns=0")
        ),
        COUNTS,
    ),
    "recomputation_is_never_over": (change_everywhere(update.note_recomputed, ("=now_ns", "=0")), COUNTS),
    "the_page_waits_for_room_in_the_engine": (
        change(RequestIntake, "_take", ("self._model.at_once(batch, self._executor)", "None")),
        PAGE,
    ),
    "the_ratio_is_not_kept": (
        change_everywhere(trace_context.begin_trace, ("round(sample_ratio * 2**64)", "2**64")),
        CONTEXT,
    ),
    "traces_go_on_where_the_sdk_is_disabled": (
        change_everywhere(telemetry.otlp_settings, ('== "true"', '== "never"')),
        CONTEXT,
    ),
    "spans_that_were_not_taken_count_as_sent": (
        change(Exporter, "_send_spans", ("num_spans if answer is None else", "0 if answer is None else")),
        TRACES,
    ),
    "stages_lie_beside_their_request": (
        change_everywhere(otlp._messages, ("number), context.span_id", "number), context.parent_id")),
        TRACES,
    ),
    "times_of_another_clock_are_told": (
        change_everywhere(spans.spans_of, ("row.received_ns <= span.start_ns <= span.end_ns <= row.ended_ns", "True")),
        TRACES,
    ),
    "vllms_families_are_told_twice": (
        change_everywhere(metrics.add_metrics_route, ('page = _VLLM_LINES.sub("", page)', "pass")),
        GATEWAY,
    ),
}

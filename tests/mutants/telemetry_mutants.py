"""Planted bugs: metrics under vLLM's names, traces, and what says whose they are."""

from __future__ import annotations

# This one goes first: it brings the triton_python_backend_utils that backend.serving needs.
from tests.serving import conftest  # noqa: F401

# isort: split

from backend.api.config import telemetry
from backend.api.distributions import Distributions
from backend.engine import distributions, update
from backend.engine.statistics import Statistics
from backend.replicas import totals
from backend.scheduler import admission
from backend.serving.intake import requests
from backend.serving.intake.intake import RequestIntake
from backend.serving.observe import trace_context, vllm_page
from backend.serving.observe.tracing import otlp, spans
from backend.serving.observe.tracing.export import Exporter
from backend.serving.observe.tracing.measures import Measures
from backend.serving.wires import commands
from gateway import metrics, tracing
from tests.mutants.changes import Plant, change, change_everywhere

COUNTS = ["tests/engine/test_distributions.py"]
PAGE = ["tests/serving/test_vllm_page.py"]
CONTEXT = ["tests/serving/test_trace_context.py"]
TRACES = ["tests/serving/test_traces.py"]
GATEWAY = ["tests/gateway/test_metrics.py"]
HEADERS = ["tests/gateway/test_tracing.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "first_tokens_are_measured_in_milliseconds": (
        change_everywhere(distributions.note_first_token, ("/ 1e9", "/ 1e6")),
        COUNTS,
    ),
    "a_group_of_gaps_counts_once": (change(Distributions, "add", ("+= times", "+= 1")), COUNTS),
    "each_sequence_of_a_request_counts_its_prompt": (
        change_everywhere(distributions.note_sequence, ("seq.group is None or not seq.group.members", "True")),
        COUNTS,
    ),
    "the_longest_sequence_is_the_last_one": (
        change_everywhere(distributions.note_sequence, ("max(seq.group.most_output_tokens, num_output)", "0")),
        COUNTS,
    ),
    "a_step_counts_its_prompts_only": (
        change(
            Statistics, "record", ("latest.num_context_tokens + latest.num_decoded_tokens", "latest.num_context_tokens")
        ),
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
    "buckets_are_not_added_up": (
        change_everywhere(vllm_page._histogram, ("count += in_bucket", "count = in_bucket")),
        PAGE,
    ),
    "bounds_above_the_longest_sequence_are_told": (
        change_everywhere(vllm_page._histogram, ("if bound <= most:", "if True:")),
        PAGE,
    ),
    "a_name_may_end_its_label": (change_everywhere(vllm_page._escaped, (""".replace('"', '\\\\"')""", "")), PAGE),
    "what_is_swapped_waits_besides": (change_everywhere(vllm_page._gauges, (" - swapped", "")), PAGE),
    "any_name_is_taken": (
        change_everywhere(commands.read_metrics, ("if len(command.metrics) > MAX_NAME:", "if False:")),
        PAGE,
    ),
    "the_page_waits_for_room_in_the_engine": (
        change(RequestIntake, "_take", ("self._model.at_once(batch, self._executor)", "None")),
        PAGE,
    ),
    "the_callers_flag_is_overlooked": (
        change_everywhere(trace_context.begin_trace, ("if is_sampled else None", "")),
        CONTEXT,
    ),
    "the_ratio_is_not_kept": (
        change_everywhere(trace_context.begin_trace, ("round(sample_ratio * 2**64)", "2**64")),
        CONTEXT,
    ),
    "a_parent_of_zeros_is_one": (
        change_everywhere(trace_context._read_parent, (" or not int(parent_id, 16)", "")),
        CONTEXT,
    ),
    "a_state_of_any_length_is_kept": (
        change_everywhere(trace_context._read_state, ("len(text) <= MAX_STATE and ", "")),
        CONTEXT,
    ),
    "a_number_is_taken_for_a_parent": (
        change_everywhere(requests._caller, ("if not isinstance(parent, str):", "if False:")),
        CONTEXT,
    ),
    "any_ratio_is_one": (change_everywhere(telemetry._ratio, ("if not 0.0 <= ratio <= 1.0:", "if False:")), CONTEXT),
    "a_header_may_hold_a_line_break": (
        change_everywhere(telemetry._headers, (" or not value.isprintable()", "")),
        CONTEXT,
    ),
    "traces_go_on_where_the_sdk_is_disabled": (
        change_everywhere(telemetry.otlp_settings, ('== "true"', '== "never"')),
        CONTEXT,
    ),
    "the_queue_of_spans_has_no_end": (
        change(Exporter, "add", ("len(self._waiting) >= self._max_waiting", "False")),
        TRACES,
    ),
    "spans_that_were_not_taken_count_as_sent": (
        change(Exporter, "_send_spans", ("num_spans if answer is None else", "0 if answer is None else")),
        TRACES,
    ),
    "an_export_is_never_tried_again": (change(Exporter, "_deliver", ("status not in AGAIN", "True")), TRACES),
    "trouble_is_logged_for_each_export": (
        change(Exporter, "_tell", ("if trouble and not self._trouble:", "if trouble:")),
        TRACES,
    ),
    "stages_lie_beside_their_request": (
        change_everywhere(otlp._messages, ("number), context.span_id", "number), context.parent_id")),
        TRACES,
    ),
    "all_stages_have_one_id": (change_everywhere(otlp._derived, (" + number", "")), TRACES),
    "times_of_another_clock_are_told": (
        change_everywhere(spans.spans_of, ("row.received_ns <= span.start_ns <= span.end_ns <= row.ended_ns", "True")),
        TRACES,
    ),
    "failed_requests_are_measured_as_quick_ones": (change(Measures, "add", (' if failed else ""', "")), TRACES),
    "vllms_families_are_told_twice": (
        change_everywhere(metrics.add_metrics_route, ('page = _VLLM_LINES.sub("", page)', "pass")),
        GATEWAY,
    ),
    "the_gateway_passes_any_state_on": (
        change_everywhere(tracing.caller_of, ("len(state) > MAX_STATE", "False")),
        HEADERS,
    ),
}

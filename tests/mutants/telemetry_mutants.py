"""Planted bugs: metrics under vLLM's names, traces, and what says whose they are."""

from __future__ import annotations

# This one goes first: it brings the triton_python_backend_utils that backend.serving needs.
from tests.serving import conftest  # noqa: F401

# isort: split

from backend.api.config import telemetry
from backend.api.distributions import Distributions
from backend.engine import distributions, update
from backend.replicas import totals
from backend.scheduler import admission
from backend.serving.intake.intake import Intake
from backend.serving.observe import trace_context
from backend.serving.observe.tracing import otlp, spans
from backend.serving.observe.tracing.export import Exporter
from gateway import metrics
from tests.mutants.changes import Plant, change, change_everywhere

COUNTS = ["tests/engine/test_distributions.py"]
PAGE = ["tests/serving/test_vllm_page.py"]
CONTEXT = ["tests/serving/test_trace_context.py"]
TRACES = ["tests/serving/test_traces.py"]
GATEWAY = ["tests/gateway/test_metrics.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
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
        change(Intake, "_take", ("self._model.at_once(batch, self._executor)", "None")),
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

"""Spans of requests as they arrive at a collector."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from backend.api import PerfMetrics
from backend.api.config.schema import EngineConfig, TelemetryConfig
from backend.api.config.telemetry import OtlpSettings, check_traces
from backend.api.errors import ConfigError
from backend.api.response import Interruption
from backend.serving.observe.ended import EndedRow
from backend.serving.observe.trace_context import Caller, TraceContext, begin_trace
from backend.serving.observe.tracing import export
from backend.serving.observe.tracing.export import Exporter
from backend.serving.observe.tracing.spans import spans_of
from backend.serving.server import ModelServer
from tests.otlp_collector import DEADLINE_S, Collector, attributes, collecting
from tests.serving.fake_triton import InferenceRequest
from tests.serving.helpers import token_inputs
from tests.serving.scripted import ScriptedExecutor

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CALLER = Caller(f"00-{TRACE}-{PARENT}-01", "vendor=a")
MS = 1_000_000
ACCOUNT = PerfMetrics(
    arrival_ns=1002 * MS,
    first_scheduled_ns=1010 * MS,
    first_token_ns=1030 * MS,
    last_token_ns=1090 * MS,
    num_cached_tokens=3,
    num_context_tokens=9,
    num_recomputed_tokens=8,
    num_pauses=1,
    num_evictions=1,
    num_output_tokens=4,
    interruptions=(Interruption(1040 * MS, 1060 * MS, 8, 1070 * MS),),
)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def exporter(collector: Collector) -> Iterator[Exporter]:
    exporter = make_exporter(collector)
    yield exporter
    collector.hold.set()
    exporter.close()


def make_exporter(collector: Collector, **options: int) -> Exporter:
    settings = OtlpSettings(collector.url, 1.0, "the service", {"authorization": "Bearer abc"})
    return Exporter(settings, "everbatch", "stub-1", delay_s=0.01, **options)


def ended(trace: TraceContext | None, reason: str = "length", code: str = "", **fields: object) -> EndedRow:
    account = fields.pop("account", ACCOUNT)
    return EndedRow("r1", "", None, reason, code, 12, 4, 1000 * MS, 1100 * MS, 50.0, account, trace=trace, **fields)


def traced(reason: str = "length", code: str = "", **fields: object) -> EndedRow:
    return ended(begin_trace(CALLER, 0.0), reason, code, **fields)


def test_the_stages_of_a_request_lie_under_its_span_and_that_under_the_callers(
    collector: Collector, exporter: Exporter
) -> None:
    exporter.add(traced())
    collector.wait(lambda told: bool(told.spans))
    request, *stages = collector.spans
    assert (request.trace_id.hex(), request.parent_span_id.hex(), request.trace_state) == (TRACE, PARENT, "vendor=a")
    assert request.name == "llm_request" and request.kind == 2 and request.flags & 1
    told = {
        span.name: (span.start_time_unix_nano / MS - 49_900, span.end_time_unix_nano / MS - 49_900) for span in stages
    }
    assert told == {
        "queue": (2, 10),
        "context": (10, 30),
        "generation": (30, 90),
        "pause": (40, 60),
        "evict": (60, 60),
        "recompute": (60, 70),
    }
    assert all(span.parent_span_id == request.span_id and span.trace_id == request.trace_id for span in stages)
    assert len({span.span_id for span in collector.spans}) == len(collector.spans)
    assert (request.start_time_unix_nano, request.end_time_unix_nano) == (49_900 * MS, 50_000 * MS)


def test_the_queue_begins_where_preparation_ends() -> None:
    account = msgspec.structs.replace(ACCOUNT, prepared_ns=1007 * MS)
    spans = {
        span.name: (span.start_ns // MS, span.end_ns // MS) for span in spans_of(ended(None, account=account), "m")
    }
    assert (spans["prepare"], spans["queue"]) == ((1002, 1007), (1007, 1010))


def test_spans_bear_the_names_of_the_semantic_conventions(collector: Collector, exporter: Exporter) -> None:
    exporter.add(traced())
    collector.wait(lambda told: bool(told.spans))
    told = attributes(collector.spans[0])
    expected = {
        "gen_ai.request.model": "everbatch",
        "gen_ai.request.id": "r1",
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.latency.time_in_queue": pytest.approx(0.008),
        "gen_ai.latency.time_to_first_token": pytest.approx(0.03),
        "gen_ai.latency.e2e": pytest.approx(0.1),
        "everbatch.pauses": 1,
        "everbatch.evictions": 1,
    }
    assert {name: told[name] for name in expected} == expected and "error.type" not in told
    (evict,) = (span for span in collector.spans if span.name == "evict")
    assert attributes(evict)["everbatch.lost_tokens"] == 8
    (of_resource,) = collector.exports[0].resource_spans
    assert attributes(of_resource.resource) == {"service.name": "the service", "service.instance.id": "stub-1"}
    assert collector.headers[0]["authorization"] == "Bearer abc"
    assert collector.headers[0]["content-type"] == "application/x-protobuf"


def test_a_refused_request_has_one_span_with_its_error(collector: Collector, exporter: Exporter) -> None:
    exporter.add(traced("refused", "INVALID_ARGUMENT", account=None))
    collector.wait(lambda told: bool(told.spans))
    (request,) = collector.spans
    assert request.status.code == 2 and attributes(request)["error.type"] == "INVALID_ARGUMENT"


def test_stages_by_the_clock_of_another_machine_are_left_out(collector: Collector, exporter: Exporter) -> None:
    elsewhere = PerfMetrics(arrival_ns=1, first_scheduled_ns=2, first_token_ns=3, last_token_ns=4, num_output_tokens=2)
    exporter.add(traced(account=elsewhere))
    collector.wait(lambda told: bool(told.spans))
    assert [span.name for span in collector.spans] == ["llm_request"]


def test_a_collector_that_does_not_answer_holds_nobody_up_and_what_does_not_fit_is_counted(
    collector: Collector,
) -> None:
    collector.hold.clear()
    exporter = make_exporter(collector, max_waiting=8)
    exporter.add(traced())
    collector.wait(lambda told: bool(told.headers))  # it has the first, and answers nothing
    began = time.monotonic()
    for _ in range(100):
        exporter.add(traced())
    assert time.monotonic() - began < export.TIMEOUT_S, "nobody waits for an export"
    assert exporter.totals.dropped_requests == 92
    collector.hold.set()
    collector.wait(lambda told: len(told.spans) == 9 * 7)
    until(lambda: exporter.totals.sent == 9 * 7)
    exporter.close()


def test_what_a_collector_does_not_take_is_counted_and_told_once(
    collector: Collector, exporter: Exporter, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 400
    with caplog.at_level(logging.WARNING):
        for number in range(1, 4):
            exporter.add(traced())
            until(lambda: exporter.totals.rejected == 7 * number)  # noqa: B023
        collector.status, collector.rejected = 200, 2
        exporter.add(traced())
        until(lambda: exporter.totals.sent == 5)
    assert exporter.totals.rejected == 23
    told = [record.getMessage() for record in caplog.records if "collector" in record.getMessage()]
    assert len(told) == 2 and "status 400" in told[0] and "again" in told[1]


def test_a_collector_that_asks_for_patience_gets_the_same_spans_again(collector: Collector, exporter: Exporter) -> None:
    collector.status = 503
    exporter.add(traced())
    collector.wait(lambda told: bool(told.headers))
    collector.status = 200
    collector.wait(lambda told: bool(told.spans))
    until(lambda: exporter.totals.sent == 7)
    assert exporter.totals.rejected == 0


def test_the_end_of_a_model_sends_what_waits_and_its_metrics(collector: Collector) -> None:
    exporter = make_exporter(collector)
    exporter.add(traced())
    exporter.add(ended(None))  # not traced, and measured all the same
    exporter.add(ended(None, "error", "UNAVAILABLE", account=None))
    exporter.close()
    collector.wait(lambda told: bool(told.metrics))
    assert len(collector.spans) == 7
    (of_resource,) = collector.metrics[-1].resource_metrics
    (of_scope,) = of_resource.scope_metrics
    told = {metric.name: metric for metric in of_scope.metrics}
    assert told.keys() == {
        "gen_ai.server.request.duration",
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token",
    }
    assert all(metric.unit == "s" and metric.histogram.aggregation_temporality == 2 for metric in told.values())
    points = {
        attributes(point).get("error.type"): point
        for point in told["gen_ai.server.request.duration"].histogram.data_points
    }
    assert {error: point.count for error, point in points.items()} == {None: 2, "UNAVAILABLE": 1}
    (first,) = told["gen_ai.server.time_to_first_token"].histogram.data_points
    assert (first.count, first.sum) == (2, pytest.approx(0.06))
    assert list(first.bucket_counts)[list(first.explicit_bounds).index(0.04)] == 2
    (per_token,) = told["gen_ai.server.time_per_output_token"].histogram.data_points
    assert per_token.sum == pytest.approx(0.04)


def test_requests_of_a_model_are_traced_as_their_parameters_say(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor, collector: Collector
) -> None:
    config = EngineConfig(telemetry=TelemetryConfig(otlp_endpoint=collector.url, sample_ratio=0.0))
    server = make_server(config=config, labels={"model": "m", "version": "1"})
    parents = [f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00", None]
    for number, parent in enumerate(parents, start=1):
        parameters = {} if parent is None else {"traceparent": parent}
        request = InferenceRequest(token_inputs([[1, 2, 3]]), request_id=f"r{number}", parameters=parameters)
        server.execute([request])
        executor.end(number, 5)
        request.sender.wait()
    collector.wait(lambda told: bool(told.spans))
    (span,) = collector.spans
    assert attributes(span)["gen_ai.request.id"] == "r1" and attributes(span)["gen_ai.request.model"] == "m"


def test_without_a_collector_nothing_of_opentelemetry_is_imported() -> None:
    program = (
        "import sys; sys.modules['triton_python_backend_utils'] = __import__('tests.serving.fake_triton', fromlist=['x']);"
        "import backend.serving.assembly; print([name for name in sys.modules if 'opentelemetry' in name])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_library_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TelemetryConfig(otlp_endpoint="http://collector:4318")
    check_traces(config)
    monkeypatch.setitem(sys.modules, "opentelemetry.proto", None)
    with pytest.raises(ConfigError, match=r"requirements/telemetry\.txt"):
        check_traces(config)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

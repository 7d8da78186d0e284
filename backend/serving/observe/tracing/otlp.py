"""Spans and metrics as the protobuf messages of OTLP (https://opentelemetry.io/docs/specs/otlp/)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2

from backend.serving.observe.ended import EndedRow
from backend.serving.observe.trace_context import TraceContext
from backend.serving.observe.tracing.measures import MeasureKey, Points
from backend.serving.observe.tracing.spans import Span, Value, spans_of

SCOPE = InstrumentationScope(name="everbatch")
_SAMPLED = 0x01
_IS_REMOTE = 0x300  # the context of the parent is known to be remote


def traces(rows: Iterable[tuple[TraceContext, EndedRow]], resource: Resource, model: str) -> tuple[bytes, int]:
    """The body of an export, and the number of spans in it."""
    spans = [message for context, row in rows for message in _messages(context, row, model)]
    scoped = trace_pb2.ScopeSpans(scope=SCOPE, spans=spans)
    whole = trace_pb2.ResourceSpans(resource=resource, scope_spans=[scoped])
    return bytes(ExportTraceServiceRequest(resource_spans=[whole]).SerializeToString()), len(spans)


def num_rejected(answer: bytes) -> int:
    """How many spans the collector did not take, of its answer to an export; 0 for an answer that cannot be read."""
    try:
        return int(ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans)
    except Exception:  # protobuf's DecodeError; an answer without a body of this kind, as a proxy gives it
        return 0


def metrics(points: Mapping[MeasureKey, Points], resource: Resource, model: str, start_ns: int, now_ns: int) -> bytes:
    """The body of an export of histograms that add up from `start_ns` to `now_ns`, nanoseconds since 1970."""
    by_name: dict[str, list[metrics_pb2.HistogramDataPoint]] = {}
    for (name, error_type), each in points.items():
        about: dict[str, Value] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "everbatch",
            "gen_ai.request.model": model,
        }
        if error_type:
            about["error.type"] = error_type
        point = metrics_pb2.HistogramDataPoint(
            attributes=attributes(about),
            start_time_unix_nano=start_ns,
            time_unix_nano=now_ns,
            count=sum(each.counts),
            sum=each.total,
            bucket_counts=each.counts,
            explicit_bounds=each.bounds,
        )
        by_name.setdefault(name, []).append(point)
    cumulative = metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE
    told = [
        metrics_pb2.Metric(
            name=name,
            unit="s",
            histogram=metrics_pb2.Histogram(data_points=of_name, aggregation_temporality=cumulative),
        )
        for name, of_name in by_name.items()
    ]
    scoped = metrics_pb2.ScopeMetrics(scope=SCOPE, metrics=told)
    whole = metrics_pb2.ResourceMetrics(resource=resource, scope_metrics=[scoped])
    return bytes(ExportMetricsServiceRequest(resource_metrics=[whole]).SerializeToString())


def resource_of(service_name: str, instance: str) -> Resource:
    about: dict[str, Value] = {
        "service.name": service_name,
        "service.instance.id": instance,
    }
    return Resource(attributes=attributes(about))


def attributes(values: Mapping[str, Value]) -> list[KeyValue]:
    return [KeyValue(key=name, value=_any(value)) for name, value in values.items()]


def _messages(context: TraceContext, row: EndedRow, model: str) -> list[trace_pb2.Span]:
    own, *stages = spans_of(row, model)
    to_wall_ns = int(row.wall_time * 1e9) - row.ended_ns
    messages = [_message(own, context, context.span_id, context.parent_id, to_wall_ns)]
    messages[0].kind = trace_pb2.Span.SPAN_KIND_SERVER
    if context.parent_id:
        messages[0].flags |= _IS_REMOTE
    if row.code:
        messages[0].status.code = trace_pb2.Status.STATUS_CODE_ERROR
    for number, stage in enumerate(stages, start=1):
        messages.append(_message(stage, context, _derived(context.span_id, number), context.span_id, to_wall_ns))
    return messages


def _message(span: Span, context: TraceContext, span_id: bytes, parent_id: bytes, to_wall_ns: int) -> trace_pb2.Span:
    return trace_pb2.Span(
        trace_id=context.trace_id,
        span_id=span_id,
        parent_span_id=parent_id,
        trace_state=context.state,
        flags=_SAMPLED,
        name=span.name,
        kind=trace_pb2.Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=span.start_ns + to_wall_ns,
        end_time_unix_nano=span.end_ns + to_wall_ns,
        attributes=attributes(span.attributes),
    )


def _derived(span_id: bytes, number: int) -> bytes:
    """The id of a stage: the request's own, counted on. Never all zero."""
    return ((int.from_bytes(span_id, "big") + number) % (2**64 - 1) or 2**64 - 1).to_bytes(8, "big")


def _any(value: Value) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, tuple):
        return AnyValue(array_value=ArrayValue(values=[AnyValue(string_value=each) for each in value]))
    return AnyValue(int_value=value) if isinstance(value, int) else AnyValue(double_value=value)

"""Which requests are traced, and as a part of which trace."""

from __future__ import annotations

import random

import pytest

from backend.api.config.schema import TelemetryConfig
from backend.api.config.telemetry import OtlpSettings, otlp_settings
from backend.api.errors import ConfigError
from backend.serving.intake.requests import parse_parameters
from backend.serving.observe.trace_context import NO_CALLER, Caller, begin_trace

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
URL = "http://collector:4318"


def test_a_request_goes_on_with_the_trace_of_its_caller() -> None:
    context = begin_trace(Caller(SAMPLED, "vendor=a"), 0.0)
    assert context is not None
    assert (context.trace_id.hex(), context.parent_id.hex(), context.state) == (TRACE, PARENT, "vendor=a")
    assert len(context.span_id) == 8 and context.span_id.hex() != PARENT


def test_the_callers_decision_holds_against_the_ratio() -> None:
    assert begin_trace(Caller(UNSAMPLED), 1.0) is None
    assert begin_trace(Caller(SAMPLED), 0.0) is not None
    assert begin_trace(Caller(f"00-{TRACE}-{PARENT}-03"), 0.0) is not None, "the other flags are no decision"


@pytest.mark.parametrize(
    "text",
    [
        *("", "00", "garbage", SAMPLED[:-1], SAMPLED + "0", SAMPLED + "-more", SAMPLED.upper()),
        *(f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", "0" * 10_000),
    ],
)
def test_what_is_no_valid_parent_begins_a_trace_of_its_own(text: str) -> None:
    context = begin_trace(Caller(text, "vendor=a"), 1.0)
    assert context is not None and (context.parent_id, context.state) == (b"", "")
    assert context.trace_id.hex() != TRACE
    assert begin_trace(Caller(text), 0.0) is None


def test_later_versions_may_have_more_fields() -> None:
    context = begin_trace(Caller(f"01-{TRACE}-{PARENT}-01-more"), 0.0)
    assert context is not None and context.trace_id.hex() == TRACE


@pytest.mark.parametrize("state", ["x" * 513, "a=\n", "a=é"])
def test_a_state_that_cannot_be_passed_on_is_dropped(state: str) -> None:
    context = begin_trace(Caller(SAMPLED, state), 0.0)
    assert context is not None and context.state == ""


def test_a_ratio_chooses_that_part_of_the_traces_by_their_ids() -> None:
    source = random.Random(5)
    chosen = [begin_trace(NO_CALLER, 0.25, source.getrandbits) for _ in range(4000)]
    traced = [context for context in chosen if context is not None]
    assert 900 < len(traced) < 1100
    assert all(int.from_bytes(context.trace_id[8:], "big") < 2**62 for context in traced)


def test_no_id_is_all_zero() -> None:
    context = begin_trace(NO_CALLER, 1.0, lambda bits: 0)
    assert context is not None and any(context.trace_id) and any(context.span_id)


def test_the_caller_comes_as_two_parameters_that_no_model_takes_for_its_own() -> None:
    parameters = parse_parameters(0, f'{{"traceparent": "{SAMPLED}", "tracestate": "a=b", "other": 1}}')
    assert parameters.caller == Caller(SAMPLED, "a=b") and parameters.others == {"other": 1}
    assert parse_parameters(0, '{"traceparent": 5, "tracestate": []}').caller == NO_CALLER
    assert parse_parameters(0, f'{{"traceparent": "{SAMPLED}", "tracestate": 5}}').caller == Caller(SAMPLED)


def test_nothing_is_traced_without_a_collector() -> None:
    assert otlp_settings(TelemetryConfig(), {}) is None
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_SDK_DISABLED": "true"}
    assert otlp_settings(TelemetryConfig(), variables) is None


def test_the_configuration_goes_before_opentelemetrys_variables() -> None:
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"{URL}/",
        "OTEL_TRACES_SAMPLER_ARG": "0.5",
        "OTEL_SERVICE_NAME": "mine",
        "OTEL_EXPORTER_OTLP_HEADERS": "Authorization=Bearer%20abc, x-team = blue",
    }
    headers = {"authorization": "Bearer abc", "x-team": "blue"}
    assert otlp_settings(TelemetryConfig(), variables) == OtlpSettings(URL, 0.5, "mine", headers)
    own = TelemetryConfig(otlp_endpoint="https://other/prefix", sample_ratio=0.0, service_name="own")
    assert otlp_settings(own, variables) == OtlpSettings("https://other/prefix", 0.0, "own", headers)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "grpc://collector:4317"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:secret@collector"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:99999"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a b"),
        ("OTEL_TRACES_SAMPLER_ARG", "nan"),
        ("OTEL_TRACES_SAMPLER_ARG", "1e308"),
        ("OTEL_TRACES_SAMPLER_ARG", "-0.1"),
        ("OTEL_TRACES_SAMPLER_ARG", "half"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a=b%0d%0ac"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a b=c"),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        otlp_settings(TelemetryConfig(), {"OTEL_EXPORTER_OTLP_ENDPOINT": URL, name: value})

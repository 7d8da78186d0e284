"""Where traces go, and which requests are traced: as the configuration says, else OpenTelemetry's environment variables."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote

from backend.api.config.endpoints import check_otlp_endpoint
from backend.api.config.schema import TelemetryConfig
from backend.api.errors import ConfigError, shown

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
RATIO_VARIABLE = "OTEL_TRACES_SAMPLER_ARG"
HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
LACKING = (
    "telemetry.otlp_endpoint (or OTEL_EXPORTER_OTLP_ENDPOINT) is set and opentelemetry-proto is not installed; pip install "
    "'everbatch[telemetry]' (or pip install -r requirements/telemetry.txt), or leave it out"
)


class OtlpSettings(NamedTuple):
    """A collector that takes OTLP over HTTP with protobuf bodies."""

    endpoint: str  # http://HOST:PORT or https://..., to which /v1/traces and /v1/metrics are added
    sample_ratio: float  # share of the requests without a decision of their caller that are traced
    service_name: str
    headers: dict[str, str]  # that every export bears; secrets may be among them


def otlp_settings(config: TelemetryConfig, environment: Mapping[str, str] = os.environ) -> OtlpSettings | None:
    """None if nothing is to be traced. Raises ConfigError for what cannot be read."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    endpoint = config.otlp_endpoint or environment.get(ENDPOINT_VARIABLE, "").strip()
    if not endpoint:
        return None
    check_otlp_endpoint("telemetry.otlp_endpoint" if config.otlp_endpoint else ENDPOINT_VARIABLE, endpoint)
    ratio = config.sample_ratio
    if ratio is None:
        ratio = _ratio(environment.get(RATIO_VARIABLE, "").strip() or "1")
    name = config.service_name or environment.get("OTEL_SERVICE_NAME", "").strip() or "everbatch"
    return OtlpSettings(endpoint.rstrip("/"), ratio, name, _headers(environment.get(HEADERS_VARIABLE, "")))


def check_traces(config: TelemetryConfig) -> None:
    """Raise ConfigError where traces are asked for and cannot be sent."""
    if otlp_settings(config) is not None and not _has_library():
        raise ConfigError(LACKING)


def _has_library() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.proto") is not None
    except ModuleNotFoundError:  # there is not even a package `opentelemetry`
        return False


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise ConfigError(f"{RATIO_VARIABLE} is {shown(text)!r}, allowed is 0 to 1; change it or leave it out")
    return ratio


def _headers(text: str) -> dict[str, str]:
    """`name=value,name=value`, percent-encoded, as the specification of the variable has it. The values are never shown."""
    headers: dict[str, str] = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = each.partition("=")
        name, value = name.strip().lower(), unquote(value.strip())
        if not equals or not name.replace("-", "").replace("_", "").isalnum() or not value.isprintable():
            raise ConfigError(f"{HEADERS_VARIABLE} holds an entry that is not NAME=VALUE; write NAME=VALUE,NAME=VALUE")
        if not (name.isascii() and value.isascii()):
            raise ConfigError(f"{HEADERS_VARIABLE} holds an entry that is not ASCII; percent-encode its value")
        headers[name] = value
    return headers

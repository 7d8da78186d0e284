"""Starts the export of traces where a collector is configured; only then is anything of OpenTelemetry imported."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from backend.api.config.telemetry import OtlpSettings

if TYPE_CHECKING:
    from backend.serving.observe.tracing.export import Exporter


def start_exporter(settings: OtlpSettings, model: str) -> Exporter:
    """Export what ends from now on; `check_traces` has passed."""
    from backend.serving.observe.tracing.export import Exporter  # here, because most servers trace nothing

    return Exporter(settings, model, f"{model}-{os.getpid()}")

"""Books: publishes the figures of one model as metrics, as request log, and as TensorRT-LLM's line of statistics.

Any thread may note a row that ended. Everything else runs on the housekeeper's thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from backend.api import EngineConfig, EngineStats
from backend.api.config.telemetry import OtlpSettings, otlp_settings
from backend.api.stats import PauseCounts
from backend.core.messages import Hello
from backend.serving import pb
from backend.serving.observe.ended import EndedRow, EndedRows
from backend.serving.observe.families import statistics_line
from backend.serving.observe.metrics import MetricsPublisher
from backend.serving.observe.request_log import RequestLog
from backend.serving.protocols import EngineClient
from backend.serving.served_model import ServedModel

if TYPE_CHECKING:
    from backend.serving.observe.tracing.export import Exporter

PUBLISH_S = 0.1  # longest time for publishing ended rows at once; the rest waits for the next call


class Books:
    def __init__(
        self,
        labels: dict[str, str],
        log_requests: bool,
        owner: bool,
        vllm_hello: Callable[[], Hello | None],
        is_static: bool = False,
        traces: Exporter | None = None,
    ) -> None:
        """`labels` name the model and its version. The `owner` publishes the engine's metrics too. `vllm_hello` returns the
        engine's description once it is known; from then on vLLM's metrics are published too. `is_static`: True if the
        engine's batches are static. `traces` gets all rows that have ended.
        """
        self.ended = EndedRows()
        self._metrics = MetricsPublisher(pb.new_metric_family, labels, owner, is_static)
        self._is_static = is_static
        self._log = RequestLog(labels.get("model", "")) if log_requests else None
        self._vllm_hello = vllm_hello
        self._traces = traces
        if traces is not None:
            self._metrics.add_spans()

    def publish_rows(self) -> None:
        """Log and publish the rows that have ended."""
        hello = self._vllm_hello()
        if hello is not None:
            self._metrics.add_vllm(hello.model.max_seq_len)
        self._metrics.publish_rows(self._logged(PUBLISH_S))

    def publish_engine(self, stats: EngineStats | None, ready: bool) -> None:
        """Publish the engine's changed metrics, and write them to Triton's verbose log."""
        self._metrics.publish_engine(stats, ready)
        if stats is not None:
            pb.log_verbose(statistics_line(stats, self._is_static))

    def publish_pauses(self, counts: PauseCounts) -> None:
        self._metrics.publish_pauses(counts)

    def publish_spans(self) -> None:
        if self._traces is not None:
            self._metrics.publish_spans(self._traces.totals._asdict())

    def close(self, ends_engine: bool = False) -> None:
        """Log the remaining rows without publishing them, because Triton is about to unload the model. `ends_engine`: the gauges
        of this model's engine become 0.
        """
        for _ in self._logged(budget_s=1.0):
            pass
        if self._traces is not None:
            self._traces.close()
        if ends_engine:
            self._metrics.end_engine()

    def _logged(self, budget_s: float) -> Iterator[EndedRow]:
        for row in self.ended.take(budget_s):
            if self._log is not None:
                self._log.add(row)
            if self._traces is not None:
                self._traces.add(row)
            yield row


def open_books(model: ServedModel, executor: EngineClient, config: EngineConfig) -> Books:
    """The books of a model. Where a collector is configured, what ends from now on is exported as traces."""
    vllm_hello = (lambda: executor.hello) if model.reports_vllm else (lambda: None)
    otlp = otlp_settings(config.telemetry)
    traces = None if otlp is None else start_exporter(otlp, dict(model.labels).get("model", ""))
    is_static = config.scheduler.batching == "static"
    return Books(dict(model.labels), config.triton.log_requests, model.owner, vllm_hello, is_static, traces)


def start_exporter(settings: OtlpSettings, model: str) -> Exporter:
    """Export what ends from now on; `check_traces` has passed."""
    from backend.serving.observe.tracing.export import Exporter  # here, because most servers trace nothing

    return Exporter(settings, model, f"{model}-{os.getpid()}")

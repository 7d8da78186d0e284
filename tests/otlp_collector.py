"""A collector of traces and metrics: OTLP over HTTP, read with the protobuf messages of the specification."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

DEADLINE_S = 60


class Collector:
    """What has arrived. `answer` is what each export of traces gets; `hold` keeps it waiting while it is clear."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.rejected = 0
        self.headers: list[dict[str, str]] = []
        self.exports: list[ExportTraceServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.hold = threading.Event()
        self.hold.set()

    def take(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        self.headers.append(headers)
        self.hold.wait(DEADLINE_S)
        if self.status == 200 and path.endswith("/v1/traces"):
            self.exports.append(ExportTraceServiceRequest.FromString(body))
        elif self.status == 200 and path.endswith("/v1/metrics"):
            self.metrics.append(ExportMetricsServiceRequest.FromString(body))
        answer = ExportTraceServiceResponse()
        answer.partial_success.rejected_spans = self.rejected
        return self.status, answer.SerializeToString()

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for export in list(self.exports)
            for of_resource in export.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    def wait(self, condition: Callable[[Collector], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition(self):
            assert time.monotonic() < deadline, f"{len(self.spans)} spans of {len(self.exports)} exports came"
            time.sleep(0.01)


def attributes(message: Any) -> dict[str, Any]:
    """Attributes of a span, a resource or a point of a metric."""
    found: dict[str, Any] = {}
    for each in message.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status, answer = collector.take(
                self.path, {name.lower(): value for name, value in self.headers.items()}, body
            )
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        collector.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield collector
        finally:
            collector.hold.set()
            server.shutdown()
            thread.join()

"""Servers on this machine that say over gRPC and HTTP what a test tells them, and keep what they were asked."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from client.grpc_messages import encode_values

# Self-made for localhost and 127.0.0.1, valid for a hundred years, and trusted by nobody but the tests:
# openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 36500 -subj "/CN=localhost"
#   -addext "subjectAltName=DNS:localhost,IP:127.0.0.1" -keyout key.pem -out certificate.pem
CERTIFICATE = Path(__file__).parent / "tls" / "certificate.pem"
KEY_FILE = Path(__file__).parent / "tls" / "key.pem"
Answers = Callable[["GrpcServer"], Iterator[Any]]
Models = dict[str, dict[str, str]]  # name -> input -> datatype
NO_STREAMS = "[INVALID_ARGUMENT] Streaming is only supported in decoupled mode."


def grpc_answer(text: str = "", *, final: bool = False, error: str = "") -> Any:
    """A ModelStreamInferResponse with one text, or with an error."""
    if error:
        return service_pb2.ModelStreamInferResponse(error_message=error)
    message = service_pb2.ModelStreamInferResponse()
    message.infer_response.parameters["triton_final_response"].bool_param = final
    output = message.infer_response.outputs.add()
    output.name, output.datatype = "text_output", "BYTES"
    message.infer_response.raw_output_contents.append(encode_values("BYTES", [text]))
    return message


class GrpcServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers each stream with `answers(self)`. `left` is set when a client has gone, or has the whole stream. `models`: name
    -> inputs of those that it has, for who asks; None: it does not tell.
    """

    models: Models | None = None

    def __init__(self, answers: Answers) -> None:
        self.requests: list[Any] = []
        self.keys: list[str | bytes | None] = []  # the metadata `authorization` of each request
        self.left = threading.Event()
        self.url = ""
        self._answers = answers

    def ModelStreamInfer(self, request_iterator: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        context.add_callback(self.left.set)
        self.requests.append(next(request_iterator))
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        self.context = context  # of the last request, for answers that refuse it
        yield from self._answers(self)

    def ModelStatistics(self, request: Any, context: grpc.ServicerContext) -> Any:
        if self.models is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "not here")
        stats = [service_pb2.ModelStatistics(name=name) for name in self.models or ()]
        return service_pb2.ModelStatisticsResponse(model_stats=stats)

    def ModelMetadata(self, request: Any, context: grpc.ServicerContext) -> Any:
        tensor = service_pb2.ModelMetadataResponse.TensorMetadata
        inputs = (self.models or {})[request.name]
        return service_pb2.ModelMetadataResponse(inputs=[tensor(name=name, datatype=inputs[name]) for name in inputs])


@contextmanager
def grpc_server(answers: Answers, *, tls: bool = False, threads: int = 2) -> Iterator[GrpcServer]:
    servicer = GrpcServer(answers)
    server = grpc.server(ThreadPoolExecutor(threads))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    if tls:
        credentials = grpc.ssl_server_credentials([(KEY_FILE.read_bytes(), CERTIFICATE.read_bytes())])
        servicer.url = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    else:
        servicer.url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield servicer
    finally:
        server.stop(grace=None).wait()


class HttpServer(ThreadingHTTPServer):
    """Answers generate_stream with all `answers` (or refuses it), generate with the last. `requests`: path and body of each.
    `models`: as of GrpcServer.
    """

    daemon_threads = True
    refuses_streams = False
    models: Models | None = None

    def __init__(self, answers: tuple[dict[str, Any], ...], status: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str | None] = []  # the header Authorization of each request
        self.answers, self.status = answers, status
        self.url = f"http://127.0.0.1:{self.server_port}"

    def use_tls(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE, KEY_FILE)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing on standard error: a client that leaves, or does not trust, is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, json.loads(asked)))
        self.server.keys.append(self.headers["Authorization"])
        self.send_response(self.server.status)
        self.end_headers()
        texts = [json.dumps(answer) for answer in self.server.answers]
        streamed = self.path.endswith("/generate_stream")
        if streamed and self.server.refuses_streams:
            texts = [json.dumps({"error": NO_STREAMS})]
        self.wfile.write("".join(f"data: {text}\n\n" for text in texts).encode() if streamed else texts[-1].encode())

    def do_GET(self) -> None:
        found: dict[str, Any] | None = None
        models, name = self.server.models or {}, self.path.removeprefix("/v2/models/")
        if self.path == "/v2/models/stats" and self.server.models is not None:
            found = {"model_stats": [{"name": name} for name in models]}
        elif name in models:
            found = {"inputs": [{"name": name, "datatype": datatype} for name, datatype in models[name].items()]}
        self.send_response(404 if found is None else 200)
        self.end_headers()
        self.wfile.write(b"" if found is None else json.dumps(found).encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing on standard error: tests read it."""


@contextmanager
def http_server(*answers: dict[str, Any], status: int = 200, tls: bool = False) -> Iterator[HttpServer]:
    with HttpServer(answers, status) as server:
        if tls:
            server.use_tls()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()

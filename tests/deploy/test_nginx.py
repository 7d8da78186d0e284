"""deploy/nginx.conf, run by the real nginx in front of a stand-in for tritonserver that says what reached it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest

from client.client import EverbatchClient
from client.errors import ClientError
from deploy import ROOT
from deploy.ports import Ports
from gateway.settings import Settings

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="no nginx here: apt-get install -y nginx-light")
KEY = {"Authorization": "Bearer 5f1c09a7e2b84d63905fb7c1aa3e4d2288b6c0f91d7e35a4"}


class Upstream(BaseHTTPRequestHandler):
    """Answers with the request it got; a generate_stream waits for `go` between its two events."""

    protocol_version = "HTTP/1.1"
    bodies: list[int] = []
    go = threading.Event()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))  # a chunked body has none, and would fail here
        self.bodies.append(len(body))
        if self.path.endswith(("generate_stream", "/v1/chat/completions")):
            self._stream()
        else:
            self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        seen = {"path": self.path, "headers": dict(self.headers), "from": self.client_address[1]}
        data = json.dumps(seen).encode()
        self.send_response(503 if self.path == "/v1/stopping" else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in (b"data: 1\n\n", b"data: 2\n\n"):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            assert self.go.wait(60)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None: ...


class Grpc(grpc.GenericRpcHandler):
    """Every method, of two-way streams: the answer to a message is the metadata that came with the call."""

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        metadata = json.dumps(sorted(dict(call.invocation_metadata))).encode()
        return grpc.stream_stream_rpc_method_handler(lambda requests, context: (metadata for _ in requests))


@dataclass
class Proxy:
    http: int
    grpc: int
    openai: int = 0

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = KEY,
        port: int = 0,
        **options: bool,
    ) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", port or self.http, timeout=60)
        connection.request(method, path, body, headers or {}, **options)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text


def configuration(
    run: Path,
    http: int,
    grpc_port: int,
    upstream_http: int,
    upstream_grpc: int,
    openai: int = 0,
    *upstreams_openai: int,
) -> Path:
    """The file with its words filled in. `openai`: 0 lets nginx listen where nobody asks."""
    of_openai = [f"127.0.0.1:{port}" for port in upstreams_openai or (1,)]
    text = (ROOT / "deploy" / "nginx.conf").read_text()
    values = {
        "LISTEN_HTTP": f"127.0.0.1:{http}",
        "LISTEN_GRPC": f"127.0.0.1:{grpc_port}",
        "LISTEN_OPENAI": f"127.0.0.1:{openai}" if openai else f"unix:{run}/openai.socket",
        "UPSTREAM_OPENAI": " max_fails=0; server ".join(of_openai),
        "UPSTREAM_HTTP": f"127.0.0.1:{upstream_http}",
        "UPSTREAM_GRPC": f"127.0.0.1:{upstream_grpc}",
        "KEYS": str(run / "keys"),
        "RUN": str(run),
    }
    (run / "keys").write_text('"5f1c09a7e2b84d63905fb7c1aa3e4d2288b6c0f91d7e35a4" "client-a";\n')
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    filled = "\n".join(lines)
    for word, value in values.items():
        filled = filled.replace(word, value)
    path = run / "nginx.conf"
    path.write_text(filled)
    return path


def wait_until_open(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while True:
        assert process.poll() is None and time.monotonic() < deadline, "nginx does not listen"
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)


@pytest.fixture(scope="module")
def upstream() -> Iterator[tuple[int, int]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Upstream) as server, futures.ThreadPoolExecutor(4) as pool:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        rpc = grpc.server(pool, handlers=[Grpc()])
        port = rpc.add_insecure_port("127.0.0.1:0")
        rpc.start()
        yield server.server_port, port
        rpc.stop(None).wait()
        server.shutdown()


@pytest.fixture(scope="module")
def proxy(upstream: tuple[int, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    run = tmp_path_factory.mktemp("nginx")
    ports = Ports.free()
    path = configuration(run, ports.http, ports.grpc, *upstream, ports.metrics, upstream[0])
    command = [str(NGINX), "-p", str(run), "-c", str(path), "-g", "daemon off;", "-e", str(run / "error.log")]
    process = subprocess.Popen(command)
    try:
        wait_until_open(ports.http, process)
        yield Proxy(ports.http, ports.grpc, ports.metrics)
    finally:
        process.terminate()
        process.wait()


GENERATE = "/v2/models/ensemble/generate"


def test_a_request_with_a_key_passes_without_the_key_and_without_an_admin_header(proxy: Proxy) -> None:
    status, text = proxy.ask("POST", GENERATE, b"{}", KEY | {"x-everbatch-admin": "guess"})
    seen = json.loads(text)
    assert status == 200 and seen["path"] == GENERATE
    assert not {"authorization", "x-everbatch-admin"} & {name.lower() for name in seen["headers"]}


@pytest.mark.parametrize(
    "headers",
    [None, {"Authorization": "Bearer wrong"}, {"Authorization": "5f1c09a7e2b84d63905fb7c1aa3e4d2288b6c0f91d7e35a4"}],
    ids=str,
)
def test_without_a_known_key_there_is_health_and_nothing_else(proxy: Proxy, headers: dict[str, str] | None) -> None:
    assert proxy.ask("POST", GENERATE, b"{}", headers)[0] == 401
    assert proxy.ask("GET", "/v2/models/ensemble", headers=headers)[0] == 401
    assert proxy.ask("GET", "/v2/health/ready", headers=headers)[0] == 200
    assert proxy.ask("GET", "/v2/health/live", headers=headers)[0] == 200


def test_a_body_over_a_megabyte_is_refused_before_triton_sees_it(proxy: Proxy) -> None:
    before = len(Upstream.bodies)
    assert proxy.ask("POST", GENERATE, b"[" * (4 << 20))[0] == 413
    pieces = (b"[" * 4096 for _ in range(1024))
    assert proxy.ask("POST", GENERATE, pieces, encode_chunked=True)[0] == 413
    assert len(Upstream.bodies) == before


def test_a_chunked_body_within_the_limit_arrives_whole_and_in_one_piece(proxy: Proxy) -> None:
    assert proxy.ask("POST", GENERATE, (b"[" for _ in range(2000)), encode_chunked=True)[0] == 200
    assert Upstream.bodies[-1] == 2000


@pytest.mark.parametrize("path", [GENERATE + "_stream", "/v1/chat/completions"])
def test_events_pass_one_by_one(path: str, proxy: Proxy) -> None:
    """The second event is not even sent before the first has arrived here."""
    Upstream.go.clear()
    port = proxy.openai if path.startswith("/v1") else proxy.http
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, b"{}", KEY)
    response = connection.getresponse()
    assert response.readline() == b"data: 1\n"
    Upstream.go.set()
    assert b"data: 2" in response.read()
    connection.close()


@pytest.mark.parametrize(
    "method, path",
    [
        ("POST", "/v2/repository/index"),
        ("POST", "/v2/repository/models/ensemble/unload"),
        ("GET", "/v2/systemsharedmemory/status"),
        ("POST", "/v2/cudasharedmemory/region/x/register"),
        ("GET", "/v2/logging"),
        ("GET", "/v2/trace/setting"),
        ("POST", "/v2/models/preprocessing/infer"),
        ("GET", "/v2/models/stats"),
        ("GET", "/v2/models/ensemble/trace/setting"),
        ("GET", "/metrics"),
        ("POST", "/v2/models/ensemble/generate/../../../repository/index"),
        ("POST", "/v2/models/../repository/index"),
    ],
)
def test_what_is_not_for_clients_does_not_exist(proxy: Proxy, method: str, path: str) -> None:
    assert proxy.ask(method, path, b"{}" if method == "POST" else None)[0] == 404


def call(proxy: Proxy, method: str, metadata: dict[str, str]) -> list[str]:
    with grpc.insecure_channel(f"127.0.0.1:{proxy.grpc}") as channel:
        stream = channel.stream_stream(f"/inference.GRPCInferenceService/{method}")
        (answer,) = stream(iter([b"request"]), metadata=list(metadata.items()), timeout=60)
        return list(json.loads(answer))


def test_grpc_streams_pass_without_the_metadata_that_is_not_for_clients(proxy: Proxy) -> None:
    metadata = {
        "authorization": "Bearer 5f1c09a7e2b84d63905fb7c1aa3e4d2288b6c0f91d7e35a4",
        "triton_grpc_error": "true",
        "triton-grpc-protocol-x-everbatch-admin": "guess",
        "harmless": "1",
    }
    arrived = call(proxy, "ModelStreamInfer", metadata)
    assert "harmless" in arrived
    assert not {"authorization", "triton_grpc_error", "triton-grpc-protocol-x-everbatch-admin"} & set(arrived)


def test_grpc_without_a_key_or_to_another_method_is_refused(proxy: Proxy) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        call(proxy, "ModelStreamInfer", {"authorization": "Bearer wrong"})
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    for method in (
        "RepositoryModelUnload",
        "RepositoryIndex",
        "SystemSharedMemoryRegister",
        "TraceSetting",
        "LogSettings",
    ):
        with pytest.raises(grpc.RpcError) as refused:
            call(proxy, method, {"authorization": "Bearer 5f1c09a7e2b84d63905fb7c1aa3e4d2288b6c0f91d7e35a4"})
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED, method
    assert call(proxy, "ServerReady", {}) is not None


def client_of(proxy: Proxy, protocol: str, api_key: str) -> EverbatchClient:
    if protocol == "grpc":
        return EverbatchClient(f"127.0.0.1:{proxy.grpc}", "grpc", api_key=api_key)
    return EverbatchClient(f"http://127.0.0.1:{proxy.http}", "http", api_key=api_key)


@pytest.mark.parametrize(("api_key", "words"), [("", "asks for a key"), ("wrong", "does not take the key")])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_our_client_is_told_that_a_key_is_needed(proxy: Proxy, protocol: str, api_key: str, words: str) -> None:
    with client_of(proxy, protocol, api_key) as client, pytest.raises(ClientError, match=words) as caught:
        client.generate("x")
    assert caught.value.code == "UNAUTHENTICATED"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_our_clients_key_lets_it_in(proxy: Proxy, protocol: str) -> None:
    """Whoever is let in is answered by the stand-in, which over gRPC is not what the client understands."""
    with client_of(proxy, protocol, KEY["Authorization"].removeprefix("Bearer ")) as client:
        if protocol == "http":
            assert client.generate("x").text == ""
        else:
            with pytest.raises(ClientError) as caught:
                client.generate("x")
            assert caught.value.code != "UNAUTHENTICATED"


# ---- the OpenAI endpoint -----------------------------------------------------------------------------------------------


def test_the_openai_endpoint_gets_the_key_by_a_connection_that_is_kept(proxy: Proxy) -> None:
    seen = [json.loads(proxy.ask("GET", "/v1/models", port=proxy.openai)[1]) for _ in range(20)]
    assert seen[0]["path"] == "/v1/models" and seen[0]["headers"]["Authorization"] == KEY["Authorization"]
    # Each worker of nginx keeps connections of its own.
    assert len({each["from"] for each in seen}) < len(seen), "each request came by a connection of its own"


def test_without_a_key_it_answers_in_the_form_of_its_clients(proxy: Proxy) -> None:
    status, text = proxy.ask("POST", "/v1/chat/completions", b"{}", None, port=proxy.openai)
    assert status == 401 and json.loads(text)["error"]["code"] == "invalid_api_key"
    assert proxy.ask("GET", "/health", None, None, port=proxy.openai)[0] == 200


@pytest.mark.parametrize(
    "path", ["/metrics", "/docs", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v2/models/stats"]
)
def test_what_of_it_is_not_for_clients_does_not_exist(proxy: Proxy, path: str) -> None:
    assert proxy.ask("POST", path, b"{}", port=proxy.openai)[0] == 404


def test_it_takes_bodies_up_to_its_own_limit(proxy: Proxy) -> None:
    assert proxy.ask("POST", "/v1/completions", b"[" * (32 << 20), port=proxy.openai)[0] == 200
    assert proxy.ask("POST", "/v1/completions", b"[" * ((32 << 20) + 1), port=proxy.openai)[0] == 413
    assert (32 << 20) == Settings().max_image_body_bytes


def test_a_refusal_for_the_moment_reaches_the_client_where_there_is_no_other_server(proxy: Proxy) -> None:
    assert proxy.ask("GET", "/v1/stopping", port=proxy.openai)[0] == 503


class Named(BaseHTTPRequestHandler):
    """Answers with its server's port, and ends the connection."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        name = str(self.server.server_port).encode()  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", str(len(name)))
        self.end_headers()
        self.wfile.write(name)

    def log_message(self, *_: object) -> None: ...


def test_conversations_stay_with_their_server_and_only_those_of_a_lost_one_move(tmp_path: Path) -> None:
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Named) for _ in range(3)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    ports = Ports.free()
    path = configuration(tmp_path, ports.http, ports.grpc, 1, 1, ports.metrics, *(each.server_port for each in servers))
    process = subprocess.Popen([str(NGINX), "-p", str(tmp_path), "-c", str(path), "-g", "daemon off;", "-e", "stderr"])

    def servers_of(sessions: list[str]) -> dict[str, str]:
        proxy = Proxy(ports.http, ports.grpc, ports.metrics)
        answers = {s: proxy.ask("POST", "/v1/x", b"", KEY | {"X-Session-Id": s}, ports.metrics) for s in sessions}
        assert {status for status, _ in answers.values()} == {200}
        return {session: name for session, (_, name) in answers.items()}

    sessions = [f"conversation {n}" for n in range(60)]
    try:
        wait_until_open(ports.metrics, process)
        before = servers_of(sessions)
        assert servers_of(sessions) == before == servers_of(sessions[::-1])
        assert len(set(before.values())) == 3
        assert len({servers_of([""])[""] for _ in range(40)}) == 3, "without the header there is no favourite"
        servers[0].shutdown()
        servers[0].server_close()
        lost = str(servers[0].server_port)
        after = servers_of(sessions)
        assert {s for s in sessions if after[s] != before[s]} == {s for s in sessions if before[s] == lost}
    finally:
        process.terminate()
        process.wait()
        for server in servers[1:]:
            server.shutdown()
            server.server_close()

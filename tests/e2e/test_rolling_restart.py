"""Two servers behind deploy/nginx.conf, restarted one after the other under load: no client notices."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from backend.api import load_config
from deploy.errors import ServerFailed
from deploy.ports import Ports
from deploy.repository import DEFAULT_REPOSITORY
from deploy.triton_server import TritonServer
from tests.deploy.test_nginx import KEY, NGINX, Proxy, configuration, wait_until_open
from tests.e2e.conftest import EXACT
from tests.e2e.starts import START_TIMEOUT_S, wait_ready
from tests.e2e.wire import eventually

pytestmark = pytest.mark.skipif(NGINX is None, reason="no nginx here: apt-get install -y nginx-light")
REQUEST = {"prompt": "def main(", "max_tokens": 20, "ignore_eos": True}
MODEL = "everbatch"
PAUSE_S = 0.03  # between two requests of a client: the servers that start need the processor, too


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[TritonServer]]:
    models = tmp_path / "models"
    shutil.copytree(DEFAULT_REPOSITORY / MODEL, models / MODEL, ignore=shutil.ignore_patterns("__pycache__"))
    config = load_config(overrides=EXACT)
    made = [
        TritonServer(config, run_dir=tmp_path / name, model_repository=models, exit_timeout_s=20) for name in ("a", "b")
    ]
    try:
        for server in made:
            server.start()
        for server in made:
            wait_ready(server)
        yield made
    finally:
        for server in made:
            server.kill()


@pytest.fixture
def proxy(servers: list[TritonServer], tmp_path: Path) -> Iterator[Proxy]:
    ports = Ports.free()
    first, second = (server.ports for server in servers)
    path = configuration(tmp_path, ports.http, ports.grpc, first.http, first.grpc)
    text = path.read_text()
    for one, other in ((first.http, second.http), (first.grpc, second.grpc)):
        line = f"server 127.0.0.1:{one} max_fails=0;"
        assert line in text
        text = text.replace(line, f"{line} server 127.0.0.1:{other} max_fails=0;")
    path.write_text(text)
    command = [str(NGINX), "-p", str(tmp_path), "-c", str(path), "-g", "daemon off;", "-e", str(tmp_path / "error.log")]
    process = subprocess.Popen(command)
    try:
        wait_until_open(ports.http, process)
        yield Proxy(ports.http, ports.grpc)
    finally:
        process.terminate()
        process.wait()


def begin(server: TritonServer) -> None:
    """Start it again, and once more if that fails: a tritonserver that starts beside much load may hang, or abort."""
    for last_try in (False, True):
        try:
            server.start()
            return wait_ready(server, START_TIMEOUT_S / 3)
        except ServerFailed:
            server.kill()
            if last_try:
                raise
    return None


class Load:
    """Clients that ask again and again, without any repetition of their own, until they are told to end."""

    def __init__(self, asks: list[Callable[[], str]]) -> None:
        """Each of `asks` returns what went wrong with one request; "" when all of the answer has come."""
        self.answered, self.errors = 0, []
        self._over, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(ask,)) for ask in asks]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, ask: Callable[[], str]) -> None:
        while not self._over.wait(PAUSE_S):
            error = ask()
            with self._lock:
                self.answered += not error
                if error:
                    self.errors.append(error)


def over_http(proxy: Proxy, method: str) -> str:
    connection = HTTPConnection("127.0.0.1", proxy.http, timeout=60)
    try:
        body = json.dumps({"request": json.dumps({**REQUEST, "stream": method == "generate_stream"})})
        connection.request("POST", f"/v2/models/{MODEL}/{method}", body, KEY)
        response = connection.getresponse()
        text = response.read().decode()
        whole = response.status == 200 and 'finish_reason\\":\\"length' in text
        return "" if whole else f"{method}: {response.status} {text[-300:]}"
    except Exception as error:
        return f"{method}: {error!r}"
    finally:
        connection.close()


def over_grpc(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> str:
    message = service_pb2.ModelInferRequest(model_name=MODEL)
    tensor = message.inputs.add(name="request", datatype="BYTES", shape=[1])
    assert tensor is not None
    data = json.dumps({**REQUEST, "stream": True}).encode()
    message.raw_input_contents.append(struct.pack("<I", len(data)) + data)
    last = b""
    try:
        for answer in stub.ModelStreamInfer(
            iter([message]), timeout=60, metadata=[("authorization", KEY["Authorization"])]
        ):
            if answer.error_message:
                return f"gRPC: {answer.error_message}"
            last = b"".join(answer.infer_response.raw_output_contents) or last
    except grpc.RpcError as error:
        return f"gRPC: {error.code().name} {error.details()}"
    return "" if b'"finish_reason":"length"' in last else f"gRPC: the stream ended early, after {last!r}"


def has_served(server: TritonServer) -> bool:
    return server.log_path.read_text(errors="replace").count(f"request model={MODEL}") > 5


def test_a_restart_of_one_server_after_the_other_loses_no_request(servers: list[TritonServer], proxy: Proxy) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{proxy.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        asks = [lambda: over_http(proxy, "generate"), lambda: over_http(proxy, "generate_stream")]
        with Load([*asks, *[lambda: over_grpc(stub)] * 2]) as load:
            assert eventually(lambda: all(has_served(server) for server in servers), 30)
            for server in servers:
                server.stop()
                assert not server.processes()
                begin(server)
                assert eventually(partial(has_served, server), 30), "the proxy has found it again"
    assert load.errors == [] and load.answered > 50

"""The gateway as it runs, with uvicorn on a free port, before a fake Triton."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import openai
import pytest

from gateway.server import GatewayServer
from gateway.settings import Settings
from tests.gateway.fake_triton import FakeTriton

if TYPE_CHECKING:
    from anthropic import Anthropic


class Served:
    """A gateway that runs in a thread."""

    def __init__(self, settings: Settings) -> None:
        self.server = GatewayServer(settings)
        self.gateway = self.server.gateway
        self._thread = threading.Thread(target=self.server.run)

    def start(self) -> None:
        self._thread.start()
        deadline = time.monotonic() + 20
        while not self.server.started:
            assert self._thread.is_alive() and time.monotonic() < deadline, "the gateway does not start"
            time.sleep(0.005)
        self.address = self.server.address()

    def wait_healthy(self) -> None:
        """Until it has reached its Triton, which takes a while on a busy machine."""
        deadline = time.monotonic() + 20
        while self.request("GET", "/health")[0] != 200:
            assert time.monotonic() < deadline, "the gateway does not reach its Triton"
            time.sleep(0.02)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive(), "the gateway does not stop"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON (or text where it is none), headers. `body`: bytes as they are, else JSON."""
        host, _, port = self.address.partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = {"Content-Type": "application/json"} if body is not None else {}
        connection.request(method, path, data, {**given, **(headers or {})})
        response = connection.getresponse()
        text = response.read().decode()
        found = {name.lower(): value for name, value in response.getheaders()}
        connection.close()
        is_json = found.get("content-type", "").startswith("application/json")
        return response.status, json.loads(text) if is_json and text else text, found

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)


@contextmanager
def serving(triton: str, **values: Any) -> Iterator[Served]:
    """A gateway before the Triton at HOST:PORT."""
    served = Served(Settings(**{"triton": triton, "port": 0, "shutdown_grace_s": 0.2, **values}))
    served.start()
    try:
        yield served
    finally:
        served.stop()


@pytest.fixture(scope="module")
def shared_triton() -> Iterator[FakeTriton]:
    with FakeTriton() as fake:
        yield fake


@pytest.fixture
def triton(shared_triton: FakeTriton) -> FakeTriton:
    """A fake that has seen nothing."""
    shared_triton.requests.clear()
    shared_triton.script.clear()
    return shared_triton


@pytest.fixture(scope="module")
def shared_served(shared_triton: FakeTriton) -> Iterator[Served]:
    with serving(shared_triton.url) as served:
        served.wait_healthy()
        yield served


@pytest.fixture
def served(shared_served: Served, triton: FakeTriton) -> Served:
    """A gateway with the default settings, shared by the tests of a file."""
    return shared_served


@pytest.fixture
def serve(triton: FakeTriton) -> Callable[..., AbstractContextManager[Served]]:
    """`with serve(setting=value, ...) as served`: a gateway of a test's own."""
    return lambda **values: serving(triton.url, **values)


@pytest.fixture
def claude(served: Served) -> Iterator[Anthropic]:
    """Anthropic's own client, which takes half a second to import."""
    from anthropic import Anthropic

    with Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client

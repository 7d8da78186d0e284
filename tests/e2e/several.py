"""Two models in one real tritonserver, the endpoint before them, and clients of both."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import openai

from deploy import probe
from deploy.gateway import GatewayOptions, ServerWithGateway
from deploy.model_source import DEFAULT_MODEL
from deploy.models_file import Entry, Models
from deploy.multi_model_options import of_several, several_of
from deploy.multi_model_server import MultiModelServer
from deploy.ports import Ports
from deploy.serve import ServeOptions
from tests.e2e.starts import wait_ready

WAIT_S = 60.0
PAUSE_S = 0.03  # between two requests of a client: the engines that start need the processor, too
EXACT = ("model.dtype=float32", "model.num_threads=1", "kv_transfer.enabled=true")


class Running:
    """The server, its endpoint, and what an operator does."""

    def __init__(self, served: ServerWithGateway, server: MultiModelServer) -> None:
        self.served, self.server = served, server

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.served.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)

    def operate(self, operation: str, name: str) -> int:
        return probe.request(self.served.url, "POST", f"/v1/admin/models/{name}/{operation}", {}, 2 * WAIT_S)[0]

    def wait_for(self, name: str, state: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while True:
            assert self.server.control is not None
            (each,) = [each for each in self.server.control.described() if each.name == name]
            if each.state == state and not each.operation:
                return
            assert time.monotonic() < deadline, each
            time.sleep(0.1)


@contextmanager
def two_models(directory: Path) -> Iterator[Running]:
    """Models `one` and `two` (`two` is a copy in `directory`)."""
    other = shutil.copytree(DEFAULT_MODEL, directory / "checkpoint")
    entries = {
        "one": Entry(str(DEFAULT_MODEL), set=("kv_cache.max_tokens=4096",)),
        "two": Entry(str(other), set=("kv_cache.max_tokens=2048",), names=("org/two",), load_timeout_s=WAIT_S),
    }
    models = Models(entries)
    several = several_of(ServeOptions(models=models, overrides=EXACT), models)
    server = MultiModelServer(several, ports=Ports.free(), run_dir=directory / "run", exit_timeout_s=5)
    served = ServerWithGateway(server, of_several(GatewayOptions(Ports.free().http), several))
    served.start()
    try:
        wait_ready(served)
        yield Running(served, server)
    finally:
        served.stop()
        assert server.processes() == []


class Load:
    """Clients of all wires that ask one request after the other; counts what comes back."""

    def __init__(self, running: Running) -> None:
        self.running, self.answers, self.failures = running, Counter[str](), list[str]()
        self._end = threading.Event()
        asks = [lambda: self._openai("one"), lambda: self._openai("two"), lambda: self._triton("two.ensemble")]
        self._threads = [threading.Thread(target=self._ask_on, args=(ask,)) for ask in (*asks, asks[1])]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _ask_on(self, ask: Callable[[], str]) -> None:
        while not self._end.wait(PAUSE_S):
            try:
                self.answers[ask()] += 1
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")

    def _openai(self, name: str) -> str:
        with self.running.client() as client:
            chunks = list(client.completions.create(model=name, prompt="a b", max_tokens=3, stream=True))
        assert chunks[-1].choices[0].finish_reason is not None
        return name

    def _triton(self, name: str) -> str:
        body = {"text_input": "a b", "max_tokens": 3, "stream": False}
        status, text = probe.request(self.running.server.http_url, "POST", f"/v2/models/{name}/generate", body, WAIT_S)
        assert status == 200 and "text_output" in text, text
        return name

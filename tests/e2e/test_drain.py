"""What clients with a running stream see of a stop, and of a server that dies: over gRPC and over the OpenAI endpoint."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from backend.api import load_config
from deploy import drain
from deploy.gateway import GatewayOptions, ServerWithGateway
from deploy.ports import Ports
from deploy.processes import stubs_of
from deploy.triton_server import TritonServer
from tests.e2e.conftest import EXACT
from tests.e2e.starts import wait_ready
from tests.e2e.test_engine_death import engine_pid
from tests.e2e.wire import TokenClient, eventually, ids_of

LONG, SHORT = 2000, 1000  # tokens
EXIT_TIMEOUT_S = 16  # four streams share a slow machine, and the short ones have to end within it


@pytest.fixture
def both(tmp_path: Path) -> Iterator[ServerWithGateway]:
    server = TritonServer(load_config(overrides=EXACT), run_dir=tmp_path, exit_timeout_s=EXIT_TIMEOUT_S)
    made = ServerWithGateway(server, GatewayOptions(Ports.free().http, names=("everbatch",)))
    try:
        yield made
    finally:
        made.kill()


def start(both: ServerWithGateway) -> None:
    both.start()
    wait_ready(both)


class Reader:
    """A client that reads a stream in a thread of its own."""

    def __init__(self, read: Callable[[Reader], None]) -> None:
        self.tokens, self.error = 0, ""
        self.over_at: float | None = None
        self._thread = threading.Thread(target=self._run, args=(read,))
        self._thread.start()

    def _run(self, read: Callable[[Reader], None]) -> None:
        try:
            read(self)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        self.over_at = time.monotonic()

    def join(self) -> None:
        self._thread.join(60)
        assert self.over_at is not None, "the stream has no end"


def grpc_reader(url: str, num_tokens: int) -> Reader:
    def read(self: Reader) -> None:
        with TokenClient(url) as client:
            stream = client.start([1, 2, 3], num_tokens, streaming=True)
            for result in stream:
                self.tokens += len(ids_of(result))

    return Reader(read)


def openai_reader(both: ServerWithGateway, num_tokens: int) -> Reader:
    def read(self: Reader) -> None:
        with openai.OpenAI(base_url=f"{both.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            request = {
                "model": "everbatch",
                "prompt": "def",
                "max_tokens": num_tokens,
                "extra_body": {"ignore_eos": True},
                "stream_options": {"include_usage": True},
            }
            for chunk in client.completions.create(**request, stream=True):
                self.tokens += 1
                if chunk.usage is not None:  # On a busy machine several tokens share a chunk.
                    self.tokens = chunk.usage.completion_tokens

    return Reader(read)


def is_begun(*readers: Reader) -> bool:
    return all(reader.tokens > 0 for reader in readers)


def run_in_pulses(engine: int, until: Callable[[], bool]) -> None:
    """Lets the engine run for moments only, so that no stream is over before all have begun; it is held at the end.

    The short streams take a second together: on a busy machine that is less than this thread may have to wait for a turn.
    """
    os.kill(engine, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while not until():
        assert time.monotonic() < deadline, "some stream has not begun"
        os.kill(engine, signal.SIGCONT)
        time.sleep(0.01)
        os.kill(engine, signal.SIGSTOP)
        time.sleep(0.05)


def test_a_stop_lets_streams_run_for_the_whole_exit_timeout_and_tells_who_is_cut_off(
    both: ServerWithGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is held for longer than a server without requests would get, and again once the short streams are over."""
    monkeypatch.setattr(drain, "UNLOAD_S", 0.5)
    start(both)
    url, engine = both.server.grpc_url, engine_pid(both.server)
    assert engine is not None
    long = [grpc_reader(url, LONG), openai_reader(both, LONG)]
    short = [grpc_reader(url, SHORT), openai_reader(both, SHORT)]
    run_in_pulses(engine, until=lambda: is_begun(*short, *long))
    assert all(reader.over_at is None for reader in short + long)

    def hold_the_engine() -> None:
        time.sleep(4 * drain.UNLOAD_S)  # How long a server is waited for is what this test is about.
        os.kill(engine, signal.SIGCONT)
        for reader in short:
            reader.join()
        os.kill(engine, signal.SIGSTOP)

    holder = threading.Thread(target=hold_the_engine)
    stopped_at = time.monotonic()
    holder.start()
    both.stop()
    holder.join()
    for reader in short + long:
        reader.join()
    assert [reader.error for reader in short] == ["", ""] and [reader.tokens >= SHORT for reader in short] == [
        True,
        True,
    ]
    assert "[UNAVAILABLE] the server is shutting down" in long[0].error
    assert "503" in long[1].error or "being stopped" in long[1].error or "shutting down" in long[1].error
    assert all(reader.over_at is not None and reader.over_at - stopped_at >= EXIT_TIMEOUT_S for reader in long)
    assert not both.server.processes()


def test_the_endpoint_tells_its_clients_that_a_server_died_and_goes_on_refusing_new_ones(
    both: ServerWithGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the next server first, here for 3 s instead of two minutes."""
    monkeypatch.setattr(both, "_program", (*both._program, "--resume-timeout-s", "3"))
    start(both)
    reader = openai_reader(both, LONG)
    assert eventually(lambda: is_begun(reader), 30)
    endpoint = both._process
    engine = engine_pid(both.server)
    assert endpoint is not None and engine is not None
    os.kill(engine, signal.SIGSTOP)
    for stub in stubs_of(both.server.pid):
        os.kill(stub.pid, signal.SIGKILL)
    assert eventually(lambda: both.failure() is not None, 30)
    both.abandon()
    reader.join()
    assert reader.tokens < LONG and reader.error.startswith("APIError") and "inference server" in reader.error
    assert endpoint.poll() is None and not both.server.running()
    with pytest.raises(openai.InternalServerError) as refused:
        openai_reader_once(both)
    assert refused.value.status_code == 503


def openai_reader_once(both: ServerWithGateway) -> None:
    with openai.OpenAI(base_url=f"{both.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        client.completions.create(model="everbatch", prompt="def", max_tokens=2)

"""The engine process is killed, or stopped: it returns, streams go on, and the next answers are the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from deploy.triton_server import TritonServer
from tests.e2e.conftest import health, serve
from tests.e2e.starts import wait_ready
from tests.e2e.wire import TokenClient, eventually, ids_of


@pytest.fixture(scope="module")
def mortal_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """One for both tests of it, of which the second one stops it."""
    with serve(tmp_path_factory.mktemp("mortal")) as server:
        wait_ready(server)
        yield server


WATCHDOG_S = 8.0
LONG = 1000  # tokens: seconds, so that streams have not ended before the engine is stopped


@pytest.fixture
def watched_server(tmp_path: Path) -> Iterator[TritonServer]:
    with serve(tmp_path, f"triton.watchdog_timeout_s={WATCHDOG_S}") as server:
        wait_ready(server)
        yield server


def engine_pid(server: TritonServer) -> int | None:
    for pid in server.processes():
        if b"backend.executor.engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def is_alive(pid: int) -> bool:
    """A process that has ended but was not waited for by its adoptive parent does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.feature("002-34")
def test_streams_of_a_killed_engine_go_on_with_the_next_one(mortal_server: TritonServer) -> None:
    with TokenClient(mortal_server.grpc_url) as client:
        before = client.generate([1, 2, 3], 8)
        expected = [client.start([i + 1, 5], 600, streaming=True).token_ids() for i in range(4)]
        streams = [client.start([i + 1, 5], 600, streaming=True) for i in range(4)]
        begun = [ids_of(next(iter(stream))) for stream in streams]
        dead = engine_pid(mortal_server)
        os.kill(dead, signal.SIGKILL)
        assert [[*first, *stream.token_ids()] for first, stream in zip(begun, streams, strict=True)] == expected

        def serves() -> bool:
            try:
                return client.generate([1, 2, 3], 8) == before
            except InferenceServerException as error:
                assert "UNAVAILABLE" in str(error)
                return False

        assert eventually(serves, 60)
        assert engine_pid(mortal_server) not in (None, dead)


def test_nothing_is_left_after_stop(mortal_server: TritonServer) -> None:
    with TokenClient(mortal_server.grpc_url) as client:
        client.start([1, 2], 1500, streaming=True)
        pids = mortal_server.processes()
        assert len(pids) >= 5, "server, three stubs, engine"
        mortal_server.stop()
    # A process that was killed is still seen while the kernel frees its memory.
    assert eventually(lambda: not [pid for pid in pids if is_alive(pid)], 30)
    assert not list(Path("/dev/shm").glob(f"*{mortal_server.run_id}*"))


def refusal(client: TokenClient) -> str | None:
    """What a newcomer is told; None when it is served."""
    try:
        client.generate([1, 2, 3], 8)
    except InferenceServerException as error:
        return str(error)
    return None


def test_a_stopped_engine_refuses_newcomers_then_is_killed_and_replaced(watched_server: TritonServer) -> None:
    """Streams in flight wait, and go on with the next engine."""
    with TokenClient(watched_server.grpc_url) as client:
        before = client.generate([1, 2, 3], 8)
        whole = [client.start([i + 1, 5], LONG, streaming=True) for i in range(4)]
        expected = [stream.token_ids() for stream in whole]
        stopped = engine_pid(watched_server)
        streams = [client.start([i + 1, 5], LONG, streaming=True) for i in range(4)]
        begun = [ids_of(next(iter(stream))) for stream in streams]
        os.kill(stopped, signal.SIGSTOP)
        started = time.monotonic()
        # From then on everybody who comes must be refused.
        assert eventually(lambda: health(watched_server)["tensorrt_llm"].state == "unavailable", WATCHDOG_S)
        error = refusal(client)
        assert error is not None and "no sign of life" in error and "UNAVAILABLE" in error
        assert is_alive(stopped), "refused while it may still come back, not by its end"
        assert [[*first, *stream.token_ids()] for first, stream in zip(begun, streams, strict=True)] == expected
        assert time.monotonic() - started > WATCHDOG_S - 1
        assert eventually(lambda: refusal(client) is None, 60)
        assert client.generate([1, 2, 3], 8) == before
        assert engine_pid(watched_server) not in (None, stopped)

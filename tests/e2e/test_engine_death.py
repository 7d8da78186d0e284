"""The engine process is killed: every client hears of it, the engine returns, the next answers are the same."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from tests.e2e.conftest import START_TIMEOUT_S, serve
from tests.e2e.wire import TokenClient, eventually, ids_of


@pytest.fixture
def mortal_server(tmp_path):
    with serve(tmp_path) as server:
        server.wait_ready(START_TIMEOUT_S)
        yield server


def engine_pid(server) -> int | None:
    for pid in server.processes():
        if b"backend.engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def is_alive(pid: int) -> bool:
    """A process that has ended but was not waited for by its adoptive parent does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_engine_ends_its_streams_with_unavailable_and_returns(mortal_server):
    with TokenClient(mortal_server.grpc_url) as client:
        before = client.generate([1, 2, 3], 8)
        streams = [client.start([i + 1, 5], 1500, streaming=True) for i in range(8)]
        for stream in streams:
            assert ids_of(next(iter(stream)))
        dead = engine_pid(mortal_server)
        os.kill(dead, signal.SIGKILL)
        killed = time.monotonic()
        for stream in streams:
            with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
                list(stream)
        assert time.monotonic() - killed < 10

        def serves() -> bool:
            try:
                return client.generate([1, 2, 3], 8) == before
            except InferenceServerException as error:
                assert "UNAVAILABLE" in str(error)
                return False

        assert eventually(serves, 60)
        assert engine_pid(mortal_server) not in (None, dead)


def test_nothing_is_left_after_stop(mortal_server):
    with TokenClient(mortal_server.grpc_url) as client:
        client.start([1, 2], 1500, streaming=True)
        pids = mortal_server.processes()
        assert len(pids) >= 5, "server, three stubs, engine"
        mortal_server.stop()
    assert not [pid for pid in pids if is_alive(pid)]
    assert not list(Path("/dev/shm").glob(f"*{mortal_server.run_id}*"))

"""What Triton does not notice the launcher does: stopped processes, dead stubs, and who may see and use the admin key."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient

from deploy import health, memory
from deploy.processes import stubs_of
from deploy.signs import PIPE
from deploy.triton_server import TritonServer
from tests.e2e.conftest import serve
from tests.e2e.launched import launched
from tests.e2e.starts import wait_ready
from tests.e2e.test_engine_death import engine_pid
from tests.e2e.wire import eventually, post


@pytest.fixture(scope="module")
def watched_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with serve(tmp_path_factory.mktemp("watched")) as server:
        wait_ready(server)
        yield server


# Two seconds are promised, and measured where the processor is free (docs/reliability.md). Here other tests may want it.
SOON_S = 10.0


def readiness(server: TritonServer, timeout_s: float = 10.0) -> int:
    """The status of the answer; 0 when there was none in time."""
    try:
        with urllib.request.urlopen(f"{server.http_url}/v2/health/ready", timeout=timeout_s) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:  # A busy machine may not even accept the connection.
        return 0


def says_no(server: TritonServer) -> bool:
    return readiness(server) not in (0, 200)


def seconds_until(condition: Callable[[], bool], limit_s: float = 30.0) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, f"not within {limit_s} s"
        time.sleep(0.02)
    return time.monotonic() - began


def both_say(server: TritonServer, ready: bool) -> bool:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        return (readiness(server) == 200) == ready and client.is_server_ready() == ready


def signs(server: TritonServer) -> list[health.Report]:
    assert server._signs is not None
    return server._signs.latest


def failure_of(server: TritonServer) -> str:
    """Why it must end now; empty when it need not. On a busy machine it may say for a moment that a stub is silent."""
    failure = server.failure()
    return "" if failure is None else failure.text


def test_a_stopped_engine_makes_the_server_not_ready_until_it_goes_on(watched_server: TritonServer) -> None:
    server = watched_server
    assert eventually(lambda: len(signs(server)) == len(server.models), 30), "every stub gives signs of life"
    assert eventually(lambda: both_say(server, True), 30)
    pid = engine_pid(server)
    os.kill(pid, signal.SIGSTOP)
    try:
        seconds_until(partial(says_no, server), SOON_S)
        assert both_say(server, False)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert eventually(lambda: both_say(server, True), 30)
    assert post(f"{server.http_url}/v2/models/ensemble/generate", {"text_input": "a", "max_tokens": 2})[0] == 200


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stub_that_is_killed_or_stopped_makes_the_server_not_ready_and_fail(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Triton 24.10 itself kills some stubs that have been stopped for about a second, and then serves on without them;
    the others are silent until the watchdog's time is over.
    """
    with serve(tmp_path, "triton.watchdog_timeout_s=5") as server:
        wait_ready(server)
        assert eventually(lambda: both_say(server, True), 30)
        os.kill(stubs_of(server.pid)[0].pid, number)
        seconds_until(partial(says_no, server), SOON_S)
        assert both_say(server, False)
        words = ("died",) if number == signal.SIGKILL else ("died", "silent")
        assert eventually(lambda: any(word in failure_of(server) for word in words), 60), failure_of(server)


def test_a_stopped_server_is_noticed_after_the_watchdogs_time(tmp_path: Path) -> None:
    with serve(tmp_path, "triton.watchdog_timeout_s=5") as server:
        wait_ready(server)
        assert eventually(lambda: server.failure() is None, 30)
        os.kill(server.pid, signal.SIGSTOP)
        assert eventually(lambda: "has not answered" in failure_of(server), 60), failure_of(server)
        server.kill()
    assert not server.processes()


def test_an_engine_that_was_given_up_ends_serve_with_status_one() -> None:
    """The sign is written by hand, for a model of that name; serve knows only signs."""
    with launched() as server:
        pipe = server.root / f"serve-{server.ports.http}" / PIPE
        pipe.write_text(json.dumps({"model": "by_hand", "state": "given_up", "pid": 1, "live": 0}) + "\n")
        said, _ = server.process.communicate(timeout=60)
        assert server.process.returncode == 1
    assert "the engine of model by_hand ended too often and was given up" in said


def test_the_switch_of_readiness_is_neither_in_the_index_nor_in_reach_of_clients(watched_server: TritonServer) -> None:
    server = watched_server
    load = f"{server.http_url}/v2/repository/models/everbatch_not_ready/load"
    assert post(load, {})[0] == 403
    request = urllib.request.Request(
        f"{server.http_url}/v2/repository/index", data=b"{}", headers={"x-everbatch-admin": server.admin_key}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        text = response.read().decode()
    assert "tensorrt_llm" in text and "everbatch_not_ready" not in text


def test_no_command_line_shows_the_admin_key_and_only_the_server_has_large_stacks(watched_server: TritonServer) -> None:
    pids = watched_server.processes()
    assert len(pids) >= 5, "server, three stubs, engine"
    for pid in pids:
        assert watched_server.admin_key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    sizes = {int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * memory.PAGE_BYTES for pid in pids[1:]}
    assert max(sizes) < 100 << 30

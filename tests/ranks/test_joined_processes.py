"""Ranks that `./everbatch rank` runs: what becomes of streams when one dies or hangs, and that the next group is the same."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from backend.api import EngineConfig, OutputConfig, Request
from backend.executor import Executor
from backend.wire.client import wait_until
from deploy import ROOT
from tests.executor.helpers import drain, tokens_of
from tests.ranks.harness import PROMPTS, engine_config, run

pytestmark = [pytest.mark.slow("engine processes"), pytest.mark.usefixtures("native_kernels")]
OUTPUT = OutputConfig(exclude_input_from_output=True)
VARIABLES = {"EVERBATCH_RANK_KEY": "a key of sixteen characters or more", "PYTHONPATH": str(ROOT)}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


def joined(directory: Path, size: int, stages: int = 1, timeout_s: float = 60.0) -> EngineConfig:
    """Ranks of one thread, which join."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    config = engine_config(directory, size, stages=stages)
    workers = replace(config.workers, rank_timeout_s=timeout_s, join_address=f"127.0.0.1:{port}")
    return replace(config, model=replace(config.model, num_threads=1), workers=workers)


@contextmanager
def rank_command(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "deploy.cli", "rank", *arguments]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **(environment or {})}) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def child_of(process: subprocess.Popen[bytes]) -> int:
    """The rank that a command has started."""
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"PPid:\t{process.pid}\n" in (each / "status").read_text():
                return int(each.name)
    raise LookupError("the command has no child")


def tokens(executor: Executor) -> list[list[int]]:
    requests = [Request(each, 10, streaming=True, output_config=OUTPUT) for each in PROMPTS]
    answers = drain(executor, ids := executor.enqueue_requests(requests))
    return [tokens_of(answers[each]) for each in ids]


@pytest.mark.parametrize("event", [signal.SIGKILL, signal.SIGSTOP], ids=lambda event: event.name)
def test_streams_go_on_with_the_next_group_when_a_rank_dies_or_hangs(
    checkpoint: Callable[..., Path], tmp_path: Path, event: signal.Signals
) -> None:
    directory = checkpoint("llama", max_position_embeddings=4096)
    config = joined(directory, 2, timeout_s=2.0)
    with (
        rank_command("--join", config.workers.join_address) as command,
        Executor.launch(config, str(tmp_path / "engine.sock")) as executor,
    ):
        before = tokens(executor)
        streams = [Request(each, 600, streaming=True, output_config=OUTPUT) for each in PROMPTS]
        ids = executor.enqueue_requests(streams)
        assert wait_until(lambda: all(executor.get_num_responses_ready(each) > 2 for each in ids), 60)
        rank, engine = child_of(command), executor._transport.engine_pid
        started = time.monotonic()
        os.kill(rank, event)
        assert wait_until(lambda: not executor.is_ready(), 30)
        assert time.monotonic() - started < 30
        if event is signal.SIGSTOP:
            os.kill(rank, signal.SIGCONT)
        assert wait_until(lambda: executor.is_ready() and executor._transport.engine_pid != engine, 120)
        answers = drain(executor, ids)
        found = [tokens_of(answers[each]) for each in ids]
        assert [each[:10] for each in found] == before and {len(each) for each in found} == {600}
        assert tokens(executor) == before
        assert child_of(command) != rank
    assert command.returncode == 0


@pytest.mark.feature("002-36")
def test_a_group_that_torchrun_has_counted(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Rank 0 leads, and alone has the output."""
    directory = checkpoint("llama")
    config = joined(directory, 1, stages=2)
    host, port = config.workers.join_address.split(":")
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": port}
    config = replace(config, workers=replace(config.workers, join_address="env"))
    with rank_command("--once", environment=world | {"RANK": "1"}) as command, pytest.MonkeyPatch.context() as patch:
        for name, value in (world | {"RANK": "0"}).items():
            patch.setenv(name, value)
        with Executor.launch(config, str(tmp_path / "engine.sock")) as executor:
            found = tokens(executor)
        assert command.wait(60) == 0
    assert found[0] == run(engine_config(directory, 1)).tokens[0]

"""Ranks as processes: what becomes of streams and of the engine when one of them dies or hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from backend.api import ConfigError, EngineConfig, OutputConfig, Request, Response
from backend.api.config.schema import WorkersConfig
from backend.executor import Executor
from tests.executor.helpers import drain, tokens_of
from tests.ranks.harness import PROMPTS, engine_config, run

pytestmark = [pytest.mark.slow("engine processes"), pytest.mark.usefixtures("native_kernels")]
LONG = 400  # tokens: longer than what happens to the ranks meanwhile
OUTPUT = OutputConfig(exclude_input_from_output=True)


WAYS = {"ranks": WorkersConfig(2), "stages": WorkersConfig(1, 2, micro_batches=2)}  # of two processes each


def config_of(directory: Path, timeout_s: float = 60.0, workers: WorkersConfig = WAYS["ranks"]) -> EngineConfig:
    config = engine_config(directory, 2)
    return replace(config, workers=replace(workers, rank_timeout_s=timeout_s))


# Things that happen to an engine process and its other rank.
EVENTS: dict[str, Callable[[int, int], None]] = {
    "the rank dies": lambda engine, rank: os.kill(rank, signal.SIGKILL),
    "the engine dies": lambda engine, rank: os.kill(engine, signal.SIGKILL),
    "the rank hangs": lambda engine, rank: os.kill(rank, signal.SIGSTOP),
}
EVERY = "EVERBATCH_EVERY" in os.environ  # both ways, with every event
SOME = {"ranks": ["the rank dies", "the engine dies"], "stages": ["the rank hangs", "the engine dies"]}


@contextmanager
def launched(config: EngineConfig, directory: Path) -> Iterator[Executor]:
    with Executor.launch(config, str(directory / "engine.sock")) as executor:
        yield executor


def children(pid: int) -> list[int]:
    """The ranks of an engine process."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (
                f"PPid:\t{pid}\n" in (each / "status").read_text()
                and b"rank_process" in (each / "cmdline").read_bytes()
            ):
                found.append(int(each.name))
    return found


def exists(pid: int) -> bool:
    """True for a process that has not ended; a zombie has."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 400.0) -> float:
    """Returns the seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit_s, f"not within {limit_s:g} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - started


class Stream:
    """What a streaming request was answered."""

    def __init__(self, executor: Executor, prompt: list[int]) -> None:
        self.responses: list[Response] = []
        self.ended = threading.Event()
        executor.submit(Request(prompt, LONG, streaming=True, output_config=OUTPUT), self._on_response)

    def _on_response(self, response: Response) -> None:
        self.responses.append(response)
        if response.is_final:
            self.ended.set()


def check_recovery(executor: Executor, what: Callable[[int, int], None], directory: Path) -> None:
    """Do `what` to the engine or its rank under streams: each goes on with the next engine, and the same tokens come again."""
    engine = executor._transport.engine_pid
    (rank,) = children(engine)
    streams = [Stream(executor, prompt) for prompt in PROMPTS]
    wait_until(lambda: all(stream.responses for stream in streams), "every stream has begun")
    what(engine, rank)
    wait_until(lambda: not exists(engine) and not exists(rank), "both processes are gone")
    wait_until(executor.is_ready, "the engine is ready again")
    wait_until(lambda: all(stream.ended.is_set() for stream in streams), "every stream has ended")
    for stream in streams:
        assert [response.is_final for response in stream.responses].count(True) == 1
        assert len(tokens_of(stream.responses)) == LONG, "none lost, none twice"
    ids = executor.enqueue_requests([Request(prompt, 10, output_config=OUTPUT) for prompt in PROMPTS[:1]])
    got = drain(executor, ids)
    assert tokens_of(got[ids[0]]) == run(engine_config(directory, 1), PROMPTS[:1]).tokens[0]


@pytest.mark.feature("001-61")
@pytest.mark.parametrize("way", WAYS)
def test_the_death_or_hang_of_any_rank_ends_the_engine_which_comes_again(
    checkpoint: Callable[..., Path], tmp_path: Path, way: str
) -> None:
    directory = checkpoint("llama", max_position_embeddings=2048)
    with launched(config_of(directory, 3.0, WAYS[way]), tmp_path) as executor:
        for name in EVENTS if EVERY else SOME[way]:
            check_recovery(executor, EVENTS[name], directory)
        (rank,) = children(executor._transport.engine_pid)
        engine = executor._transport.engine_pid
        os.kill(rank, signal.SIGKILL)  # while nothing runs
        assert wait_until(lambda: not executor.is_ready(), "the engine says that it is not ready") < 2.5
        wait_until(
            lambda: executor.is_ready() and executor._transport.engine_pid != engine, "the engine is ready again"
        )
        last = executor._transport.engine_pid, *children(executor._transport.engine_pid)
    wait_until(lambda: not any(map(exists, last)), "all processes have ended")


def test_what_keeps_a_rank_from_loading_is_told_by_the_engine(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backend.worker.rank_followers.sys.executable", "/bin/false")
    with pytest.raises(
        ConfigError, match="rank 1 ended with code 1 while it was loading; its lines in the log say why"
    ):
        Executor.from_directory(checkpoint("llama"), config_of(checkpoint("llama")))

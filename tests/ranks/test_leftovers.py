"""After a rank was killed its group fails with one clear error, and the engine process keeps no memfd or socket open."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from backend.api import ConfigError
from backend.core.step import WorkersLost
from backend.executor.load import workers_of
from backend.worker import rank_followers, ranked_group
from tests.descriptors import open_descriptors
from tests.parity.scenario import RecordingEngine
from tests.ranks.harness import PROMPTS, engine_config

pytestmark = pytest.mark.usefixtures("native_kernels")


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked_group, "physical_cores", lambda: 8)


def descriptors() -> set[str]:
    """The sockets and the shared memory that this process has open."""
    return {name for name in open_descriptors() if name.startswith(("socket:", "/memfd:"))}


def test_a_rank_killed_while_it_loads_is_one_error_and_leaves_nothing(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(rank_followers.RankFollower):
        def __init__(self, rank: int, on_end: Callable[[int], None]) -> None:
            super().__init__(rank, on_end)
            os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr(rank_followers, "RankFollower", Killed)
    before = descriptors()
    workers = workers_of(engine_config(checkpoint("llama"), 1, stages=2))
    with pytest.raises(ConfigError) as error:
        workers.load()
    assert error.value.message == "rank 1 was ended by signal 9 while it was loading; its lines in the log say why"
    assert not descriptors() - before  # a socket that another test left may be collected meanwhile
    assert not any(map(is_running, workers._others.pids))


def test_a_rank_killed_within_a_step_leaves_nothing(checkpoint: Callable[..., Path]) -> None:
    before = descriptors()
    config = engine_config(checkpoint("llama", max_position_embeddings=4096), 1, stages=2)
    workers = workers_of(config)
    try:
        engine = RecordingEngine(config, workers)
        engine.start(PROMPTS[0], 2000)
        for _ in range(5):
            engine.core.step()
        assert len(descriptors() - before) == 2
        os.kill(workers._others.pids[0], signal.SIGKILL)
        with pytest.raises(WorkersLost, match="rank 1 .* was ended by signal 9"):
            engine.run()
    finally:
        workers.shutdown()
    assert not descriptors() - before  # a socket that another test left may be collected meanwhile
    assert not any(map(is_running, workers._others.pids))


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()

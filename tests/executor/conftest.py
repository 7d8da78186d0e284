"""An engine process over the model of hashes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backend.api.config.schema import EngineConfig
from backend.executor import Executor
from tests.executor.helpers import POOL


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Executor]]:
    """Makes the owner of an engine process over the model of hashes, whose steps take 2 ms."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.executor.hash_engine "$@"\n')
    program.chmod(0o700)
    monkeypatch.setenv("EVERBATCH_PYTHON", str(program))
    monkeypatch.setenv("EVERBATCH_STEP_MS", "2")
    owners: list[Executor] = []

    def start(config: EngineConfig = POOL) -> Executor:
        owners.append(Executor.launch(config, str(tmp_path / "run" / "engine.sock")))
        owners[-1]._process._back_off._delay_s = 0.01
        return owners[-1]

    yield start
    for owner in owners:
        owner.shutdown()


@pytest.fixture
def owner(launch: Callable[..., Executor]) -> Executor:
    return launch()

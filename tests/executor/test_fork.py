"""Programs that fork: the engine, its connection and its directory stay the parent's, whatever the child does."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
    import os, sys
    from pathlib import Path
    from backend.api import EngineConfig, EngineUnavailable, Request
    from backend.executor import Executor

    directory = Path(sys.argv[1])
    executor = Executor.launch(EngineConfig(), str(directory / "engine.sock"), owns_directory=True)
    with executor:
        child = os.fork()
        if child == 0:
            try:
                executor.enqueue_request(Request([1], 2))
            except EngineUnavailable as error:
                print(error, flush=True)
            sys.exit(0)  # runs the `with` block's end, and atexit's functions
        assert os.waitpid(child, 0)[1] == 0
        response = executor.await_responses(executor.enqueue_request(Request([1, 2], 2)), 20)
        print(len(response[0].result.output_token_ids[0]), flush=True)
"""


@pytest.fixture
def engine_of_hashes(tmp_path: Path) -> str:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.executor.hash_engine "$@"\n')
    program.chmod(0o700)
    return str(program)


@pytest.mark.slow("starts an engine process")
def test_a_forked_child_takes_neither_the_engine_nor_its_connection(engine_of_hashes: str, tmp_path: Path) -> None:
    directory = tmp_path / "own"
    directory.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(directory)],
        env={**os.environ, "EVERBATCH_PYTHON": engine_of_hashes},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    refusal, answer = done.stdout.splitlines()
    assert "from which process" in refusal and "was forked; make a new one" in refusal
    assert answer == "4" and done.returncode == 0, done.stderr

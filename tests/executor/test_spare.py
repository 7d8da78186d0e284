"""A spare engine process: it waits until it is called, takes over at once, and never outlives its supervisor."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from backend.api import EngineConfig, OutputConfig, Request
from backend.api.config.schema import TritonConfig
from backend.executor import Executor
from backend.executor.engine_supervisor import EngineProcess
from backend.wire.client import wait_until
from tests.executor.helpers import drain, tokens_of
from tests.families.tiny import make
from tests.guided.processes import is_alive
from tests.ranks.harness import PROMPTS, engine_config

PROGRAM = """#!/bin/sh
case "$*" in
*--spare*) echo "spare $$" >> {log}; read line || exit 0; echo "called $$ $line" >> {log} ;;
*) echo "plain $$" >> {log} ;;
esac
echo '{{"ready": true}}'
read nothing
"""


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], EngineProcess]]:
    """Start a supervised program that notes what becomes of it."""
    made: list[EngineProcess] = []

    def start(spare_engine: bool) -> EngineProcess:
        program = tmp_path / "engine"
        program.write_text(PROGRAM.format(log=tmp_path / "log"))
        program.chmod(0o700)
        monkeypatch.setenv("EVERBATCH_PYTHON", str(program))
        config = EngineConfig(triton=TritonConfig(spare_engine=spare_engine))
        made.append(EngineProcess(config, str(tmp_path / "engine.sock")))
        made[-1].start(10)
        return made[-1]

    yield start
    for process in made:
        process.stop()


def pids(tmp_path: Path, word: str) -> list[int]:
    lines = (tmp_path / "log").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith(word)]


def wait_for(tmp_path: Path, word: str, count: int) -> list[int]:
    assert wait_until(lambda: len(pids(tmp_path, word)) == count, 10), (tmp_path / "log").read_text()
    return pids(tmp_path, word)


def test_a_spare_takes_over_and_another_one_takes_its_place(
    live: Callable[[bool], EngineProcess], tmp_path: Path
) -> None:
    process = live(True)
    (first,) = wait_for(tmp_path, "spare", 1)
    for number in (1, 2):
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        spares = wait_for(tmp_path, "spare", number + 1)
        assert wait_for(tmp_path, "called", number)[-1] == spares[-2] == process.pid
    assert pids(tmp_path, "called")[0] == first and len(pids(tmp_path, "plain")) == 1
    process.stop()
    assert wait_until(lambda: not any(map(is_alive, pids(tmp_path, "spare"))), 10)


def test_the_first_end_is_followed_at_once_and_further_ones_are_not(
    live: Callable[[bool], EngineProcess], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = live(True)
    for number in (1, 2):
        wait_for(tmp_path, "spare", number)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        wait_for(tmp_path, "called", number)
    told = [record.message for record in caplog.records if "started again" in record.message]
    assert [line.rsplit(" in ", 1)[1] for line in told] == ["0.0 s", "1.0 s"]


def test_a_spare_that_has_died_is_not_called(live: Callable[[bool], EngineProcess], tmp_path: Path) -> None:
    process = live(True)
    (spare,) = wait_for(tmp_path, "spare", 1)
    os.kill(spare, signal.SIGKILL)
    assert wait_until(lambda: not is_alive(spare), 10)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    last = wait_for(tmp_path, "plain", 2)[-1]  # which the program may write before its supervisor knows its id
    assert wait_until(lambda: process.pid == last, 10) and not pids(tmp_path, "called")


def test_there_is_none_unless_it_is_asked_for(live: Callable[[bool], EngineProcess], tmp_path: Path) -> None:
    process = live(False)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    wait_for(tmp_path, "plain", 2)
    assert not pids(tmp_path, "spare")


@pytest.mark.slow("engine processes")
def test_streams_go_on_with_a_spare(tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "model", "llama", "float32")
    config = engine_config(checkpoint, 1)
    config = replace(config, triton=replace(config.triton, spare_engine=True))
    output = OutputConfig(exclude_input_from_output=True)
    requests = [Request(each, 200, streaming=True, output_config=output) for each in PROMPTS]
    with Executor.launch(config, str(tmp_path / "front" / "engine.sock")) as executor:
        answers = drain(executor, ids := executor.enqueue_requests(requests))
        expected = [tokens_of(answers[each]) for each in ids]
        process = executor._process
        assert isinstance(process, EngineProcess) and process._spare is not None
        assert wait_until(lambda: process._spare.pid is not None, 10)
        spare, engine = process._spare.pid, process.pid
        assert engine is not None
        ids = executor.enqueue_requests(requests)
        assert wait_until(lambda: all(executor.get_num_responses_ready(each) > 2 for each in ids), 60)
        os.kill(engine, signal.SIGKILL)
        assert wait_until(lambda: executor._transport.engine_pid == spare and executor.is_ready(), 120)
        answers = drain(executor, ids)
        assert [tokens_of(answers[each]) for each in ids] == expected

"""When an engine counts as not ready, and when its owner ends it: in ticks, without a clock."""

from __future__ import annotations

import pytest

from backend.api import EngineUnavailable, Request, Response
from backend.api.processes import liveness
from backend.api.processes.liveness import BUSY_S, TICK_S, CpuDemand
from backend.api.processes.liveness import SILENT_S as STALE_S
from backend.executor import Executor
from backend.executor.watch import Watch
from tests.executor.helpers import ScriptedTransport

PATIENCE_S = 10.0
LONGEST_TURN_S = 30.0


class Process:
    """The process of an engine that is ready."""

    def __init__(self) -> None:
        self.num_signs = 1
        self.patience_s: float | None = PATIENCE_S
        self.longest_turn_s = LONGEST_TURN_S
        self.killed: list[str] = []
        self.num_deaths = 0
        self.why_given_up = ""

    @property
    def has_given_up(self) -> bool:
        return bool(self.why_given_up)

    def kill(self, reason: str, stuck_s: float) -> None:
        self.killed.append(reason)

    def stop(self) -> None:
        pass


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
def watch(process: Process) -> Watch:
    watch = Watch(process)
    watch.tick()
    return watch


def tick(watch: Watch, seconds: float, turn_age_s: float | None = None) -> None:
    """Let time pass: in silence, or with heartbeats that tell the age of the present turn."""
    for _ in range(round(seconds / TICK_S)):
        if turn_age_s is not None:
            watch.beat(turn_age_s)
        watch.tick()


def test_not_ready_is_said_within_two_seconds_of_the_last_heartbeat() -> None:
    assert STALE_S + 2 * TICK_S <= 2.0


def test_silence_makes_stale_and_one_heartbeat_fresh_again(watch: Watch) -> None:
    watch.beat(0.0)
    tick(watch, STALE_S - TICK_S)
    assert watch.is_fresh
    watch.tick()
    assert not watch.is_fresh and watch.silent_s == STALE_S
    watch.beat(0.0)
    assert watch.is_fresh


def test_a_silent_engine_is_killed_after_its_patience_and_only_once(watch: Watch, process: Process) -> None:
    watch.beat(0.0)
    tick(watch, PATIENCE_S)
    assert process.killed == []
    watch.tick()
    assert process.killed == ["gave no sign of life for 10.2 s, the limit is 10 s"]
    tick(watch, 5 * PATIENCE_S)
    assert len(process.killed) == 1


def test_the_next_process_is_watched_afresh(watch: Watch, process: Process) -> None:
    tick(watch, 2 * PATIENCE_S)
    process.num_signs += 1
    tick(watch, PATIENCE_S)
    assert len(process.killed) == 1
    tick(watch, 2 * TICK_S)
    assert len(process.killed) == 2


def test_a_step_that_takes_too_long_is_ended_although_the_heart_beats(watch: Watch, process: Process) -> None:
    tick(watch, 3 * PATIENCE_S, turn_age_s=LONGEST_TURN_S)
    assert process.killed == [] and watch.is_fresh
    tick(watch, TICK_S, turn_age_s=LONGEST_TURN_S + 0.25)
    assert process.killed == ["was in one step for 30.2 s, the limit is 30 s"]


def test_what_the_process_before_it_did_is_not_held_against_a_new_one(watch: Watch, process: Process) -> None:
    watch.beat(LONGEST_TURN_S + 1)
    process.num_signs += 1
    watch.tick()
    assert process.killed == []


def test_a_process_that_is_not_there_is_not_killed(watch: Watch, process: Process) -> None:
    process.patience_s = None
    tick(watch, 5 * PATIENCE_S)
    assert process.killed == []


def test_status_lines_are_signs_of_life_while_it_loads(watch: Watch, process: Process) -> None:
    for _ in range(5):
        tick(watch, PATIENCE_S)
        process.num_signs += 1
    assert process.killed == []


def test_an_engine_that_works_or_waits_for_a_processor_is_slow_and_not_dead(
    watch: Watch, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.patience_s = None
    watch.pid = 4711
    demand = CpuDemand(0, waiting=True)
    monkeypatch.setattr(liveness, "cpu_demand", lambda pid: demand)
    watch.beat(0.0)
    tick(watch, BUSY_S - TICK_S)
    assert watch.is_fresh
    watch.tick()
    assert not watch.is_fresh and watch.describe().endswith("for 10.0 s, the limit is 10 s")
    watch.beat(0.0)
    tick(watch, BUSY_S / 2)
    assert watch.is_fresh
    demand = CpuDemand()  # it was stopped, or hangs
    watch.tick()
    assert not watch.is_fresh and watch.describe().endswith("for 5.2 s, the limit is 1.25 s")
    demand = CpuDemand(0, waiting=True)
    watch.tick()
    assert not watch.is_fresh, "only a sign of life helps now"


# ---- the executor ----------------------------------------------------------------------------------------------------


@pytest.fixture
def transport() -> ScriptedTransport:
    return ScriptedTransport(is_remote=True)


def test_a_stale_engine_gets_no_new_requests_while_those_in_flight_wait(transport: ScriptedTransport) -> None:
    answers: list[Response] = []
    with Executor(transport) as executor:
        executor.submit(Request([1], 1), answers.append)
        assert executor.is_ready()
        tick(executor._watch, STALE_S)
        assert not executor.is_ready() and answers == []
        with pytest.raises(EngineUnavailable, match="no sign of life for .* s, the limit is 1.25 s; try again"):
            executor.submit(Request([1], 1), answers.append)
        with pytest.raises(EngineUnavailable, match="no sign of life"):
            executor.stop_session(1, True, answers.append)
        executor._beat(0.0)
        assert executor.is_ready() and answers == []


def test_an_engine_that_is_connected_anew_is_fresh(transport: ScriptedTransport) -> None:
    with Executor(transport) as executor:
        tick(executor._watch, 10 * STALE_S)
        transport.lose()
        transport.say(executor.hello)
        assert executor.is_ready()


def test_when_the_engine_was_given_up_live_and_new_requests_are_told_to_restart_the_server(
    transport: ScriptedTransport, process: Process
) -> None:
    answers: list[Response] = []
    executor = Executor(transport, process)
    executor.submit(Request([1], 1), answers.append)
    assert not executor.has_given_up
    process.why_given_up, process.num_deaths = "the engine died 6 times in 9 s; restart the server", 1
    transport.lose()
    assert executor.has_given_up and not executor.is_ready()
    assert [answer.error_msg for answer in answers] == [process.why_given_up]
    with pytest.raises(EngineUnavailable, match="restart the server"):
        executor.submit(Request([1], 1), answers.append)
    executor.shutdown()


def test_while_an_engine_is_started_again_live_requests_and_new_ones_wait(
    transport: ScriptedTransport, process: Process
) -> None:
    answers: list[Response] = []
    with Executor(transport, process) as executor:
        executor.submit(Request([1], 1), answers.append)
        process.num_deaths = 1
        transport.lose()
        executor.submit(Request([1], 1), answers.append)
        assert answers == []


def test_it_says_why_it_is_not_ready_and_watches_the_process_at_the_other_end(transport: ScriptedTransport) -> None:
    with Executor(transport) as executor:
        assert executor.why_not_ready() == "" and executor._watch.pid == transport.engine_pid == 4711
        tick(executor._watch, STALE_S)
        assert executor.why_not_ready() == "the engine has given no sign of life for 1.2 s, the limit is 1.25 s"
        transport.lose()
        assert executor.why_not_ready() == "the engine is not running, or is still starting"
    assert executor.why_not_ready() == "the executor has been shut down"

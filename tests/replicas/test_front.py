"""ReplicaFront: several engines as one. The engines run a model of hashes in this process, each behind its own socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from backend.api import EngineUnavailable, ErrorCode, Request, Response
from backend.api.config.schema import EngineConfig, RecordsConfig
from backend.api.processes.liveness import TICK_S
from backend.api.request import SessionConfig, SessionId
from backend.api.stats import BlocksStored, RequestStage
from backend.core.step import StepInput
from backend.engine.core import EngineCore
from backend.executor import Executor
from backend.replicas.front import ReplicaFront, listen
from backend.replicas.placement import Placement
from backend.wire.client import wait_until
from tests.executor.helpers import CONFIG, crash, drain, engine, tokens_of
from tests.fakes.hash_worker import HashWorkerGroup, oracle


class Replicas:
    """Engines that the test starts and ends, a front over them, and a client."""

    def __init__(self, directory: Path, number: int, config: EngineConfig) -> None:
        self.config = config
        self.cores: dict[int, EngineCore] = {}
        self._paths = [directory / f"replica-{index}" / "s" for index in range(number)]
        self._running: dict[int, ExitStack] = {}
        for index in range(number):
            self.start(index)
        self._attached = [Executor.attach(str(path), 5) for path in self._paths]
        self.front = ReplicaFront(self._attached, Placement(), listen(str(directory / "s")), stats_period_s=0.01)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.client = Executor.attach(str(directory / "s"), 5)

    def _run(self) -> None:
        with suppress(EngineUnavailable):
            self.front.run()

    def start(self, index: int) -> None:
        self._running[index] = ExitStack()
        self.cores[index] = self._running[index].enter_context(engine(self._paths[index], self.config))

    def end(self, index: int) -> None:
        """In good order: it answers what it has."""
        self._running.pop(index).close()

    def crash(self, index: int) -> None:
        crash(self.cores[index])
        self.end(index)

    def close(self) -> None:
        self.client.shutdown()
        self.front.stop()
        self._thread.join()
        for each in self._attached:
            each.shutdown()
        for index in list(self._running):
            self.end(index)

    def num_accepted(self) -> list[int]:
        return [self.cores[index].counters.requests_accepted_total for index in sorted(self.cores)]

    def ask(self, request: Request) -> list[int]:
        """The tokens of the answer."""
        return tokens_of(self.answers(request))

    def answers(self, request: Request) -> list[Response]:
        """All responses; other requests may be live meanwhile."""
        request_id = self.client.enqueue_request(request)
        got: list[Response] = []
        while not got or not got[-1].is_final:
            new = self.client.await_responses(request_id, 10)
            assert new, f"nothing came for 10 s; so far {got}"
            got += new
        return got


@contextmanager
def replicas(directory: Path, number: int = 2, config: EngineConfig = CONFIG) -> Iterator[Replicas]:
    made = Replicas(directory, number, config)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a hundred tokens take longer than what a test does meanwhile."""
    submit = HashWorkerGroup.submit

    def slow(self: HashWorkerGroup, step: StepInput) -> None:
        time.sleep(0.005)
        submit(self, step)

    monkeypatch.setattr(HashWorkerGroup, "submit", slow)


def stream(prompt: list[int], max_tokens: int = 8) -> Request:
    return Request(prompt, max_tokens, streaming=True)


def turn(tokens: list[int], start: bool = False, session: int = 7) -> Request:
    return Request(tokens, 4, streaming=True, session=SessionConfig(SessionId(session), start))


@pytest.mark.feature("002-39")
def test_requests_spread_and_each_gets_its_own_answer(tmp_path: Path) -> None:
    with replicas(tmp_path) as both:
        ids = {both.client.enqueue_request(stream([first], 100)): first for first in range(1, 9)}
        answers = drain(both.client, list(ids))
        for request_id, first in ids.items():
            assert tokens_of(answers[request_id]) == oracle([first], 100, 1000)
        assert both.num_accepted() == [4, 4]


def test_turns_of_a_session_run_on_one_replica_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    with replicas(tmp_path) as both:
        busy = both.client.enqueue_request(stream([99], 200))  # on the first replica
        first = both.ask(turn([1, 2], start=True))
        assert both.ask(turn([3])) == oracle([1, 2, *first, 3], 4, 1000, counter=4)
        drain(both.client, [busy])
        assert both.num_accepted() == [1, 2]
        (refused,) = both.answers(turn([3], session=8))
        assert "session 8" in refused.error_msg


def test_stopping_a_session_reaches_its_replica(tmp_path: Path) -> None:
    with replicas(tmp_path) as both:
        busy = both.client.enqueue_request(stream([99], 200))
        both.ask(turn([1, 2], start=True))
        ended: list[Response] = []
        done = threading.Event()
        both.client.stop_session(SessionId(7), True, lambda response: (ended.append(response), done.set()))
        assert done.wait(10) and not ended[0].has_error()
        (refused,) = both.answers(turn([3]))
        assert refused.has_error()
        drain(both.client, [busy])


@pytest.mark.usefixtures("slow_steps")
def test_cancelling_reaches_the_replica_and_a_client_that_leaves_cancels_all(tmp_path: Path) -> None:
    with replicas(tmp_path) as both:
        first, second = (both.client.enqueue_request(stream([each], 250)) for each in (1, 2))
        both.client.cancel_request(first)
        answers = drain(both.client, [first, second])
        assert len(tokens_of(answers[first])) < 250 and len(tokens_of(answers[second])) == 250
        other = Executor.attach(str(tmp_path / "s"), 5)
        for each in range(4):
            other.enqueue_request(stream([each], 250))
        assert wait_until(lambda: sum(core.num_live for core in both.cores.values()) == 4, 10)
        other.shutdown()
        assert wait_until(lambda: all(core.num_live == 0 for core in both.cores.values()), 10)
        ends = [core.counters.requests_finished_total.get("CANCELLED", 0) for core in both.cores.values()]
        assert sum(ends) == 5, "the first, and all of the other client"
        assert both.ask(stream([5])) == oracle([5], 8, 1000)
        assert all(load.num_live == 0 and load.waiting_tokens == 0 for load in both.front._loads)


@pytest.mark.usefixtures("slow_steps")
def test_streams_of_a_lost_replica_go_on_at_another_one(tmp_path: Path) -> None:
    with replicas(tmp_path) as both:
        both.ask(turn([1, 2], start=True))  # on the first replica
        ids = {
            both.client.enqueue_request(stream([each], 110)): each for each in range(1, 5)
        }  # two at once fill a pool
        assert wait_until(lambda: all(both.client.get_num_responses_ready(each) for each in ids), 10)
        assert both.num_accepted() == [3, 2]
        both.crash(0)
        for request_id, answers in drain(both.client, list(ids)).items():
            assert tokens_of(answers) == oracle([ids[request_id]], 110, 1000)
        assert both.cores[1].counters.requests_accepted_total == 4
        assert [load.num_live for load in both.front._loads] == [0, 0]
        assert [load.waiting_tokens for load in both.front._loads] == [0, 0]
        assert both.client.is_ready()
        assert [both.ask(stream([each])) for each in (1, 2)] == [oracle([each], 8, 1000) for each in (1, 2)]
        both.start(0)
        assert wait_until(lambda: len(both.front._ready()) == 2, 10)
        (gone,) = both.answers(turn([3]))
        assert "not known" in gone.error_msg, "the replica of a session answers, and this one has no log"


@pytest.mark.usefixtures("slow_steps")
def test_a_turn_of_a_session_waits_for_its_own_replica(tmp_path: Path) -> None:
    with replicas(tmp_path) as both:
        both.ask(turn([1, 2], start=True))
        both.crash(0)
        assert wait_until(lambda: len(both.front._ready()) == 1, 10)
        (refused,) = both.answers(turn([3]))
        assert refused.error_code is ErrorCode.UNAVAILABLE and both.num_accepted() == [1, 0]


@pytest.mark.usefixtures("slow_steps")
def test_without_another_replica_a_stream_goes_on_when_its_own_is_back(tmp_path: Path) -> None:
    with replicas(tmp_path, number=1) as one:
        request_id = one.client.enqueue_request(stream([1], 110))
        assert wait_until(lambda: one.client.get_num_responses_ready(request_id) > 0, 10)
        one.crash(0)
        one.start(0)
        assert tokens_of(drain(one.client, [request_id])[request_id]) == oracle([1], 110, 1000)


@pytest.mark.usefixtures("slow_steps")
def test_a_request_that_has_no_answer_yet_moves_to_another_replica(tmp_path: Path) -> None:
    """Without streaming the first answer is the last, so that nothing of it has reached the client."""
    with replicas(tmp_path) as both:
        ids = {both.client.enqueue_request(Request([each], 110)): each for each in range(1, 5)}
        assert wait_until(lambda: both.num_accepted() == [2, 2], 10)
        both.end(0)
        for request_id, answers in drain(both.client, list(ids)).items():
            assert tokens_of(answers)[-110:] == oracle([ids[request_id]], 110, 1000)
        assert [load.num_live for load in both.front._loads] == [0, 0]
        assert [load.waiting_tokens for load in both.front._loads] == [0, 0]


@pytest.mark.usefixtures("slow_steps")
def test_a_cancelled_request_is_not_sent_to_another_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with replicas(tmp_path) as both:
        request_id = both.client.enqueue_request(Request([1], 110))
        assert wait_until(lambda: both.num_accepted() == [1, 0], 10)
        monkeypatch.setattr(both._attached[0], "cancel_request", lambda *arguments: None)  # it is lost with the replica
        both.client.cancel_request(request_id)
        assert wait_until(lambda: any(live.is_cancelled for live in both.front._live.values()), 10)
        both.end(0)
        assert drain(both.client, [request_id])[request_id][-1].error_code is ErrorCode.UNAVAILABLE
        assert both.num_accepted() == [1, 0]


@pytest.mark.usefixtures("slow_steps")
def test_streams_wait_while_replicas_are_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent replicas may come back, so nobody is hung up on; meanwhile the server is not ready."""
    with replicas(tmp_path) as both:
        request_id = both.client.enqueue_request(stream([1], 110))
        assert wait_until(lambda: both.client.get_num_responses_ready(request_id) > 0, 10)
        with monkeypatch.context() as silence:
            for each in both._attached:
                silence.setattr(each, "is_ready", lambda: False)
            assert wait_until(lambda: not both.client.is_ready(), 20)
            assert both.client.is_connected
        assert wait_until(both.client.is_ready, 10)
        assert tokens_of(drain(both.client, [request_id])[request_id]) == oracle([1], 110, 1000)


def test_streams_of_a_replica_that_is_stopped_go_on_at_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its connection, and nothing comes of it."""
    submit, may_go_on = HashWorkerGroup.submit, threading.Event()
    with replicas(tmp_path) as both:
        watch, steps = both._attached[0]._watch, []
        assert watch is not None
        of_first = both.cores[0]

        def stopped(self: HashWorkerGroup, step: StepInput) -> None:
            if self is of_first.workers:
                steps.append(step)
                if len(steps) > 3:
                    may_go_on.wait(20)
            submit(self, step)

        monkeypatch.setattr(HashWorkerGroup, "submit", stopped)
        request_id = both.client.enqueue_request(stream([1], 50))
        assert wait_until(lambda: len(steps) > 3, 10)
        monkeypatch.setattr(watch, "beat", lambda turn_age_s: None)
        monkeypatch.setattr(both._attached[0]._transport, "_connect", lambda: None)  # it answers no newcomer either
        # An Executor that owns its engine does not leave it but kills it, and on another node that may come to nothing.
        monkeypatch.setattr(both._attached[0], "_leave_silent_engine", lambda: None)
        limit_s = both.config.triton.watchdog_timeout_s
        watch._silence._ticks = int(limit_s / TICK_S) - 8
        assert not wait_until(lambda: both.num_accepted()[1] > 0, 0.5), "it may come back until then"
        assert tokens_of(drain(both.client, [request_id])[request_id]) == oracle([1], 50, 1000)
        assert both.num_accepted() == [1, 1] and watch.silent_s >= limit_s
        may_go_on.set()


@pytest.mark.usefixtures("slow_steps")
def test_without_any_replica_the_door_is_closed_until_one_is_back(tmp_path: Path) -> None:
    with replicas(tmp_path) as both:
        request_id = both.client.enqueue_request(stream([1], 250))
        assert wait_until(lambda: both.client.get_num_responses_ready(request_id) > 0, 10)
        both.crash(0)
        both.crash(1)
        assert wait_until(lambda: not both.client.is_ready(), 10)
        late = both.client.enqueue_request(stream([5]))
        both.start(1)
        assert wait_until(both.client.is_ready, 10)
        answers = drain(both.client, [request_id, late])
        assert tokens_of(answers[request_id]) == oracle([1], 250, 1000)
        assert tokens_of(answers[late]) == oracle([5], 8, 1000), "it waited for a replica"


def test_statistics_are_totals(tmp_path: Path) -> None:
    with replicas(tmp_path) as both:
        drain(both.client, [both.client.enqueue_request(stream([each], 5)) for each in range(4)])
        assert wait_until(
            lambda: (told := both.client.latest_stats()) is not None and told.counters.generated_tokens_total == 20, 10
        )


def test_records_have_the_clients_ids_and_events_count_without_gaps(tmp_path: Path) -> None:
    records = RecordsConfig(max_iterations=1000, max_request_iterations=1000, max_kv_events=1000)
    with replicas(tmp_path, config=replace(CONFIG, records=records)) as both:
        ids = [both.client.enqueue_request(stream([each] * 9, 20)) for each in range(1, 5)]
        drain(both.client, ids)
        steps = both.client.take_request_stats()
        last = {each.request_id for step in steps for each in step.requests if each.stage is RequestStage.COMPLETE}
        assert last == set(ids)
        assert both.client.take_iteration_stats()
        events = both.client.take_kv_events(5.0)
        assert [each.event_id for each in events] == list(range(len(events)))
        prompts = {
            block.token_ids[0] for each in events if isinstance(each.data, BlocksStored) for block in each.data.blocks
        }
        assert set(range(1, 5)) <= prompts, "of both replicas"


def test_a_front_without_replicas_that_may_return_ends(tmp_path: Path) -> None:
    class Lost:
        has_given_up, hello, is_connected = True, None, False

        def is_ready(self) -> bool:
            return False

    front = ReplicaFront([Lost(), Lost()], Placement(), listen(str(tmp_path / "s")))  # type: ignore[list-item]
    with pytest.raises(EngineUnavailable, match="all replicas ended too often"):
        front.run()

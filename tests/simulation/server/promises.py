"""Promises: what must hold while a simulated server lives, and whether a request has ended as it may."""

from __future__ import annotations

from backend.core.messages import CLIENT_SHIFT
from tests.simulation.server import threads
from tests.simulation.server.havoc import Havoc
from tests.simulation.server.orders import Order
from tests.simulation.server.server import OWNER, POLL_S
from tests.simulation.server.stubs import Stub
from tests.simulation.server.world import Process, Violation

UNREADY_AFTER_S = (
    3.0  # a stub must not say for longer that it is ready while the engine is stopped: 1.25 s, ticks, a late Hello
)
LOST_AFTER_S = 0.4  # the same when the connection is lost
LOAD_NS = 2_000_000_000  # for which nothing may come of a load: 0.1 s, the step that runs, and the one after it
ORPHAN_NS = 1_500_000_000  # for which a request may outlive its client
CANCEL_S = 1.8  # a sweep of the poller every 0.5 s at most, the step that runs, and the one after it
LOST = "the engine process ended while the request ran"
SLOW_TEXT = "took longer than 2 s"  # to tokenise it: its thread may have been held back
BLAMED = "times while this request ran"
SLOW = {"sender slow", "thread held", "slow text"}
QUEUE_WORDS = ("queue size", "waited")


class Promises(Havoc):
    def __init__(self, seed: int, without: frozenset[str], num_requests: int | None) -> None:
        super().__init__(seed, without, num_requests)
        self._no_engine_since: int | None = None
        self._has_been_frozen = False  # since then the engine was stopped, at some time at least
        self._orphans: dict[int, int] = {}  # live requests of clients that are gone, and since when

    def monitor(self) -> None:
        while True:
            now_ns, engine = self.world.now_ns, self.engine
            if not self.is_well():
                self.troubles.append(now_ns)
            self._no_engine_since = None if self.has_engine else self._no_engine_since or now_ns
            self._has_been_frozen = not self.has_engine and (self._has_been_frozen or bool(engine and engine.is_frozen))
            self._look_for_orphans(engine)
            self._look_at_loads(engine)
            threads.sleep(POLL_S)

    def _look_at_loads(self, engine: Process | None) -> None:
        """A sequence does not wait for a level from which nothing comes."""
        is_slow = "thread held" in self.swarm.kinds or self.device.hanging is engine
        if engine is None or engine.engine is None or engine.is_frozen or is_slow or not self.swarm.has_level:
            return
        traffic = engine.engine._core.level
        for load in traffic._loading.values():
            waited_ns = self.world.now_ns - max(load.begun_ns, traffic._progress_ns)
            if waited_ns > LOAD_NS:
                raise Violation(
                    f"{load.seq} waits for the second level, from which nothing has come for {waited_ns / 1e9} s"
                )

    def _look_for_orphans(self, engine: Process | None) -> None:
        """Requests of a client that is gone must not go on."""
        if engine is None or engine.engine is None or engine.is_frozen or self.device.hanging is engine:
            self._orphans.clear()
            return
        clients = engine.engine._server._connections
        orphans = [each for each in engine.engine._core._live if each >> CLIENT_SHIFT not in clients]
        self._orphans = {each: self._orphans.get(each, self.world.now_ns) for each in orphans}
        for request_id, since in self._orphans.items():
            self.world.reached["request of a client that is gone"] += 1
            if self.world.now_ns - since > ORPHAN_NS and "thread held" not in self.swarm.kinds:
                raise Violation(f"request {request_id} goes on, though its client is gone")

    def on_report(self, stub: Stub, state: str) -> None:
        """A sign of life of a stub."""
        stub.state = state
        self.world.reached[f"state {state}"] += 1
        since = self._no_engine_since
        if state == "ready" and since is not None and not self.has_engine and "thread held" not in self.swarm.kinds:
            silent_s = (self.world.now_ns - since) / 1e9
            is_frozen = self._has_been_frozen or bool(self.engine and self.engine.is_frozen)  # also since the last look
            if silent_s > (UNREADY_AFTER_S if is_frozen else LOST_AFTER_S):
                self.world.fail(f"{stub.model} says that it is ready, {silent_s:.1f} s after its engine has gone")

    def judge(self, order: Order) -> None:
        """Whether a request has ended as it may."""
        is_refused_stop = order.stops is not None and self.is_draining and order.code == "UNAVAILABLE"
        outcome = "UNAVAILABLE" if is_refused_stop else order.check()
        self.world.reached[f"ends {outcome}"] += 1
        assert order.ended_ns is not None
        began, ended, error = order.received_ns, order.ended_ns, order.error
        kinds = self.swarm.kinds
        may_end = {
            "whole": not order.is_garbage,
            "part": order.has_left or order.was_stopped or order.timeout_s is not None,
            "CANCELLED": order.was_stopped or order.has_left,
            "INVALID_ARGUMENT": order.is_garbage
            or order.hangs_tokenizer
            or self.forgets(order)
            or ("thread held" in kinds and SLOW_TEXT in error),
            "INTERNAL": order.had_failures
            or any(time <= ended for time in self.failed_steps)
            or (BLAMED in error and self._may_be_blamed(order)),
            "stop": True,
            "UNAVAILABLE": self.was_troubled(began, ended)
            or self.is_draining
            or (any(words in error for words in QUEUE_WORDS) and self.swarm.config.limits.max_queue_size < 10)
            or "slow text" in kinds,
        }
        self._check_end_of_wait(order)
        if LOST in error and "many kills" not in self.swarm.kinds and not self.is_draining:
            may_give_up_s = self.swarm.config.triton.attach_timeout_s  # a stub that is attached waits for so long
            owner = self.stubs[OWNER].executor
            is_given_up = owner is not None and owner.has_given_up
            if (ended - began) / 1e9 < may_give_up_s and not is_given_up:
                raise Violation(f"{order} was not resumed: {error}")
        if not may_end.get(outcome, False):
            raise Violation(f"{order} ends with {outcome}: {error}")

    @property
    def _num_ends(self) -> int:
        """How often an engine process has ended badly, poison apart."""
        ends = sum(each.name == "engine_process" and each.code is not None for each in self.world.processes)
        return ends - self.world.reached["poison"]

    def _may_be_blamed(self, order: Order) -> bool:
        """Whether engines may have ended for this request: poison does it, and from three ends on it may look so by chance."""
        return order.is_poison or (self._num_ends > 0 and self._num_ends + self.world.reached["poison"] >= 3)

    def check_given_up(self) -> None:
        """One request must not use up the restarts of an engine."""
        if self._num_ends + self.world.reached["a process that cannot be started"] < 3:
            raise Violation("the engine was given up for one request")

    def _check_end_of_wait(self, order: Order) -> None:
        """A request that nobody wants any more ends soon, unless something is wrong with the machine."""
        since, ended = order.given_up_ns, order.ended_ns
        if not since or ended is None or self.was_troubled(order.received_ns, ended) or self.swarm.kinds & SLOW:
            return
        self.world.reached["cancelled while all was well"] += 1
        if (ended - since) / 1e9 > CANCEL_S:
            raise Violation(f"{order} was given up by its client, and ended {(ended - since) / 1e9:.1f} s later")

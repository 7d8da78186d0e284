"""SimulatedServer: the state of a simulated server that faults change and promises are checked against."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from random import Random

from tests.simulation.server import threads
from tests.simulation.server.disk import Disk
from tests.simulation.server.faults import swarm_of
from tests.simulation.server.orders import Order
from tests.simulation.server.stubs import SOCKET, Program, Stub
from tests.simulation.server.workers import Device
from tests.simulation.server.world import Process, Violation, World

MODELS = ("tensorrt_llm", "ensemble")
OWNER = "tensorrt_llm"  # its stub owns the engine process
READY_S = 90.0  # the longest back-off is 30 s
MARGIN_NS = 400_000_000
QUIET_NS = 5_000_000_000
POLL_S = 0.05


class SimulatedServer:
    def __init__(self, seed: int, without: frozenset[str], num_requests: int | None) -> None:
        self.seed = seed
        self.swarm = swarm_of(seed)
        self.swarm.kinds -= without
        self.swarm.disk_kinds -= without
        if num_requests is not None:
            self.swarm.num_requests = num_requests
        self.rng = Random(f"server {seed}")
        self.world = World(seed)
        self.world.disk = Disk(seed, self.swarm.disk_kinds)
        self.device = Device(self.swarm.step_s, self.swarm.looks_ahead, self.swarm.config.kv_cache.block_size)
        self.device.on_poison = lambda: self.note("poisoned")
        self.orders: list[Order] = []
        self.troubles: list[int] = []  # times at which something was wrong
        self.stub_deaths: list[tuple[int, str]] = []  # when which stub was killed
        self.failed_steps: list[int] = []
        self.is_calm = self.is_draining = False  # Faults have stopped; the server was asked to drain.
        self.stubs = {name: Stub(name, self.swarm.config, self.on_report) for name in MODELS}
        self.program: Program | None = None

    def on_report(self, stub: Stub, state: str) -> None:
        """A sign of life of a stub."""
        raise NotImplementedError

    @property
    def engine(self) -> Process | None:
        """The engine process that serves now."""
        found = [each for each in self.world.processes if each.name == "engine_process" and each.is_alive]
        return found[-1] if found else None

    @property
    def has_engine(self) -> bool:
        """Whether an engine process listens, and is not stopped."""
        listener = self.world.listeners.get(SOCKET)
        return listener is not None and listener._accepts and not listener._process.is_frozen

    def is_well(self) -> bool:
        """Whether each loaded stub reaches an engine that works."""
        engine = self.engine
        if engine is None or engine.is_frozen or self.device.hang_next_s or self.device.hanging is engine:
            return False
        return all(
            stub.is_loaded
            and stub.state == "ready"
            and stub.executor is not None
            and stub.executor.is_ready()
            and getattr(stub.executor._transport, "engine_pid", None) == engine.pid
            for stub in self.stubs.values()
        )

    def has_been_well(self) -> bool:
        """Whether all has been well for longer than the watch needs to kill an engine that was frozen."""
        return self.is_well() and self.world.now_ns - max(self.troubles, default=0) > QUIET_NS

    def note(self, fault: str) -> None:
        self.world.reached[fault] += 1
        self.troubles.append(self.world.now_ns)
        if any(order.ended_ns is None for order in self.orders):
            self.world.reached[f"{fault} while requests run"] += 1

    def was_troubled(self, began_ns: int, ended_ns: int) -> bool:
        """Whether anything was wrong with the machine at some time in between."""
        self.troubles.sort()
        at = bisect.bisect_left(self.troubles, began_ns - MARGIN_NS)
        return at < len(self.troubles) and self.troubles[at] <= ended_ns + MARGIN_NS

    def forgets(self, order: Order) -> bool:
        """Whether the session of a second turn is gone: sessions lie with the stub that owns the engine."""
        first = order.before
        return first is not None and any(
            model == OWNER and first.received_ns <= at <= (order.ended_ns or at) for at, model in self.stub_deaths
        )

    def is_lost(self, order: Order) -> bool:
        """Its stub has died, and its client with it."""
        return order.incarnation != self.stubs[order.model].incarnation or not self.stubs[order.model].is_loaded

    def submit(self, stub: Stub, *orders: Order) -> None:
        """Hand over requests as soon as the model is loaded."""
        self.wait(f"{stub.model} is loaded", lambda: stub.is_loaded, READY_S)
        for order in orders:
            order.incarnation = stub.incarnation
            order.sender.round_trip_s = self.swarm.round_trip_s
            self.orders.append(order)
        stub.inbox.put(list(orders))

    def wait(self, what: str, condition: Callable[[], bool], seconds: float) -> None:
        """Poll a condition. Raises Violation when the time is over."""
        if not self.comes_true(condition, seconds):
            raise Violation(f"after {seconds:g} s it is still not so that {what}\n{self.world.stacks()}")

    def comes_true(self, condition: Callable[[], bool], seconds: float) -> bool:
        end_ns = self.world.now_ns + int(seconds * 1e9)
        while not condition():
            if self.world.now_ns > end_ns:
                return False
            threads.sleep(POLL_S)
        return True

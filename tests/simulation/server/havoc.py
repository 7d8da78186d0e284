"""Havoc: what goes wrong with a simulated server."""

from __future__ import annotations

import signal
from collections.abc import Callable
from random import Random

from tests.simulation.server.orders import Order
from tests.simulation.server.processes import send_signal
from tests.simulation.server.server import MARGIN_NS, MODELS, SimulatedServer
from tests.simulation.server.stubs import stranger
from tests.simulation.server.workers import POISON
from tests.simulation.server.world import Process

FOR_EVER_S = 1e6


class Havoc(SimulatedServer):
    def arm(self, kind: str, order: Order, rng: Random) -> None:
        """Let a fault happen soon, or to this request."""
        world = self.world
        soon = int(10 ** rng.uniform(0, 3.2))
        act: Callable[[], None] | None = {
            "kill": self.kill_engine,
            "terminate": self._terminate_engine,
            "freeze": lambda: self._freeze(rng.choice((0.5, 2.0, 20.0, FOR_EVER_S))),
            "hang": lambda: self._hang(rng.choice((1.0, 4.0, FOR_EVER_S)), rng.random() < 0.5),
            "hang twice": lambda: self._hang_twice(rng.random() < 0.5),
            "cut": lambda: self._cut(rng.choice(MODELS)),
            "kill text stub": lambda: self._kill_stub("ensemble"),
            "kill owner": lambda: self._kill_stub("tensorrt_llm"),
            "step fails": self._fail_step,
            "no file": lambda: self._no_file(rng),
            "no process": lambda: self._no_process(rng.randint(1, 2)),
            "many kills": lambda: self._kill_again(8),
            "thread held": lambda: self._hold_threads(rng),
            "stranger": lambda: self._start_stranger(rng.randrange(1 << 30)),
            "cancel": lambda: self._leave(order),
        }.get(kind)
        if kind in ("cancel", "cut", "kill text stub"):
            self._lengthen(order)
        if act is not None:
            world.after_switches(soon, act)
        elif kind == "sender slow":
            order.sender.delays_s = [rng.choice((0.05, 1.0, 8.0)) for _ in range(rng.randint(1, 3))]
        elif kind == "sender fails":
            order.sender.num_failures = rng.randint(1, 2)  # the pump tries three times
        elif kind == "garbage":
            order.is_garbage = True
        elif kind == "slow text" and order.model == "ensemble":
            order.hangs_tokenizer, order.namespace = True, "slow"
            order.work_out(self.swarm.setup)
        elif kind == "poison" and order.session_id is None and order.model == "tensorrt_llm":
            order.is_poison, order.prompt = True, [POISON, *order.prompt[1:]]
            order.work_out(self.swarm.setup)
        elif kind == "time out":
            order.timeout_s = rng.choice((0.001, 0.01, 0.1))
        elif kind == "stop":
            self._lengthen(order)
            world.after_switches(soon, lambda: self._stop(order))
        elif kind == "drain":
            world.after_switches(soon, self._drain)

    def _lengthen(self, order: Order) -> None:
        """Let a request run for so long that an end ahead of time shows."""
        order.max_tokens = 26
        order.work_out(self.swarm.setup)

    def kill_engine(self) -> None:
        if self.engine is not None:
            self.note("kill")
            self.engine.end(-9)

    def _kill_again(self, times: int) -> None:
        """Kill each engine process soon after its start, until it is given up."""
        if self.is_calm:
            return
        self.kill_engine()
        if times:
            self.world.after_s(0.8 * 2 ** (8 - times), lambda: self._kill_again(times - 1))

    def _freeze(self, seconds: float) -> None:
        engine = self.engine
        if engine is not None:
            self.note("freeze")
            engine.freeze()
            engine.is_stopped_for_ever = seconds == FOR_EVER_S
            self.world.after_s(seconds, lambda: self._thaw(engine))

    def _thaw(self, engine: Process) -> None:
        """What it was sent while it was stopped happens now."""
        self.troubles.append(self.world.now_ns)
        engine.thaw()

    def _terminate_engine(self) -> None:
        """Ask the engine process to end, as an operator might who does not know that it is supervised."""
        if self.engine is not None:
            self.note("terminate")
            send_signal(self.engine, signal.SIGTERM)

    def _hang(self, seconds: float, is_busy: bool) -> None:
        self.note("hang")
        self.device.hang_next_s, self.device.is_busy = seconds, is_busy

    def _hang_twice(self, is_busy: bool) -> None:
        """Let the first step of the next engine hang as well."""
        self._hang(FOR_EVER_S, is_busy)
        self.device.num_more = 1

    def _cut(self, model: str) -> None:
        """Break a connection between stub and engine, both of which go on."""
        executor = self.stubs[model].executor
        sock = getattr(executor._transport, "_sock", None) if executor is not None else None
        if sock is not None and sock._input is not None and sock._output is not None:
            self.note("cut")
            sock._input.end()
            sock._output.end()
            sock._input.abandon()
            sock._output.abandon()

    def _kill_stub(self, model: str) -> None:
        process = self.stubs[model].process
        if process is not None and process.is_alive and not self.is_draining:
            self.note(f"kill {model}")
            self.stub_deaths.append((self.world.now_ns, model))
            process.end(-9)

    def _fail_step(self) -> None:
        self.device.fail_next = True
        self.failed_steps.append(self.world.now_ns)

    def _no_file(self, rng: Random) -> None:
        self.world.failing_connects = rng.randint(1, 4)
        self._cut(rng.choice(MODELS))

    def _no_process(self, count: int) -> None:
        self.world.failing_starts = count
        self.kill_engine()

    def _hold_threads(self, rng: Random) -> None:
        """Do not let some threads run for a while."""
        alive = [each for each in self.world.threads if each.is_alive and each.process.name != "world"]
        for thread in rng.sample(alive, min(rng.randint(1, 6), len(alive))):
            self.world.hold_back(thread, rng.choice((0.01, 0.5, 2.5)))
        self.world.reached["thread held"] += 1
        self.troubles += range(self.world.now_ns, self.world.now_ns + 3_000_000_000, MARGIN_NS)

    def _start_stranger(self, seed: int) -> None:
        self.world.reached["stranger"] += 1
        self.world.start_process("stranger", stranger(Random(seed)))

    def _leave(self, order: Order) -> None:
        if order.ended_ns is None:
            self.world.reached["client left"] += 1
            order.given_up_ns = self.world.now_ns
        order.has_left = True

    def _stop(self, order: Order) -> None:
        stub = self.stubs[order.model]
        if stub.is_loaded and order.incarnation == stub.incarnation and not self.is_calm:
            order.was_stopped = True
            order.given_up_ns = order.given_up_ns or self.world.now_ns
            stop = Order(order.number, order.model, [65], 1, False, stops=order, namespace=order.namespace)
            stop.incarnation = stub.incarnation
            self.orders.append(stop)
            stub.inbox.put([stop])

    def _drain(self) -> None:
        if not self.is_draining:
            self.is_draining = True
            self.note("drain")
            for stub in self.stubs.values():
                if stub.process is not None:
                    send_signal(stub.process, signal.SIGUSR1)

    def calm(self) -> None:
        """No more faults."""
        world = self.world
        self.is_calm = world.disk.is_calm = True
        world.at_switch.clear()
        world.failing_connects = world.failing_starts = 0
        self.device.fail_next = False
        if self.device.hanging is None:
            self.device.hang_next_s = 0.0
        for thread in world.threads:
            thread.held_until_ns = 0
        for process in world.processes:
            if process.is_frozen and not process.is_stopped_for_ever:
                process.thaw()
        for order in self.orders:
            order.sender.delays_s.clear()

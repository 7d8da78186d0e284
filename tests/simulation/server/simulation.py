"""ServerSimulation: a whole life of a server, from its start to its end, with the faults and the order of threads of one seed.

start      the stubs load, the owner starts the engine process
serve      requests come, faults happen
settle     faults stop: every request must end, the server must be ready, and a request to each model must succeed
check      nothing is held for requests that have ended
end        the models are unloaded: no thread, no file, no process may be left
"""

from __future__ import annotations

from contextlib import nullcontext
from random import Random

from tests.serving import fake_triton
from tests.simulation.server import threads
from tests.simulation.server.fine import fine_switches
from tests.simulation.server.install import simulated
from tests.simulation.server.leaks import check_engine, check_stub
from tests.simulation.server.orders import Order
from tests.simulation.server.promises import Promises
from tests.simulation.server.server import MODELS, READY_S
from tests.simulation.server.stubs import Program, Stub, engine_program
from tests.simulation.server.tokens import text_of, tokenizer
from tests.simulation.server.workers import ServerWorkers
from tests.simulation.server.world import Violation

SETTLE_S = 240.0  # simulated seconds in which everything must have ended once faults have stopped
CLEAN_S = 8.0


class ServerSimulation(Promises):
    def __init__(self, seed: int, without: frozenset[str] = frozenset(), num_requests: int | None = None) -> None:
        """`without`: kinds of faults that are left out. `num_requests`: instead of the seed's own, for shrinking."""
        super().__init__(seed, without, num_requests)

    def run(self) -> None:
        """Raises Violation, or whatever came out of the server's threads."""
        world, swarm = self.world, self.swarm
        fake_triton.MetricFamily.created.clear()
        tokenizer()
        world.switchiness, world.by_priority = swarm.switchiness, swarm.by_priority
        world.clock_tick_ns, world.switch_ns = swarm.clock_tick_ns, swarm.switch_ns
        world.socket_bytes, world.short_io = swarm.socket_bytes, swarm.short_io
        world.programs = engine_program
        world.new_workers = self._load_model
        with simulated(world), fine_switches() if swarm.is_fine else nullcontext():
            driver = world.new_thread(world.new_process("world"), self._drive, "driver")
            world.run(driver)

    def _load_model(self) -> ServerWorkers:
        threads.sleep(self.swarm.load_s)
        return ServerWorkers(self.device)

    # ---- the driver's thread -----------------------------------------------------------------------------------------

    def _drive(self) -> None:
        monitor = threads.Thread(target=self.monitor, name="monitor")
        monitor.start()
        launchers = [threads.Thread(target=self._launch, args=(stub,), name="launcher") for stub in self.stubs.values()]
        for launcher in launchers:
            launcher.start()
        self.wait("the models load", lambda: all(stub.is_loaded for stub in self.stubs.values()), READY_S)
        if self.swarm.has_program:
            self._start_program()
        if self.rng.random() < 0.7:
            self.wait("the server is ready", self.is_well, READY_S)
            threads.sleep(1.0)  # so that nothing that went wrong before excuses anything
        self._serve()
        self._settle()
        self._end()

    def _launch(self, stub: Stub) -> None:
        """Triton and the launcher: start a stub again when it has ended by itself."""
        while not stub.is_closing:
            stub.server = stub.executor = None
            stub.state = ""
            stub.incarnation += 1
            process = stub.process = self.world.start_process(stub.model, stub.main)
            self.world.wait_until(lambda: not process.is_alive, process.waiters, None, "the end of a stub")  # noqa: B023
            threads.sleep(0.5)

    def _start_program(self) -> None:
        rng = Random(f"program {self.seed}")
        self.program = Program(rng, self.swarm.setup, self._is_excused, 2)
        self.program.process = self.world.start_process("program", self.program.main)

    def _is_excused(self, began_ns: int) -> bool:
        """Whether a request of the program that began then may be refused now."""
        return not self.is_well() or self.was_troubled(began_ns, self.world.now_ns)

    def _serve(self) -> None:
        rng, swarm = self.rng, self.swarm
        faults = [fault for kind in sorted(swarm.kinds) for fault in self._times_of(kind)]
        for number in range(swarm.num_requests):
            order = self._new_order(number)
            stub = self.stubs[order.model]
            for at, kind, chance in faults:
                if at == number:
                    self.arm(kind, order, chance)
            self.submit(stub, order)
            if rng.random() < 0.6:
                threads.sleep(rng.choice((0.0, 0.001, 0.02, 0.3)))
        if rng.random() < 0.5:
            threads.sleep(rng.choice((0.01, 0.5, 4.0)))
        for order in list(self.orders):
            if order.session_id is not None:
                self._continue(order)

    def _continue(self, first: Order) -> None:
        """The second turn of a session, once the first one has ended well. The engine may die in between."""
        rng = Random(f"session {self.seed}")
        self.world.wait_until(lambda: first.ended_ns is not None, first.waiters, 40.0, "the first turn")
        is_whole = first.ended_ns is not None and not self.is_lost(first) and first.check() == "whole"
        if not is_whole or self.is_draining or first.has_left:
            return
        if "kill" in self.swarm.kinds and rng.random() < 0.5:
            self.kill_engine()
            threads.sleep(rng.choice((0.0, 1.0, 5.0)))
        if not self.comes_true(
            self.is_well, READY_S
        ):  # it may have been given up, or a hang may wait for the next step
            return
        prompt = [rng.randrange(3 + 32, 3 + 100) for _ in range(rng.randint(1, 5))]
        number, model, salt = 1000 + first.number, first.model, first.namespace
        second = Order(number, model, prompt, rng.randint(1, 8), rng.random() < 0.7, seed=3, namespace=salt)
        second.session_id, second.before = first.session_id, first
        second.work_out(self.swarm.setup)
        num_tokens = len(first.prompt) + len(first.tokens) + len(prompt) + second.max_tokens
        if num_tokens > self.swarm.config.kv_cache.max_tokens - 4 * self.swarm.config.kv_cache.block_size:
            return  # too long for the pool
        self.world.reached["second turn"] += 1
        self.submit(self.stubs[model], second)

    def _times_of(self, kind: str) -> list[tuple[int, str, Random]]:
        """Ahead of which requests a fault is armed. Each kind has random numbers of its own, so that it stays when others go."""
        rng = Random(f"{kind} {self.seed}")
        at = [int(rng.random() * self.swarm.num_requests) for _ in range(rng.randint(1, 2))]
        return [(number, kind, rng) for number in at]

    def _new_order(self, number: int) -> Order:
        rng = self.rng
        order = Order(
            number,
            rng.choice(MODELS),
            [rng.randrange(3 + 32, 3 + 100) for _ in range(rng.randint(1, 12))],
            rng.randint(1, 14),
            rng.random() < 0.7,
            seed=rng.randrange(50),
            namespace=rng.choice(("", "", "x")),
        )
        if order.model == "ensemble":
            order.prompt = tokenizer().encode("".join(rng.choice("abc de") for _ in range(rng.randint(1, 12))))
        if self.swarm.has_level and order.model == "tensorrt_llm":
            shared = Random(f"beginning {self.seed} {number % 3}")  # blocks that several requests use are written
            order.prompt = [shared.randrange(3 + 32, 3 + 100) for _ in range(16)] + order.prompt[:4]
        order.work_out(self.swarm.setup)
        if order.model == "tensorrt_llm" and rng.random() < 0.3:
            order.end_ids = (rng.choice(order.tokens),)
        if order.model == "ensemble" and rng.random() < 0.4:
            text, _ = text_of(order.tokens)
            at = rng.randrange(len(text)) if text else 0
            stop = text[at : at + rng.randint(1, 3)]
            order.stop = "" if "\ufffd" in stop or not stop.isprintable() else stop
        if order.model == "tensorrt_llm" and rng.random() < 0.25:
            order.session_id, order.prompt, order.max_tokens = 77 + number, order.prompt[:6], min(order.max_tokens, 8)
            order.end_ids = ()
            order.work_out(self.swarm.setup)
        if order.end_ids:
            order.work_out(self.swarm.setup)
        return order

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        self.calm()
        end_ns = self.world.now_ns + int(SETTLE_S * 1e9)
        for order in self.orders:
            self._await_end(order, end_ns)
        self.device.hang_next_s = 0.0
        for order in self.orders:
            if not self.is_lost(order):
                self.judge(order)
        if self.program is not None and self.program.process is not None:
            process = self.program.process
            self.wait("the program ends", lambda: not process.is_alive, 600.0)
        owner = self.stubs["tensorrt_llm"].executor
        if owner is not None and owner.has_given_up:
            self.world.reached["given up"] += 1
            self.check_given_up()
        elif not self.is_draining:
            self.wait("the server is ready again", self.has_been_well, READY_S)
            self.wait("the last failing step is over", lambda: not self.device.is_failing, READY_S)
            self._probe()
        self._wait_until_clean()

    def _await_end(self, order: Order, end_ns: int) -> None:
        def is_over() -> bool:
            return order.ended_ns is not None or self.is_lost(order)

        left_s = (end_ns - self.world.now_ns) / 1e9
        if not self.world.wait_until(is_over, order.waiters, left_s, f"the end of {order}"):
            raise Violation(f"{order} has no end {SETTLE_S:g} s after the faults\n{self.world.stacks()}")

    def _wait_until_clean(self) -> None:
        """Nothing may be held for requests that have ended, once threads that were held back or hang have had their time."""
        end_ns = self.world.now_ns + int(CLEAN_S * 1e9)
        while True:
            threads.sleep(0.5)
            if not self.is_well() and self.world.now_ns > end_ns:
                return  # What is held waits for the next engine.
            try:
                for stub in self.stubs.values():
                    check_stub(stub)
                if self.engine is not None:
                    strangers = sum(each.is_alive and each.name == "stranger" for each in self.world.processes)
                    check_engine(self.engine, sum(stub.is_loaded for stub in self.stubs.values()) + strangers)
                return
            except Violation:
                if self.world.now_ns > end_ns:
                    raise

    def _probe(self) -> None:
        """Everything is well: a request to each model must succeed."""
        for model, stub in self.stubs.items():
            probe = Order(10_000, model, tokenizer().encode("abc"), 5, True, seed=1)
            probe.work_out(self.swarm.setup)
            self.submit(stub, probe)
            self.world.wait_until(lambda: probe.ended_ns is not None, probe.waiters, 30.0, "a probe")  # noqa: B023
            outcome = probe.check() if probe.ended_ns is not None else "no end"
            if outcome != "whole":
                raise Violation(f"all is well, and {probe} ends with {outcome} {probe.error}\n{self.world.stacks()}")

    def _end(self) -> None:
        """Triton unloads the models, and the machine must be empty then."""
        last, order = self.engine if self.is_well() else None, list(self.stubs.values())
        self.rng.shuffle(order)
        if "kill at the end" in self.swarm.kinds:
            self.world.after_switches(int(10 ** self.rng.uniform(0, 2.5)), self.kill_engine)
            last = None
        for stub in order:
            stub.is_closing = True
            stub.inbox.put(None)
        for stub in order:
            process = stub.process
            assert process is not None
            self.wait(f"{stub.model} ends", lambda: not process.is_alive, 60.0)  # noqa: B023
            if stub.left or process.code:
                raise Violation(f"{stub.model} ends with code {process.code} and leaves {stub.left}")
        if self.program is not None and (self.program.left or self.program.process.code):
            raise Violation(f"the program leaves {self.program.left}")
        threads.sleep(1.0)
        alive = [each for each in self.world.processes if each.is_alive and not each.is_frozen]
        alive = [each for each in alive if each.name not in ("world", "stranger")]
        if alive:
            raise Violation(f"left over: {[each.name for each in alive]}\n{self.world.stacks()}")
        if last is not None and last.code:
            raise Violation(f"the last engine process ended with code {last.code}")
        held = [file.name for file in self.world.disk.files if file.holder is last] if last is not None else []
        if held and not self.swarm.disk_kinds:
            raise Violation(f"the last engine process has left {held} open")

"""The simulated machine: one clock, processes, and threads of which exactly one runs at a time.

A thread is a greenlet. It runs until it blocks, or until a point at which the seed lets another one go on: each operation on a
lock, queue, event, socket, pipe or process is such a point (`pause`). The clock stands still while a thread can run. When none
can, it moves to the next timer. So a seed decides all of a run.

A killed process is never resumed: its threads stay where they are, and only its end of sockets and pipes is seen to close.
"""

from __future__ import annotations

import heapq
import itertools
import math
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, NoReturn

from greenlet import GreenletExit, getcurrent, greenlet

MAX_SWITCHES = 600_000  # a schedule that takes more runs in circles
FIRST_PID = 1000


class Violation(AssertionError):
    """The server has broken one of its promises."""


class Over(GreenletExit):
    """Raised in threads that are left over when the simulation ends, so that they give up their stacks."""


class SimThread:
    """A thread of a simulated process. `what` says what it waits for."""

    def __init__(self, world: World, process: Process, target: Callable[[], object], name: str) -> None:
        self.number = next(world.numbers)
        self.process = process
        self.name = name
        self.what = ""
        self.priority = 0.0
        self.has_started = self.is_done = self.is_blocked = self.has_timed_out = False
        self.held_until_ns = 0
        self.ticket = 0  # the number of its present wait
        self.waiters: list[SimThread] = []  # the list in which it waits
        self.joiners: list[SimThread] = []
        self.pending: type[BaseException] | None = None  # raised as soon as it runs again
        self.error: BaseException | None = None
        self.stand_in: Any = None  # the object that the code under test knows
        self._target = target
        self._world = world
        self.greenlet = greenlet(self._run, world.hub)

    @property
    def is_alive(self) -> bool:
        return self.has_started and not self.is_done and self.process.is_alive

    def _run(self) -> None:
        try:
            self._target()
        except GreenletExit:
            pass
        except BaseException as error:
            self.error = error
        self.is_done = True
        self._world.wake(self.joiners)

    def stack(self) -> str:
        """Where it stands, the innermost frame last."""
        frame = self.greenlet.gr_frame
        if frame is None:
            return "    it has not begun\n" if not self.is_done else "    it has ended\n"
        frames = [each for each in traceback.extract_stack(frame) if "/tests/simulation/server/" not in each.filename]
        return "".join(traceback.format_list(frames[-8:]))


class Process:
    """A simulated process: its threads, its open files, and how it ended."""

    def __init__(self, world: World, name: str, parent: Process | None = None) -> None:
        self.world, self.name, self.parent = world, name, parent
        self.pid = FIRST_PID + next(world.pids)
        self.threads: list[SimThread] = []
        self.files: dict[
            int, Any
        ] = {}  # open ones by their numbers; each has `drop`, which the end of the process calls
        self.next_file = 3
        self.is_alive = True
        self.is_frozen = self.is_stopped_for_ever = False
        self.is_busy = False  # it would use a processor even while its loop hangs
        self.code: int | None = None
        self.waiters: list[SimThread] = []  # for its end
        self.parked: list[SimThread] = []  # could run if the process were not frozen
        self.handlers: dict[int, Callable[..., object]] = {}
        self.wakeup: int | None = None  # the file to which numbers of signals are written
        self.stdin: Any = None
        self.stdout: Any = None
        self.engine: Any = None  # the ServedEngine of an engine process

    def open(self, file: Any) -> int:
        number, self.next_file = self.next_file, self.next_file + 1
        self.files[number] = file
        return number

    def end(self, code: int) -> None:
        """End it at once, as SIGKILL or os._exit do."""
        if not self.is_alive:
            return
        self.is_alive, self.code = False, code
        for file in list(self.files.values()):
            file.drop()
        self.files.clear()
        self.world.wake(self.waiters)

    def freeze(self) -> None:
        """Stop it, as SIGSTOP does."""
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        parked, self.parked = self.parked, []
        self.world.ready += parked


class World:
    def __init__(self, seed: int) -> None:
        self.rng = Random(f"world {seed}")
        self.secrets = Random(f"secrets {seed}")
        self.hub = getcurrent()
        self.numbers, self.pids, self._sequence = itertools.count(1), itertools.count(1), itertools.count()
        self.now_ns = 1_000_000_000_000
        self.clock_tick_ns = 1  # what the clocks show is a multiple of it
        self.switch_ns = 0  # how long it takes to go from one thread to the next
        self.switchiness = 1.0  # the share of pauses at which another thread may go on
        self.by_priority = False
        self.ready: list[SimThread] = []
        self.timers: list[tuple[int, int, SimThread | Callable[[], None], int]] = []
        self.threads: list[SimThread] = []
        self.processes: list[Process] = []
        self.current: SimThread = None  # type: ignore[assignment]
        self.num_switches = 0
        self.num_pauses = 0
        self.trace = 0  # a hash of the order in which threads ran
        self.is_over = False
        self.in_thread = False  # False while the scheduler itself runs
        self.at_switch: list[tuple[int, int, Callable[[], None]]] = []  # what is to happen after so many switches
        self.reached: Counter[str] = Counter()
        self.failure: Violation | None = None
        # of the machine; see machine.py
        self.listeners: dict[str, Any] = {}
        self.written: dict[str, bytes] = {}
        self.environ: dict[str, str] = {}
        self.disk: Any = None  # a Disk (disk.py)
        self.programs: Callable[[list[str]], Callable[[], int]]  # what a command line runs
        self.new_workers: Callable[[], Any]  # of an engine process
        self.socket_bytes = 1 << 17
        self.short_io = 0.0  # the share of reads and writes that take a part only
        self.failing_connects = 0  # how many of the next connections find no free file
        self.failing_starts = 0  # how many of the next processes cannot be started

    # ---- threads -----------------------------------------------------------------------------------------------------

    def new_thread(self, process: Process, target: Callable[[], object], name: str) -> SimThread:
        thread = SimThread(self, process, target, name)
        thread.priority = self.rng.random()
        self.threads.append(thread)
        process.threads.append(thread)
        return thread

    def begin(self, thread: SimThread) -> None:
        thread.has_started = True
        self.ready.append(thread)

    def new_process(self, name: str, parent: Process | None = None) -> Process:
        process = Process(self, name, parent)
        self.processes.append(process)
        return process

    def start_process(self, name: str, main: Callable[[], int | None], process: Process | None = None) -> Process:
        """Run `main` in a process, which ends with the code that it returns."""
        process = process or self.new_process(name)

        def run() -> None:
            try:
                code = main() or 0
            except SystemExit as error:
                code = int(error.code or 0)
            process.end(code)

        self.begin(self.new_thread(process, run, f"{name}-main"))
        return process

    def pause(self) -> None:
        """A point at which another thread may go on."""
        if self.is_over:
            raise Over
        thread = self.current
        self.num_pauses += 1
        if self.switchiness == 1.0 or self.rng.random() < self.switchiness:
            self.ready.append(thread)
            self.hub.switch()
            if self.is_over:
                raise Over
        if thread.pending is not None:
            self._raise_pending(thread)

    def block(self, waiters: list[SimThread], timeout_s: float | None = None, what: str = "") -> None:
        """Wait until `wake(waiters)`, or for so many seconds. It may return early: the caller looks again."""
        if self.is_over:
            raise Over
        thread = self.current
        thread.ticket += 1
        thread.what, thread.waiters = what, waiters
        waiters.append(thread)
        if timeout_s is not None:
            self._set_timer(timeout_s, thread, thread.ticket)
        thread.is_blocked = True
        self.hub.switch()
        if self.is_over:
            raise Over
        if thread.pending is not None:
            self._raise_pending(thread)

    def wait_until(
        self, condition: Callable[[], bool], waiters: list[SimThread], timeout_s: float | None, what: str
    ) -> bool:
        """Wait for a condition that changes with `wake(waiters)`. False after the timeout."""
        if condition():
            return True
        end_ns = None if timeout_s is None else self.now_ns + _as_ns(timeout_s)
        while True:
            if end_ns is not None and self.now_ns >= end_ns:
                return False
            self.block(waiters, None if end_ns is None else (end_ns - self.now_ns) / 1e9, what)
            if condition():
                return True

    def wake(self, waiters: list[SimThread]) -> None:
        if waiters:
            for thread in waiters:
                if thread.is_blocked:
                    thread.is_blocked = False
                    self.ready.append(thread)
            waiters.clear()

    def sleep(self, seconds: float) -> None:
        end_ns = self.now_ns + _as_ns(seconds)
        while self.now_ns < end_ns:
            self.block([], (end_ns - self.now_ns) / 1e9, "sleep")

    def fail(self, text: str) -> NoReturn:
        """End the simulation. To be called where code under test might catch a Violation."""
        self.failure = Violation(text)
        raise self.failure

    def exit_process(self, code: int) -> None:
        """os._exit: never returns."""
        self.current.process.end(code)
        self.block([], None, "the end of its process")

    def _raise_pending(self, thread: SimThread) -> None:
        error, thread.pending = thread.pending, None
        assert error is not None
        raise error

    # ---- what happens without a thread -------------------------------------------------------------------------------

    def after_s(self, seconds: float, action: Callable[[], None]) -> None:
        self._set_timer(seconds, action, 0)

    def after_switches(self, count: int, action: Callable[[], None]) -> None:
        heapq.heappush(self.at_switch, (self.num_switches + count, next(self._sequence), action))

    def hold_back(self, thread: SimThread, seconds: float) -> None:
        """Do not let a thread run for so long, as a machine with too few processors might."""
        thread.held_until_ns = self.now_ns + int(seconds * 1e9)

    def _set_timer(self, seconds: float, what: SimThread | Callable[[], None], ticket: int) -> None:
        heapq.heappush(self.timers, (self.now_ns + _as_ns(seconds), next(self._sequence), what, ticket))

    # ---- the scheduler -----------------------------------------------------------------------------------------------

    def run(self, driver: SimThread) -> None:
        """Run until the driver's thread has ended. Raises what any thread has raised, or Violation."""
        self.begin(driver)
        switch_ns = self.switch_ns
        while not driver.is_done:
            if self.at_switch and self.at_switch[0][0] <= self.num_switches:
                heapq.heappop(self.at_switch)[2]()
            if self.timers and self.timers[0][0] <= self.now_ns:
                self._fire()
                continue
            ready = self.ready
            if not ready:
                if not self.timers:
                    raise Violation(f"nobody can run, and no timer is left\n{self.stacks()}")
                self.now_ns = self.timers[0][0]
                continue
            thread = self._choose(ready)
            process = thread.process
            if not process.is_alive:
                continue
            if process.is_frozen:
                process.parked.append(thread)
                continue
            if thread.held_until_ns > self.now_ns:
                self._set_timer((thread.held_until_ns - self.now_ns) / 1e9, partial(self.ready.append, thread), 0)
                continue
            self.num_switches += 1
            if self.num_switches > MAX_SWITCHES:
                raise Violation(f"{MAX_SWITCHES} switches, and no end\n{self.stacks()}")
            self.now_ns += switch_ns
            self.trace = (self.trace * 1_000_003 + thread.number) & 0xFFFFFFFFFFFF
            self.current = thread
            self.in_thread = True
            thread.greenlet.switch()
            self.in_thread = False
            if self.failure is not None:
                raise self.failure
            if thread.error is not None:
                raise thread.error

    def _choose(self, ready: list[SimThread]) -> SimThread:
        count = len(ready)
        if count == 1:
            return ready.pop()
        if self.by_priority:
            index = max(range(count), key=lambda n: ready[n].priority)
            if self.rng.random() < 0.02:
                ready[index].priority = self.rng.random() - 1.0
        else:
            index = int(self.rng.random() * count)
        ready[index], ready[-1] = ready[-1], ready[index]
        return ready.pop()

    def _fire(self) -> None:
        _, _, what, ticket = heapq.heappop(self.timers)
        if not isinstance(what, SimThread):
            what()
        elif what.is_blocked and what.ticket == ticket:
            what.is_blocked, what.has_timed_out = False, True
            what.waiters.remove(what)
            self.ready.append(what)

    def close(self) -> None:
        """Let all threads give up their stacks."""
        self.is_over = True
        for thread in self.threads:
            if not thread.greenlet.dead:
                self.current = thread
                with suppress(BaseException):  # Whatever its clean-up raises now has no meaning.
                    thread.greenlet.throw(GreenletExit)

    # ---- for errors --------------------------------------------------------------------------------------------------

    def stacks(self) -> str:
        """Where all threads of living processes stand."""
        alive = [thread for thread in self.threads if thread.is_alive]
        return "".join(
            f"  {thread.process.name}: {thread.name} waits for {thread.what or 'its turn'}\n{thread.stack()}"
            for thread in alive
        )


def _as_ns(seconds: float) -> int:
    """Rounded up, as the kernel does."""
    return math.ceil(seconds * 1e9) if seconds > 0 else 0

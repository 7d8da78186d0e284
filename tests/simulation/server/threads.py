"""Stand-ins of threading, queue, time and concurrent.futures: the same behaviour, on simulated threads and time."""

from __future__ import annotations

import itertools
import queue as real_queue
import threading as real_threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.simulation.server.world import SimThread, World

_world: World = None  # type: ignore[assignment]


def here() -> World:
    """The world that runs."""
    return _world


def enter(world: World | None) -> None:
    global _world
    _world = world  # type: ignore[assignment]


class Thread:
    _names = itertools.count(1)

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        world = here()
        self._call = (target, args, kwargs or {})
        self.name = name or "thread"
        self.daemon = bool(daemon)
        self.sim: SimThread = world.new_thread(world.current.process, self.run, self.name)
        self.sim.stand_in = self

    def run(self) -> None:
        target, args, kwargs = self._call
        if target is not None:
            target(*args, **kwargs)

    def start(self) -> None:
        if self.sim.has_started:
            raise RuntimeError("threads can only be started once")
        here().begin(self.sim)
        here().pause()

    def join(self, timeout: float | None = None) -> None:
        if not self.sim.has_started:
            raise RuntimeError("cannot join thread before it is started")
        if here().current is self.sim:
            raise RuntimeError("cannot join current thread")
        here().pause()
        here().wait_until(lambda: self.sim.is_done, self.sim.joiners, timeout, f"the end of {self.name}")

    def is_alive(self) -> bool:
        here().pause()
        return self.sim.is_alive

    @property
    def ident(self) -> int | None:
        return self.sim.number if self.sim.has_started else None


class Timer(Thread):
    def __init__(self, interval: float, function: Callable[..., object], args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=self._wait, name="timer")
        self._interval, self._function, self._args = interval, function, args
        self._finished = Event()

    def _wait(self) -> None:
        if not self._finished.wait(self._interval):
            self._function(*self._args)

    def cancel(self) -> None:
        self._finished.set()


def current_thread() -> Any:
    sim = here().current
    return sim.stand_in if sim.stand_in is not None else SimpleNamespace(name=sim.name, sim=sim)


class Lock:
    _is_reentrant = False

    def __init__(self) -> None:
        self._holder: SimThread | None = None
        self._depth = 0
        self._waiters: list[SimThread] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = here()
        world.pause()
        me = world.current
        if self._holder is None:
            self._holder, self._depth = me, 1
            return True
        if self._holder is me:
            if self._is_reentrant:
                self._depth += 1
                return True
            if blocking and timeout < 0:
                world.fail(f"{me.name} waits for a lock that it holds itself\n{world.stacks()}")
        if not blocking:
            return False
        limit_s = None if timeout < 0 else timeout
        if not world.wait_until(lambda: self._holder is None, self._waiters, limit_s, "a lock"):
            return False
        self._holder, self._depth = me, 1
        return True

    def release(self) -> None:
        world = here()
        if self._holder is None:
            raise RuntimeError("release unlocked lock")
        if self._is_reentrant and self._holder is not world.current:
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        if not self._depth:
            self._holder = None
            world.wake(self._waiters)
        world.pause()

    def locked(self) -> bool:
        return self._holder is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class RLock(Lock):
    _is_reentrant = True


class Condition:
    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiting: deque[list[SimThread]] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        world = here()
        if self._lock._holder is not world.current:
            raise RuntimeError("cannot wait on un-acquired lock")
        place: list[SimThread] = []
        told: list[bool] = []
        entry = _Place(place, told)
        self._waiting.append(entry)  # type: ignore[arg-type]
        depth, self._lock._depth = self._lock._depth, 1
        self._lock.release()
        world.wait_until(lambda: bool(told), place, timeout, "a condition")
        if not told:
            self._waiting.remove(entry)  # type: ignore[arg-type]
        self._lock.acquire()
        self._lock._depth = depth
        return bool(told)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        world = here()
        end_ns = None if timeout is None else world.now_ns + int(max(0.0, timeout) * 1e9)
        result = predicate()
        while not result:
            if end_ns is not None and world.now_ns >= end_ns:
                break
            self.wait(None if end_ns is None else (end_ns - world.now_ns) / 1e9)
            result = predicate()
        return result

    def notify(self, n: int = 1) -> None:
        world = here()
        if self._lock._holder is not world.current:
            raise RuntimeError("cannot notify on un-acquired lock")
        for _ in range(min(n, len(self._waiting))):
            entry: Any = self._waiting.popleft()
            entry.told.append(True)
            world.wake(entry.place)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class _Place:
    def __init__(self, place: list[SimThread], told: list[bool]) -> None:
        self.place, self.told = place, told


class Event:
    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[SimThread] = []

    def is_set(self) -> bool:
        here().pause()
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        here().wake(self._waiters)
        here().pause()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        here().pause()
        here().wait_until(lambda: self._is_set, self._waiters, timeout, "an event")
        return self._is_set


class Semaphore:
    def __init__(self, value: int = 1) -> None:
        self._value = self._first = value
        self._waiters: list[SimThread] = []

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        world = here()
        world.pause()
        if not self._value:
            if not blocking:
                return False
            if not world.wait_until(lambda: self._value > 0, self._waiters, timeout, "a semaphore"):
                return False
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._value += n
        here().wake(self._waiters)
        here().pause()

    __enter__ = acquire

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class BoundedSemaphore(Semaphore):
    def release(self, n: int = 1) -> None:
        if self._value + n > self._first:
            raise ValueError("Semaphore released too many times")
        super().release(n)


class SimpleQueue:
    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiters: list[SimThread] = []

    @classmethod
    def __class_getitem__(cls, item: object) -> type[SimpleQueue]:
        return cls

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        here().wake(self._waiters)
        here().pause()

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        world = here()
        world.pause()
        if not self._items:
            if not block or not world.wait_until(lambda: bool(self._items), self._waiters, timeout, "a queue"):
                raise real_queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        here().pause()
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Queue(SimpleQueue):
    """A queue that may be full; nothing waits for room in it."""

    def __init__(self, maxsize: int = 0) -> None:
        super().__init__()
        self.maxsize = maxsize

    def put_nowait(self, item: Any) -> None:
        here().pause()
        if 0 < self.maxsize <= len(self._items):
            raise real_queue.Full
        super().put(item)


class Future:
    """The part of concurrent.futures.Future that the engine's loop uses."""

    def __init__(self) -> None:
        self._outcome: list[Any] = []
        self._waiters: list[SimThread] = []

    @classmethod
    def __class_getitem__(cls, item: object) -> type[Future]:
        return cls

    def set_result(self, value: Any) -> None:
        self._outcome.append(value)
        here().wake(self._waiters)

    def result(self, timeout: float | None = None) -> Any:
        if not here().wait_until(lambda: bool(self._outcome), self._waiters, timeout, "a future"):
            raise TimeoutError
        return self._outcome[0]


def _shown_ns() -> int:
    world = here()
    return world.now_ns // world.clock_tick_ns * world.clock_tick_ns


def sleep(seconds: float) -> None:
    here().pause()
    here().sleep(seconds)


threading = SimpleNamespace(
    Thread=Thread,
    Timer=Timer,
    Lock=Lock,
    RLock=RLock,
    Condition=Condition,
    Event=Event,
    Semaphore=Semaphore,
    BoundedSemaphore=BoundedSemaphore,
    current_thread=current_thread,
    get_ident=lambda: here().current.number,
    TIMEOUT_MAX=real_threading.TIMEOUT_MAX,
)
queue = SimpleNamespace(SimpleQueue=SimpleQueue, Queue=Queue, Empty=real_queue.Empty, Full=real_queue.Full)
time = SimpleNamespace(
    monotonic=lambda: _shown_ns() / 1e9,
    monotonic_ns=_shown_ns,
    perf_counter=lambda: _shown_ns() / 1e9,
    perf_counter_ns=_shown_ns,
    time=lambda: 1_700_000_000 + _shown_ns() / 1e9,
    time_ns=lambda: 1_700_000_000_000_000_000 + _shown_ns(),
    sleep=sleep,
)

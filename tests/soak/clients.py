"""The clients of a soak: honest ones, whose answers must not change, ones that leave midway, and ones with malformed requests."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.crashes.served import Ask
from tests.hostile import answers
from tests.hostile.case import Case
from tests.hostile.cycles import cancel_case
from tests.hostile.mix import Mix
from tests.hostile.send import Sender
from tests.hostile.target import Target, wait_until

REFUSED = (
    "UNAVAILABLE",
    "503",
    "429",
    "Maximum queue size",
    "not running",
    "overloaded",
)  # texts of what may be sent again
BAD = (answers.INTERNAL, answers.NO_END, answers.TWICE, answers.UNEXPLAINED)
DEADLINE_S = 60.0
GONE_S = 0.5


@dataclass
class Pauses:
    """When the engine was away, on the monotonic clock."""

    spans: list[tuple[float, float]] = field(default_factory=list)  # the last one may be open: its end is infinite

    def begin(self) -> None:
        self.spans.append((time.monotonic(), float("inf")))

    def end(self) -> None:
        self.spans[-1] = (self.spans[-1][0], time.monotonic())

    def touch(self, begun: float, ended: float) -> bool:
        """Whether the engine was away at some time between these two."""
        return any(first <= ended and begun <= last for first, last in self.spans)


@dataclass
class Heard:
    """What all clients were told; safe from several threads."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    num_told: int = 0  # problems that `news` has given
    lock: threading.Lock = field(default_factory=threading.Lock)

    def news(self) -> list[str]:
        """The problems since the last call."""
        with self.lock:
            new, self.num_told = self.problems[self.num_told :], len(self.problems)
        return new

    def count(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1

    def problem(self, text: str) -> None:
        with self.lock:
            self.problems.append(text)


class Clients:
    """Threads that send until `stop`. Each work phase of a soak makes new ones."""

    def __init__(
        self,
        target: Target,
        asks: dict[str, Ask],
        right: dict[str, object],
        pauses: Pauses,
        heard: Heard,
        seed: int,
        num: dict[str, int],
    ) -> None:
        """`right`: by the names of `asks` what an undisturbed server answered. `num`: how many honest, leaving, hostile."""
        self._target, self._asks, self._right, self._pauses, self._heard = target, asks, right, pauses, heard
        self._stop = threading.Event()
        self._places = itertools.count(seed * 1_000_000)  # of hostile and of cancelled requests
        self._seed = seed
        self._mix = Mix(seed, kinds=(), grpc_error=0.0)  # the metadata ends a tritonserver by a bug of its own
        kinds: dict[str, Callable[[random.Random], None]] = {
            "honest": self._honest,
            "leaving": self._leaving,
            "hostile": self._hostile,
        }
        self._threads = [
            threading.Thread(target=work, args=(random.Random(f"{seed} {name} {index}"),), name=f"{name}-{index}")
            for name, work in kinds.items()
            for index in range(num[name])
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each client finish its request."""
        self._stop.set()
        for thread in self._threads:
            thread.join(3 * DEADLINE_S)
            if thread.is_alive():
                self._heard.problem(f"a request of {thread.name} has had no end for {3 * DEADLINE_S:.0f} s")

    def _honest(self, rng: random.Random) -> None:
        while not self._stop.is_set():
            name = rng.choice(list(self._asks))
            begun = time.monotonic()
            try:
                answer: object = self._asks[name]()
            except Exception as error:
                self._refused_or_wrong(name, error, begun)
                continue
            self._heard.count(f"honest: {name}")
            if answer != self._right[name]:
                self._heard.problem(f"{name}: other bytes than on an undisturbed server")

    def _server_is_gone(self) -> bool:
        """Whether tritonserver has died, which a client sees a moment before its parent does. All clients stop then."""
        if wait_until(lambda: not self._target.server.running(), GONE_S):
            self._heard.count("lost with tritonserver")
            self._stop.set()
            return True
        return False

    def _refused_or_wrong(self, name: str, error: Exception, begun: float) -> None:
        """New requests may be refused while the engine is away and while the queue is full."""
        text = str(error)
        full = "queue" in text and any(word in text for word in REFUSED)
        away = self._pauses.touch(begun, time.monotonic()) and any(word in text for word in REFUSED)
        if full or away:
            self._heard.count("honest: refused while the engine was away" if away else "honest: refused, queue full")
            self._stop.wait(0.2)
        elif not self._server_is_gone():
            self._heard.problem(f"{name}: {type(error).__name__}: {text[:300]}")

    def _leaving(self, rng: random.Random) -> None:
        self._send(lambda index: cancel_case(self._seed, index), "leaving")

    def _hostile(self, rng: random.Random) -> None:
        self._send(self._mix.case, "hostile")

    def _send(self, make: Callable[[int], Case], who: str) -> None:
        server = self._target.server
        sender = Sender(server.http_url, server.grpc_url, self._target.gateway_url, DEADLINE_S)
        try:
            while not self._stop.is_set():
                index = next(self._places)
                case = make(index)
                begun = time.monotonic()
                reply = sender.send(case)
                found = answers.classify(case, reply)
                if reply.ending in ("cut", "none") and not case.incomplete and self._server_is_gone():
                    return
                self._heard.count(f"{who}: {found}")
                if found in BAD and not self._pauses.touch(begun, time.monotonic()):
                    said = f"{reply.status}: {reply.errors or reply.other}"
                    self._heard.problem(f"{who} {index}, {case.kind}, {case.model} {case.name}: {found}: {said[:300]}")
                for leak in answers.leaks(case, reply):
                    self._heard.problem(f"{who} {index}, {case.kind}, {case.model} {case.name}: tells {leak}")
        finally:
            sender.close()

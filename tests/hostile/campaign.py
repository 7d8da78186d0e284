"""Send a run of cases from several threads, look at the server after each chunk, start it again when it has died."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.hostile import answers, deaths
from tests.hostile.canary import FULL, Canary, Witness
from tests.hostile.case import Case
from tests.hostile.send import Sender
from tests.hostile.tally import Tally
from tests.hostile.target import Target

WATCH_S = 0.02  # time between two looks at which process has died first
GONE_S = 0.5  # a cut connection of a dying server: how long until the process is seen to have ended


@dataclass(frozen=True)
class Settings:
    workers: int = 8
    chunk: int = 500
    deadline_s: float = 30.0
    ask_after_each: str = ""  # a question of tests/hostile/honest.py that follows each case; "" = none
    max_deaths: int = 20


class Campaign:
    """One run against one target. `tell(text)` shows progress; results are in `tally`."""

    def __init__(self, target: Target, settings: Settings, tell: Callable[[str], None] = lambda text: None) -> None:
        self._target = target
        self._settings = settings
        self._tell = tell
        self.canary = Canary(target)
        self.tally = Tally()

    def start(self) -> None:
        """Start the server and note what an honest client gets."""
        self._target.start()
        self.canary.learn()
        self.sample()

    def run(self, make: Callable[[int], Case], indexes: Sequence[int]) -> None:
        """Send the cases of these places, in chunks; each chunk ends with a look at the processes and a canary."""
        for first in range(0, len(indexes), self._settings.chunk):
            todo = deque(indexes[first : first + self._settings.chunk])
            while todo and not self.tally.gave_up:
                witness = Witness(self.canary, first)
                witness.start()
                _Volley(self._target, self._settings, self.tally, make, todo, self.canary).fire()
                witness.stop()
                self._hear(witness, self._look_after_deaths())
            self._after_chunk()
            self._tell(self.tally.line(min(len(indexes), first + self._settings.chunk), len(indexes)))
            if self.tally.gave_up:
                return

    def sample(self) -> None:
        self.tally.watch_growth({"cases": self.tally.num_cases, **self._target.memory(), **self._target.descriptors()})

    def _after_chunk(self) -> None:
        if self.tally.gave_up:
            return
        problems = self.canary.check()
        self._look_after_deaths()  # the canary may be what a dying process could not bear
        self.tally.canaries += 1
        self.tally.canary_failures += [f"after {self.tally.num_cases} cases: {problem}" for problem in problems]
        self.tally.log_bytes = self._target.log_bytes()
        self.sample()

    def _hear(self, witness: Witness, someone_died: bool) -> None:
        """What the honest client among the hostile ones has seen; while a process dies it sees errors."""
        self.tally.witnessed += witness.asked
        self.tally.witnesses_refused += witness.refused
        if not someone_died:
            self.tally.canary_failures += [f"among {self.tally.num_cases} cases: {text}" for text in witness.problems]

    def _look_after_deaths(self) -> bool:
        """Note who has died, and start a server whose processes are not all there again. Returns whether someone has."""
        found = self._target.look()
        for death in found:
            self.tally.add_death(death, deaths.explanation(death, self.tally.suspects()))
        if found and len(self.tally.deaths) >= self._settings.max_deaths:
            self.tally.gave_up = True
        elif found:
            self._target.stop()
            self._target.start()
            self.tally.begin_anew()
        return bool(found)


class _Volley:
    """The cases of one chunk, sent until they are all done or tritonserver is gone."""

    def __init__(
        self,
        target: Target,
        settings: Settings,
        tally: Tally,
        make: Callable[[int], Case],
        todo: deque[int],
        canary: Canary,
    ) -> None:
        self._target, self._settings, self._tally, self._make, self._todo = target, settings, tally, make, todo
        self._canary = canary
        self._dead = threading.Event()

    def fire(self) -> None:
        threads = [threading.Thread(target=self._work, name=f"hostile-{n}") for n in range(self._settings.workers)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self._target.watch()
            time.sleep(WATCH_S)

    def _work(self) -> None:
        server = self._target.server
        sender = Sender(server.http_url, server.grpc_url, self._target.gateway_url, self._settings.deadline_s)
        try:
            while not self._dead.is_set():
                try:
                    index = self._todo.popleft()
                except IndexError:
                    return
                self._one(sender, index)
        finally:
            sender.close()

    def _one(self, sender: Sender, index: int) -> None:
        case = self._make(index)
        self._tally.begin(index, case)
        reply = sender.send(case)
        if reply.ending in ("cut", "none") and self._server_is_gone(case):
            self._dead.set()
            self._tally.lost(index, case)
            return
        self._tally.add(index, case, reply, answers.classify(case, reply), answers.leaks(case, reply))
        if self._settings.ask_after_each:
            problem = self._canary.compare(self._settings.ask_after_each)
            if problem and FULL not in problem and self._target.server.running():
                self._tally.canary_failures.append(f"after {case.model} {case.name}: {problem}")

    def _server_is_gone(self, case: Case) -> bool:
        deadline = time.monotonic() + (0 if case.incomplete else GONE_S)
        while self._target.server.running():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True

"""Honest clients must get exactly what they got at the start: between hostile requests, and among them."""

from __future__ import annotations

import random
import threading
import urllib.error

import grpc

from deploy.probe import is_ready
from tests.e2e.wire import eventually, scrape
from tests.hostile import honest
from tests.hostile.target import Target

FULL = "Maximum queue size of"
QUIET_S = 30.0  # how long it may take until nothing of clients that are gone is in use
ACCEPTED, FINISHED = "everbatch_requests_accepted_total", "everbatch_requests_finished_total{"


class Canary:
    """The answers of a fresh server to every question of tests/hostile/honest.py, asked for again and compared."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._expected: dict[str, str] = {}

    def learn(self) -> None:
        """Note the answers of a fresh server."""
        self._expected = {question: honest.ask(self._target, question) for question in honest.QUESTIONS}

    def check(self) -> list[str]:
        """What is wrong now that all hostile clients are gone, in sentences; nothing when all is well."""
        wrong = [problem for question in honest.QUESTIONS if (problem := self.compare(question))]
        if not is_ready(self._target.server.http_url):
            wrong.append("the server is not ready")
        if not eventually(lambda: not self._left(), QUIET_S):
            wrong.append(f"although every client is gone, {self._left()}")
        return wrong

    def compare(self, question: str) -> str | None:
        """What is wrong with the answer to one question now."""
        try:
            found = honest.ask(self._target, question)
        except (RuntimeError, OSError, grpc.RpcError, KeyError, ValueError) as error:
            return f"an honest request ({question}) failed: {type(error).__name__}: {str(error)[:200]}"
        expected = self._expected[question]
        return None if found == expected else f"{question} answered {found[:300]!r}, not {expected[:300]!r}"

    def _left(self) -> str:
        """What is still in use, or not accounted for; empty when there is nothing."""
        try:
            metrics = scrape(self._target.server.metrics_url)
        except urllib.error.URLError as error:
            return f"the metrics do not answer: {error.reason}"
        used, active = metrics["everbatch_kv_blocks{state=used}"], metrics["everbatch_requests{state=active}"]
        finished = sum(value for name, value in metrics.items() if name.startswith(FINISHED))
        if used or active:
            return f"{used:.0f} KV blocks and {active:.0f} requests stay in use"
        if busy := self._gateway_busy():
            return busy
        accepted = metrics[ACCEPTED]
        return "" if accepted == finished else f"{accepted:.0f} requests were accepted and {finished:.0f} have ended"

    def _gateway_busy(self) -> str:
        """What the OpenAI endpoint still has in hand although its clients are gone."""
        own = scrape(f"{self._target.gateway_url}/metrics")
        held = {name: own[f"everbatch_gateway_{name}_in_flight"] for name in ("requests", "choices")}
        return ", ".join(f"the endpoint has {number:.0f} {name} in flight" for name, number in held.items() if number)


class Witness:
    """An honest client among the hostile ones: asks one question after the other, in a thread of its own."""

    def __init__(self, canary: Canary, seed: int) -> None:
        self._canary, self._rng, self._stop = canary, random.Random(seed), threading.Event()
        self._thread = threading.Thread(target=self._work, name="honest")
        self.asked = self.refused = 0  # refused: the queue was full, and its limit was named
        self.problems: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stop.is_set():
            problem = self._canary.compare(self._rng.choice(honest.QUESTIONS))
            self.asked += 1
            if problem and FULL in problem:
                self.refused += 1
            elif problem:
                self.problems.append(problem)

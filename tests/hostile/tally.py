"""What a run has found, counted while it goes on; safe from several threads."""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections import Counter, deque
from typing import Any

from tests.hostile import answers, deaths
from tests.hostile.case import Case
from tests.hostile.deaths import Bug
from tests.hostile.send import Reply
from tests.hostile.target import Death

RECENT_S = 3.0  # a case that ended this long before a death is still a suspect
MAX_EXAMPLES = 200
MAX_STUB_MB = 60.0
MAX_DESCRIPTORS = 80.0  # clients that are just leaving still hold some
GROWTH = {"engine": 600.0, "gateway": 120.0}  # MB; the engine touches the pages of its KV pool one after the other
MAX_TEXTS = 2000
_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|-?\d[\d.e+,-]*")


def _pattern(text: str) -> str:
    """An error text without what it quotes and its numbers, so that texts of one kind are counted as one."""
    return _VARIABLE.sub("#", text[:2000])[:400]


class Tally:
    """Counts, examples and figures of one run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[int, Case] = {}
        self._recent: deque[tuple[float, int, Case]] = deque(maxlen=300)
        self._began = time.monotonic()
        self.num_cases = 0
        self.canaries = 0
        self.witnessed = 0  # honest requests that were sent among the hostile ones
        self.classes: Counter[tuple[str, str]] = Counter()  # (protocol, class of answer)
        self.kinds: Counter[tuple[str, str]] = Counter()  # (class of request, class of answer)
        self.seconds: dict[str, list[float]] = {}  # by protocol and class of answer
        self.examples: dict[str, list[dict[str, Any]]] = {}  # of INTERNAL, unexplained, without an end, leaks
        self.witnesses_refused = 0  # of these, because the queue was full
        self._steady: dict[str, float] = {}  # the sample that growth is measured from
        self.texts: Counter[str] = Counter()  # of errors, their numbers and quotations left out
        self.deaths: list[dict[str, Any]] = []
        self.canary_failures: list[str] = []
        self.samples: list[dict[str, float]] = []
        self.log_bytes = 0
        self.gave_up = False

    # ---- threads of a volley -----------------------------------------------------------------------------------------

    def begin(self, index: int, case: Case) -> None:
        with self._lock:
            self._under_way[index] = case

    def add(self, index: int, case: Case, reply: Reply, found: str, leaks: list[str]) -> None:
        """Count one reply and keep what is worth a look."""
        with self._lock:
            self._end(index, case)
            self.num_cases += 1
            protocol = answers.protocol(case)
            self.classes[protocol, found] += 1
            self.kinds[case.kind, found] += 1
            self.seconds.setdefault(f"{protocol} {found}", []).append(reply.seconds)
            if found in (answers.INTERNAL, answers.NO_END, answers.TWICE, answers.UNEXPLAINED):
                self._keep(found, index, case, f"{reply.status}: {reply.errors or reply.other}")
            for line in reply.errors.splitlines():
                if (text := _pattern(line)) in self.texts or len(self.texts) < MAX_TEXTS:
                    self.texts[text] += 1
            for leak in leaks:
                self._keep("leak", index, case, leak)

    def lost(self, index: int, case: Case) -> None:
        """A case that was under way when tritonserver died."""
        with self._lock:
            self._end(index, case)
            self.kinds[case.kind, "lost with the server"] += 1

    def _end(self, index: int, case: Case) -> None:
        self._under_way.pop(index, None)
        self._recent.append((time.monotonic(), index, case))

    def _keep(self, what: str, index: int, case: Case, text: str) -> None:
        kept = self.examples.setdefault(what, [])
        if len(kept) < MAX_EXAMPLES:
            kept.append({"index": index, "kind": case.kind, "case": f"{case.model} {case.name}", "said": text[:400]})

    # ---- between volleys ---------------------------------------------------------------------------------------------

    def suspects(self) -> list[Case]:
        """The cases of the last seconds."""
        with self._lock:
            latest = max((when for when, _, _ in self._recent), default=0.0)
            return [case for when, _, case in self._recent if when >= latest - RECENT_S]

    def add_death(self, death: Death, bug: Bug | None) -> None:
        with self._lock:
            recent = [f"{index}: {case.kind}, {case.model}, {case.name}" for _, index, case in list(self._recent)[-24:]]
        self.deaths.append(
            {
                "who": death.who,
                "status": death.status,
                "after": self.num_cases,
                "explained by": bug.name if bug else None,
                "sentence": bug.sentence if bug else None,
                "log": str(death.log_path),
                "backtrace": deaths.backtrace(death),
                "last cases": recent,
            }
        )

    def begin_anew(self) -> None:
        """Another server has been started: its processes begin small."""
        self._steady = {}

    def watch_growth(self, sample: dict[str, float]) -> None:
        """Note a process of ours that is far larger than it was when it had seen some cases."""
        self.samples.append(sample)
        if not self._steady:
            self._steady = sample
        for name, now in sample.items():
            most = GROWTH.get(name, MAX_DESCRIPTORS if name.startswith("descriptors") else MAX_STUB_MB)
            grown = now - self._steady.get(name, now)
            if name not in ("cases", "other", "tritonserver") and grown > most:
                self.canary_failures.append(f"{name} has grown by {grown:.0f} since {self._steady['cases']:.0f} cases")

    # ---- results -----------------------------------------------------------------------------------------------------

    def count(self, found: str) -> int:
        return sum(number for (_, name), number in self.classes.items() if name == found)

    def failures(self) -> list[str]:
        """Why the run failed, in sentences; empty when it passed."""
        wrong = [
            f"{self.count(found)} answers: {found}"
            for found in (answers.INTERNAL, answers.NO_END, answers.TWICE, answers.UNEXPLAINED)
            if self.count(found)
        ]
        if leaks := self.examples.get("leak"):
            wrong.append(f"{len(leaks)} leaks")
        if unexplained := [death for death in self.deaths if not death["explained by"]]:
            wrong.append(
                f"{len(unexplained)} deaths that no documented bug explains: {', '.join(d['who'] for d in unexplained)}"
            )
        if self.canary_failures:
            wrong.append(f"{len(self.canary_failures)} canaries failed: {self.canary_failures[0]}")
        if self.gave_up:
            wrong.append("given up after too many deaths")
        return wrong

    def line(self, done: int, total: int) -> str:
        """Progress in one line."""
        elapsed = time.monotonic() - self._began
        rate = self.num_cases / max(elapsed, 0.001)
        memory = self.samples[-1].get("tritonserver", 0.0) if self.samples else 0.0
        bad = sum(self.count(found) for found in (answers.INTERNAL, answers.NO_END, answers.TWICE, answers.UNEXPLAINED))
        return (
            f"{done}/{total} cases, {rate:.0f}/s, {(total - done) / max(rate, 0.1):.0f} s left, {bad} bad answers, "
            f"{len(self.examples.get('leak', ()))} leaks, {len(self.deaths)} deaths, "
            f"{len(self.canary_failures)} canaries failed, tritonserver {memory:.0f} MB"
        )

    def quantiles(self) -> dict[str, tuple[float, float]]:
        """p50 and p99 in milliseconds by protocol and class of answer."""
        found = {}
        for name, seconds in sorted(self.seconds.items()):
            ordered = sorted(seconds)
            found[name] = (1000 * statistics.median(ordered), 1000 * ordered[int(0.99 * (len(ordered) - 1))])
        return found

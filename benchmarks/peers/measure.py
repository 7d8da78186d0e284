"""Carries a plan out: loads, pauses, measures; collects what each contestant reached."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import commands, plan
from benchmarks.peers.engines import EngineSpec
from benchmarks.peers.environments import BENCH
from benchmarks.peers.errors import Skipped
from benchmarks.peers.models import Model
from benchmarks.peers.plan import Action, Step
from benchmarks.peers.protocol import Load, Measure
from benchmarks.peers.roof import Meter
from benchmarks.peers.runners import Runner
from deploy.progress import SteppedProgress

MEMORY_SHARE = 0.95  # engines may take this share of the available memory together
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Work:
    """What is measured. `prompts`: tokens of a request's prompt; requests take several lengths in turn.

    `new`: tokens of its output. `busy`: other processes that keep a core busy all the while.
    """

    model: Model
    weights: str
    concurrencies: tuple[int, ...]
    prompts: tuple[int, ...]
    new: int
    repeats: int
    threads: int
    busy: int = 0
    seed: int = 0

    @property
    def max_length(self) -> int:
        """The tokens of the longest sequence."""
        return max(self.prompts) + self.new

    @property
    def kv_bytes(self) -> int:
        return max(self.concurrencies) * self.max_length * self.model.kv_bytes_per_token

    def lengths(self, concurrency: int) -> list[int]:
        """Tokens of the prompts of so many requests."""
        return [self.prompts[index % len(self.prompts)] for index in range(concurrency)]


@dataclass(frozen=True)
class Sample:
    """Rates of one measurement, in tokens a second over all requests. `output`: all that were generated, over the whole time.

    `bandwidth`: bytes a second that this machine could read then, the mean of a reading right before and one right after.
    """

    decode: float
    prefill: float
    output: float
    bandwidth: float


@dataclass
class Contestant:
    """An engine in one setting, and what was found out. `skipped`: why it takes no part (any more)."""

    engine: EngineSpec
    setting: str
    skipped: str = ""
    python: Path | None = None
    form: Path | None = None  # the model as this engine reads it
    load_s: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    note: str = ""
    samples: dict[int, list[Sample]] = field(default_factory=dict)  # samples by concurrency
    peak_rss_gib: dict[int, float] = field(default_factory=dict)  # the highest memory until then, by concurrency

    @property
    def label(self) -> str:
        """The engine's name, with the setting where it has several."""
        several = any(self.setting in choice and len(choice) > 1 for choice in self.engine.settings.values())
        return f"{self.engine.name} ({self.setting})" if several else self.engine.name


@dataclass
class Outcome:
    """`alternated`: whether engines took turns; otherwise one ran after the other."""

    contestants: list[Contestant]
    alternated: bool

    @property
    def bandwidths(self) -> list[float]:
        """Bytes a second of all measurements."""
        samples = [sample for contestant in self.contestants for some in contestant.samples.values() for sample in some]
        return [sample.bandwidth for sample in samples]


def fit_together(engines: Sequence[EngineSpec], work: Work, available_bytes: int) -> bool:
    """Whether all of them can be held in memory at once, by estimate; the one that loads has its weights twice."""
    return bytes_together(engines, work) <= MEMORY_SHARE * available_bytes


def bytes_together(engines: Sequence[EngineSpec], work: Work) -> int:
    """The bytes that `fit_together` compares with the limit."""
    weights = work.model.resident_bytes(work.weights)
    return weights + sum(engine.held_bytes(weights, work.kv_bytes) for engine in engines)


def available_memory() -> int:
    """Bytes that could be had without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))) * 1024


def measure(work: Work, contestants: list[Contestant], progress: SteppedProgress) -> Outcome:
    """Measure everybody who has not been skipped. A contestant that fails is skipped from there on."""
    present = [contestant for contestant in contestants if not contestant.skipped]
    alternated = fit_together([contestant.engine for contestant in present], work, available_memory())
    if not alternated:
        progress.step("memory does not suffice for all engines at once: they are measured one after the other")
    make = plan.alternating if alternated else plan.one_by_one
    with ExitStack() as stack:
        session = _Session(work, present, progress, stack)
        for step in make(len(present), work.concurrencies, work.repeats):
            session.do(step)
    return Outcome(contestants, alternated)


class _Session:
    """The runners of one plan; all but the one at work are paused."""

    def __init__(self, work: Work, contestants: list[Contestant], progress: SteppedProgress, stack: ExitStack) -> None:
        self._work = work
        self._contestants = contestants
        self._progress = progress
        self._stack = stack
        self._runners: dict[int, Runner] = {}
        self._concurrency = 0
        progress.step("measuring the read bandwidth, here and around each measurement")
        self._meter = Meter(work.threads)
        stack.callback(self._meter.close)
        for _ in range(work.busy):
            neighbour = commands.start([sys.executable, "-c", "while True: pass"], {}, stdin=subprocess.DEVNULL)
            stack.callback(commands.end, neighbour)

    def do(self, step: Step) -> None:
        contestant = self._contestants[step.contestant]
        if contestant.skipped:
            return
        try:
            if step.action is Action.LOAD:
                self._load(step.contestant)
            elif step.action is Action.END:
                self._runners[step.contestant].close()
            else:
                self._run(step)
        except Skipped as reason:
            contestant.skipped = str(reason)
            self._progress.step(f"{contestant.engine.name} is skipped: {reason}")
            self._runners[step.contestant].close()

    def _load(self, index: int) -> None:
        work, contestant = self._work, self._contestants[index]
        self._progress.step(f"loading {work.model.name} {work.weights} into {contestant.label}")
        self._progress.note("at work")
        log = BENCH / f"run-{contestant.engine.name}-{index}.log"
        began = time.monotonic()
        runner = Runner(contestant.python, contestant.engine.module, work.threads, log, self._progress.tick)
        self._runners[index] = runner
        self._stack.callback(runner.close)
        answer = runner.load(
            Load(
                str(contestant.form),
                work.weights,
                contestant.setting,
                work.threads,
                max(work.concurrencies),
                work.max_length,
                work.model.kv_bytes_per_token,
            )
        )
        contestant.load_s = time.monotonic() - began
        contestant.versions, contestant.note = answer["versions"], answer["note"]
        runner.pause()

    def _run(self, step: Step) -> None:
        work, contestant, runner = self._work, self._contestants[step.contestant], self._runners[step.contestant]
        if step.concurrency != self._concurrency:
            self._concurrency = step.concurrency
            self._progress.step(f"measuring {work.repeats} times at concurrency {step.concurrency}")
        warm_up = step.action is Action.WARM_UP
        self._progress.note(f"{contestant.label}, {'warm-up' if warm_up else f'{step.repeat + 1} of {work.repeats}'}")
        new = min(work.new, WARM_UP_TOKENS) if warm_up else work.new
        round_number = 0 if warm_up else 1 + step.repeat
        seed = (work.seed * 1000 + step.concurrency) * 1000 + round_number  # no prompt is seen twice
        lengths = work.lengths(step.concurrency)
        measure = Measure(lengths, new, seed, work.model.vocab_size)
        if warm_up:
            self._measure(runner, measure)
            return
        before = self._meter.read()
        answer = self._measure(runner, measure)
        bandwidth = (before + self._meter.read()) / 2
        contestant.peak_rss_gib[step.concurrency] = answer["peak_rss_gib"]
        decode = answer["decode_tokens"] / answer["decode_s"]
        prefill = sum(lengths) / answer["prefill_s"]
        output = step.concurrency * new / (answer["prefill_s"] + answer["decode_s"])
        contestant.samples.setdefault(step.concurrency, []).append(Sample(decode, prefill, output, bandwidth))

    @staticmethod
    def _measure(runner: Runner, measure: Measure) -> dict[str, Any]:
        runner.resume()
        answer = runner.measure(measure)
        runner.pause()
        return answer

"""What a runner (one engine in one process) and the controller say to each other; the runner's side of it.

One JSON object a line, on the runner's standard input and output. A runner ends when its standard input does.

    {"load": LOAD}         ->  {"versions": {"torch": "2.13.0"}, "note": "..."}
    {"measure": MEASURE}   ->  {"prefill_s": .., "decode_s": .., "decode_tokens": .., "peak_rss_gib": ..}
    either                 ->  {"error": "one sentence"}

Standard library only: it runs in the peers' environments too.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, TextIO

_FIRST_TOKEN_ID = 5  # ids below it are special in many vocabularies


@dataclass(frozen=True)
class Load:
    """What a runner loads. `model`: directory or file in the engine's own form; lengths and room in tokens."""

    model: str
    weights: str  # bf16, int8, int4 or file
    setting: str  # the setting of an engine that has several
    threads: int
    max_concurrency: int
    max_length: int  # tokens of one sequence, prompt and output
    kv_bytes_per_token: int

    @property
    def kv_gib(self) -> int:
        """Room for the KV of all sequences with a block to spare for each, in whole GiB."""
        return self.max_concurrency * (self.max_length + 64) * self.kv_bytes_per_token // 2**30 + 1


@dataclass(frozen=True)
class Measure:
    """One measurement: a request of random tokens for each of `lengths`, all at once, which generate `new` tokens."""

    lengths: list[int]
    new: int
    seed: int
    vocab_size: int

    def prompts(self) -> list[list[int]]:
        """The prompts: equal for equal seeds, so that every engine is given the same."""
        rng = random.Random(self.seed)
        ids = range(min(_FIRST_TOKEN_ID, self.vocab_size - 1), self.vocab_size)
        return [rng.choices(ids, k=length) for length in self.lengths]


@dataclass(frozen=True)
class Timing:
    """`prefill_s`: until every request has its first token; `decode_s` and `decode_tokens`: from then to the end."""

    prefill_s: float
    decode_s: float
    decode_tokens: int


class Engine(Protocol):
    note: str  # what a reader of the figures should know, or nothing

    def measure(self, prompts: list[list[int]], new: int) -> Timing:
        """Generate exactly `new` tokens greedily for each prompt, all at once."""
        ...


class Stopwatch:
    """Times one measurement of an engine that delivers tokens piece by piece. Runs from when it is made."""

    def __init__(self, concurrency: int) -> None:
        self._counts = [0] * concurrency
        self._waiting = concurrency
        self._began = time.perf_counter()
        self._all_started = self._last = 0.0
        self._early_tokens = 0

    def add(self, request: int, count: int) -> None:
        """`count` more tokens of a request have arrived just now."""
        if count and not self._counts[request]:
            self._waiting -= 1
        self._counts[request] += count
        self._last = time.perf_counter()
        if not self._waiting and not self._all_started:
            self._all_started = self._last
            self._early_tokens = sum(self._counts)

    @property
    def all_started(self) -> bool:
        """Whether every request has its first token."""
        return bool(self._all_started)

    def timing(self, new: int) -> Timing:
        """The result. RuntimeError unless every request got `new` tokens."""
        if set(self._counts) != {new}:
            raise RuntimeError(f"requests got {sorted(set(self._counts))} tokens, {new} were asked for")
        decoded = sum(self._counts) - self._early_tokens
        return Timing(self._all_started - self._began, self._last - self._all_started, decoded)


def serve(load: Callable[[Load], Engine], packages: Sequence[str]) -> None:
    """Answer requests until standard input ends. `packages`: those whose versions are reported."""
    channel = _claim_stdout()
    engine: Engine | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "load" in request:
                engine = load(Load(**request["load"]))
                answer: dict[str, Any] = {
                    "versions": {name: metadata.version(name) for name in packages},
                    "note": engine.note,
                }
            else:
                answer = _measure(engine, Measure(**request["measure"]))
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
        channel.write(json.dumps(answer) + "\n")
        channel.flush()


def _measure(engine: Engine, measure: Measure) -> dict[str, float]:
    timing = engine.measure(measure.prompts(), measure.new)
    return {**vars(timing), "peak_rss_gib": peak_rss_gib()}


def peak_rss_gib() -> float:
    """The highest memory of this program. (getrusage would count what its parent held at the fork.)"""
    status = Path("/proc/self/status").read_text()
    kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(kib) / 2**20


def _claim_stdout() -> TextIO:
    """Standard output for the protocol alone; what an engine prints goes to standard error."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel

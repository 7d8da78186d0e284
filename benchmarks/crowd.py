"""Throughput against oversubscription: more users than the KV pool holds, a few of whom speak at the same time.

The pool holds the whole conversations of HELD users, HELD of them speak at once, and their turns come round in the same order:
the least recently used is always the next, which is the worst case for LRU.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from backend.api import EngineConfig, OutputConfig, Request, Response, SessionConfig
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.executor import Executor

HELD = 4
FACTORS = (1, 4, 16)
HISTORY_TOKENS, TURN_TOKENS, OUTPUT_TOKENS = 192, 32, 32
TURNS = 2  # turns of each user, after the history


@dataclass(frozen=True)
class CrowdRow:
    oversubscription: int  # users / those whose KV the pool holds
    users: int
    output_tokens_per_s: float
    first_token_ms: float  # median
    recomputed_per_turn: float  # tokens, mean


def measure_crowds(model_dir: Path, progress: Callable[[str], None]) -> list[CrowdRow]:
    """One row for each of FACTORS, each on an engine of its own."""
    rows = []
    for factor in FACTORS:
        progress(f"{factor}x: {factor * HELD} users over a pool for {HELD}")
        rows.append(_measure(model_dir, factor))
    return rows


def _measure(model_dir: Path, factor: int) -> CrowdRow:
    from backend.worker.group import InProcessWorkerGroup

    section = ModelConfigSection(path=str(model_dir))
    scheduler = SchedulerConfig(max_batch_size=HELD, policy="max_utilization")
    conversation = HISTORY_TOKENS + (TURNS + 1) * OUTPUT_TOKENS + TURNS * TURN_TOKENS
    block = KvCacheConfig().block_size
    kv_cache = KvCacheConfig(max_tokens=HELD * -(-conversation // block) * block, watermark=0.0)
    workers = InProcessWorkerGroup(section, scheduler, kv_cache)
    with Executor.in_process(EngineConfig(section, kv_cache, scheduler), workers, str(model_dir)) as executor:
        crowd = _Crowd(executor, factor * HELD)
        crowd.round(HISTORY_TOKENS, start=True)
        crowd.forget()
        started = time.perf_counter()
        for _ in range(TURNS):
            crowd.round(TURN_TOKENS, start=False)
        elapsed = time.perf_counter() - started
    num_turns = len(crowd.first_token_ms)
    return CrowdRow(
        factor,
        factor * HELD,
        num_turns * OUTPUT_TOKENS / elapsed,
        statistics.median(crowd.first_token_ms),
        crowd.recomputed / num_turns,
    )


class _Crowd:
    def __init__(self, executor: Executor, users: int) -> None:
        self._executor = executor
        self._users = users
        self._rng = random.Random(0)
        self._vocab_size = executor.hello.model.vocab_size
        self.forget()

    def forget(self) -> None:
        """Drop what was measured so far."""
        self.first_token_ms: list[float] = []
        self.recomputed = 0

    def round(self, num_tokens: int, start: bool) -> None:
        """A turn of every user, HELD at a time."""
        places = threading.Semaphore(HELD)
        turns = []
        for user in range(1, self._users + 1):
            places.acquire()
            turns.append(self._speak(user, num_tokens, start, places.release))
        for done in turns:
            done.wait()

    def _speak(self, user: int, num_tokens: int, start: bool, leave: Callable[[], None]) -> threading.Event:
        prompt = [self._rng.randrange(self._vocab_size) for _ in range(num_tokens)]
        done, asked, began = threading.Event(), time.perf_counter(), []

        def on_response(response: Response) -> None:
            if response.has_error():
                raise SystemExit(response.error_msg)
            if not began:
                began.append(time.perf_counter())
                self.first_token_ms.append((began[0] - asked) * 1e3)
            if response.is_final:
                self.recomputed += response.result.perf_metrics.num_recomputed_tokens
                done.set()
                leave()

        request = Request(
            prompt,
            OUTPUT_TOKENS,
            streaming=True,
            session=SessionConfig(user, start=start),
            output_config=OutputConfig(return_perf_metrics=True),
        )
        self._executor.submit(request, on_response)
        return done

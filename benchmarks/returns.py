"""Conversations that return: first-token time with a second level of KV in a file, against computing evicted KV again.

Two traces of many turns, rebuilt from published distributions:

    chat    vLLM's benchmarks/multi_turn/generate_multi_turn.json: a shared prefix of 500 tokens, an own one of log-normal length
            (mean 1,000, at most 5,000), then turns of U(120, 160) tokens with answers of U(80, 120)
    agent   AIPerf's `agentic-code` defaults, all lengths divided by 32: a shared prefix of 32,000, an own one of log-normal
            length (mean 15,000, at most 30,000), 6,000 a turn, answers of 1,000; 70 % of the gaps are an agent's (8 s), the
            others a human's (5 minutes)

Turns come in the order of their times, one after the other, and the answers are the model's own. Two engines with equal pools
get each turn one right after the other, so that the machine's noise hits both; their answers must be equal. The pool holds 5, 10
and 25 % of the working set: the KV of all conversations at their ends.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from backend.api import EngineConfig, Request, Response
from backend.api.config import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.executor import Executor

SHARES = (0.05, 0.10, 0.25)  # of the working set that the pool holds
LEAST_RATIO = 0.98  # recompute / level, of the time to the first token: the level must make nothing slower
DIRECTORY_BYTES = 8 << 30


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens, gaps in seconds."""

    shared: int
    own_mean: float
    own_most: int
    turn: tuple[int, int]
    answer: tuple[int, int]
    human_share: float

    def scaled(self, scale: float) -> Shape:
        def part(tokens: float) -> int:
            return max(1, round(scale * tokens))

        turn, answer = tuple(map(part, self.turn)), tuple(map(part, self.answer))
        return Shape(
            part(self.shared), max(1.0, scale * self.own_mean), part(self.own_most), turn, answer, self.human_share
        )


TRACES = {
    "chat": Shape(500, 1000, 5000, (120, 160), (80, 120), 1.0),
    "agent": Shape(1000, 470, 940, (188, 188), (31, 31), 0.3),
}


@dataclass(frozen=True)
class Turn:
    conversation: int
    is_return: bool  # it is not the first turn of its conversation
    new: list[int]  # token ids behind the conversation so far
    num_answer: int
    num_shared: int  # first tokens of `new` that another conversation has begun with


@dataclass(frozen=True)
class ReturnRow:
    """Times in milliseconds, of turns that return."""

    trace: str
    share: float  # of the working set that the pool holds
    turns: int
    recompute_ms: float  # median
    level_ms: float  # median
    ratio: float  # of the sums: above 1 the level is quicker
    ideal_hit_rate: float  # prompt tokens that were there before, of all: an infinite pool would find them
    found_share: float  # tokens that were not run by the engine with the level, of those
    misses: int  # blocks that could not be used


def make_trace(shape: Shape, conversations: int, turns: int, vocab_size: int, seed: int = 0) -> list[Turn]:
    """The turns in the order of their times."""
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    shared = ids(shape.shared)
    due = [(rng.random() * 60.0, number) for number in range(conversations)]
    heapq.heapify(due)
    left = dict.fromkeys(range(conversations), turns)
    made: list[Turn] = []
    while due:
        now, number = heapq.heappop(due)
        is_first = left[number] == turns
        num_shared = len(shared) if is_first and made else 0
        start = [*shared, *ids(_log_normal(rng, shape.own_mean, shape.own_most))] if is_first else []
        made.append(
            Turn(number, not is_first, [*start, *ids(rng.randint(*shape.turn))], rng.randint(*shape.answer), num_shared)
        )
        left[number] -= 1
        if left[number]:
            gap = rng.expovariate(1 / 300.0) if rng.random() < shape.human_share else rng.expovariate(1 / 8.0)
            heapq.heappush(due, (now + gap, number))
    return made


def _log_normal(rng: random.Random, mean: float, most: int) -> int:
    """A length with this mean (before it is cut) and a sigma of 1."""
    return max(1, min(most, round(rng.lognormvariate(math.log(mean) - 0.5, 1.0))))


def working_set(trace: list[Turn]) -> tuple[int, int]:
    """(tokens of all conversations at their ends, tokens of the longest one)."""
    lengths: dict[int, int] = {}
    for turn in trace:
        lengths[turn.conversation] = lengths.get(turn.conversation, 0) + len(turn.new) + turn.num_answer
    return sum(lengths.values()), max(lengths.values())


def measure_returns(
    model_dir: Path, conversations: int, turns: int, scale: float, progress: Callable[[str], None]
) -> list[ReturnRow]:
    """A row for each trace and each share of the working set."""
    rows = []
    for name, shape in TRACES.items():
        for share in SHARES:
            progress(f"{name}: {conversations} conversations, a pool of {share:.0%} of their KV")
            rows.append(_measure(model_dir, name, shape.scaled(scale), conversations, turns, share))
    return rows


def _measure(model_dir: Path, name: str, shape: Shape, conversations: int, turns: int, share: float) -> ReturnRow:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        vocab_size = 100
        trace = make_trace(shape, conversations, turns, vocab_size)
        size, longest = working_set(trace)
        num_tokens = max(round(share * size), longest + 128)
        recompute, level = (stack.enter_context(_engine(model_dir, num_tokens, each)) for each in ("", directory))
        return _play(trace, recompute, level, name, share)


def _engine(model_dir: Path, num_tokens: int, directory: str) -> Executor:
    from backend.worker.group import InProcessWorkerGroup

    section, scheduler = ModelConfigSection(path=str(model_dir)), SchedulerConfig(max_batch_size=4, max_num_tokens=512)
    kv_cache = KvCacheConfig(max_tokens=num_tokens, watermark=0.0, directory=directory, directory_bytes=DIRECTORY_BYTES)
    workers = InProcessWorkerGroup(section, scheduler, kv_cache)
    return Executor.in_process(EngineConfig(section, kv_cache, scheduler), workers, str(model_dir))


def _play(trace: list[Turn], recompute: Executor, level: Executor, name: str, share: float) -> ReturnRow:
    histories: dict[int, list[int]] = {}
    times: list[tuple[float, float]] = []
    num_prompt = num_known = 0
    for number, turn in enumerate(trace):
        history = histories.get(turn.conversation, [])
        prompt = [*history, *turn.new]
        num_prompt, num_known = num_prompt + len(prompt), num_known + len(history) + turn.num_shared
        engines = (recompute, level) if number % 2 else (level, recompute)
        asked = {engine: _ask(engine, prompt, turn.num_answer) for engine in engines}
        (slow_ms, slow), (quick_ms, quick) = asked[recompute], asked[level]
        if slow != quick:
            raise SystemExit(f"turn {number} of {name}: the answers differ: {slow} and {quick}")
        histories[turn.conversation] = [*prompt, *slow]
        if turn.is_return:
            times.append((slow_ms, quick_ms))
    stats = level.latest_stats()
    assert stats is not None  # the engine runs in this process
    num_found = num_prompt - stats.counters.context_tokens_total
    return ReturnRow(
        *(name, share, len(times)),
        *(statistics.median(slow for slow, _ in times), statistics.median(quick for _, quick in times)),
        sum(slow for slow, _ in times) / sum(quick for _, quick in times),
        num_known / num_prompt,
        num_found / max(1, num_known),
        sum(stats.latest.second_level.misses_total.values()),
    )


def _ask(executor: Executor, prompt: list[int], max_tokens: int) -> tuple[float, list[int]]:
    """(milliseconds to the first token, the tokens)."""
    times, tokens, done = [], [], threading.Event()

    def on_response(response: Response) -> None:
        if response.has_error():
            tokens.append(response.error_msg)
        else:
            times.append(time.perf_counter())
            tokens.extend(response.result.output_token_ids[0])
        if response.is_final:
            done.set()

    started = time.perf_counter()
    executor.submit(Request(prompt, max_tokens, streaming=True), on_response)
    done.wait()
    if not times:
        raise SystemExit(str(tokens[0]))
    return (times[0] - started) * 1e3, tokens


def slower_rows(rows: list[ReturnRow]) -> Iterator[ReturnRow]:
    """Those in which the level has made first tokens later than it may."""
    return (row for row in rows if row.ratio < LEAST_RATIO)

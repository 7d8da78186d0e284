"""Conversations that return: first-token time with a second level of KV in a file, against computing evicted KV again.

    ./everbatch bench returns                                                       one turn at a time
    ./everbatch bench returns --streams 32 --conversations 160 --scale 0.25         32 turns at once

Two traces of many turns, rebuilt from published distributions:

    chat    vLLM's benchmarks/multi_turn/generate_multi_turn.json: a shared prefix of 500 tokens, an own one of log-normal length
            (mean 1,000, at most 5,000), then turns of U(120, 160) tokens with answers of U(80, 120)
    agent   AIPerf's `agentic-code` defaults, all lengths divided by 32: a shared prefix of 32,000, an own one of log-normal
            length (mean 15,000, at most 30,000), 6,000 a turn, answers of 1,000; 70 % of the gaps are an agent's (8 s), the
            others a human's (5 minutes)

Turns come in the order of their times, in rounds of one turn, or of one for each of several streams, and the answers are the
model's own. Two engines with equal pools get each round one right after the other, so that the machine's noise hits both; their
answers must be equal. The pool holds 5, 10 and 25 % of the working set: the KV of all conversations at their ends.
"""

from __future__ import annotations

import heapq
import json
import math
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from backend.api import EngineConfig
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.executor import Executor
from backend.executor.served_engine import SPIN_COUNT
from benchmarks import pictures
from benchmarks.called_from import from_caller
from benchmarks.streams import Stream

RESULTS = Path(__file__).parent / "results"
LONGEST_TOKENS = 16_384  # positions of the model that is made
SHARES = (0.05, 0.10, 0.25)  # of the working set that the pool holds
LEAST_RATIO = 0.98  # recompute / level, of the time to the first token: the level must make nothing slower
DIRECTORY_BYTES = 8 << 30
VOCAB_SIZE = 100  # token ids of prompts are below it, which any model has


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
    streams: int  # turns at once
    recompute_ms: float  # median
    level_ms: float  # median
    recompute_p99_ms: float
    level_p99_ms: float
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
    model_dir: Path, conversations: int, turns: int, scale: float, streams: int, progress: Callable[[str], None]
) -> list[ReturnRow]:
    """A row for each trace and each share of the working set."""
    rows = []
    for name, shape in TRACES.items():
        trace = make_trace(shape.scaled(scale), conversations, turns, VOCAB_SIZE)
        for share in SHARES:
            progress(f"{name}: {conversations} conversations, {streams} at a time, a pool of {share:.0%} of their KV")
            rows.append(_measure(model_dir, name, trace, share, streams))
    return rows


def _measure(model_dir: Path, name: str, trace: list[Turn], share: float, streams: int) -> ReturnRow:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        size, longest = working_set(trace)
        num_tokens = max(round(share * size), longest + 128)
        recompute, level = (
            stack.enter_context(_engine(model_dir, num_tokens, streams, each)) for each in ("", directory)
        )
        return _play(trace, recompute, level, name, share, streams)


def _engine(model_dir: Path, num_tokens: int, streams: int, directory: str) -> Executor:
    from backend.worker.group import InProcessWorkerGroup

    section = ModelConfigSection(path=str(model_dir))
    scheduler = SchedulerConfig(max_batch_size=max(4, streams), max_num_tokens=512)
    kv_cache = KvCacheConfig(max_tokens=num_tokens, watermark=0.0, directory=directory, directory_bytes=DIRECTORY_BYTES)
    workers = InProcessWorkerGroup(section, scheduler, kv_cache)
    return Executor.in_process(EngineConfig(section, kv_cache, scheduler), workers, str(model_dir))


def rounds_of(trace: list[Turn], streams: int) -> Iterator[list[Turn]]:
    """The turns in rounds of at most `streams`; a conversation has one turn in a round, and its turns stay in order."""
    waiting = list(trace)
    while waiting:
        taken: dict[int, Turn] = {}
        left = []
        for turn in waiting:
            if len(taken) < streams and turn.conversation not in taken:
                taken[turn.conversation] = turn
            else:
                left.append(turn)
        yield list(taken.values())
        waiting = left


def _play(trace: list[Turn], recompute: Executor, level: Executor, name: str, share: float, streams: int) -> ReturnRow:
    histories: dict[int, list[int]] = {}
    slow: list[float] = []
    quick: list[float] = []
    num_prompt = num_known = 0
    for number, turns in enumerate(rounds_of(trace, streams)):
        prompts = [[*histories.get(turn.conversation, []), *turn.new] for turn in turns]
        engines = (recompute, level) if number % 2 else (level, recompute)
        answers = {engine: _ask(engine, prompts, turns) for engine in engines}
        for turn, prompt, slower, quicker in zip(turns, prompts, answers[recompute], answers[level], strict=True):
            if slower.tokens != quicker.tokens:
                raise SystemExit(f"round {number} of {name}: answers differ: {slower.tokens} and {quicker.tokens}")
            num_prompt += len(prompt)
            num_known += len(prompt) - len(turn.new) + turn.num_shared
            histories[turn.conversation] = [*prompt, *slower.tokens]
            if turn.is_return:
                slow.append(slower.first_token_ms)
                quick.append(quicker.first_token_ms)
    stats = level.latest_stats()
    assert stats is not None  # the engine runs in this process
    num_found = num_prompt - stats.counters.context_tokens_total
    return ReturnRow(
        *(name, share, len(slow), streams, statistics.median(slow), statistics.median(quick), _p99(slow), _p99(quick)),
        sum(slow) / sum(quick),
        num_known / num_prompt,
        num_found / max(1, num_known),
        sum(stats.latest.second_level.misses_total.values()),
    )


def _ask(executor: Executor, prompts: list[list[int]], turns: list[Turn]) -> list[Stream]:
    """Asks for all answers at once, and waits for them."""
    streams = [Stream(executor, prompt, turn.num_answer) for prompt, turn in zip(prompts, turns, strict=True)]
    for stream in streams:
        stream.result()
    return streams


def _p99(times: list[float]) -> float:
    return sorted(times)[math.ceil(0.99 * len(times)) - 1]


def slower_rows(rows: list[ReturnRow]) -> Iterator[ReturnRow]:
    """The rows in which the level has made first tokens later than it may: on average, or the slowest of many at once."""
    for row in rows:
        if row.ratio < LEAST_RATIO or (row.streams > 1 and p99_ratio(row) < LEAST_RATIO):
            yield row


def p99_ratio(row: ReturnRow) -> float:
    return row.recompute_p99_ms / row.level_p99_ms


def show(rows: list[ReturnRow], console: Console) -> None:
    """Print the table, and what is slower with the level."""
    table = Table(title="first token of turns that return: KV from the second level, or computed again")
    for column in (
        "trace",
        "pool",
        "turns",
        "median, ms",
        "of the sums",
        "p99, ms",
        "of p99",
        "found of ideal",
        "ideal",
    ):
        table.add_column(column, justify="left" if column == "trace" else "right")
    for row in rows:
        table.add_row(
            *(row.trace, f"{row.share:.0%}", str(row.turns), f"{row.recompute_ms:.0f} / {row.level_ms:.0f}"),
            *(f"{row.ratio:.2f}x", f"{row.recompute_p99_ms:.0f} / {row.level_p99_ms:.0f}", f"{p99_ratio(row):.2f}x"),
            *(f"{row.found_share:.0%}", f"{row.ideal_hit_rate:.0%}"),
        )
    console.print(table)
    for row in slower_rows(rows):
        console.print(
            f"[red]{row.trace} at {row.share:.0%} is below {LEAST_RATIO}: {row.ratio:.3f} of the sums, "
            f"{p99_ratio(row):.3f} of p99[/red]"
        )


def plot(rows: list[ReturnRow], path: Path, title: str) -> None:
    """How many times sooner the first token comes with the level, for each trace and pool."""
    figure, axes = pictures.pyplot().subplots(figsize=(8, 3.4), layout="constrained")
    for place, (name, of) in enumerate((("sum of all", lambda row: row.ratio), ("p99", p99_ratio))):
        bars = axes.bar([each + 0.4 * place for each in range(len(rows))], [of(row) for row in rows], 0.36, label=name)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_xticks([each + 0.2 for each in range(len(rows))], [f"{row.trace}\n{row.share:.0%}" for row in rows])
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("computed again / from the level")
    axes.set_xlabel("trace, and the pool's part of the working set")
    axes.set_title(title, fontsize=10)
    axes.legend()
    figure.savefig(path, dpi=130)


def main(
    model_dir: Annotated[
        Path | None, typer.Option(help="Checkpoint directory; the M shape of random weights without it.")
    ] = None,
    conversations: Annotated[int, typer.Option(help="Conversations of each trace.", min=2, max=4096)] = 24,
    turns: Annotated[int, typer.Option(help="Turns of each conversation.", min=2, max=64)] = 4,
    scale: Annotated[float, typer.Option(help="Factor of all lengths.", min=0.001, max=10.0)] = 1.0,
    streams: Annotated[int, typer.Option(help="Turns at once.", min=1, max=256)] = 1,
) -> None:
    """Measure first tokens of conversations that return, with and without a second level; write a table and a plot."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is loaded
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        if model_dir is None:
            from tools.make_random_model import make_random_model

            console.print("making the M shape (30 layers, hidden 576, vocabulary 49,152) of random weights")
            model_dir = make_random_model(Path(scratch) / "M", shape="M", max_position_embeddings=LONGEST_TOKENS)
        rows = measure_returns(from_caller(model_dir), conversations, turns, scale, streams, console.print)
    show(rows, console)
    RESULTS.mkdir(exist_ok=True)
    name = f"returns-{model_dir.name}-{streams}"
    document = {
        "conversations": conversations,
        "turns": turns,
        "scale": scale,
        "returns": [asdict(row) for row in rows],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    title = (
        f"{model_dir.name}, {conversations} conversations of {turns} turns, {streams} at a time, lengths x {scale:g}"
    )
    plot(rows, RESULTS / f"{name}.png", title)
    console.print(f"written: benchmarks/results/{name}.json and .png")


if __name__ == "__main__":
    typer.run(main)

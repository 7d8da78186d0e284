"""What a session's cached KV is worth: first-token time of a turn whose history is cached, and of one that was evicted.

    ./everbatch bench sessions                      the M shape of random weights, 1,000 tokens of history
    ./everbatch bench sessions --model-dir DIR      any checkpoint

One pool that holds the KV of two sessions. A turn is *warm* when the session was the last to be used; it is *evicted* when
two other sessions have pushed its KV out, so that its history is computed again from token ids. Warm and evicted turns
alternate in one run; the figures are medians. Then crowd.py: tokens/s of 1, 4 and 16 times as many users as the pool holds.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from backend.api import EngineConfig, OutputConfig, Request, Response, SessionConfig
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.executor import Executor
from backend.executor.served_engine import SPIN_COUNT
from benchmarks import pictures
from benchmarks.crowd import CrowdRow, measure_crowds

RESULTS = Path(__file__).parent / "results"
TURN_TOKENS = 16  # new tokens of a turn
OUTPUT_TOKENS = 8
console = Console()


@dataclass
class Turn:
    """One measured turn. Times in milliseconds."""

    kind: str
    first_token_ms: float
    context_tokens: int
    recomputed_tokens: int


class Sessions:
    """A few conversations over one engine."""

    def __init__(self, executor: Executor, vocab_size: int, history: int) -> None:
        self._executor = executor
        self._rng = random.Random(0)
        self._vocab_size = vocab_size
        self._history = history

    def begin(self, session_id: int) -> None:
        """Give a session its history."""
        self._turn(session_id, self._history, start=True)

    def turn(self, session_id: int, kind: str) -> Turn:
        """Ask a turn, then rewind the session to its history, so that every turn is the same work."""
        first_ms, result = self._turn(session_id, TURN_TOKENS, step=self._history)
        metrics = result.result.perf_metrics
        return Turn(kind, first_ms, metrics.num_context_tokens, metrics.num_recomputed_tokens)

    def _turn(self, session_id: int, num_tokens: int, **session: object) -> tuple[float, Response]:
        prompt = [self._rng.randrange(self._vocab_size) for _ in range(num_tokens)]
        done, times, last = threading.Event(), [], []

        def on_response(response: Response) -> None:
            times.append(time.perf_counter())
            if response.is_final:
                last.append(response)
                done.set()

        request = Request(
            prompt,
            OUTPUT_TOKENS,
            streaming=True,
            session=SessionConfig(session_id, **session),
            output_config=OutputConfig(return_perf_metrics=True),
        )
        started = time.perf_counter()
        self._executor.submit(request, on_response)
        done.wait()
        if last[0].has_error():
            raise SystemExit(last[0].error_msg)
        return (times[0] - started) * 1e3, last[0]


def measure(model_dir: Path, history: int, repeats: int) -> list[Turn]:
    """Alternate warm and evicted turns. Returns every measured turn."""
    from backend.worker.group import InProcessWorkerGroup

    section = ModelConfigSection(path=str(model_dir))
    scheduler = SchedulerConfig(max_batch_size=4, max_num_tokens=512)
    per_session = history + TURN_TOKENS + OUTPUT_TOKENS + 32
    kv_cache = KvCacheConfig(max_tokens=2 * per_session, watermark=0.0)
    config = EngineConfig(section, kv_cache, scheduler)
    turns = []
    workers = InProcessWorkerGroup(section, scheduler, kv_cache)
    with Executor.in_process(config, workers, str(model_dir)) as executor:
        sessions = Sessions(executor, executor.hello.model.vocab_size, history)
        for session_id in (1, 2, 3):
            sessions.begin(session_id)
        for _ in track(range(repeats), "turns", console=console):
            for session_id in (1, 2, 3):
                turns.append(sessions.turn(session_id, "evicted"))  # two others came between
                turns.append(sessions.turn(session_id, "warm"))
    return turns


def summarise(turns: list[Turn]) -> dict[str, float]:
    """Medians, their ratio, and the cost of recomputation per token."""
    median = {
        kind: statistics.median(t.first_token_ms for t in turns if t.kind == kind) for kind in ("warm", "evicted")
    }
    recomputed = statistics.median(t.recomputed_tokens for t in turns if t.kind == "evicted")
    return {
        "warm_first_token_ms": median["warm"],
        "evicted_first_token_ms": median["evicted"],
        "ratio": median["evicted"] / median["warm"],
        "recomputed_tokens": recomputed,
        "recompute_ms_per_token": (median["evicted"] - median["warm"]) / max(1, recomputed),
    }


def plot(turns: list[Turn], summary: dict[str, float], crowds: list[CrowdRow], path: Path, title: str) -> None:
    """Left every turn as a dot, medians as lines; right the crowds."""
    pyplot = pictures.pyplot()
    figure, (axes, right) = pyplot.subplots(1, 2, figsize=(11, 3.4), layout="constrained")
    for row, (kind, colour) in enumerate((("warm", "#2a7f62"), ("evicted", "#b3532e"))):
        times = [t.first_token_ms for t in turns if t.kind == kind]
        axes.scatter(times, [row] * len(times), color=colour, alpha=0.5, s=28)
        axes.plot([summary[f"{kind}_first_token_ms"]] * 2, [row - 0.25, row + 0.25], color=colour, linewidth=3)
    axes.set_yticks([0, 1], ["history cached", "history evicted,\nrecomputed"])
    axes.set_ylim(-0.6, 1.6)
    axes.set_xscale("log")
    axes.set_xlabel("time to first token, ms (log scale; bars are medians)")
    axes.set_title(f"{title}: evicted / cached = {summary['ratio']:.1f}x", fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    bars = right.bar([f"{row.oversubscription}x" for row in crowds], [row.output_tokens_per_s for row in crowds])
    right.bar_label(bars, [f"{row.output_tokens_per_s:.0f}" for row in crowds])
    right.margins(y=0.1)
    right.set_xlabel("users / users whose KV the pool holds")
    right.set_ylabel("output tokens/s")
    right.set_title("throughput against oversubscription", fontsize=10)
    right.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=130)


def show_crowds(crowds: list[CrowdRow]) -> None:
    """Print the table."""
    table = Table(title="users who come round in turn, four at a time")
    for column in ("oversubscription", "users", "output tokens/s", "first token, ms (median)", "recomputed per turn"):
        table.add_column(column, justify="right")
    for row in crowds:
        table.add_row(
            f"{row.oversubscription}x",
            str(row.users),
            f"{row.output_tokens_per_s:.0f}",
            f"{row.first_token_ms:.0f}",
            f"{row.recomputed_per_turn:.0f}",
        )
    console.print(table)


def main(
    model_dir: Annotated[
        Path | None, typer.Option(help="Checkpoint directory; the M shape of random weights without it.")
    ] = None,
    history: Annotated[int, typer.Option(help="Tokens of history.", min=32)] = 1000,
    repeats: Annotated[int, typer.Option(help="Rounds over three sessions.", min=1)] = 5,
) -> None:
    """Measure first-token times of warm and evicted turns, and crowds; write tables, a plot and the raw figures."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is loaded
    with tempfile.TemporaryDirectory() as scratch:
        if model_dir is None:
            from tools.make_random_model import make_random_model

            console.print("making the M shape (30 layers, hidden 576, vocabulary 49,152) of random weights")
            model_dir = make_random_model(Path(scratch) / "M", shape="M")
        turns = measure(model_dir, history, repeats)
        crowds = measure_crowds(model_dir, console.print)
    summary = summarise(turns)
    table = Table(title=f"{model_dir.name}: a turn of {TURN_TOKENS} new tokens on {history} tokens of history")
    for column in ("turn", "context tokens", "recomputed", "first token, ms (median)"):
        table.add_column(column, justify="left" if column == "turn" else "right")
    for kind in ("warm", "evicted"):
        some = next(t for t in turns if t.kind == kind)
        table.add_row(
            kind, str(some.context_tokens), str(some.recomputed_tokens), f"{summary[f'{kind}_first_token_ms']:.1f}"
        )
    console.print(table)
    console.print(
        f"evicted / warm = [bold]{summary['ratio']:.1f}x[/bold]; recomputation costs "
        f"{summary['recompute_ms_per_token']:.3f} ms a token"
    )
    show_crowds(crowds)
    RESULTS.mkdir(exist_ok=True)
    name = f"sessions-{model_dir.name}"
    document = {"history": history, "summary": summary, "turns": [asdict(turn) for turn in turns]}
    document["crowds"] = [asdict(row) for row in crowds]
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    plot(turns, summary, crowds, RESULTS / f"{name}.png", f"{model_dir.name}, {history} tokens of history")
    console.print(f"written: benchmarks/results/{name}.json and .png")


if __name__ == "__main__":
    typer.run(main)

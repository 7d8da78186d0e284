"""What prompts that come in between cost the streams that flow: `./everbatch bench mixed --model-dir M`.

Closed loop: each of the streams that has ended is followed by another, with prompts of the given lengths in turn. The engines of
all settings are in one process and take turns, one round each at a time. A gap is the time between two tokens of one stream.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from backend.api import Request, Response, load_config
from backend.api.processes.setup import calm_garbage_collector
from backend.executor import Executor
from backend.executor.served_engine import SPIN_COUNT

console = Console()


@dataclass(frozen=True)
class Round:
    gap_p50_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    first_token_p50_ms: float
    prompt_tokens_per_s: float  # of prompts and outputs over the whole time
    output_tokens_per_s: float
    prefill_tokens_per_s: (
        float  # of the first prompts, all of which come at once: until the last of them has its first token
    )


class Crowd:
    """`width` streams at a time until `total` have ended."""

    def __init__(self, executor: Executor, prompts: list[list[int]], width: int, new: int) -> None:
        self._executor, self._prompts, self._width, self._new = executor, prompts, width, new
        self._next = itertools.count()
        self._lock = threading.Lock()
        self._num_ended = 0
        self._done = threading.Event()
        self._times: list[list[float]] = [[] for _ in prompts]
        self._asked = [0.0] * len(prompts)

    def run(self) -> Round:
        began = time.perf_counter()
        for _ in range(self._width):
            self._ask()
        self._done.wait()
        elapsed = time.perf_counter() - began
        gaps = np.concatenate([np.diff(times) for times in self._times]) * 1e3
        firsts = [times[0] - asked for times, asked in zip(self._times, self._asked, strict=True)]
        opening = max(times[0] for times in self._times[: self._width]) - began
        return Round(
            float(np.percentile(gaps, 50)),
            float(np.percentile(gaps, 99)),
            float(gaps.max()),
            statistics.median(firsts) * 1e3,
            sum(map(len, self._prompts)) / elapsed,
            len(self._prompts) * self._new / elapsed,
            sum(map(len, self._prompts[: self._width])) / opening,
        )

    def _ask(self) -> None:
        with self._lock:
            index = next(self._next)
        if index >= len(self._prompts):
            return

        def on_response(response: Response) -> None:
            if response.has_error():
                raise SystemExit(response.error_msg)
            self._times[index] += [time.perf_counter()] * len(response.result.output_token_ids[0])
            if response.is_final:
                self._num_ended += 1
                if self._num_ended == len(self._prompts):
                    self._done.set()
                self._ask()

        self._asked[index] = time.perf_counter()
        self._executor.submit(Request(self._prompts[index], self._new, streaming=True), on_response)


def main(
    model_dir: Annotated[Path, typer.Option(help="Checkpoint directory.")],
    weights: Annotated[str, typer.Option(help="bf16, int8 or w8a8.")] = "bf16",
    streams: Annotated[int, typer.Option(help="Streams at a time.", min=1)] = 32,
    requests: Annotated[int, typer.Option(help="Requests of a round.", min=1)] = 64,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts, in turn.")] = "16,16,16,900",
    new: Annotated[int, typer.Option(help="Tokens of each answer.", min=2)] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds of each setting; medians are told.", min=1)] = 2,
    setting: Annotated[
        list[str] | None, typer.Option(help="section.key=value, several with commas; one a column.")
    ] = None,
) -> None:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is loaded
    from backend.worker.group import InProcessWorkerGroup

    sizes = [int(size) for size in lengths.split(",")]
    vocab_size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    executors = {}
    for name in setting or [""]:
        overrides = [
            f"model.path={model_dir}",
            "model.dtype=bfloat16",
            f"model.quantization={'none' if weights == 'bf16' else weights}",
            f"scheduler.max_batch_size={streams}",
            f"kv_cache.max_tokens={streams * (max(sizes) + new + 32)}",
            "kv_cache.watermark=0",
            "kv_cache.enable_block_reuse=false",
            *filter(None, name.split(",")),
        ]
        config = load_config(overrides=overrides)
        workers = InProcessWorkerGroup(config.model, config.scheduler, config.kv_cache)
        executors[name or "default"] = Executor.in_process(config, workers, str(model_dir))
    calm_garbage_collector()
    told: dict[str, list[Round]] = {name: [] for name in executors}
    for turn in range(rounds):
        for name, executor in executors.items():
            rng = random.Random(turn)
            prompts = [[rng.randrange(5, vocab_size) for _ in range(sizes[n % len(sizes)])] for n in range(requests)]
            told[name].append(Crowd(executor, prompts, streams, new).run())
    table = Table(
        title=f"{model_dir.name} {weights}: {streams} streams, prompts of {lengths}, {new} new; medians of {rounds}"
    )
    table.add_column("")
    for name in told:
        table.add_column(name, justify="right")
    for field in Round.__dataclass_fields__:
        table.add_row(field, *(f"{statistics.median(getattr(r, field) for r in all_):,.0f}" for all_ in told.values()))
    console.print(table)
    for executor in executors.values():
        executor.shutdown()


if __name__ == "__main__":
    typer.run(main)

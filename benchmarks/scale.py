"""Threads, ranks, stages and replicas beside each other: `./everbatch bench scale --model-dir M` (docs/scale.md).

Ways to use the same cores: one rank with all threads; as many ranks as there are threads; as many stages, which take turns with
all threads, or have a thread each and work on micro-batches; as many engines as there are threads. Each engine is a process of
its own. The ways take turns, one round each at a time, and those whose turn it is not sleep.
All streams send their prompts at once. The table has prompt tokens/s until the last stream has its first token, and output
tokens/s from then until the first stream ends.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from backend.api import EngineConfig, Request, Response, load_config
from backend.api.errors import ConfigError
from backend.executor import Executor

console = Console()


@dataclass(frozen=True)
class Round:
    prompt_tokens_per_s: float
    output_tokens_per_s: float


class Streams:
    """One round: all streams begin at once, each on the engine whose turn it is."""

    def __init__(self, engines: Sequence[Executor], prompts: Sequence[list[int]], new: int) -> None:
        self._engines, self._prompts, self._new = engines, prompts, new
        self._lock = threading.Lock()
        self._times: list[list[float]] = [[] for _ in prompts]
        self._left = len(prompts)
        self._done = threading.Event()
        self._error = ""

    def run(self) -> Round:
        began = time.perf_counter()
        for index, prompt in enumerate(self._prompts):
            engine = self._engines[index % len(self._engines)]
            engine.submit(Request(prompt, self._new, streaming=True), self._listener(index))
        self._done.wait()
        if self._error:
            raise SystemExit(self._error)
        all_begun, first_ended = max(times[0] for times in self._times), min(times[-1] for times in self._times)
        between = sum(all_begun < at <= first_ended for times in self._times for at in times)
        return Round(sum(map(len, self._prompts)) / (all_begun - began), between / (first_ended - all_begun))

    def _listener(self, index: int) -> Callable[[Response], None]:
        def on_response(response: Response) -> None:
            with self._lock:
                if response.has_error():
                    self._error = response.error_msg
                else:
                    tokens = response.result.output_token_ids[0]
                    self._times[index] += [time.perf_counter()] * len(tokens)
                self._left -= response.is_final
                if self._left == 0:
                    self._done.set()

        return on_response


def configs(model_dir: Path, weights: str, cores: int, streams: int, cells: int) -> dict[str, list[EngineConfig]]:
    """The engines of each way, by its name."""

    def engine(*settings: str) -> EngineConfig:
        return load_config(
            overrides=[
                f"model.path={model_dir}",
                "model.dtype=bfloat16",
                f"model.quantization={'none' if weights == 'bf16' else weights}",
                f"scheduler.max_batch_size={streams}",
                f"kv_cache.max_tokens={cells}",
                "kv_cache.watermark=0",
                "kv_cache.enable_block_reuse=false",
                *settings,
            ]
        )

    stages = f"workers.pipeline_parallel_size={cores}"
    return {
        f"1 rank x {cores} threads": [engine(f"model.num_threads={cores}")],
        f"{cores} ranks x 1 thread": [engine(f"model.num_threads={cores}", f"workers.tensor_parallel_size={cores}")],
        f"{cores} stages in turns": [engine(f"model.num_threads={cores}", stages)],
        f"{cores} stages, micro-batches": [
            engine(f"model.num_threads={cores}", stages, f"workers.micro_batches={2 * cores}")
        ],
        f"{cores} replicas x 1 thread": [engine("model.num_threads=1") for _ in range(cores)],
    }


def main(
    model_dir: Annotated[Path, typer.Option(help="Checkpoint directory; tools/make_random_model.py makes one.")],
    weights: Annotated[str, typer.Option(help="bf16, int8, w8a8 or w4a8.")] = "bf16",
    cores: Annotated[int, typer.Option(help="Cores that each way uses.", min=2)] = 2,
    streams: Annotated[
        str, typer.Option(help="Streams of a round; several numbers with commas, one a line.")
    ] = "1,8,32",
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 128,
    new: Annotated[int, typer.Option(help="Tokens of each answer.", min=8)] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds of each way, after one that is not counted.", min=1)] = 3,
    stages: Annotated[bool, typer.Option(help="Measure stages as well, both ways; each way holds all weights.")] = True,
    replicas: Annotated[bool, typer.Option(help="Measure replicas as well; each holds all weights.")] = True,
) -> None:
    """Threads, ranks, stages and replicas beside each other."""
    numbers = [int(number) for number in streams.split(",")]
    vocab_size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    ways = configs(model_dir, weights, cores, max(numbers), max(numbers) * (prompt + new + 32))
    left_out = [word for word, wanted in (("stages", stages), ("replicas", replicas)) if not wanted]
    ways = {name: of_way for name, of_way in ways.items() if not any(word in name for word in left_out)}
    with ExitStack() as stack:
        engines = {name: [_launched(stack, config) for config in of_way] for name, of_way in ways.items()}
        table = Table(
            title=f"{model_dir.name} {weights}, prompts of {prompt}, {new} new; medians of {rounds}, tokens/s"
        )
        table.add_column("streams", justify="right")
        for name in engines:
            table.add_column(f"{name}: output", justify="right")
            table.add_column("prompt", justify="right")
        for number in numbers:
            table.add_row(str(number), *_measured(engines, vocab_size, number, prompt, new, rounds))
        console.print(table)


def _launched(stack: ExitStack, config: EngineConfig) -> Executor:
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="everbatch-scale-"))
    try:
        return stack.enter_context(Executor.launch(config, f"{directory}/engine.sock"))
    except ConfigError as error:  # such as a model whose heads the ranks cannot share
        raise SystemExit(f"{error}; or give another --model-dir") from None


def _measured(
    engines: dict[str, list[Executor]], vocab_size: int, streams: int, prompt: int, new: int, rounds: int
) -> list[str]:
    """The cells of a line: of each way output tokens/s, with the ratio to the first way, and prompt tokens/s."""
    told: dict[str, list[Round]] = {name: [] for name in engines}
    for turn in range(rounds + 1):
        for name, of_way in engines.items():
            rng = random.Random(turn)
            prompts = [[rng.randrange(5, vocab_size) for _ in range(prompt)] for _ in range(streams)]
            told[name].append(Streams(of_way, prompts, new).run())
    outputs = {name: statistics.median(each.output_tokens_per_s for each in all_[1:]) for name, all_ in told.items()}
    cells, first = [], next(iter(outputs.values()))
    for name, all_ in told.items():
        cells.append(f"{outputs[name]:,.1f} ({outputs[name] / first:.2f})")
        cells.append(f"{statistics.median(each.prompt_tokens_per_s for each in all_[1:]):,.0f}")
    return cells


if __name__ == "__main__":
    typer.run(main)

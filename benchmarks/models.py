"""Families beside Llama, at one shape: `./everbatch bench models`.

Every family gets a random checkpoint of the same sizes, so that linear layers do the same arithmetic. All engines are in one
process and take turns, a round each; figures are medians of the rounds, and ratios to native Llama. `llama-transformers` is the
Llama checkpoint with model.implementation=transformers, `transformers` is the library's own generate() on it.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from backend.api import Request, Response, load_config
from backend.api.processes.setup import calm_garbage_collector
from backend.executor import Executor
from backend.executor.served_engine import SPIN_COUNT
from tools.make_random_model import make_random_model

console = Console()

FAMILIES = ("llama", "gemma3", "phi3", "olmo2", "granite")
HOSTED = "llama-transformers"
LIBRARY = "transformers"


class Speed(NamedTuple):
    prefill: float  # prompt tokens a second, until the last prompt has its first token
    decode: float  # output tokens a second, after that


def run_engine(executor: Executor, prompts: list[list[int]], new: int) -> Speed:
    """All prompts at once."""
    times: list[list[float]] = [[] for _ in prompts]
    left, ended = [len(prompts)], threading.Event()

    def responder(index: int) -> Callable[[Response], None]:
        def on_response(response: Response) -> None:
            if response.has_error():
                raise SystemExit(response.error_msg)
            times[index] += [time.perf_counter()] * len(response.result.output_token_ids[0])
            if response.is_final:
                left[0] -= 1
                if not left[0]:
                    ended.set()

        return on_response

    began = time.perf_counter()
    for index, prompt in enumerate(prompts):
        executor.submit(Request(prompt, new, streaming=True), responder(index))
    ended.wait()
    opening, end = max(of_prompt[0] for of_prompt in times), max(of_prompt[-1] for of_prompt in times)
    return Speed(sum(map(len, prompts)) / (opening - began), len(prompts) * (new - 1) / (end - opening))


def run_library(model: object, prompts: list[list[int]], new: int) -> Speed:
    """transformers.generate, one padded batch; all prompts have one length."""
    import torch

    ids = torch.tensor(prompts)
    ended: list[float] = []
    for count in (1, new):
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(  # type: ignore[attr-defined]  # a PreTrainedModel
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
        ended.append(time.perf_counter() - began)
    return Speed(ids.numel() / ended[0], len(prompts) * (new - 1) / (ended[1] - ended[0]))


def main(
    shape: Annotated[str, typer.Option(help="Sizes of tools/make_random_model.py: S, M or L.")] = "M",
    weights: Annotated[str, typer.Option(help="bf16, w8a8 or w4a8.")] = "bf16",
    rows: Annotated[str, typer.Option(help="Prompts at a time.")] = "1,8,32",
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 256,
    new: Annotated[int, typer.Option(help="Tokens of an answer.", min=2)] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are told.", min=1)] = 3,
    families: Annotated[str, typer.Option(help="Families beside llama, with commas.")] = ",".join(FAMILIES[1:]),
    library: Annotated[bool, typer.Option(help="Run transformers.generate as well.")] = True,
    save: Annotated[Path | None, typer.Option(help="File to write the figures to, as JSON.")] = None,
) -> None:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is loaded
    widths = [int(width) for width in rows.split(",")]
    names = ["llama", *filter(None, families.split(","))]
    speeds: dict[str, dict[int, list[Speed]]] = {}
    with tempfile.TemporaryDirectory() as place:
        runners = _runners(Path(place), names, shape, weights, max(widths), prompt + new, library)
        calm_garbage_collector()
        cells = [(turn, name, width) for turn in range(rounds + 1) for name in runners for width in widths]
        for turn, name, width in track(cells, "measuring", console=console):
            rng = random.Random(turn)
            prompts = [[rng.randrange(5, 30_000) for _ in range(prompt)] for _ in range(width)]
            speed = runners[name](prompts, new)
            if turn:  # the first round warms up
                speeds.setdefault(name, {}).setdefault(width, []).append(speed)
            gc.collect()
    medians = {
        name: {width: Speed(*map(statistics.median, zip(*told, strict=True))) for width, told in of.items()}
        for name, of in speeds.items()
    }
    console.print(_table(medians, widths, f"{shape} {weights}: {prompt} + {new} tokens, medians of {rounds}"))
    if save is not None:
        save.write_text(json.dumps(medians, indent=1) + "\n")


def _runners(
    place: Path, names: list[str], shape: str, weights: str, width: int, length: int, library: bool
) -> dict[str, Callable[[list[list[int]], int], Speed]]:
    from backend.worker.group import InProcessWorkerGroup

    runners: dict[str, Callable[[list[list[int]], int], Speed]] = {}
    for name in [*names, HOSTED]:
        directory = place / ("llama" if name == HOSTED else name)
        if not directory.exists():
            console.print(f"making the checkpoint {name}, shape {shape}")
            make_random_model(directory, name, shape=shape, **({"head_dim": 64} if name == "gemma3" else {}))
        overrides = [
            f"model.path={directory}",
            "model.dtype=bfloat16",
            f"model.quantization={'none' if weights == 'bf16' else weights}",
            f"model.implementation={'transformers' if name == HOSTED else 'native'}",
            f"scheduler.max_batch_size={width}",
            f"kv_cache.max_tokens={width * (length + 64)}",
            "kv_cache.watermark=0",
            "kv_cache.enable_block_reuse=false",
        ]
        config = load_config(overrides=overrides)
        workers = InProcessWorkerGroup(config.model, config.scheduler, config.kv_cache)
        executor = Executor.in_process(config, workers, str(directory))
        runners[name] = lambda prompts, new, executor=executor: run_engine(executor, prompts, new)  # type: ignore[misc]
    if library and weights == "bf16":
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(place / "llama", dtype=torch.bfloat16)
        runners[LIBRARY] = lambda prompts, new: run_library(model, prompts, new)
    return runners


def _table(medians: dict[str, dict[int, Speed]], widths: list[int], title: str) -> Table:
    table = Table(title=title)
    table.add_column("")
    for kind in Speed._fields:
        for width in widths:
            table.add_column(f"{kind}, {width} rows", justify="right")
    for name, speeds in medians.items():
        cells = []
        for kind in Speed._fields:
            for width in widths:
                speed, base = (getattr(of[width], kind) for of in (speeds, medians["llama"]))
                cells.append(f"{speed:,.0f} ({speed / base:.2f})")
        table.add_row(name, *cells)
    return table


if __name__ == "__main__":
    typer.run(main)

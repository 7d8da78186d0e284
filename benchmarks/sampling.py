"""What choosing the tokens of one step costs: the native kernel against torch operators, both through the Sampler.

    ./everbatch bench sampling                                    some minutes, most of them torch's
    ./everbatch bench sampling --rows 1,32 --vocab 49152          fewer cells

Logits are synthetic. *peaked*: a Zipf distribution over shuffled tokens, as a language model's are, a nucleus of tens of tokens;
*flat*: normal, a nucleus of thousands, the hard case of top-p. Native and torch calls alternate on the same logits, which are
written anew before each, outside the measured time. Figures are microseconds of CPU time a step on one thread, the list of
SampledToken included, of the fastest call: what else runs on the machine adds little to them. Both paths share a step's rows out
among threads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from backend.api.sampling import SamplingConfig
from backend.core.step import NewRow, SlotId
from backend.sampling.sampler import Sampler
from kernels.cpu.build import load
from kernels.cpu.isa import best_isa

RESULTS = Path(__file__).parent / "results" / "sampling.json"
KNOWN_TOKENS, PROMPT_TOKENS = 512, 256
SECONDS = 0.5  # after this time no further call of a cell and path is begun
MAX_CALLS = 50
console = Console()

# mode -> what a row asks for, kind of logits
MODES: dict[str, tuple[dict[str, object], str]] = {
    "greedy": ({}, "peaked"),
    "temperature": ({"sampling": SamplingConfig(temperature=0.8)}, "peaked"),
    "top-k 50": ({"sampling": SamplingConfig(temperature=0.8, top_k=50)}, "peaked"),
    "top-p 0.9": ({"sampling": SamplingConfig(temperature=0.8, top_p=0.9)}, "peaked"),
    "top-p 0.9, flat": ({"sampling": SamplingConfig(temperature=0.8, top_p=0.9)}, "flat"),
    "everything": (
        {
            "sampling": SamplingConfig(
                temperature=0.8, top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=1.1, presence_penalty=0.2,
                frequency_penalty=0.1, logit_bias={5: 1.0, 6: -1.0}, min_tokens=1000,
            ),
            "end_ids": (0, 1), "bad_words": [[7], [8, 9]], "return_log_probs": True, "top_log_probs": 5,
        },
        "peaked",
    ),
}  # fmt: skip


@dataclass
class Cell:
    """Microseconds of CPU time a step."""

    rows: int
    vocab: int
    mode: str
    native_us: float
    torch_us: float
    ratio: float


def make_logits(kind: str, rows: int, vocab: int) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator)
    if kind == "flat":
        return logits.mul_(2)
    ranks = torch.arange(1, vocab + 1).log()
    for row in logits:
        row.mul_(0.3).sub_(1.2 * ranks[torch.randperm(vocab, generator=generator)])
    return logits


def make_call(sampler: Sampler, rows: int, vocab: int, fields: dict[str, object], logits: Tensor) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(rows)
    token_ids = torch.randint(vocab, (rows, 2 * KNOWN_TOKENS), generator=generator)
    for slot in range(rows):
        tokens = token_ids[slot, :KNOWN_TOKENS].tolist()
        sampler.set_row(NewRow(SlotId(slot), tokens, PROMPT_TOKENS, 0, [], **{"sampling": SamplingConfig(), **fields}))
    slots, known = list(range(rows)), [KNOWN_TOKENS] * rows
    return lambda: sampler.sample(logits, slots, token_ids, known)


def measure(rows: int, vocab: int, mode: str) -> Cell:
    fields, kind = MODES[mode]
    original = make_logits(kind, rows, vocab)
    logits = original.clone()
    device = torch.device("cpu")
    calls = {
        name: make_call(Sampler(rows, vocab, device, library), rows, vocab, fields, logits)
        for name, library in (("native", load()), ("torch", None))
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for attempt in range(MAX_CALLS + 1):
        for name, call in calls.items():
            if sum(times[name]) > SECONDS:
                continue
            logits.copy_(original)
            started = time.process_time()
            call()
            if attempt > 0:  # the first one warms up
                times[name].append(time.process_time() - started)
    native, reference = (min(times[name]) * 1e6 for name in ("native", "torch"))
    return Cell(rows, vocab, mode, round(native, 1), round(reference, 1), round(reference / native, 1))


def show(cells: list[Cell], title: str) -> None:
    table = Table(title=title)
    for column in ("rows", "vocabulary", "mode", "native, us", "torch, us", "torch / native"):
        table.add_column(column, justify="left" if column == "mode" else "right", no_wrap=True)
    for cell in cells:
        table.add_row(
            str(cell.rows),
            f"{cell.vocab:,}",
            cell.mode,
            f"{cell.native_us:,.0f}",
            f"{cell.torch_us:,.0f}",
            f"{cell.ratio:.1f}",
        )
    console.print(table)


def main(
    rows: Annotated[str, typer.Option(help="Numbers of rows, separated by commas.")] = "1,8,32,256",
    vocab: Annotated[str, typer.Option(help="Sizes of the vocabulary.")] = "32000,49152,128256",
) -> None:
    """Measure every mode; write a table, and the figures as JSON."""
    torch.set_num_threads(1)
    shapes = [(int(size), int(count)) for size in vocab.split(",") for count in rows.split(",")]
    todo = [(count, size, mode) for size, count in shapes for mode in MODES]
    cells = [measure(*cell) for cell in track(todo, "measuring", console=console)]
    show(cells, f"sampling a step, one thread, {best_isa()}")
    RESULTS.parent.mkdir(exist_ok=True)
    document = {"isa": best_isa(), "cells": [asdict(cell) for cell in cells]}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    console.print("written: benchmarks/results/sampling.json")


if __name__ == "__main__":
    typer.run(main)

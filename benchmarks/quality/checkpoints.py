"""What `./everbatch quantize` costs: perplexity of checkpoints that it makes of the default model.

Each is made with the calibration text and, as a control of what that is worth, without (rounded to nearest). They are read as
the engine reads them, and computed by the torch tier in float32; KV is quantised as the pool holds it. Two texts: what the
default model was not trained on, and random tokens, which no calibration has seen the like of.

The bound is on the rise of perplexity over the float model, on the held-out text: the project's acceptance.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from backend.models.config import read_model_config
from backend.models.decoder import Decoder
from backend.models.loader import DEFAULT_MODEL, load_directory
from backend.quant.run import QuantSettings, quantize_checkpoint
from backend.quant.text import built_in_texts, rows_of
from benchmarks.quality.perplexity import ROW_TOKENS, ROWS_AT_ONCE, Measured, compare, held_out_rows, row_logits
from kernels.common.kv_format import KV_FORMATS, KVFormat

# name -> (what is made, the most that perplexity may rise)
CHECKPOINTS: dict[str, tuple[QuantSettings, float | None]] = {
    "W8A8, KV8": (QuantSettings("w8a8", kv="int8"), 0.01),
    "W4A16 g128": (QuantSettings("w4a16", 128), 0.05),
    "W4A8 g128": (QuantSettings("w4a8", 128), None),
    "W4A8 g128, KV4": (QuantSettings("w4a8", 128, "int4"), 0.10),
    "W4A8 rows, KV4": (QuantSettings("w4a8", -1, "int4"), None),
}


class Result(NamedTuple):
    name: str
    is_calibrated: bool
    num_bytes: int
    held_out: Measured
    random: Measured
    rise: float  # relative rise of perplexity on the held-out text
    random_rise: float
    bound: float | None

    @property
    def is_within(self) -> bool:
        return self.bound is None or self.rise <= self.bound


class Texts:
    """Rows of tokens and the float model's logits of them."""

    def __init__(self, model: Decoder, rows: Tensor) -> None:
        self.rows = rows
        self._expected = [row_logits(model, part) for part in rows.split(ROWS_AT_ONCE)]
        self.perplexity = self._compare(self._expected).perplexity

    def measure(self, model: Decoder, kv: KVFormat) -> tuple[Measured, float]:
        """Returns the results and the rise of perplexity."""
        found = self._compare(row_logits(model, part, kv) for part in self.rows.split(ROWS_AT_ONCE))
        return found, found.perplexity / self.perplexity - 1

    def _compare(self, logits: Iterable[Tensor]) -> Measured:
        return compare(self._expected, logits, self.rows, is_text=True)


def measure_checkpoints(held_out: Tensor, random: Tensor, console: Console) -> tuple[list[Result], tuple[float, float]]:
    """Each checkpoint, calibrated and not; and the float model's perplexities on both texts."""
    model = _load(DEFAULT_MODEL)
    texts = Texts(model, held_out), Texts(model, random)
    rows = rows_of(built_in_texts(), DEFAULT_MODEL, model.config.max_position)
    cases = [(name, is_calibrated) for name in CHECKPOINTS for is_calibrated in (True, False)]
    results = []
    for name, is_calibrated in track(cases, "checkpoints", console=console, transient=True):
        wanted, bound = CHECKPOINTS[name]
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "made"
            made = quantize_checkpoint(DEFAULT_MODEL, folder, wanted, rows if is_calibrated else None)
            model = _load(folder)
        kv = KV_FORMATS[wanted.kv or "auto"]
        (text, rise), (noise, random_rise) = (of.measure(model, kv) for of in texts)
        results.append(Result(name, is_calibrated, made.bytes_after, text, noise, rise, random_rise, bound))
    return results, (texts[0].perplexity, texts[1].perplexity)


def table_of(results: list[Result], perplexities: tuple[float, float]) -> Table:
    found = Table(title="checkpoints of ./everbatch quantize, default model (reference: the same in float32)")
    found.add_column("checkpoint")
    for column in ("perplexity", "rise", "bound", "KL", "random tokens", "rise", "MB"):
        found.add_column(column, justify="right")
    found.add_row("float32", f"{perplexities[0]:.4f}", "", "", "", f"{perplexities[1]:.4g}", "", "")
    for result in results:
        bound = "" if result.bound is None else f"{100 * result.bound:g} %, {'met' if result.is_within else 'MISSED'}"
        found.add_row(
            result.name if result.is_calibrated else "  not calibrated",
            f"{result.held_out.perplexity:.4f}",
            f"{100 * result.rise:+.2f} %",
            bound,
            f"{result.held_out.divergence:.2e}",
            f"{result.random.perplexity:.4g}",
            f"{100 * result.random_rise:+.2f} %",
            f"{result.num_bytes / 1e6:.1f}",
        )
    return found


def document_of(results: list[Result], perplexities: tuple[float, float]) -> dict[str, Any]:
    rows = [
        result._asdict() | {"held_out": result.held_out._asdict(), "random": result.random._asdict()}
        for result in results
    ]
    return {"perplexity": {"held_out": perplexities[0], "random": perplexities[1]}, "made": rows}


def run(tokens: int, output: Path | None) -> None:
    """Measure every checkpoint; print a table, and write a JSON object. tokens: of held-out text."""
    console, text = Console(), held_out_rows(tokens)
    vocab_size = read_model_config(DEFAULT_MODEL).vocab_size
    random = torch.randint(vocab_size, (min(8, len(text)), ROW_TOKENS), generator=torch.Generator().manual_seed(2))
    made, perplexities = measure_checkpoints(text, random, console)
    console.print(table_of(made, perplexities))
    if output is not None:
        document = {"held_out_tokens": text.numel()} | document_of(made, perplexities)
        output.write_text(json.dumps(document, indent=1) + "\n")


def _load(directory: Path) -> Decoder:
    return load_directory(directory, None, "float32", torch.device("cpu"))

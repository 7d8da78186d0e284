"""What the int8 formats cost in quality, beside those of llama.cpp and OpenVINO: perplexity of the default model, and the
error of its logits and of random models'. And what checkpoints of `./everbatch quantize` cost (checkpoints.py).

Every format is computed by the torch tier in float32, so that the format's own error shows and nothing else; `bfloat16` alone
computes in bfloat16. Embedding, norms, attention and KV stay as they are. The reference is the same checkpoint in float32.

    error        rms of the difference of logits / rms of logits
    divergence   mean over the positions of KL(reference || format), in nats
    perplexity   exp of the mean loss of a next token, on files that the default model was not trained on

A format is *no worse than q8_0* when on every model its error is at most q8_0's and TIE. Perplexity does not decide: an error
moves it up or down, and on one text by chance.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from backend.api.config.schema import Quantization
from backend.layers.linear import DenseLinear
from backend.models.config import read_model_config
from backend.models.decoder import Decoder
from backend.models.linears import WHOLE_ROW, LinearOptions
from backend.models.loader import DEFAULT_MODEL, load_directory
from benchmarks.peers.errors import Skipped
from benchmarks.peers.models import GGUF_WRITTEN, to_gguf
from benchmarks.quality.checkpoints import document_of, measure_checkpoints, table_of
from benchmarks.quality.perplexity import ROW_TOKENS, ROWS_AT_ONCE, Measured, compare, held_out_rows, row_logits
from kernels.common.quantize import dequantize, quantize_activations
from tools.make_random_model import make_random_model

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LLAMACPP = ROOT / ".run" / "bench" / "env-llamacpp" / "bin" / "python"
Q8_0_BLOCK = 32
Q8_0, LLAMACPP_Q8_0 = "q8_0 format, simulated", "q8_0, llama.cpp itself"
TIE = 1.02  # q8_0 and w8a8 in groups of 32 differ in the rounding of the scale alone: by up to 1.5 %, either way
console = Console()
Keeps = Callable[[Tensor], Tensor]  # values -> the values that a format keeps of them


class Format(NamedTuple):
    name: str
    bits: float  # bits of one weight, scales included; with one scale for each row, those of a long row
    linears: LinearOptions
    dtype: str = "float32"  # type of the computation


def q8_0(x: Tensor) -> Tensor:
    """[rows, k] -> what llama.cpp's q8_0 keeps of it, float32. ValueError when k is no multiple of 32.

    ggml-quants.c, `quantize_row_q8_0_ref`: for each block of 32, d = max |x| / 127, q = roundf(x / d), which rounds half away
    from zero; d is stored as float16 after q was found.
    """
    if x.shape[1] % Q8_0_BLOCK:
        raise ValueError(f"a row has {x.shape[1]} columns, q8_0 needs a multiple of {Q8_0_BLOCK}")
    blocks = x.float().unflatten(1, (-1, Q8_0_BLOCK))
    d = blocks.abs().amax(2, keepdim=True) / 127
    ratio = blocks / torch.where(d > 0, d, 1)
    q = ratio.sign() * (ratio.abs() + 0.5).floor()
    return (q * d.half().float()).flatten(1)


def asymmetric_rows(w: Tensor) -> Tensor:
    """[n, k] -> what OpenVINO's default int8 keeps of it (NNCF's INT8_ASYM), float32: 0..255 between least and greatest of
    each row, 0 among them, with a zero point that is rounded."""
    w = w.float()
    least, greatest = w.amin(1, keepdim=True).clamp(max=0), w.amax(1, keepdim=True).clamp(min=0)
    scale = (greatest - least) / 255
    scale = torch.where(scale > 0, scale, 1)
    zero = (-least / scale).round()
    return ((w / scale + zero).round().clamp(0, 255) - zero) * scale


def activations_in_groups(x: Tensor) -> Tensor:
    """[tokens, k] -> what int8 in groups of 32 keeps of it (OpenVINO's dynamic quantisation)."""
    return dequantize(*quantize_activations(x, 32), 32)


class ForeignLinear(DenseLinear):
    """A peer's product: what its format keeps of the weight times what it keeps of the activations."""

    def __init__(self, weight: Tensor, bias: Tensor | None, of_activations: Keeps) -> None:
        super().__init__(weight, bias)
        self._of_activations = of_activations

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(self._of_activations(x))


def foreign(of_weight: Keeps, of_activations: Keeps) -> LinearOptions:
    return LinearOptions(make=lambda weight, bias: ForeignLinear(of_weight(weight), bias, of_activations))


def formats() -> list[Format]:
    """The reference first, then ours, then the peers'."""
    kinds: tuple[Quantization, ...] = ("int8", "w8a8")
    found = [
        Format("float32", 32, LinearOptions(make=DenseLinear)),
        Format("bfloat16", 16, LinearOptions(), "bfloat16"),
    ]
    for kind in kinds:
        for group in (32, 64, 128, None):
            name = f"{kind}, {f'groups of {group}' if group else 'whole rows'}"
            found.append(Format(name, 8 + (32 / group if group else 0), LinearOptions(kind, group or WHOLE_ROW)))
    return [
        *found,
        Format("w8a8, rotated", 8 + 16 / 256, LinearOptions("w8a8")),
        Format("w4a8, two levels", 4.25 + 16 / 256, LinearOptions("w4a8")),
        Format("w4a8, groups of 32", 4.5, LinearOptions("w4a8", 32)),
        Format(Q8_0, 8.5, foreign(q8_0, q8_0)),
        Format("OpenVINO int8, simulated", 8, foreign(asymmetric_rows, lambda x: x)),
        Format("the same, dynamic groups of 32", 8, foreign(asymmetric_rows, activations_in_groups)),
    ]


def random_tokens(like: Tensor) -> Tensor:
    """Random rows of the default model's tokens: as many as `like` has, at most 8."""
    vocab_size = read_model_config(DEFAULT_MODEL).vocab_size
    return torch.randint(vocab_size, (min(8, len(like)), ROW_TOKENS), generator=torch.Generator().manual_seed(2))


def random_rows(model: Decoder) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(model.config.vocab_size, (2, ROW_TOKENS // 2), generator=generator)


def llamacpp_logits(directory: Path, rows: Tensor) -> Iterable[Tensor]:
    """llama.cpp's own logits with its own q8_0, embedding included. Raises Skipped with the reason if there are none."""
    if not LLAMACPP.exists():
        raise Skipped("llama.cpp is not installed here; ./everbatch bench peers installs it")
    with tempfile.TemporaryDirectory() as scratch:
        model, ids, logits = (str(Path(scratch) / name) for name in ("model.gguf", "rows.npy", "logits.npy"))
        np.save(ids, rows.numpy())
        arguments = [model, ids, logits, str(torch.get_num_threads()), "llamacpp"]
        for command in (
            to_gguf(directory, Path(model), *GGUF_WRITTEN["q8_0"]),
            [str(LLAMACPP), "-m", "benchmarks.peers.llamacpp_logits", *arguments],
        ):
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                last = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
                raise Skipped(f"{command[2]} of {directory.name} failed: {last}")
        return torch.from_numpy(np.load(logits)).split(ROWS_AT_ONCE)


def measure(
    directory: Path, rows: Callable[[Decoder], Tensor], is_text: bool, every: list[Format]
) -> dict[str, Measured]:
    """Every format on one checkpoint, and llama.cpp where it is installed."""
    load = lambda format: load_directory(directory, None, format.dtype, torch.device("cpu"), format.linears)
    reference = load(every[0])
    inputs = rows(reference)
    parts = inputs.split(ROWS_AT_ONCE)
    expected = [row_logits(reference, part) for part in parts]
    found = {}
    for format in track(every, directory.name, console=console, transient=True):
        model = load(format)
        found[format.name] = compare(expected, (row_logits(model, part) for part in parts), inputs, is_text)
    try:
        found[LLAMACPP_Q8_0] = compare(expected, llamacpp_logits(directory, inputs), inputs, is_text)
    except Skipped as reason:
        console.print(f"llama.cpp itself is skipped: {reason}")
    return found


def no_worse(results: dict[str, dict[str, Measured]], format: str) -> bool:
    """Whether the error is at most q8_0's on every model, or a tie."""
    return all(of[format].error <= TIE * of[Q8_0].error for of in results.values())


def is_ours(format: str) -> bool:
    return format.startswith(("int8", "w8a8"))  # of 8 bits


def table(results: dict[str, dict[str, Measured]], bits: dict[str, float]) -> Table:
    found = Table(title="quality of the formats (reference: float32)")
    found.add_column("format")
    for column in ("bits", "perplexity", *(f"{name}: error, KL" for name in results), "no worse than q8_0"):
        found.add_column(column, justify="right")
    for format, width in bits.items():
        measured = [of.get(format) for of in results.values()]
        perplexity = next((f"{m.perplexity:.4f}" for m in measured if m and m.perplexity is not None), "")
        verdict = ("yes" if no_worse(results, format) else "no") if is_ours(format) else ""
        cells = [f"{m.error:.5f}, {m.divergence:.2e}" if m else "" for m in measured]
        found.add_row(format, f"{width:g}", perplexity, *cells, verdict)
    return found


def run(tokens: int) -> None:
    """Measure every format; print a table and write the figures. `tokens`: of held-out text."""
    every = formats()
    text = held_out_rows(tokens)
    with tempfile.TemporaryDirectory() as scratch:
        tiny = dict(hidden_size=128, intermediate_size=352, num_attention_heads=8)  # q8_0 needs multiples of 32
        results = {
            "default": measure(DEFAULT_MODEL, lambda _: text, True, every),
            "tiny": measure(make_random_model(Path(scratch) / "tiny", **tiny), random_rows, False, every),
            "S": measure(make_random_model(Path(scratch) / "S", shape="S"), random_rows, False, every),
        }
    bits = {format.name: format.bits for format in every}
    if any(LLAMACPP_Q8_0 in of for of in results.values()):
        bits[LLAMACPP_Q8_0] = 8.5
    console.print(table(results, bits))
    winners = [name for name in bits if is_ours(name) and no_worse(results, name)]
    console.print(f"no worse than q8_0: {'; '.join(winners) or 'none'}")
    made, perplexities = measure_checkpoints(text, random_tokens(text), console)
    console.print(table_of(made, perplexities))
    document = {
        "held_out_tokens": text.numel(),
        "checkpoints": document_of(made, perplexities),
        "no_worse_than_q8_0": winners,
        "formats": [
            {"format": name, "bits": width} | {model: of[name]._asdict() for model, of in results.items() if name in of}
            for name, width in bits.items()
        ],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "quality.json").write_text(json.dumps(document, indent=1) + "\n")
    console.print("written: benchmarks/results/quality.json")

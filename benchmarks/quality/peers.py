"""The types that llama.cpp makes of a checkpoint, judged by its own logits: `bench quality --model DIR --peers llamacpp`.

It quantises a file of bfloat16 with its own quantiser, with and without an importance matrix: the mean squares of inputs that
the engine rounds by as well (backend/quant/importance.py). It chooses the type of each tensor; rows that are no multiple of 256,
which K types need, get Q5_0, Q5_1 or Q8_0.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from backend.api.checkpoint.gguf import read_header
from backend.models.loader import open_directory
from backend.quant.importance import measured, token_rows
from benchmarks.peers import commands, environments, models
from benchmarks.peers.engines import PEERS
from benchmarks.peers.errors import Skipped
from benchmarks.quality.plot import MATRIX
from deploy.progress import SteppedProgress

TYPES = ("q4_0", "iq4_nl", "q4_k_m", "q5_k_m", "q6_k")


class Peer(NamedTuple):
    """A type of llama.cpp's and its logits."""

    form: str
    bits: float  # of a weight of the decoder layers
    log_probs: Iterator[Tensor]  # of each row, [length, vocab]
    weights: str  # what llama.cpp holds the model as


def llamacpp(directory: Path, rows: Tensor, progress: SteppedProgress) -> Iterator[Peer]:
    """Yields the peer for each of TYPES, with and without a matrix; `progress` gets the reason where llama.cpp cannot make one.

    rows: int64 [rows, length], token ids.
    """
    engine = PEERS["llamacpp"]
    try:
        python = environments.python_of(engine, progress)
        floats = models.form_for(engine, python, models.of_directory(directory), "bf16", "bf16", progress)
    except Skipped as reason:
        progress.step(f"llama.cpp is skipped: {reason}")
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        np.savez(folder / "imatrix.npz", **_importance(directory))
        np.save(folder / "rows.npy", rows.numpy())
        for kind in TYPES:
            for matrix in ([], [str(folder / "imatrix.npz")]):
                form = f"llama.cpp {kind.upper()}{MATRIX if matrix else ''}"
                made, logits = folder / "made.gguf", folder / "logits.npy"
                words = [str(made), str(folder / "rows.npy"), str(logits), str(torch.get_num_threads()), "llamacpp"]
                try:
                    quantise = ["benchmarks.peers.quantize_gguf", str(floats), str(made), kind, *matrix]
                    commands.run([str(python), "-m", *quantise], progress, f"{directory.name}: {form}")
                    said = commands.run(
                        [str(python), "-m", "benchmarks.peers.llamacpp_logits", *words], progress, f"logits of {form}"
                    )
                except commands.CommandFailed as failure:
                    progress.step(f"{form} is skipped: {failure}")
                    continue
                found = np.load(logits, mmap_mode="r")
                yield Peer(form, layer_bits(made), (torch.tensor(row).log_softmax(1) for row in found), said[-1])


def layer_bits(file: Path) -> float:
    """Bits of a weight of the decoder layers of a GGUF file, scales included."""
    tensors = read_header(file).tensors
    layers = [each for name, each in tensors.items() if name.startswith("blk.") and len(each.shape) == 2]
    return 8 * sum(each.num_bytes for each in layers) / sum(each.shape[0] * each.shape[1] for each in layers)


def _importance(directory: Path) -> dict[str, np.ndarray]:
    checkpoint = open_directory(directory)
    rows = token_rows(directory, checkpoint.config.vocab_size)
    return {name: each.numpy() for name, each in measured(checkpoint.config, checkpoint.tensors, rows).items()}

"""What the quality benchmarks measure: logits of rows of text, compared with the reference's."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from backend.models.decoder import Decoder
from backend.models.loader import DEFAULT_MODEL
from backend.quant.calibration import forward_rows
from kernels.common.kv_format import PLAIN, KVFormat

# What tools/train_default_model.py held out (seed 0, CPython 3.11.7): 1 % of the characters.
HELD_OUT = (
    "turtledemo/lindenmayer.py",
    "unittest/__init__.py",
    "http/__init__.py",
    "distutils/command/bdist.py",
    "wsgiref/types.py",
    "distutils/archive_util.py",
    "aifc.py",
    "distutils/core.py",
    "importlib/resources/__init__.py",
    "fractions.py",
)
ROW_TOKENS = 512
ROWS_AT_ONCE = 4


class Measured(NamedTuple):
    """One format on one model."""

    error: float
    divergence: float
    perplexity: float | None  # perplexity of real text


@torch.inference_mode()
def row_logits(model: Decoder, rows: Tensor, kv: KVFormat = PLAIN) -> Tensor:
    """rows [rows, length] int64, each a text of its own -> logits [rows, length, vocab] float32."""
    hidden, _ = forward_rows(model, rows, kv)
    return model.logits(hidden).unflatten(0, rows.shape)


def held_out_rows(num_tokens: int) -> Tensor:
    """Text that the default model has not seen, in the tokens of its tokenizer: [rows, ROW_TOKENS] int64, from all of it."""
    library = Path(sysconfig.get_path("stdlib"))
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    ids: list[int] = []
    for path in (library / name for name in HELD_OUT):
        if path.is_file():  # some have left newer versions of Python
            ids += [*tokenizer.encode(path.read_text(encoding="utf-8")).ids, tokenizer.token_to_id("<|endoftext|>")]
    rows = torch.tensor(ids[: len(ids) // ROW_TOKENS * ROW_TOKENS]).view(-1, ROW_TOKENS)
    num_rows = min(num_tokens // ROW_TOKENS, len(rows))
    return rows[torch.arange(num_rows) * len(rows) // num_rows]


def compare(expected: Iterable[Tensor], measured: Iterable[Tensor], rows: Tensor, is_text: bool) -> Measured:
    """The reference's and a format's logits of `rows`, both ROWS_AT_ONCE at a time."""
    differences = squares = divergence = loss = 0.0
    for part, reference, logits in zip(rows.split(ROWS_AT_ONCE), expected, measured, strict=True):
        differences += (logits - reference).norm().item() ** 2
        squares += reference.norm().item() ** 2
        log_p, log_q = reference.log_softmax(2), logits.log_softmax(2)
        divergence += F.kl_div(log_q, log_p, reduction="sum", log_target=True).item()
        loss += F.nll_loss(log_q[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    num_targets = rows.shape[0] * (rows.shape[1] - 1)
    return Measured(
        error=math.sqrt(differences / squares),
        divergence=divergence / rows.numel(),
        perplexity=math.exp(loss / num_targets) if is_text else None,
    )

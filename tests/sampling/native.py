"""Rows of logits for the native sampling kernel, and its call without a Sampler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels import sampling as kernel
from kernels.cpu.sampling import FloatColumn, IntColumn, Mode, NativeSampling

MIN_TEMPERATURE = 1.2e-38
KINDS = ("normal", "zipf", "flat", "coarse", "masked", "lonely", "wide")


@dataclass
class Parameters:
    """Parameters of one draw. 0, 1 and 0 switch the filters off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    counter: int = 1

    @property
    def is_filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def logits_of(kind: str, vocab: int, generator: torch.Generator) -> Tensor:
    """Returns one row of logits [vocab] float32."""
    normal = torch.randn(vocab, generator=generator)
    match kind:
        case "normal":
            return normal * 2
        case "zipf":  # most of the mass in few tokens, as a language model has it
            return -1.3 * (torch.randperm(vocab, generator=generator) + 1.0).log() + 0.3 * normal
        case "flat":
            return torch.full((vocab,), 3.5)
        case "coarse":  # many equal ones
            return (normal * 2).round()
        case "masked":
            return normal.masked_fill_(torch.rand(vocab, generator=generator) < 0.9, -torch.inf).index_fill_(
                0, torch.randint(vocab, (1,), generator=generator), 0.5
            )
        case "lonely":  # one finite logit
            return torch.full((vocab,), -torch.inf).index_fill_(0, torch.tensor([vocab // 2]), -7.0)
        case "wide":
            return normal * 1e30
    raise ValueError(f"kind is {kind!r}, allowed are {KINDS}")


def draw(native: NativeSampling, logits: Tensor, rows: list[Parameters]) -> list[int]:
    """Tokens for each row of logits [rows, vocab], every one in a slot of its own."""
    vocab = logits.shape[1]
    floats = torch.zeros(len(rows), len(FloatColumn), dtype=torch.float64)
    ints = torch.zeros(len(rows), len(IntColumn), dtype=torch.int64)
    columns = [FloatColumn.TEMPERATURE, FloatColumn.TOP_P, FloatColumn.MIN_P]
    floats[:, columns] = torch.tensor([(row.temperature, row.top_p, row.min_p) for row in rows], dtype=torch.float64)
    columns = [IntColumn.TOP_K, IntColumn.SEED, IntColumn.MODE]
    ints[:, columns] = torch.tensor([(row.top_k or vocab, row.seed, Mode.FILTERED * row.is_filtered) for row in rows])
    index = range(len(rows))
    token_ids = torch.zeros(len(rows), 1, dtype=torch.int64)
    samples = np.array([index, index, [row.counter for row in rows]])
    return native.sample(logits, samples, floats, ints, token_ids)[0].tolist()


def draw_by_reference(weights: Tensor, row: Parameters) -> int:
    """The reference's token for integer weights [vocab]."""
    u = kernel.uniform(torch.tensor([row.seed]), torch.tensor([row.counter]))
    if not row.is_filtered:
        return int(kernel.draw(weights[None], u))
    top_k = row.top_k or len(weights)
    filters = (torch.tensor([top_k]), *torch.tensor([[row.top_p], [row.min_p]], dtype=torch.float64))
    return int(kernel.draw_filtered(weights[None], u, *filters, k_max=top_k))

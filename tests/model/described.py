"""Runs decoders of small descriptions over two texts: whole, in chunks, and token by token."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from backend.architectures.description import ModelConfig
from backend.layers.linear import make_torch_linear
from backend.models.decoder import Decoder, build_decoder
from backend.models.linears import LinearOptions
from kernels.common.kv_format import PlainPool
from kernels.paged_attention import AttentionRows, plan_attention

TEXTS = [[int(token) for token in np.random.default_rng(row).integers(0, 50, size)] for row, size in enumerate((11, 7))]
# The tokens that each text runs in a step: whole texts, chunks, and one by one.
STEPS = [[(11, 7)], [(5, 2), (4, 1), (1, 1), (1, 3)], [(1, 1)] * 7 + [(4, 0)]]


class Run:
    """The texts on their way through a decoder."""

    def __init__(self, model: Decoder, block_size: int = 4) -> None:
        config, dtype = model.config, model.dtype
        self._model, self._block_size = model, block_size
        layout = PlainPool(block_size, config.num_kv_heads, config.head_dim, dtype)
        self._tables = np.arange(10, dtype=np.int32)[::-1].reshape(2, 5).copy()
        self._pools = [layout.view(torch.full((10, *layout.block_shape), torch.nan).to(dtype)) for _ in config.layers]
        self._done = np.zeros(2, dtype=np.int64)

    def step(self, counts: tuple[int, ...]) -> list[Tensor]:
        """Run the next tokens of each text; returns their logits."""
        size = self._block_size
        rows = [row for row, count in enumerate(counts) if count]
        starts = np.concatenate(([0], np.cumsum([counts[row] for row in rows])))
        positions = [np.arange(self._done[row], self._done[row] + counts[row]) for row in rows]
        cells = [self._tables[row][p // size] * size + p % size for row, p in zip(rows, positions)]
        tokens = [TEXTS[row][position] for row, of_row in zip(rows, positions) for position in of_row]
        self._done += counts
        where = AttentionRows(starts, self._done[rows], self._tables[rows])
        config, cpu = self._model.config, torch.device("cpu")
        plans = plan_attention(where, size, config.windows, config.head_dim, self._model.dtype, cpu)
        flat = (torch.from_numpy(np.concatenate(each).astype(np.int64)) for each in (positions, cells))
        hidden = self._model.forward(torch.tensor(tokens), *flat, plans, self._pools)
        parts = self._model.logits(hidden).split([counts[row] for row in rows])
        return [parts[rows.index(row)] if row in rows else parts[0][:0] for row in range(len(counts))]


def logits_of(model: Decoder, steps: list[tuple[int, ...]], block_size: int = 4) -> list[Tensor]:
    """Of both texts, [tokens, vocab]."""
    run = Run(model, block_size)
    of_steps = [run.step(counts) for counts in steps]
    return [torch.cat([of_step[row] for of_step in of_steps]) for row in range(len(TEXTS))]


def built(config: ModelConfig, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Decoder:
    options = LinearOptions(make=make_torch_linear)
    return build_decoder(config, tensors, config.max_position, dtype, torch.device("cpu"), options)

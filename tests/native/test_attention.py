"""Attention alone: against a plain formula, and the same bits whatever ran beside a sequence and however it was cut."""

from __future__ import annotations

from ctypes import CDLL
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.common.kv_format import KV_FORMATS
from kernels.cpu.attention import NativeAttention, Scratch, StepRows
from kernels.cpu.decoder import UnknownCell

HEADS, KV_HEADS, HEAD_DIM, BLOCK, MAX_BLOCKS, SLOTS = 6, 2, 20, 32, 40, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": dict(window=50),
    "window and sink tokens": dict(window=40, sink_tokens=5),
    "scale": dict(scale=0.7),
    "softcap": dict(softcap=1.5),
    "sinks": dict(sinks=torch.linspace(-2, 3, HEADS)),
    "all": dict(window=70, scale=0.4, softcap=3.0, sinks=torch.linspace(-2, 3, HEADS)),
}


class Tokens(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor

    def part(self, start: int, stop: int) -> Tokens:
        return Tokens(*(tensor[start:stop] for tensor in self))


def random_tokens(count: int, dtype: torch.dtype, seed: int = 0) -> Tokens:
    rng = torch.Generator().manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return Tokens(*(torch.randn(count, n, HEAD_DIM, generator=rng).to(dtype) for n in heads))


class Layer:
    """A layer with a pool of its own, whose blocks are handed out in reverse."""

    def __init__(self, library: CDLL, dtype: torch.dtype, kv: str = "auto", **options: Any) -> None:
        self.attention = NativeAttention(
            library, Scratch(library), HEADS, KV_HEADS, HEAD_DIM, dtype, BLOCK, KV_FORMATS[kv], **options
        )
        self.pool = torch.full((SLOTS * MAX_BLOCKS, self.attention.kv_block_bytes), 255, dtype=torch.uint8)
        self.tables = np.arange(SLOTS * MAX_BLOCKS, dtype=np.int32)[::-1].reshape(SLOTS, MAX_BLOCKS).copy()
        self.computed = [0] * SLOTS

    def run(self, parts: list[tuple[int, Tokens]]) -> list[Tensor]:
        """Run the tokens of these slots as one batch."""
        rows = np.array([(slot, self.computed[slot], len(tokens.q), 0) for slot, tokens in parts], dtype=np.int32)
        q, k, v = (torch.cat(each) for each in zip(*(tokens for _, tokens in parts), strict=True))
        out = self.attend(q, k, v, rows)
        for slot, tokens in parts:
            self.computed[slot] += len(tokens.q)
        return list(out.split([len(tokens.q) for _, tokens in parts]))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows: NDArray[np.int32]) -> Tensor:
        return self.attention(q, k, v, StepRows(rows, self.tables, [self.pool], torch.get_num_threads()), 0)


def exact(
    tokens: Tokens,
    window: int | None = None,
    sink_tokens: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    q, k, v = (tensor.double().transpose(0, 1) for tensor in tokens)
    k, v = (tensor.repeat_interleave(HEADS // KV_HEADS, 0) for tensor in (k, v))
    scores = q @ k.transpose(1, 2) * (HEAD_DIM**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    at = torch.arange(len(tokens.q))
    hidden = at[:, None] < at
    if window is not None:
        hidden |= (at <= at[:, None] - window) & (at >= sink_tokens)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(at), 1)), 2)
    weights = scores.softmax(2)[:, :, : len(at)]
    return (weights @ v).transpose(0, 1)


@pytest.mark.parametrize("name", OPTIONS)
def test_results_are_those_of_the_formula(kernels: CDLL, name: str) -> None:
    tokens = random_tokens(300, torch.float32)
    layer = Layer(kernels, torch.float32, **OPTIONS[name])
    out = torch.cat([layer.run([(1, tokens.part(*ends))])[0] for ends in ((0, 270), (270, 299), (299, 300))])
    assert (out - exact(tokens, **OPTIONS[name])).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["plain", "all"])
def test_splits_of_one_token_s_keys_are_merged(best_kernels: CDLL, name: str) -> None:
    tokens = random_tokens(1240, torch.float32)
    layer = Layer(best_kernels, torch.float32, **OPTIONS[name])
    layer.run([(0, tokens.part(0, 1239))])
    (out,) = layer.run([(0, tokens.part(1239, 1240))])
    assert (out - exact(tokens, **OPTIONS[name])[-1:]).abs().max() <= 1e-5


@pytest.mark.parametrize("kv, most", [("auto", 0.02), ("int8", 0.03), ("k8v4", 0.3), ("int4", 0.3)])
def test_bfloat16_and_quantised_kv_are_near(kernels: CDLL, kv: str, most: float) -> None:
    tokens = random_tokens(200, torch.bfloat16)
    (out,) = Layer(kernels, torch.bfloat16, kv, **OPTIONS["all"]).run([(0, tokens)])
    assert out.dtype == torch.bfloat16
    assert (out - exact(tokens, **OPTIONS["all"])).abs().max() <= most


@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sequence_has_the_same_bits_alone_and_in_chunks_beside_others(
    kernels: CDLL, dtype: torch.dtype, kv: str
) -> None:
    tokens, others = random_tokens(150, dtype), random_tokens(150, dtype, seed=1)
    (alone,) = Layer(kernels, dtype, kv, **OPTIONS["all"]).run([(2, tokens)])
    layer, parts = Layer(kernels, dtype, kv, **OPTIONS["all"]), []
    for start, stop in ((0, 33), (33, 34), (34, 130), (130, 150)):
        beside = [(0, others.part(start, start + 1)), (3, tokens.part(start, stop)), (1, others.part(0, 40))]
        parts.append(layer.run(beside)[1])
    assert torch.equal(torch.cat(parts), alone)


@pytest.mark.parametrize("row", [(1, 0, 3, 0), (0, -1, 3, 0), (0, MAX_BLOCKS * BLOCK - 2, 3, 0)])
def test_a_row_without_blocks_is_refused_and_nothing_is_written(best_kernels: CDLL, row: tuple[int, ...]) -> None:
    layer, tokens = Layer(best_kernels, torch.float32), random_tokens(5, torch.float32)
    layer.tables[1] = -1
    before = layer.pool.clone()
    rows = np.array([(2, 0, 2, 0), row], dtype=np.int32)
    with pytest.raises(UnknownCell) as error:
        layer.attend(*tokens, rows)
    assert error.value.row == 1 and torch.equal(layer.pool, before)


def test_blocks_behind_the_window_may_be_gone(best_kernels: CDLL) -> None:
    tokens = random_tokens(200, torch.float32)
    layer = Layer(best_kernels, torch.float32, window=40)
    layer.run([(0, tokens.part(0, 199))])
    layer.tables[0, : (199 - 39) // BLOCK] = -1
    (out,) = layer.run([(0, tokens.part(199, 200))])
    assert (out - exact(tokens, window=40)[-1:]).abs().max() <= 1e-5


def test_tensors_of_other_shapes_and_types_are_refused(best_kernels: CDLL) -> None:
    layer, tokens = Layer(best_kernels, torch.float32), random_tokens(5, torch.float32)
    rows = np.array([(0, 0, 5, 0)], dtype=np.int32)
    for bad in (tokens._replace(k=tokens.q), tokens._replace(v=tokens.v.bfloat16()), tokens.part(0, 4)):
        with pytest.raises(ValueError, match="the rows need torch.float32"):
            layer.attend(*bad, rows)
    layer.pool = layer.pool[:, :100]
    with pytest.raises(ValueError, match="a block of the pool has 100 bytes, it needs"):
        layer.attend(*tokens, rows)


@pytest.mark.parametrize("changes", [dict(scale=0.0), dict(dtype=torch.float16), dict(heads=5), dict(block_size=16)])
def test_what_the_kernels_cannot_take_is_refused(best_kernels: CDLL, changes: dict[str, Any]) -> None:
    sizes = dict(heads=6, kv_heads=2, head_dim=8, dtype=torch.float32, block_size=32) | changes
    with pytest.raises(ValueError):
        NativeAttention(best_kernels, Scratch(best_kernels), **sizes)

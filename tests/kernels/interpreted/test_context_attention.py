"""The Triton kernel of attention of context rows against its reference."""

from __future__ import annotations

import itertools
import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels import context_attention as kernel
from kernels.common.attention_tiles import AttentionTiles
from kernels.common.kv_format import KV_FORMATS, KVPool, QuantizedPool, plain_pool, write_cells
from kernels.context_attention import Case
from tests.kernels.numbers import assert_near, random_tensor

SMALL = AttentionTiles(16, 16, 4, 2)  # many tiles out of few tokens
SEEN_BY_ALL = [(None, 0), (5, 0), (16, 0), (37, 0), (5, 16), (5, 1), (16, 20), (37, 3)]  # (window, sink tokens)
# Each window once, and each format several times; EVERBATCH_SWEEPS=1: every window in every format.
SWEEP = os.environ.get("EVERBATCH_SWEEPS") == "1"
WINDOWS_AND_FORMATS = [
    (*seen, kv)
    for n, seen in enumerate(SEEN_BY_ALL)
    for m, kv in enumerate(KV_FORMATS)
    if SWEEP or m == n % len(KV_FORMATS)
]


class Inputs(NamedTuple):
    q: Tensor
    pool: KVPool
    starts: Tensor
    lengths: Tensor
    tables: Tensor
    scale: float
    window: int | None
    sinks: Tensor | None
    sink_tokens: int
    softcap: float


def made(case: Case) -> Inputs:
    """Makes inputs. Whatever no query may see is NaN, and its blocks are -1. Every tensor is a part of a larger one."""
    queries, lengths = (torch.tensor(x, dtype=torch.int32) for x in zip(*case.rows))
    starts = torch.zeros(len(queries) + 1, dtype=torch.int32)
    starts[1:] = queries.cumsum(0)
    heads = case.kv_heads * case.group
    qkv = random_tensor(int(starts[-1]) + 3, heads + 2, case.head_dim, dtype=case.dtype)

    most_blocks = -(-int(lengths.max()) // case.block_size)
    num_blocks = len(lengths) * most_blocks + 1
    tables = torch.full((len(lengths), most_blocks + 2), -1, dtype=torch.int32)
    free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).int()
    if case.kv == "auto":
        shape = (num_blocks, 2, case.block_size, 2, case.kv_heads, case.head_dim)
        pool = plain_pool(torch.full(shape, torch.nan, dtype=case.dtype)[:, 1])
    else:
        layout = QuantizedPool(case.block_size, case.kv_heads, case.head_dim, KV_FORMATS[case.kv])
        pool = layout.view(torch.full((num_blocks, 2, layout.block_bytes), 255, dtype=torch.uint8)[:, 1])
    for row, (num_queries, length) in enumerate(case.rows):
        first = 0 if case.window is None else max(0, length - num_queries + 1 - case.window)
        seen = torch.tensor([key for key in range(length) if key >= first or key < case.sink_tokens], dtype=torch.int64)
        blocks = (seen // case.block_size).unique()
        tables[row, blocks] = free[row * most_blocks + blocks]
        at = tables[row, seen // case.block_size].long(), seen % case.block_size
        kv = random_tensor(len(seen), 2, case.kv_heads, case.head_dim, seed=row) + 0.3
        write_cells(pool, *at, *kv.unbind(1))
    sinks = random_tensor(heads) if case.sinks else None
    rest = case.window, sinks, case.sink_tokens, case.softcap
    return Inputs(qkv[:, :heads], pool, starts, lengths, tables[:, :-1], case.head_dim**-0.5, *rest)


def use_tiles(monkeypatch: pytest.MonkeyPatch, tiles: AttentionTiles) -> None:
    monkeypatch.setattr(kernel, "tiles_for", lambda *_: tiles)


@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_tokens_attend_what_they_may_see(case: Case) -> None:
    inputs = made(case)
    tokens = int(inputs.starts[-1])
    out, expected = kernel.context_attention(*inputs)[:tokens], kernel.reference(*inputs)[:tokens]
    assert_near(out, expected)


@pytest.mark.parametrize("window, sink_tokens, kv", WINDOWS_AND_FORMATS)
def test_rows_have_as_many_tiles_as_they_need(
    window: int | None, sink_tokens: int, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tiles(monkeypatch, SMALL)
    rows = [(19, 19), (1, 50), (0, 0), (8, 40), (16, 33)]
    case = Case(rows, 1, 3, block_size=32, kv=kv, window=window, sinks=True, sink_tokens=sink_tokens)
    inputs = made(case)
    out, expected = kernel.context_attention(*inputs)[:44], kernel.reference(*inputs)[:44]
    assert_near(out, expected)


@pytest.mark.parametrize("window, sink_tokens", [(None, 0), (40, 0), (40, 7)])
@pytest.mark.parametrize("tiles", [None, AttentionTiles(64, 32, 4, 2)], ids=["own tiles", "small tiles"])
def test_a_token_gets_the_same_in_every_chunk(
    tiles: AttentionTiles | None, window: int | None, sink_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tiles:
        use_tiles(monkeypatch, tiles)
    length = 150
    whole = made(Case([(length, length)], 1, 4, window=None))._replace(window=window, sink_tokens=sink_tokens)
    expected = kernel.context_attention(*whole)[:length]
    stops = [1, 2, 37, 101, length]
    for start, stop in zip([0, *stops], stops):
        # Not alone in its batch: the row before it has three queries.
        chunk = whole._replace(
            q=torch.cat((whole.q[:3], whole.q[start:stop])),
            starts=torch.tensor([0, 3, 3 + stop - start], dtype=torch.int32),
            lengths=torch.tensor([20, stop], dtype=torch.int32),
            tables=whole.tables.repeat(2, 1),
        )
        assert_near(kernel.context_attention(*chunk)[3:], expected[start:stop], factor=0.1)


def test_a_sink_of_minus_infinity_is_none() -> None:
    inputs = made(Case([(5, 20), (3, 0)], 1, 4, sinks=True))
    none = torch.full_like(inputs.sinks, -torch.inf)
    without = kernel.context_attention(*inputs._replace(sinks=None))
    assert torch.equal(kernel.context_attention(*inputs._replace(sinks=none))[:8], without[:8])
    assert not without[5:8].any()


def test_batches_of_few_queries_a_row_have_small_tiles_with_the_same_keys() -> None:
    for shape in itertools.product((64, 128, 256), (False, True), (80, 90)):
        head_dim, is_quantised, architecture = shape
        few, many = (kernel.tiles_for(head_dim, is_quantised, 4, tokens, 8, architecture) for tokens in (16, 2048))
        assert few.block_m < many.block_m and few.block_n == many.block_n

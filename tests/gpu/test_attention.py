"""Attention and the KV pool on the GPU, against their references, in the types that serve."""

from __future__ import annotations

import torch

from kernels import context_attention, decode_attention, kv_append
from kernels.common.kv_format import KV_FORMATS, unpack
from tests.gpu.harness import (
    DEVICE,
    HALVES,
    assert_near,
    each,
    ints,
    make_pool,
    make_tables,
    pytestmark,  # noqa: F401
    random,
)

CONTEXT_CASES = [case for case in context_attention.CASES if case.dtype is torch.float32]


@each("dtype", HALVES)
@each("kv", KV_FORMATS)
@each("case", decode_attention.CASES)
def test_decode_attention(
    case: tuple[int, int, int, int, tuple[int, ...], int | None, int], kv: str, dtype: torch.dtype
) -> None:
    heads, kv_heads, head_dim, block_size, lengths, window, sink_tokens = case
    width = -(-max(lengths) // block_size)
    pool = make_pool(len(lengths) * width, block_size, kv_heads, head_dim, kv, dtype)
    q = random(len(lengths), heads, head_dim, dtype=dtype)
    given = (q, pool, ints(lengths), make_tables(len(lengths), width), head_dim**-0.5)
    seen = dict(window=window, sinks=random(heads, seed=1), sink_tokens=sink_tokens)
    for split_tokens, softcap in ((128, 0.0), (decode_attention.SPLIT_TOKENS, 0.0), (128, 0.8)):
        measured = decode_attention.decode_attention(*given, split_tokens=split_tokens, softcap=softcap, **seen)
        assert_near(measured, decode_attention.reference(*given, softcap=softcap, **seen))


@each("dtype", HALVES)
@each("case", CONTEXT_CASES)
def test_context_attention(case: context_attention.Case, dtype: torch.dtype) -> None:
    queries, lengths = zip(*case.rows)
    starts = [0]
    for count in queries:
        starts.append(starts[-1] + count)
    width = -(-max(lengths) // case.block_size)
    pool = make_pool(len(lengths) * width, case.block_size, case.kv_heads, case.head_dim, case.kv, dtype)
    heads = case.kv_heads * case.group
    q = random(starts[-1], heads, case.head_dim, dtype=dtype)
    sinks = random(heads, seed=1) if case.sinks else None
    tables = make_tables(len(lengths), width)
    rest = case.window, sinks, case.sink_tokens, case.softcap
    given = (q, pool, ints(starts), ints(lengths), tables, case.head_dim**-0.5, *rest)
    assert_near(context_attention.context_attention(*given), context_attention.reference(*given))


@each("kv", KV_FORMATS)
def test_a_row_is_the_same_bit_for_bit_alone_and_among_others(kv: str) -> None:
    dtype, lengths = torch.bfloat16, (1200, 100, 0, 513)
    pool = make_pool(4 * 75, 16, 2, 128, kv, dtype)
    q, tables = random(4, 8, 128, dtype=dtype), make_tables(4, 75)
    together = decode_attention.decode_attention(q, pool, ints(lengths), tables, 0.1)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        narrow = tables[one, : max(1, -(-length // 16))].contiguous()
        alone = decode_attention.decode_attention(q[one], pool, ints([length]), narrow, 0.1)
        assert torch.equal(alone[0], together[row])


@each("dtype", HALVES)
@each("kv", KV_FORMATS)
@each("case", kv_append.CASES)
def test_kv_append(case: tuple[int, ...], kv: str, dtype: torch.dtype) -> None:
    tokens, heads, kv_heads, head_dim, block_size = case
    blocks = tokens // block_size + 2
    qkv = random(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    angles, positions = random(50, head_dim // 2), torch.arange(tokens, device=DEVICE) * 7 % 50
    order = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(1))
    cells = order[:tokens].to(DEVICE)
    norms = [1 + 0.1 * random(head_dim, dtype=dtype, seed=seed) for seed in (1, 2)]
    written, expected = (make_pool(blocks, block_size, kv_heads, head_dim, kv, dtype) for _ in range(2))
    q = kv_append.kv_append(qkv, positions, angles.cos(), angles.sin(), cells, written, *norms)
    expected_q = kv_append.reference(qkv, positions, angles.cos(), angles.sin(), cells, expected, *norms)
    assert_near(q, expected_q)
    for (data, bits), (expected_data, _) in zip(written.sides, expected.sides, strict=True):
        if kv == "auto":
            assert_near(data, expected_data)
            continue
        difference = (unpack(data, bits).int() - unpack(expected_data, bits).int()).abs()
        assert difference.max() <= 1 and (difference > 0).float().mean() < 0.01  # a tie may fall either way
    if written.params is not None:
        assert_near(written.params, expected.params)


@each("kv", KV_FORMATS)
@each("rope", kv_append.ROPES)
def test_kv_append_rotates_some_dimensions_in_pairs_of_either_layout(rope: tuple[int, bool], kv: str) -> None:
    rotary_dim, interleaved = rope
    qkv, angles = random(7, (9 + 2 * 3) * 96, dtype=torch.bfloat16), random(50, rotary_dim // 2)
    tables = (angles.cos(), angles.sin()) if rotary_dim else (None, None)
    positions, cells = (torch.arange(7, device=DEVICE) * step for step in (7, 2))
    norms = [1 + 0.1 * random(96, dtype=torch.bfloat16, seed=seed) for seed in (1, 2)]
    written, expected = (make_pool(1, 16, 3, 96, kv, torch.bfloat16) for _ in range(2))
    rest = (*norms, 1e-6, interleaved, 1 + random(50) ** 2)
    q = kv_append.kv_append(qkv, positions, *tables, cells, written, *rest)
    assert_near(q, kv_append.reference(qkv, positions, *tables, cells, expected, *rest))
    if written.params is None:
        assert_near(written.keys, expected.keys)
        assert_near(written.values, expected.values)
    else:
        assert_near(written.params, expected.params)


def test_a_token_of_cell_minus_one_writes_nothing() -> None:
    pool, angles = make_pool(2, 16, 2, 64, "auto", torch.bfloat16), random(50, 32)
    before = pool.keys.clone(), pool.values.clone()
    qkv, cells = random(3, 8 * 64, dtype=torch.bfloat16), ints([-1, 5, -1], torch.int64)
    kv_append.kv_append(qkv, ints([0, 1, 2], torch.int64), angles.cos(), angles.sin(), cells, pool)
    for side, old in zip(pool[:2], before, strict=True):
        assert (side != old).flatten(2).any(2).nonzero().tolist() == [[0, 5]]

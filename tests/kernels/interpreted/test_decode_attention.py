"""Decode attention's Triton kernels against their reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import decode_attention as kernel
from kernels.common.kv_format import (
    KV_FORMATS,
    KVPool,
    QuantizedPool,
    floats_of_int4,
    floats_of_int8,
    plain_pool,
    unpack,
    unpacking,
    write_cells,
)
from kernels.common.triton_runtime import jit, tl
from tests.kernels.numbers import DTYPES, assert_near, random_tensor

SPLIT = 128  # few tokens, so that short rows have several splits


def made(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    lengths: tuple[int, ...],
    kv: str,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    sink_tokens: int = 0,
) -> tuple[Tensor, KVPool, Tensor, Tensor, float]:
    """Returns q, pool, lengths, tables, scale; what no query may see is NaN."""
    width = -(-max(lengths) // block_size)
    num_blocks = len(lengths) * width + 1
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(width))[: len(lengths) * width]
    tables = order.view(len(lengths), width).int()
    tokens = random_tensor(num_blocks, block_size, 2, kv_heads, head_dim, dtype=dtype) * 2 + 0.5
    pool = plain_pool(tokens)
    if kv != "auto":
        layout = QuantizedPool(block_size, kv_heads, head_dim, KV_FORMATS[kv])
        pool = layout.view(torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8))
        cells = torch.arange(num_blocks * block_size)
        write_cells(pool, cells // block_size, cells % block_size, *tokens.flatten(0, 1).unbind(1))
    unseen = torch.ones(num_blocks, block_size, dtype=torch.bool)
    for table, length in zip(tables.long(), lengths, strict=True):
        position = torch.arange(length)
        position = position[(position >= length - (window or length)) | (position < sink_tokens)]
        unseen[table[position // block_size], position % block_size] = False
    (tokens if pool.params is None else pool.params)[unseen] = torch.nan
    q = random_tensor(len(lengths), heads, head_dim, dtype=dtype, seed=1)
    return q, pool, torch.tensor(lengths, dtype=torch.int32), tables, head_dim**-0.5


@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("case", kernel.CASES)
@pytest.mark.parametrize("split_tokens", [SPLIT, kernel.SPLIT_TOKENS])
def test_every_pool_gives_the_reference_and_unseen_nan_does_not_matter(
    case: tuple[int, int, int, int, tuple[int, ...], int | None, int], kv: str, split_tokens: int
) -> None:
    *shape, window, sink_tokens = case
    given = made(*shape, kv, window=window, sink_tokens=sink_tokens)
    seen = dict(window=window, sinks=random_tensor(shape[0], seed=2), sink_tokens=sink_tokens)
    measured = kernel.decode_attention(*given, split_tokens=split_tokens, **seen)
    assert_near(measured, kernel.reference(*given, **seen))
    assert not measured[given[2] == 0].any()


@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("case", kernel.CASES[:2])
def test_scores_are_capped(case: tuple[int, int, int, int, tuple[int, ...], int | None, int], kv: str) -> None:
    *shape, window, _ = case
    given = made(*shape, kv, window=window)
    capped = dict(window=window, sinks=random_tensor(shape[0], seed=2), softcap=0.8)
    measured = kernel.decode_attention(*given, split_tokens=SPLIT, **capped)
    assert_near(measured, kernel.reference(*given, **capped))
    assert (
        measured - kernel.decode_attention(*given, split_tokens=SPLIT, **capped | {"softcap": 0.0})
    ).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv", KV_FORMATS)
def test_16_bit_queries_without_sinks(dtype: torch.dtype, kv: str) -> None:
    q, *rest = made(4, 2, 32, 16, (150, 0), kv, dtype)
    rest[1] = rest[1].long()
    assert_near(kernel.decode_attention(q, *rest, split_tokens=SPLIT), kernel.reference(q.float(), *rest))


@pytest.mark.parametrize("kv", ["auto", "int4", "k8v4"])
def test_a_row_is_the_same_bit_for_bit_alone_and_among_others(kv: str) -> None:
    q, pool, lengths, tables, scale = made(4, 2, 32, 16, (300, 100, 0, 130), kv)
    together = kernel.decode_attention(q, pool, lengths, tables, scale, split_tokens=SPLIT)
    for row, length in enumerate(lengths.tolist()):
        one = slice(row, row + 1)
        narrow = tables[one, : max(1, -(-length // 16))].contiguous()
        alone = kernel.decode_attention(q[one], pool, lengths[one], narrow, scale, split_tokens=SPLIT)
        assert torch.equal(alone[0], together[row])


def test_a_head_dim_that_is_no_power_of_two_is_refused() -> None:
    given = made(2, 1, 48, 16, (5,), "auto")
    with pytest.raises(ValueError, match="power of two"):
        kernel.decode_attention(*given)


@jit
def _floats_kernel(data: tl.tensor, out: tl.tensor, like: tl.tensor, BITS: tl.constexpr, ASM: tl.constexpr) -> None:
    i = tl.arange(0, 256)
    packed = tl.load(data + i)
    if BITS == 4:
        low, high = floats_of_int4(packed, like.dtype.element_ty, ASM)
        tl.store(out + i, low.to(tl.float32))
        tl.store(out + 256 + i, high.to(tl.float32))
    else:
        tl.store(out + i, floats_of_int8(packed, like.dtype.element_ty, ASM).to(tl.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_every_byte_becomes_its_numbers_and_the_bias_that_is_compiled(bits: int, dtype: torch.dtype) -> None:
    data = torch.arange(256).to(torch.uint8)
    expected = unpack(data, bits).float() + unpacking(dtype, bits, compiled=True).bias
    out = torch.empty(len(expected))
    _floats_kernel[(1,)](data, out, torch.empty(1, dtype=dtype), BITS=bits, ASM=unpacking(dtype, bits).asm)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("group", [1, 16, 32])
def test_few_and_many_heads_of_a_kv_head(group: int, kv: str) -> None:
    given = made(group, 1, 64, 64, (45, 96), kv)
    assert_near(kernel.decode_attention(*given), kernel.reference(*given))


def test_tiles_that_are_seen_as_a_whole_begin_and_end_where_the_window_says() -> None:
    for window in (31, 32, 65):
        given = made(2, 1, 32, 16, (31, 32, 33, 64, 97), "int4", window=window)
        assert_near(kernel.decode_attention(*given, window=window), kernel.reference(*given, window=window))


@pytest.mark.parametrize("kv", ["int8", "int4", "k8v4"])
def test_blocks_beyond_the_first_2_gib(kv: str) -> None:
    q, pool, *rest = made(2, 1, 32, 16, (30, 17), kv)
    layout = QuantizedPool(16, 1, 32, KV_FORMATS[kv])
    stride = 2**29 + 64
    blocks = len(pool.keys)
    memory = torch.empty((blocks - 1) * stride + layout.block_bytes, dtype=torch.uint8)  # most of it is never touched
    far = layout.view(memory.as_strided((blocks, layout.block_bytes), (stride, 1)))
    for to, of in zip(far[:3], pool[:3], strict=True):
        to.copy_(of)
    assert blocks * stride > 2**31
    assert torch.equal(kernel.decode_attention(q, far, *rest), kernel.decode_attention(q, pool, *rest))

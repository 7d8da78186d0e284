"""Decode attention's Triton kernels against their reference."""

from __future__ import annotations

import pytest
import torch

from kernels import decode_attention as kernel
from kernels.kv_format import QuantizedPool, pack, quantize_rows
from tests.kernels.numbers import assert_near, random_tensor

SPLIT = 128  # so that short rows have several


def made(heads, kv_heads, head_dim, block_size, lengths, bits, dtype=torch.float32):
    """-> q, pool, lengths, tables, scale, layout; blocks that no table names hold NaN, as does what follows a row's last key."""
    width = -(-max(lengths) // block_size)
    num_blocks = len(lengths) * width + 1
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(width))[: len(lengths) * width]
    tables = order.view(len(lengths), width).int()
    tokens = random_tensor(num_blocks, block_size, 2, kv_heads, head_dim, dtype=dtype) * 2 + 0.5
    layout = None if bits == 16 else QuantizedPool(block_size, kv_heads, head_dim, bits)
    if layout is None:
        pool, marked = tokens.clone(), torch.nan
    else:
        pool = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8)
        rows = tokens.permute(0, 3, 2, 1, 4)
        n, scale, least = quantize_rows(rows.flatten(0, 3), bits)
        layout.data(pool).copy_(pack(n, bits).view(layout.data(pool).shape))
        layout.params(pool).copy_(torch.stack((scale, least), 1).view(layout.params(pool).shape))
        marked = torch.nan
    unseen = torch.ones(num_blocks, block_size, dtype=torch.bool)
    for table, length in zip(tables.long(), lengths, strict=True):
        position = torch.arange(length)
        unseen[table[position // block_size], position % block_size] = False
    target = pool if layout is None else layout.params(pool).permute(0, 3, 1, 2, 4)
    target[unseen] = marked
    q = random_tensor(len(lengths), heads, head_dim, dtype=dtype, seed=1)
    return q, pool, torch.tensor(lengths, dtype=torch.int32), tables, head_dim**-0.5, layout


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("case", kernel.CASES)
@pytest.mark.parametrize("split_tokens", [SPLIT, kernel.SPLIT_TOKENS])
def test_every_pool_gives_the_reference_and_unseen_nan_does_not_matter(case, bits, split_tokens):
    *shape, window = case
    given = made(*shape, bits)
    sinks = random_tensor(shape[0], seed=2)
    measured = kernel.decode_attention(*given, window=window, sinks=sinks, split_tokens=split_tokens)
    assert_near(measured, kernel.reference(*given, window=window, sinks=sinks))
    assert not measured[given[2] == 0].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [16, 4])
def test_16_bit_queries_without_sinks(dtype, bits):
    q, *rest = made(4, 2, 32, 16, (150, 0), bits, dtype)
    rest[1] = rest[1].long()
    assert_near(kernel.decode_attention(q, *rest, split_tokens=SPLIT), kernel.reference(q.float(), *rest))


@pytest.mark.parametrize("bits", [16, 4])
def test_a_row_is_the_same_bit_for_bit_alone_and_among_others(bits):
    q, pool, lengths, tables, scale, layout = made(4, 2, 32, 16, (300, 100, 0, 130), bits)
    together = kernel.decode_attention(q, pool, lengths, tables, scale, layout, split_tokens=SPLIT)
    for row, length in enumerate(lengths.tolist()):
        one = slice(row, row + 1)
        narrow = tables[one, : max(1, -(-length // 16))].contiguous()
        alone = kernel.decode_attention(q[one], pool, lengths[one], narrow, scale, layout, split_tokens=SPLIT)
        assert torch.equal(alone[0], together[row])


def test_a_head_dim_that_is_no_power_of_two_is_refused():
    given = made(2, 1, 48, 16, (5,), 16)
    with pytest.raises(ValueError, match="power of two"):
        kernel.decode_attention(*given)

"""Attention of one query a row over the paged KV pool, split over the keys (Flash-Decoding, Dao et al. 2023).

    out = sum_t softmax_t(scale * q.k_t) v_t           over t in [max(0, length - window), length); 0 where the length is 0
    a sink adds exp(sink) to a head's denominator, and nothing to its numerator

A program has a row, a kv head and SPLIT_TOKENS tokens; the query heads of the kv head are the rows of its dots. The split is a
number of tokens, and splits are merged in order: a row's result does not depend on the batch, nor on the tables' width.

Quantised pools (kernels/kv_format.py, x ~ n * scale + least) are not dequantised element by element (TurboMind; QServe, Lin et
al. 2024), but folded:

    q.k           = scale_k * q.n + least_k * sum(q)
    sum_t p_t v_t = sum_t (p_t * scale_v) n_t + sum_t p_t * least_v

An int4 n becomes a float as the low mantissa bits of 128 (bfloat16) or 1024 (float16): the dots see n + BIAS, and BIAS is taken
out where `least` goes in. The low and high halves of a byte are the two halves of head_dim: two dots each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import context_attention
from kernels.kv_format import QuantizedPool
from kernels.triton_runtime import INTERPRETED, Variant, jit, next_power_of_two, runs_on, tl

# (heads, kv_heads, head_dim, block_size, lengths, window)
CASES = [
    (4, 1, 32, 16, (1, 0, 150), None),
    (4, 2, 64, 32, (65, 200), 70),
    (3, 3, 32, 64, (64, 129), 1),
    (8, 1, 32, 128, (190, 7), 500),
]

SPLIT_TOKENS = 512
TILE_TOKENS = 64
LOG2_E = 1.4426950408889634


def reference(
    q: Tensor,
    pool: Tensor,
    lengths: Tensor,
    tables: Tensor,
    scale: float,
    layout: QuantizedPool | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Like `decode_attention`: of rows with one query each, context_attention's."""
    starts = torch.arange(len(q) + 1)
    return context_attention.reference(q, pool, starts, lengths, tables, scale, layout, window, sinks)


def decode_attention(
    q: Tensor,
    pool: Tensor,
    lengths: Tensor,
    tables: Tensor,
    scale: float,
    layout: QuantizedPool | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    split_tokens: int = SPLIT_TOKENS,
) -> Tensor:
    """q [rows, heads, head_dim], head_dim a power of two from 32 on -> like q.

    lengths int32 or int64 [rows], keys of each row; tables int32 [rows, max_blocks]; sinks float32 [heads]; window: tokens that
    a query sees, its own included. pool, of one layer: [num_blocks, block_size, 2, kv_heads, head_dim] of q's dtype; with a
    layout uint8 [num_blocks, block_bytes]. split_tokens: a multiple of TILE_TOKENS.
    """
    if not runs_on(q):
        return reference(q, pool, lengths, tables, scale, layout, window, sinks)
    rows, heads, head_dim = q.shape
    if layout is None:
        data, params, bits, params_stride_block = pool, None, 16, 0
        _, block_size, _, kv_heads, _ = pool.shape
        stride_block, stride_token, stride_side, stride_head, within = data.stride()
    else:
        data, params, bits = layout.data(pool), layout.params(pool), layout.bits
        block_size, kv_heads = layout.block_size, layout.kv_heads
        stride_block, stride_head, stride_side, stride_token, within = data.stride()
        params_stride_block = params.stride(0)
    if head_dim < 32 or head_dim & (head_dim - 1):
        raise ValueError(f"head_dim {head_dim} is not a power of two from 32 on")
    if within != 1 or tables.stride(1) != 1 or split_tokens % TILE_TOKENS:
        raise ValueError("rows of the pool and the tables have to lie together, and a split to be whole tiles")
    q = q.contiguous()
    out = torch.empty_like(q)
    splits = max(1, -(-tables.shape[1] * block_size // split_tokens))
    parts = stats = None
    if splits > 1:
        parts = torch.empty(rows, heads, splits, head_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=q.device)
    window = window or 0
    config = _config(heads // kv_heads, bits)
    _decode_kernel[(rows, kv_heads, splits)](
        q, data, params, lengths, tables, sinks, out, parts, stats, scale * LOG2_E, window, splits, tables.stride(0),
        stride_block, stride_token, stride_side, stride_head, params_stride_block,
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, BITS=bits, SPLIT=split_tokens,
        IN_FLOAT32=INTERPRETED, **config,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(rows, heads)](
            parts, stats, lengths, sinks, out, window, splits, HEAD_DIM=head_dim, SPLIT=split_tokens, num_warps=1
        )
    return out


def _config(group: int, bits: int) -> dict[str, int]:
    rows = max(16, next_power_of_two(group))  # a matrix instruction has 16
    return {"ROWS": rows, "TILE": TILE_TOKENS, "num_warps": 4, "num_stages": 3 if bits == 16 else 4}


@jit
def _finished(
    acc,  # float32 [N, ...] in the first dimension's units of exp2(most)
    most,  # float32 [N]
    total,  # float32 [N]
    sinks,  # [heads] float32, or None
    head,  # [N]
    inside,  # [N]
):
    """-> the factor of acc [N]."""
    factor = tl.where(total > 0, 1.0, 0.0)
    if sinks is not None:
        sink = tl.load(sinks + head, inside, other=0) * 1.4426950408889634
        new = tl.maximum(most, sink)
        safe = tl.where(new == float("-inf"), 0.0, new)
        factor = tl.exp2(most - safe)
        total = total * factor + tl.exp2(sink - safe)
    return factor / tl.where(total > 0, total, 1.0)


@jit
def _as_float(
    n,  # uint8, below 16
    DTYPE: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    BIAS: tl.constexpr,
):
    """-> n + BIAS."""
    if IN_FLOAT32:
        return n.to(tl.float32) + BIAS
    elif BIAS == 128:
        return (n.to(tl.int16) | 0x4300).to(DTYPE, bitcast=True)
    else:
        return (n.to(tl.int16) | 0x6400).to(DTYPE, bitcast=True)


@jit
def _decode_kernel(
    q,  # [rows, heads, HEAD_DIM]
    pool,  # [num_blocks, BLOCK_SIZE, 2, kv_heads, HEAD_DIM], or uint8 [num_blocks, kv_heads, 2, BLOCK_SIZE, row_bytes]
    params,  # [num_blocks, kv_heads, 2, BLOCK_SIZE, 2] float16, or None
    lengths,  # [rows] int32 or int64
    tables,  # [rows, max_blocks] int32
    sinks,  # [heads] float32, or None
    out,  # like q
    parts,  # [rows, heads, splits, HEAD_DIM] float32, or None: one split, which writes `out`
    stats,  # [rows, heads, splits, 2] float32: a split's greatest exponent and its sum; or None
    scale,  # times log2(e)
    window,  # 0: none
    splits,
    stride_table,
    stride_block,
    stride_token,
    stride_side,
    stride_head,
    params_stride_block,
    GROUP: tl.constexpr,  # heads / kv_heads
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BITS: tl.constexpr,  # of the pool
    SPLIT: tl.constexpr,  # tokens
    IN_FLOAT32: tl.constexpr,  # the dots: the interpreter's bfloat16 is wrong
    ROWS: tl.constexpr,  # a power of two, at least GROUP
    TILE: tl.constexpr,  # tokens
):
    COLUMNS: tl.constexpr = HEAD_DIM // 2 if BITS == 4 else HEAD_DIM
    DTYPE: tl.constexpr = tl.float32 if IN_FLOAT32 else q.dtype.element_ty
    BIAS: tl.constexpr = 0 if BITS != 4 else 16 if IN_FLOAT32 else 1024 if q.dtype.element_ty == tl.float16 else 128
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    start = split * SPLIT
    first = tl.maximum(length - window, 0) * (window > 0).to(tl.int32)
    if ((split > 0) & (start >= length)) | (start + SPLIT <= first):
        return
    lane = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    real = lane < GROUP
    head = kv_head * GROUP + lane
    place = (row * tl.num_programs(1) * GROUP + head)[:, None] * HEAD_DIM + columns[None, :]
    mask = real[:, None] & (columns < COLUMNS)[None, :]
    q_a = tl.load(q + place, mask, other=0).to(DTYPE)
    q_sum = tl.sum(q_a.to(tl.float32), 1)
    if BITS == 4:
        q_b = tl.load(q + place + COLUMNS, mask, other=0).to(DTYPE)
        q_sum += tl.sum(q_b.to(tl.float32), 1)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc_a = tl.zeros([ROWS, COLUMNS], tl.float32)
    acc_b = tl.zeros([ROWS, COLUMNS], tl.float32)
    shift = tl.zeros([ROWS], tl.float32)  # what is to be added to each element of acc
    begin = tl.maximum(start, first // TILE * TILE)
    stop = tl.minimum(length, start + SPLIT)
    for tile in range(begin, stop, TILE):
        token = tile + tl.arange(0, TILE)
        seen = (token >= first) & (token < stop)  # what is not seen is not read: it may be anything, NaN too
        block = tl.load(tables + row * stride_table + token // BLOCK_SIZE, seen, other=0).to(tl.int64)
        offset = token % BLOCK_SIZE
        base = pool + block * stride_block + offset * stride_token + kv_head * stride_head
        keys = tl.load(base[:, None] + columns[None, :], seen[:, None], other=0)
        if BITS == 16:
            s = tl.dot(q_a, tl.trans(keys.to(DTYPE)), input_precision="ieee") * scale
        else:
            pair = params + block * params_stride_block + (kv_head * 2 * BLOCK_SIZE + offset) * 2
            k_scale = tl.load(pair, seen, other=0).to(tl.float32)
            k_least = tl.load(pair + 1, seen, other=0).to(tl.float32)
            if BITS == 8:
                s = tl.dot(q_a, tl.trans(keys.to(DTYPE)), input_precision="ieee")
            else:
                s = tl.dot(q_a, tl.trans(_as_float(keys & 15, DTYPE, IN_FLOAT32, BIAS)), input_precision="ieee")
                s = tl.dot(q_b, tl.trans(_as_float(keys >> 4, DTYPE, IN_FLOAT32, BIAS)), s, input_precision="ieee")
            s = (s * k_scale[None, :] + q_sum[:, None] * (k_least - BIAS * k_scale)[None, :]) * scale
        s = tl.where(seen[None, :], s, float("-inf"))
        new = tl.maximum(most, tl.max(s, 1))
        decay = tl.exp2(most - new)
        p = tl.exp2(s - new[:, None])
        total = total * decay + tl.sum(p, 1)
        most = new
        acc_a *= decay[:, None]
        values = tl.load(base[:, None] + stride_side + columns[None, :], seen[:, None], other=0)
        if BITS == 16:
            acc_a = tl.dot(p.to(DTYPE), values.to(DTYPE), acc_a, input_precision="ieee")
        else:
            v_scale = tl.load(pair + 2 * BLOCK_SIZE, seen, other=0).to(tl.float32)
            v_least = tl.load(pair + 2 * BLOCK_SIZE + 1, seen, other=0).to(tl.float32)
            weight = (p * v_scale[None, :]).to(DTYPE)
            # The rounded weights' BIAS is taken out: it is they that the dots have multiplied.
            change = p * v_least[None, :] - weight.to(tl.float32) * BIAS
            shift = shift * decay + tl.sum(change, 1)
            if BITS == 8:
                acc_a = tl.dot(weight, values.to(DTYPE), acc_a, input_precision="ieee")
            else:
                acc_b *= decay[:, None]
                low, high = (
                    _as_float(values & 15, DTYPE, IN_FLOAT32, BIAS),
                    _as_float(values >> 4, DTYPE, IN_FLOAT32, BIAS),
                )
                acc_a = tl.dot(weight, low, acc_a, input_precision="ieee")
                acc_b = tl.dot(weight, high, acc_b, input_precision="ieee")
    acc_a += shift[:, None]
    acc_b += shift[:, None]
    if parts is None:
        factor = _finished(acc_a, most, total, sinks, head, real)[:, None]
        tl.store(out + place, (acc_a * factor).to(out.dtype.element_ty), mask)
        if BITS == 4:
            tl.store(out + place + COLUMNS, (acc_b * factor).to(out.dtype.element_ty), mask)
    else:
        part = (row * tl.num_programs(1) * GROUP + head) * splits + split
        target = parts + part[:, None] * HEAD_DIM + columns[None, :]
        tl.store(target, acc_a, mask)
        if BITS == 4:
            tl.store(target + COLUMNS, acc_b, mask)
        tl.store(stats + part * 2, most, real)
        tl.store(stats + part * 2 + 1, total, real)


@jit
def _merge_kernel(
    parts,  # [rows, heads, splits, HEAD_DIM] float32
    stats,  # [rows, heads, splits, 2] float32
    lengths,  # [rows]
    sinks,  # [heads] float32, or None
    out,  # [rows, heads, HEAD_DIM]
    window,
    splits,
    HEAD_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    one = tl.arange(0, 1)
    head = tl.program_id(1) + one
    columns = tl.arange(0, HEAD_DIM)
    length = tl.load(lengths + row).to(tl.int32)
    first = tl.maximum(length - window, 0) * (window > 0).to(tl.int32)
    place = row * tl.num_programs(1) + head
    most = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, HEAD_DIM], tl.float32)
    for split in range(first // SPLIT, (length + SPLIT - 1) // SPLIT):
        part = place * splits + split
        its_most = tl.load(stats + part * 2)
        new = tl.maximum(most, its_most)
        decay = tl.exp2(most - new)
        share = tl.exp2(its_most - new)
        total = total * decay + tl.load(stats + part * 2 + 1) * share
        acc = acc * decay[:, None] + tl.load(parts + part[:, None] * HEAD_DIM + columns[None, :]) * share[:, None]
        most = new
    factor = _finished(acc, most, total, sinks, head, head >= 0)[:, None]
    tl.store(out + place[:, None] * HEAD_DIM + columns[None, :], (acc * factor).to(out.dtype.element_ty))


def variants() -> dict[str, Variant]:
    types = dict.fromkeys(("q", "out"), "*bf16") | {"lengths": "*i32", "tables": "*i32", "scale": "fp32"}
    types |= dict.fromkeys(("parts", "stats"), "*fp32")
    strides = ("stride_block", "stride_token", "stride_side", "stride_head", "params_stride_block")
    types |= dict.fromkeys((*strides, "window", "splits", "stride_table"), "i32")
    made = {}
    for block_size, bits in ((64, 16), (32, 16), (64, 8), (64, 4), (32, 4)):
        config = _config(4, bits)
        num_warps, num_stages = config.pop("num_warps"), config.pop("num_stages")
        constants = config | {
            "GROUP": 4,
            "HEAD_DIM": 128,
            "BLOCK_SIZE": block_size,
            "BITS": bits,
            "SPLIT": SPLIT_TOKENS,
        }
        constants |= {"IN_FLOAT32": False, "sinks": None} | ({"params": None} if bits == 16 else {})
        its_types = types | ({"pool": "*bf16"} if bits == 16 else {"pool": "*u8", "params": "*fp16"})
        instructions = dict.fromkeys((80, 90, 100), ("HMMA", "LDGSTS"))
        made[f"{bits}-bit-blocks-of-{block_size}"] = Variant(
            _decode_kernel, its_types, constants, num_warps, num_stages, strides, instructions
        )
    merge_types = {name: kind for name, kind in types.items() if name in _MERGED}
    constants = {"HEAD_DIM": 128, "SPLIT": SPLIT_TOKENS, "sinks": None}
    made["merge"] = Variant(_merge_kernel, merge_types, constants, 1)
    return made


_MERGED = ("parts", "stats", "lengths", "out", "window", "splits")

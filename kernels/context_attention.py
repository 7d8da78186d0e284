"""Causal attention of a flat batch of context rows over paged KV.

A row may have fewer queries than keys (chunked context). Its queries are its newest positions: the mask is aligned bottom right.

    keys      0 .................. length                 query i of n stands at position length - n + i
    queries                [ n ]                          and sees keys in (position - window, position]
                                                          and those before min(sink_tokens, position + 1)

    p   = softmax over its keys, and the sink if there is one, of softcap(scale * q k^T)    a sink is a logit without a value
    out = p v                                     query heads of one kv head share its keys (GQA); kernels/common/scoring.py

The algorithm is FlashAttention (Dao 2023) over pages, with its online softmax: m_i is a query's greatest score so far, l_i the
sum of its exponentials, acc the sum of its weighted values. A tile of queries has BLOCK_M rows: some tokens times all heads of a
kv head. As in vLLM's unified attention, a program finds its row by itself: the grid depends on shapes alone, so a CUDA graph can
hold the launch. kernels/common/kv_format.py describes the pools; int8 and int4 become 16-bit floats before the products.

Two things have nearly the same name: a sink is a logit of a head, sink tokens are the first keys of a row, and ordinary ones.

Cells that no query of a row may see are never used, whatever they hold (NaN included), nor are table entries of their blocks.

Up to rounding, a token's result does not depend on the chunk in which it is computed. Tiles of keys begin at multiples of BLOCK_N
of the position, BLOCK_N depends on GPU, pool and head_dim alone, and tiles are added in ascending order, so acc and l_i are
rescaled at the same positions; a tile that a query does not see leaves its result unchanged. The tiles of sink tokens come first,
with a mask, wherever the window begins. Bits may differ: tiles with and without a mask are compiled separately, and batches
with few queries per row have a smaller BLOCK_M and another matrix instruction: a score may then differ by float32 rounding, and
a p between two 16-bit numbers may be rounded to the other one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.attention_tiles import ARCHITECTURES, constants_of, tiles_for
from kernels.common.kv_format import KV_FORMATS, KVPool, dequantised, load_seen, read_cells
from kernels.common.scoring import LOG2_E, capped
from kernels.common.triton_runtime import INTERPRETED, Variant, architecture_of, jit, runs_on, tl


class Case(NamedTuple):
    rows: list[tuple[int, int]]  # (queries, keys)
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    block_size: int = 16
    kv: str = "auto"
    window: int | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    sink_tokens: int = 0
    softcap: float = 0.0


CASES = [
    Case([(1, 1)], kv_heads=1, group=1),
    Case([(9, 9)], sinks=True),
    Case([(1, 5), (1, 64), (1, 129)], group=3),
    Case([(20, 33), (1, 16), (0, 0), (70, 260), (1, 17)], group=4, head_dim=32, block_size=128),
    Case([(5, 15), (1, 31), (40, 300)], kv_heads=1, group=7, head_dim=40, block_size=48),
    Case([(30, 250), (1, 200), (9, 9)], kv_heads=1, group=4, block_size=32, window=50, sinks=True),
    Case([(1, 10), (6, 19), (11, 11)], window=1),
    Case([(40, 290)], kv_heads=1, group=4, head_dim=64, block_size=64, window=140),
    Case([(30, 250), (1, 200), (9, 9)], kv_heads=1, group=4, block_size=32, window=50, sinks=True, sink_tokens=4),
    Case([(1, 10), (6, 19), (11, 11)], window=1, sink_tokens=1),
    Case([(40, 290), (1, 200)], kv_heads=1, group=4, head_dim=64, block_size=64, window=140, sink_tokens=70),
    Case([(3, 200), (1, 140), (20, 80)], kv="int8", head_dim=24, block_size=16, window=20, sink_tokens=17),
    Case([(33, 150)], kv_heads=1, group=4, kv="int4", head_dim=64, window=30, sink_tokens=1000),
    Case([(3, 9), (1, 140), (20, 80)], kv="int8", head_dim=24, block_size=64),
    Case([(3, 9), (1, 140), (20, 80)], kv="int4", head_dim=40, block_size=64),
    Case([(33, 150)], kv_heads=1, group=4, kv="int8", head_dim=64, window=30, sinks=True),
    Case([(33, 150)], kv_heads=1, group=4, kv="int4", head_dim=64, window=30, sinks=True),
    Case([(33, 150)], kv_heads=1, group=4, kv="k8v4", head_dim=40, window=30, sinks=True, sink_tokens=3),
    Case([(9, 9), (1, 100)], softcap=0.7),
    Case([(30, 250), (1, 200)], kv_heads=1, group=4, window=50, sinks=True, softcap=1.5),
    Case([(33, 150)], kv_heads=1, group=4, kv="int4", head_dim=64, window=30, softcap=0.7),
    *(
        Case([(5, 5), (1, 13), (3, 70), (1, 2)], kv=kv, dtype=dtype)
        for kv in KV_FORMATS
        for dtype in (torch.bfloat16, torch.float16)
    ),
]


def reference(
    q: Tensor,
    pool: KVPool,
    starts: Tensor,
    lengths: Tensor,
    tables: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    sink_tokens: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Like `context_attention`, token by token in float64, rounded at the end. Tokens outside of all rows get 0."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    _, block_size, kv_heads, _ = pool.keys.shape
    bounds = starts.tolist()
    for row, length in enumerate(lengths.tolist()):
        for token in range(bounds[row], bounds[row + 1]):
            position = length - bounds[row + 1] + token
            first = 0 if window is None else max(0, position - window + 1)
            of_sink, of_window = range(min(sink_tokens, first)), range(first, max(position + 1, first))
            seen = torch.tensor([*of_sink, *of_window], dtype=torch.int64, device=q.device)
            k, v = read_cells(pool, tables[row, seen // block_size].long(), seen % block_size)
            scores = scale * torch.einsum("hgd,khd->hgk", q[token].double().unflatten(0, (kv_heads, -1)), k)
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double().view(kv_heads, -1, 1)), dim=2)
            p = scores.softmax(2)[:, :, : len(seen)]
            out[token] = torch.einsum("hgk,khd->hgd", p, v).flatten(0, 1)
    return out.to(q.dtype)


def context_attention(
    q: Tensor,
    pool: KVPool,
    starts: Tensor,
    lengths: Tensor,
    tables: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    sink_tokens: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attends with q [tokens, heads, head_dim]; returns a new tensor like q. The KV of q's tokens must be in the pool already.

    pool     one layer's pool; a plain one has q's dtype
    starts   int32 [rows + 1]: row r's queries are tokens [starts[r], starts[r + 1]); tokens after the last row are undefined
    lengths  int32 [rows]: keys of each row, those of q's tokens included
    tables   int32 [rows, max_blocks]: block ids
    scale    factor of the scores, above 0
    window   tokens that a query sees, itself included
    sinks    float32 [heads]
    sink_tokens  the first tokens of a row, which a query sees besides its window
    softcap  of the scores; 0: none
    """
    if not runs_on(q):
        return reference(q, pool, starts, lengths, tables, scale, window, sinks, sink_tokens, softcap)
    if q.stride(2) != 1:
        q = q.contiguous()
    tokens, heads, head_dim = q.shape
    rows = len(lengths)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if tokens == 0 or rows == 0:
        return out
    _, block_size, kv_heads, _ = pool.keys.shape
    group = heads // kv_heads
    architecture, in_float32 = architecture_of(q, ARCHITECTURES), q.dtype == torch.float32
    sink_tokens = sink_tokens if window else 0
    tiles = tiles_for(head_dim, pool.format.is_quantised, group, tokens, rows, architecture, in_float32, sink_tokens)
    grid = (tokens // (tiles.block_m // group) + rows, kv_heads)
    _context_attention_kernel[grid](
        q, pool.keys, pool.words, starts, lengths, tables, sinks, out,
        scale * LOG2_E, softcap * LOG2_E if softcap else None, rows,
        tables.stride(0), q.stride(0), q.stride(1), *pool.strides,
        **constants_of(tiles, head_dim, group, block_size, pool.format, window, rows, sink_tokens),
        WIDEN=INTERPRETED and q.dtype == torch.bfloat16,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


@jit(do_not_specialize=["rows", "table_stride"])
def _context_attention_kernel(  # noqa: C901 (device code is compiled as one function)
    q,  # [tokens, heads, head_dim]
    pool,  # KVPool.keys [num_blocks, BLOCK_SIZE, kv_heads, KEY_WIDTH], from which strides lead to values
    words,  # KVPool.words [num_blocks, BLOCK_SIZE, 2, kv_heads], or None: a plain pool
    starts,  # [rows + 1] int32
    lengths,  # [rows] int32
    tables,  # [rows, max_blocks] int32
    sinks,  # [heads] float32, or None
    out,  # [tokens, heads, head_dim], contiguous
    scale,  # times log2(e)
    softcap,  # times log2(e), or None
    rows,
    table_stride,
    q_token_stride,
    q_head_stride,
    stride_block,
    stride_token,
    stride_side,
    stride_head,
    stride_value,  # from a token's value to the next one's; stride_token is that of keys
    words_stride_block,
    words_stride_token,
    words_stride_side,
    words_stride_head,
    GROUP: tl.constexpr,  # query heads of a kv head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    WINDOW: tl.constexpr,  # or None
    SINK_TOKENS: tl.constexpr,  # 0 without a window
    ROWS: tl.constexpr,  # a power of two, at least rows
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEY_D: tl.constexpr,  # a power of two, at least KEY_WIDTH
    VALUE_D: tl.constexpr,  # the same for values
    WIDEN: tl.constexpr,  # compute in float32: the interpreter cannot multiply bfloat16
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP  # tokens
    KEY_WIDTH: tl.constexpr = HEAD_DIM // 2 if KEY_BITS == 4 else HEAD_DIM  # half for int4: then q is two halves
    VALUE_WIDTH: tl.constexpr = HEAD_DIM // 2 if VALUE_BITS == 4 else HEAD_DIM  # and then out is
    query_tile = tl.num_programs(0) - 1 - tl.program_id(0)  # later tiles have more keys, so they start first
    kv_head = tl.program_id(1)

    # Row r's tiles are starts[r] // BLOCK_Q + r and on. Up to the next row's there are enough, and at most one too many.
    index = tl.arange(0, ROWS)
    first_tiles = tl.load(starts + index, index < rows, other=0) // BLOCK_Q + index
    row = tl.sum(((index < rows) & (first_tiles <= query_tile)).to(tl.int32), 0) - 1
    start = tl.load(starts + row)
    queries = tl.load(starts + row + 1) - start
    first_query = (query_tile - start // BLOCK_Q - row) * BLOCK_Q
    if first_query >= queries:
        return
    length = tl.load(lengths + row)
    table = tables + row.to(tl.int64) * table_stride

    place = tl.arange(0, BLOCK_M)
    query = first_query + place // GROUP
    is_query = (place < BLOCK_Q * GROUP) & (query < queries)
    position = length - queries + query
    d = tl.arange(0, KEY_D)
    d_value = tl.arange(0, VALUE_D)
    token = (start + first_query).to(tl.int64)  # the first of the tile; offsets in a tile fit int32
    q_mask = is_query[:, None] & (d < KEY_WIDTH)[None, :]
    q += token * q_token_stride + kv_head * GROUP * q_head_stride
    q_at = q + (place // GROUP * q_token_stride + place % GROUP * q_head_stride)[:, None] + d[None, :]
    x = tl.load(q_at, q_mask, other=0)
    if WIDEN:
        x = x.to(tl.float32)
    if KEY_BITS == 4:
        x_high = tl.load(q_at + KEY_WIDTH, q_mask, other=0)
        if WIDEN:
            x_high = x_high.to(tl.float32)

    # Keys in [begin, end) are seen by some of the queries, those of tiles in [whole_begin, whole_end) by all of them.
    first_position = length - queries + first_query
    end = tl.maximum(tl.minimum(first_position + BLOCK_Q, length), 0)
    whole_end = tl.maximum(first_position + 1, 0) // BLOCK_N
    if WINDOW is None:
        begin = 0
        whole_begin = 0
    else:
        begin = tl.maximum(first_position - WINDOW + 1, 0)
        whole_begin = tl.cdiv(tl.maximum(end - WINDOW, 0), BLOCK_N)
    first = begin // BLOCK_N
    stop = tl.cdiv(end, BLOCK_N)
    SINK_TILES: tl.constexpr = (SINK_TOKENS + BLOCK_N - 1) // BLOCK_N
    # tiles between those of sink tokens and the window's; the former are counted as if they came right before
    skipped = 0
    if SINK_TILES > 0:
        whole_begin = tl.maximum(whole_begin, SINK_TILES)
        skipped = tl.maximum(first, SINK_TILES) - tl.minimum(stop, SINK_TILES)
        first = skipped
    if WINDOW is not None:
        whole_end = tl.maximum(whole_end, whole_begin)
    bounds = (first, whole_begin, whole_end, stop)

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        m_i = tl.load(sinks + kv_head * GROUP + place % GROUP, is_query, other=0) * 1.4426950408889634
        l_i += 1.0  # the first tile rescales the 1 of a sink of -inf to 0
    acc = tl.zeros([BLOCK_M, VALUE_D], tl.float32)
    if VALUE_BITS == 4:
        acc_high = tl.zeros([BLOCK_M, VALUE_D], tl.float32)
    head = pool + kv_head.to(tl.int64) * stride_head
    if words is not None:
        head_words = words + kv_head.to(tl.int64) * words_stride_head

    unit = scale  # factor of scores
    if softcap is not None:
        unit = 1.0
    for part in tl.static_range(3):
        for tile in tl.range(bounds[part], bounds[part + 1], disable_licm=True):  # hoisting would cost registers
            if SINK_TILES > 0 and part == 0:
                tile = tl.where(tile - skipped < SINK_TILES, tile - skipped, tile)
            key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            newest = key  # sink tokens count as new ones, which are in every window
            if SINK_TILES > 0 and part == 0:
                newest = tl.where(key < SINK_TOKENS, end, key)
            is_seen = (newest >= begin) & (key < end)
            mask = is_seen[:, None] & (d < KEY_WIDTH)[None, :]
            if BLOCK_SIZE % BLOCK_N == 0:
                block = tl.load(table + tile * BLOCK_N // BLOCK_SIZE).to(tl.int64)
                cell = tile * BLOCK_N % BLOCK_SIZE + tl.arange(0, BLOCK_N)
                base = block * stride_block
            else:
                block = load_seen(table + key // BLOCK_SIZE, is_seen, part != 1).to(tl.int64)
                cell = key % BLOCK_SIZE
                base = (block * stride_block)[:, None]
            at = (cell * stride_token)[:, None] + d[None, :]
            k = load_seen(head + base + at, mask, part != 1 or KEY_D != KEY_WIDTH)
            if KEY_BITS == 16:
                k_low = k.to(x.dtype)
            else:
                words_at = block * words_stride_block + cell * words_stride_token
                k_params = load_seen(head_words + words_at, is_seen, part != 1)
                k_low = dequantised(k & 15 if KEY_BITS == 4 else k, k_params, x.dtype)
            scores = tl.dot(x, tl.trans(k_low), input_precision="ieee")
            if KEY_BITS == 4:
                k_high = dequantised(k >> 4, k_params, x.dtype)
                scores = tl.dot(x_high, tl.trans(k_high), scores, input_precision="ieee")
            if softcap is not None:
                scores = capped(scores * scale, softcap)
            if part != 1:
                may_see = key[None, :] <= position[:, None]
                if WINDOW is not None:
                    may_see &= newest[None, :] > position[:, None] - WINDOW
                scores = tl.where(may_see, scores, float("-inf"))

            m_new = tl.maximum(m_i, tl.max(scores, 1) * unit)
            shift = m_new
            if part != 1:
                shift = tl.where(m_new > float("-inf"), m_new, 0.0)
            p = tl.exp2(scores * unit - shift[:, None])
            alpha = tl.exp2(m_i - shift)
            m_i = m_new
            l_i = l_i * alpha + tl.sum(p, 1)
            acc *= alpha[:, None]
            p = p.to(x.dtype)
            if KEY_BITS != VALUE_BITS:
                mask = is_seen[:, None] & (d_value < VALUE_WIDTH)[None, :]
                at = (cell * stride_value)[:, None] + d_value[None, :]
            # loaded late to save registers
            v = load_seen(head + (base + stride_side) + at, mask, part != 1 or VALUE_D != VALUE_WIDTH)
            if VALUE_BITS == 16:
                v_low = v.to(x.dtype)
            else:
                v_params = load_seen(head_words + (words_at + words_stride_side), is_seen, part != 1)
                v_low = dequantised(v & 15 if VALUE_BITS == 4 else v, v_params, x.dtype)
            acc = tl.dot(p, v_low, acc, input_precision="ieee")
            if VALUE_BITS == 4:
                v_high = dequantised(v >> 4, v_params, x.dtype)
                acc_high = tl.dot(p, v_high, acc_high * alpha[:, None], input_precision="ieee")

    inverse = 1.0 / tl.where(l_i > 0, l_i, 1.0)
    heads = tl.num_programs(1) * GROUP
    out += (token * heads + kv_head * GROUP) * HEAD_DIM
    out_at = out + (place // GROUP * heads + place % GROUP)[:, None] * HEAD_DIM + d_value[None, :]
    q_mask = is_query[:, None] & (d_value < VALUE_WIDTH)[None, :]
    tl.store(out_at, (acc * inverse[:, None]).to(out.dtype.element_ty), q_mask)
    if VALUE_BITS == 4:
        tl.store(out_at + VALUE_WIDTH, (acc_high * inverse[:, None]).to(out.dtype.element_ty), q_mask)


def variants() -> dict[str, Variant]:
    """The variants for Llama-3-8B: 32 heads and 8 kv heads of 128."""

    def variant(
        kv: str,
        block_size: int,
        window: int | None = None,
        many: bool = True,
        architectures: tuple[int, ...] = (80, 90, 100),
        sink_tokens: int = 0,
        softcap: bool = False,
    ) -> Variant:
        is_quantised = KV_FORMATS[kv].is_quantised
        shape = (128, is_quantised, 4, 2048 if many else 8, 8)
        tiles = tiles_for(*shape, min(90, architectures[0]), sink_tokens=sink_tokens)
        names = (name for name in _context_attention_kernel.arg_names if "stride_" in name)
        strides = [*(name for name in names if name != "words_stride_token"), "q_token_stride", "q_head_stride"]
        types = dict.fromkeys(("q", "out"), "*bf16") | dict.fromkeys(("starts", "lengths", "tables"), "*i32")
        types |= dict.fromkeys((*strides, "table_stride", "rows"), "i32") | {"scale": "fp32"}
        constants = constants_of(tiles, 128, 4, block_size, KV_FORMATS[kv], window, 8, sink_tokens)
        constants |= {"WIDEN": False, "words_stride_token": 1} | ({} if is_quantised else {"words": None})
        types |= {"pool": "*u8", "words": "*i32"} if is_quantised else {"pool": "*bf16"}
        has_sinks = window and not sink_tokens  # the two do not come together in a model that is served
        types |= {"sinks": "*fp32"} if has_sinks else {}
        constants |= {} if has_sinks else {"sinks": None}
        types |= {"softcap": "fp32"} if softcap else {}
        constants |= {} if softcap else {"softcap": None}
        instructions = {80: ("HMMA", "LDGSTS"), 90: ("HGMMA" if many else "HMMA", "LDGSTS")}
        warps, stages, kernel = tiles.num_warps, tiles.num_stages, _context_attention_kernel
        return Variant(kernel, types, constants, warps, stages, tuple(strides), instructions, architectures)

    return {
        "bf16": variant("auto", 64),
        "bf16-window-sinks": variant("auto", 128, window=4096),
        "bf16-sink-tokens": variant("auto", 64, window=4096, architectures=(90, 100), sink_tokens=4),
        "bf16-sink-tokens-sm80": variant("auto", 64, window=4096, architectures=(80,), sink_tokens=4),
        "int8-sink-tokens": variant("int8", 64, window=4096, architectures=(90, 100), sink_tokens=4),
        "bf16-few": variant("auto", 16, many=False),
        "bf16-softcap": variant("auto", 64, softcap=True),
        "int8": variant("int8", 64, architectures=(90, 100)),
        "int8-sm80": variant("int8", 64, architectures=(80,)),
        "int8-keys-int4-values": variant("k8v4", 64),
        "int4": variant("int4", 64, architectures=(90, 100)),
        "int4-sm80": variant("int4", 64, architectures=(80,)),
        "int4-few": variant("int4", 64, many=False, architectures=(90, 100)),
    }

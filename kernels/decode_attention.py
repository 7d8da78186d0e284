"""Attention of one query a row over the paged KV pool, split over the keys (Flash-Decoding, Dao et al. 2023).

    out = sum_t softmax_t(softcap(scale * q.k_t)) v_t  over t in [max(0, length - window), length), and those of them below
                                                       sink_tokens; 0 where the length is 0
    a sink adds exp(sink) to a head's denominator, and nothing to its numerator; kernels/common/scoring.py has the soft cap

Each program handles one row, one kv head and one split of the keys, with the online softmax: m_i is a head's greatest score so
far, l_i the sum of its exponentials, acc the sum of its weighted values. A split has a fixed number of tokens, and
merge_splits.py merges splits in order, so a row's result does not depend on the batch or on the tables' width.

Quantised pools (kernels/common/kv_format.py, x ~ n * scale + least) are not dequantised element by element (as in TurboMind and
QServe, Lin et al. 2024); scale and least are folded into the products instead:

    q.k           = scale_k * q.n + least_k * sum(q)
    sum_t p_t v_t = sum_t (p_t * scale_v) n_t + sum_t p_t * least_v

The products multiply n + bias; the bias is subtracted together with adding `least`. Values use n relative to its middle c:

    sum_t p_t v_t = sum_t (p_t * scale_v) (n_t - c) + sum_t p_t * (least_v + c * scale_v)

Only p_t * scale_v is rounded to 16 bits, so its error is multiplied by how far n is from the middle, not by n. Over thousands of
keys the values cancel out, and the error of n itself would not (1.8 % in bfloat16 at 32,768 tokens).

The low and high halves of an int4 byte are the two halves of head_dim, so each product with int4 is two dots.

The number of instructions bounds this loop (docs/lab/kv4-decode.md). Therefore

    both products are transposed    K q^T and V^T p^T: keys, then columns, fill the 16 rows of a matrix instruction, and the heads
                                    of a kv head its 8 columns; as rows they would be padded to 16
    a program is one warp           (up to 16 heads) so that no reduction crosses warps and no warp waits for another
    columns are permuted            so that a thread's bytes of a key, or of a value, are one load from shared memory. The query
                                    is permuted like the keys, and the sum of values is permuted back at the end
    masks are used where needed     tiles that are seen as a whole have none
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import context_attention
from kernels.common.kv_format import (
    KV_FORMATS,
    KVPool,
    floats_of_int4,
    floats_of_int8,
    load_seen,
    scale_and_least,
    unpacking_constants,
)
from kernels.common.scoring import LOG2_E, capped
from kernels.common.triton_runtime import INTERPRETED, Variant, jit, next_power_of_two, runs_on, tl
from kernels.merge_splits import finished, merge_splits

# (heads, kv_heads, head_dim, block_size, lengths, window, sink_tokens)
CASES = [
    (4, 1, 32, 16, (1, 0, 150), None, 0),
    (4, 2, 64, 32, (65, 200), 70, 0),
    (3, 3, 32, 64, (64, 129), 1, 0),
    (8, 1, 32, 128, (190, 7), 500, 0),
    (4, 2, 64, 16, (65, 400, 0, 3), 70, 4),
    (3, 3, 32, 64, (64, 129), 1, 33),
    (2, 1, 32, 32, (390, 31), 20, 140),
]

# One row of 1,024 tokens is read by half as many programs with splits of 512; 64 rows of 4,096 then take 4 % less (H200).
SPLIT_TOKENS = 256
SHORT_SPLITS = (128,)  # tokens
TILE_TOKENS = 32


def reference(
    q: Tensor,
    pool: KVPool,
    lengths: Tensor,
    tables: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    sink_tokens: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Like `decode_attention`: the reference of context_attention.py for rows with one query each."""
    starts = torch.arange(len(q) + 1)
    return context_attention.reference(q, pool, starts, lengths, tables, scale, window, sinks, sink_tokens, softcap)


def split_for(rows: int, kv_heads: int) -> int:
    """Tokens of a split for batches of at most `rows` rows: short for small batches, which else would not fill the GPU."""
    return next((split for split in SHORT_SPLITS if 2 * rows * kv_heads <= split), SPLIT_TOKENS)


def decode_attention(
    q: Tensor,
    pool: KVPool,
    lengths: Tensor,
    tables: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    split_tokens: int = SPLIT_TOKENS,
    sink_tokens: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attends with q [rows, heads, head_dim], one query a row; returns a new tensor like q.

    lengths int32 or int64 [rows], keys of each row; tables int32 [rows, max_blocks]; sinks float32 [heads]; window: tokens that
    a query sees, its own included; sink_tokens: the first tokens of a row, which it sees besides these. pool is one layer's; a
    plain one has q's dtype. split_tokens is a multiple of TILE_TOKENS. softcap 0: none. Raises
    ValueError unless head_dim is a power of two from 32 on.
    """
    if not runs_on(q):
        return reference(q, pool, lengths, tables, scale, window, sinks, sink_tokens, softcap)
    rows, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = pool.keys.shape
    if head_dim < 32 or head_dim & (head_dim - 1):
        raise ValueError(f"head_dim {head_dim} is not a power of two from 32 on")
    if tables.stride(1) != 1 or split_tokens % TILE_TOKENS:
        raise ValueError("rows of the tables have to lie together, and a split to be whole tiles")
    q = q.contiguous()
    out = torch.empty_like(q)
    splits = max(1, -(-tables.shape[1] * block_size // split_tokens))
    parts = stats = None
    if splits > 1:
        parts = torch.empty(rows, heads, splits, head_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=q.device)
    window, sink_tokens = window or 0, sink_tokens if window else 0
    _decode_kernel[(rows, kv_heads, splits)](
        q, pool.keys, pool.words, lengths, tables, sinks, out, parts, stats, scale * LOG2_E,
        softcap * LOG2_E if softcap else None, window, splits, tables.stride(0), *pool.strides,
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, WINDOWED=window > 0,
        SINK_TOKENS=sink_tokens,
        WIDEN=INTERPRETED and q.dtype == torch.bfloat16, SPLIT=split_tokens,
        **unpacking_constants(q.dtype, pool.format), **_config(heads // kv_heads, pool.format.is_quantised, head_dim),
    )  # fmt: skip
    if parts is not None and stats is not None:
        merge_splits(parts, stats, lengths, out, split_tokens, window, sinks, sink_tokens)
    return out


def _config(group: int, is_quantised: bool, head_dim: int) -> dict[str, int]:
    columns = max(8, next_power_of_two(group))
    num_warps = min(4, max(1, columns * head_dim // 2048, head_dim // 128))
    return {
        "COLUMNS": columns,
        "TILE": TILE_TOKENS,
        "num_warps": num_warps,
        "num_stages": 5 if is_quantised else 3,
    }


@jit
def _for_keys(
    x,  # [N, ROW]
    N: tl.constexpr,
    ROW: tl.constexpr,
):
    """x with permuted columns: the columns that a quarter of the dot's threads holds are neighbours in x."""
    return x.reshape(N, 4, ROW // 16, 4).permute(0, 2, 1, 3).reshape(N, ROW)


@jit
def _for_values(
    x,  # [N, ROW]
    N: tl.constexpr,
    ROW: tl.constexpr,
    BITS: tl.constexpr,
):
    """Transposes x to [ROW, N] and permutes it: the columns that an eighth of the dot's threads holds are neighbours in x."""
    return _apart(x, N, ROW, BITS).reshape(N, 8, ROW // 8).permute(2, 1, 0).reshape(ROW, N)


@jit
def _apart(
    x,  # [N, ROW]
    N: tl.constexpr,
    ROW: tl.constexpr,
    BITS: tl.constexpr,
):
    """x with permuted rows: threads that read at the same time read neighbours, with fewer conflicts of memory banks."""
    if BITS != 4:
        return x  # a row spans all banks, so no order has fewer conflicts
    else:
        return x.reshape(N // 16, 4, 4, ROW).permute(0, 2, 1, 3).reshape(N, ROW)


@jit
def _straight(
    x,  # [ROW, N]
    N: tl.constexpr,
    ROW: tl.constexpr,
):
    """The inverse of _for_values."""
    return x.reshape(ROW // 8, 8, N).permute(2, 1, 0).reshape(N, ROW)


@jit(do_not_specialize=["window", "splits", "stride_table"])
def _decode_kernel(  # noqa: C901 (device code is compiled as one function)
    q,  # [rows, heads, HEAD_DIM]
    pool,  # KVPool.keys [num_blocks, BLOCK_SIZE, kv_heads, KEY_ROW], from which strides lead to values
    words,  # KVPool.words [num_blocks, BLOCK_SIZE, 2, kv_heads], or None: a plain pool
    lengths,  # [rows] int32 or int64
    tables,  # [rows, max_blocks] int32
    sinks,  # [heads] float32, or None
    out,  # like q
    parts,  # [rows, heads, splits, HEAD_DIM] float32, or None: one split, which writes `out`
    stats,  # [rows, heads, splits, 2] float32: m_i and l_i of a split; or None
    scale,  # times log2(e)
    softcap,  # times log2(e), or None
    window,  # 0: none
    splits,
    stride_table,
    stride_block,
    stride_token,
    stride_side,
    stride_head,
    stride_value,  # from a token's value to the next one's; stride_token is that of keys
    words_stride_block,
    words_stride_token,
    words_stride_side,
    words_stride_head,
    GROUP: tl.constexpr,  # heads / kv_heads
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_BITS: tl.constexpr,  # 4, 8, or 16: a plain pool, of values too
    KEY_ASM: tl.constexpr,  # kv_format.Unpacking
    KEY_BIAS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_ASM: tl.constexpr,
    VALUE_BIAS: tl.constexpr,
    WINDOWED: tl.constexpr,  # window > 0
    SINK_TOKENS: tl.constexpr,  # 0 without a window
    WIDEN: tl.constexpr,  # dots in float32: the interpreter's bfloat16 is wrong
    SPLIT: tl.constexpr,  # tokens
    COLUMNS: tl.constexpr,  # a power of two, at least GROUP
    TILE: tl.constexpr,  # tokens
):
    KEY_ROW: tl.constexpr = HEAD_DIM // 2 if KEY_BITS == 4 else HEAD_DIM
    VALUE_ROW: tl.constexpr = HEAD_DIM // 2 if VALUE_BITS == 4 else HEAD_DIM
    DTYPE: tl.constexpr = tl.float32 if WIDEN else q.dtype.element_ty
    MIDDLE: tl.constexpr = 8 if VALUE_BITS == 4 else 127
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    start = split * SPLIT
    first = tl.maximum(length - window, 0) if WINDOWED else 0
    if ((split > 0) & (start >= length)) | ((start + SPLIT <= first) & (start >= SINK_TOKENS)):
        return
    column = tl.arange(0, COLUMNS)
    real = column < GROUP
    head = kv_head * GROUP + column
    d, d_value = tl.arange(0, KEY_ROW), tl.arange(0, VALUE_ROW)
    place = (row * tl.num_programs(1) * GROUP + head) * HEAD_DIM
    q_at = q + place[None, :] + (d if KEY_BITS == 16 else d // 4 % 4 * (KEY_ROW // 4) + d // 16 * 4 + d % 4)[:, None]
    q_a = tl.load(q_at, real[None, :] & (d < KEY_ROW)[:, None], other=0).to(DTYPE)
    q_sum = tl.sum(q_a.to(tl.float32), 0)
    if KEY_BITS == 4:
        q_b = tl.load(q_at + KEY_ROW, real[None, :] & (d < KEY_ROW)[:, None], other=0).to(DTYPE)
        q_sum += tl.sum(q_b.to(tl.float32), 0)
    q_sum *= scale
    m_i = tl.full([COLUMNS], float("-inf"), tl.float32)
    l_i = tl.zeros([8, COLUMNS], tl.float32)  # in eight parts, as the threads hold them, which are added up at the end
    acc_a = tl.zeros([VALUE_ROW, COLUMNS], tl.float32)
    acc_b = tl.zeros([VALUE_ROW, COLUMNS], tl.float32)
    shift = tl.zeros([8, COLUMNS], tl.float32)  # a term to add to each element of acc at the end
    # Cells that are not seen are not read: they may hold anything, even NaN. All of tiles [whole_begin, whole_end) is seen. The
    # tiles of sink tokens come last.
    stop = tl.minimum(length, start + SPLIT)
    begin = tl.maximum(start, first // TILE * TILE)
    whole_begin = tl.maximum(start, tl.cdiv(first, TILE) * TILE)
    SINK_END: tl.constexpr = (SINK_TOKENS + TILE - 1) // TILE * TILE
    if SINK_END > 0:
        begin = tl.minimum(tl.maximum(begin, SINK_END), start + SPLIT)
        whole_begin = tl.minimum(tl.maximum(whole_begin, SINK_END), start + SPLIT)
    whole_end = tl.maximum(stop // TILE * TILE, whole_begin)
    tiles_begin = (begin, whole_begin, whole_end, start)
    tiles_end = (whole_begin, whole_end, stop, tl.minimum(stop, SINK_END))
    table = tables + row * stride_table
    pool += kv_head * stride_head
    if KEY_BITS < 16:
        words += kv_head * words_stride_head
    for part in tl.static_range(0 if WINDOWED else 1, 4 if SINK_END > 0 else 3):
        for tile in tl.range(tiles_begin[part], tiles_end[part], TILE, num_stages=None if part == 1 else 1):
            token = tile + tl.arange(0, TILE)
            seen = (token >= first) & (token < stop)
            if part == 3:
                seen |= (token < SINK_TOKENS) & (token < stop)
            if BLOCK_SIZE % TILE == 0:
                block = tl.load(table + tile // BLOCK_SIZE).to(tl.int64)
                cell = tile % BLOCK_SIZE + tl.arange(0, TILE)
                at = pool + block * stride_block + (cell * stride_token)[:, None] + d[None, :]
            else:
                block = load_seen(table + token // BLOCK_SIZE, seen, part != 1).to(tl.int64)
                cell = token % BLOCK_SIZE
                at = pool + (block * stride_block + cell * stride_token)[:, None] + d[None, :]
            keys = load_seen(at, seen[:, None], part != 1)
            if KEY_BITS == 16:
                s = tl.dot(keys.to(DTYPE), q_a, input_precision="ieee") * scale
            else:
                word = words + block * words_stride_block + cell * words_stride_token
                k_scale, k_least = scale_and_least(load_seen(word, seen, part != 1))
                keys = _for_keys(keys, TILE, KEY_ROW)
                if KEY_BITS == 4:
                    low, high = floats_of_int4(keys, q.dtype.element_ty, KEY_ASM)
                    s = tl.dot(low.to(DTYPE), q_a, input_precision="ieee")
                    s = tl.dot(high.to(DTYPE), q_b, s, input_precision="ieee")
                else:
                    s = tl.dot(floats_of_int8(keys, q.dtype.element_ty, KEY_ASM).to(DTYPE), q_a, input_precision="ieee")
                s = s * (k_scale * scale)[:, None] + q_sum[None, :] * (k_least - KEY_BIAS * k_scale)[:, None]
            if softcap is not None:
                s = capped(s, softcap)
            if part != 1:
                s = tl.where(seen[:, None], s, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(s, 0))
            alpha = tl.exp2(m_i - m_new)
            p = tl.exp2(s - m_new[None, :])
            l_i = l_i * alpha[None, :] + tl.sum(p.reshape(TILE // 8, 8, COLUMNS), 0)
            m_i = m_new
            acc_a *= alpha[None, :]
            value_at = at + stride_side
            if KEY_BITS != VALUE_BITS:
                value_at = pool + stride_side + (block * stride_block + cell * stride_value)[:, None] + d_value[None, :]
            values = _for_values(load_seen(value_at, seen[:, None], part != 1), TILE, VALUE_ROW, VALUE_BITS)
            if VALUE_BITS == 16:
                acc_a = tl.dot(values.to(DTYPE), p.to(DTYPE), acc_a, input_precision="ieee")
            else:
                v_scale, v_least = scale_and_least(load_seen(word + words_stride_side, seen, part != 1))
                weight = (p * v_scale[:, None]).to(DTYPE)
                change = p * (v_least + MIDDLE * v_scale)[:, None]
                if (
                    VALUE_BIAS != -MIDDLE
                ):  # subtracted for the rounded weights, because the dots multiply the rounded ones
                    change -= weight.to(tl.float32) * (VALUE_BIAS + MIDDLE)
                shift = shift * alpha[None, :] + tl.sum(change.reshape(TILE // 8, 8, COLUMNS), 0)
                weight = _apart(weight, TILE, COLUMNS, VALUE_BITS)
                if VALUE_BITS == 4:
                    acc_b *= alpha[None, :]
                    low, high = floats_of_int4(values, q.dtype.element_ty, VALUE_ASM)
                    acc_a = tl.dot(low.to(DTYPE), weight, acc_a, input_precision="ieee")
                    acc_b = tl.dot(high.to(DTYPE), weight, acc_b, input_precision="ieee")
                else:
                    numbers = floats_of_int8(values, q.dtype.element_ty, VALUE_ASM).to(DTYPE)
                    acc_a = tl.dot(numbers, weight, acc_a, input_precision="ieee")
    l_i = tl.sum(l_i, 0)
    shift = tl.sum(shift, 0)
    acc_a = _straight(acc_a + shift[None, :], COLUMNS, VALUE_ROW)
    acc_b = _straight(acc_b + shift[None, :], COLUMNS, VALUE_ROW)
    mask = real[:, None] & (d_value < VALUE_ROW)[None, :]
    if parts is None:
        place = place[:, None] + d_value[None, :]
        factor = finished(m_i, l_i, sinks, head, real)[:, None]
        tl.store(out + place, (acc_a * factor).to(out.dtype.element_ty), mask)
        if VALUE_BITS == 4:
            tl.store(out + place + VALUE_ROW, (acc_b * factor).to(out.dtype.element_ty), mask)
    else:
        part_at = (row * tl.num_programs(1) * GROUP + head) * splits + split
        target = parts + part_at[:, None] * HEAD_DIM + d_value[None, :]
        tl.store(target, acc_a, mask)
        if VALUE_BITS == 4:
            tl.store(target + VALUE_ROW, acc_b, mask)
        tl.store(stats + part_at * 2, m_i, real)
        tl.store(stats + part_at * 2 + 1, l_i, real)


def variants() -> dict[str, Variant]:
    names = (name for name in _decode_kernel.arg_names if "stride_" in name)
    strides = tuple(name for name in names if name not in ("words_stride_token", "stride_table"))
    types = {"lengths": "*i32", "tables": "*i32", "scale": "fp32", "parts": "*fp32", "stats": "*fp32"}
    types |= dict.fromkeys(("q", "out"), "*bf16") | dict.fromkeys((*strides, "window", "splits", "stride_table"), "i32")

    def variant(
        kv: str, block_size: int, group: int = 4, windowed: bool = False, sink_tokens: int = 0, softcap: bool = False
    ) -> Variant:
        format = KV_FORMATS[kv]
        config = _config(group, format.is_quantised, 128)
        num_warps, num_stages = config.pop("num_warps"), config.pop("num_stages")
        shape = {"GROUP": group, "HEAD_DIM": 128, "BLOCK_SIZE": block_size, "SPLIT": SPLIT_TOKENS, "WIDEN": False}
        constants = config | shape | unpacking_constants(torch.bfloat16, format)
        constants |= {"WINDOWED": windowed, "SINK_TOKENS": sink_tokens, "sinks": None, "words_stride_token": 1}
        constants |= ({} if softcap else {"softcap": None}) | ({} if format.is_quantised else {"words": None})
        its_types = types | ({"softcap": "fp32"} if softcap else {})
        its_types |= {"pool": "*u8", "words": "*i32"} if format.is_quantised else {"pool": "*bf16"}
        loads = "LDGSTS.E.BYPASS.128", "LDS.128" if format.is_quantised else "LDSM"
        instructions = dict.fromkeys((80, 90, 100), ("HMMA", *loads))
        return Variant(_decode_kernel, its_types, constants, num_warps, num_stages, strides, instructions)

    return {
        "16-bit": variant("auto", 64),
        "16-bit-blocks-of-16": variant("auto", 16),
        "8-bit": variant("int8", 64),
        "8-bit-keys-4-bit-values": variant("k8v4", 64),
        "4-bit": variant("int4", 64),
        "4-bit-blocks-of-16-window": variant("int4", 16, windowed=True),
        "16-bit-softcap": variant("auto", 64, softcap=True),
        "4-bit-softcap": variant("int4", 64, softcap=True),
        "16-bit-window-sink-tokens": variant("auto", 64, windowed=True, sink_tokens=4),
        "4-bit-window-sink-tokens": variant("int4", 64, windowed=True, sink_tokens=4),
        "4-bit-32-heads": variant("int4", 64, group=32),
    }

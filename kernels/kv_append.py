"""The steps between the projections and the attention of a layer: the heads' norms, RoPE, and the write to the KV pool.

    q, k = norm(q), norm(k)                     RMSNorm over head_dim, for models that have it (Qwen3); kernels/norm.py
    q, k = rope(q, position), rope(k, position) for layers that have it                           kernels/rope.py
    q *= query_scales[position]                 for models that have it (Ministral 3)
    q, k = H q, H (k - key_shift)               where keys are quantised: kernels/common/kv_rotation.py
    pool[cell] = k, v                           as they are or quantised: kernels/common/kv_format.py

for qkv [tokens, (heads + 2 * kv_heads) * head_dim] = [q | k | v]. Everything is computed in float32, and a value is rounded once,
when it is written. A cell is a token's physical position, block * block_size + offset. A token whose cell is -1 pads the batch
of a CUDA graph: nothing is read or written for it, and its q is undefined.

TurboMind (kv_cache_utils_v2), QServe (Lin et al. 2024) and LMDeploy (fill_kv_cache) fuse the same steps.
"""

from __future__ import annotations

from torch import Tensor

from kernels import norm, rope
from kernels.common.kv_format import KV_FORMATS, KVPool, write_cells
from kernels.common.kv_rotation import factors_of, rotated_key, rotated_query, rounds_of, turned_halves
from kernels.common.triton_runtime import Variant, jit, next_power_of_two, runs_on, tl

# (rotary dimensions, interleaved), of heads of 96
ROPES = [(96, True), (32, False), (40, True), (66, False), (0, False)]

# (tokens, heads, kv_heads, head_dim, block_size)
CASES = [(1, 1, 1, 8, 4), (5, 4, 2, 64, 16), (7, 9, 3, 80, 2), (4, 2, 1, 96, 16), (3, 16, 8, 128, 8)]

# A program handles at most this many heads of one token. 8 heads of 128 elements are 16 bytes a thread and load in two warps;
# with one head a program, each token of Llama-3-8B would take 48 programs that load 256 bytes each.
HEADS_AT_ONCE = 8


def reference(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    cells: Tensor,
    pool: KVPool,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    query_scales: Tensor | None = None,
    key_shift: Tensor | None = None,
) -> Tensor:
    """Like `kv_append`; q is 0 where the cell is -1."""
    heads, kv_heads, head_dim, block_size = _shape(qkv, pool)
    real = cells >= 0
    cells, positions = cells[real], positions[real]
    parts = qkv[real].float().unflatten(1, (-1, head_dim))
    query, key, value = parts.split((heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None:
        query = norm.reference(query, q_norm.float(), eps)
    if k_norm is not None:
        key = norm.reference(key, k_norm.float(), eps)
    if cos is not None and sin is not None:
        factors = rope.rope_factors(cos[positions], sin[positions], interleaved)
        query, key = (rope.reference(x, *factors, interleaved) for x in (query, key))
    if query_scales is not None:
        query = query * query_scales[positions, None, None]
    if pool.format.is_quantised:
        query, key = rotated_query(query), rotated_key(key, key_shift)
    write_cells(pool, cells // block_size, cells % block_size, key, value)
    out = qkv.new_zeros(len(qkv), heads, head_dim)
    out[real] = query.to(qkv.dtype)
    return out


def kv_append(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    cells: Tensor,
    pool: KVPool,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    query_scales: Tensor | None = None,
    key_shift: Tensor | None = None,
) -> Tensor:
    """Writes the batch's keys and values to `pool`, and returns its q [tokens, heads, head_dim] in qkv's dtype.

    qkv [tokens, (heads + 2 * kv_heads) * head_dim]; positions, cells int64 [tokens], cells all different or -1;
    cos, sin float32 [max_seq_len, rotary_dim / 2], or both None: nothing is rotated; q_norm, k_norm [head_dim]; interleaved:
    which dimensions are pairs (kernels/rope.py); query_scales float32 [max_seq_len]; key_shift float32 [kv_heads, head_dim].
    """
    if not runs_on(qkv):
        return reference(
            qkv, positions, cos, sin, cells, pool, q_norm, k_norm, eps, interleaved, query_scales, key_shift
        )
    heads, kv_heads, head_dim, block_size = _shape(qkv, pool)
    q = qkv.new_empty(len(qkv), heads, head_dim)
    config = _config(heads, kv_heads, head_dim)
    cos, sin = (None if table is None else table.contiguous() for table in (cos, sin))
    rotary_dim = 0 if cos is None else 2 * cos.shape[1]
    query_factor, key_factor = factors_of(head_dim)
    _kv_append_kernel[(len(qkv), _num_groups(heads, kv_heads, config["GROUP"]))](
        qkv.contiguous(), positions.contiguous(), cos, sin, query_scales, key_shift, cells.contiguous(), q_norm, k_norm,
        q, pool.keys, pool.words, eps, *pool.strides, ROTARY_DIM=rotary_dim, INTERLEAVED=interleaved,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        KEY_BITS=pool.format.key_bits, VALUE_BITS=pool.format.value_bits, ROUNDS=rounds_of(head_dim)[0],
        QUERY_FACTOR=query_factor, KEY_FACTOR=key_factor, **config,
    )  # fmt: skip
    return q


def _shape(qkv: Tensor, pool: KVPool) -> tuple[int, int, int, int]:
    """Returns heads, kv_heads, head_dim, block_size."""
    _, block_size, kv_heads, _ = pool.keys.shape
    return qkv.shape[1] // pool.head_dim - 2 * kv_heads, kv_heads, pool.head_dim, block_size


def _config(heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    group = min(HEADS_AT_ONCE, next_power_of_two(max(heads, kv_heads)))
    half_block = next_power_of_two(head_dim // 2)
    return {"GROUP": group, "HALF_BLOCK": half_block, "num_warps": min(8, max(1, group * half_block // 256))}


def _num_groups(heads: int, kv_heads: int, group: int) -> int:
    """The number of programs for each token."""
    return -(-heads // group) + 2 * -(-kv_heads // group)


@jit
def _rotated(
    a,  # float32 [GROUP, HALF_BLOCK]: the heads' first halves
    b,  # like a: their second halves
    source,  # [GROUP, 1]: where the heads begin in qkv
    mask,  # like a: what of it are numbers
    weight,  # [HEAD_DIM] of the norm, or None
    eps,
    cos,  # [ROTARY_DIM / 2] float32, or None
    sin,  # like cos
    columns,  # [HALF_BLOCK]
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    inside = columns < HALF
    inverse = None
    if weight is not None:
        inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD_DIM + eps)[:, None]
        a = a * inverse * tl.load(weight + columns, inside, other=0).to(tl.float32)[None, :]
        b = b * inverse * tl.load(weight + HALF + columns, inside, other=0).to(tl.float32)[None, :]
    if cos is None:
        return a, b
    elif ROTARY_DIM == HEAD_DIM and not INTERLEAVED:
        c = tl.load(cos + columns, inside, other=0)[None, :]
        s = tl.load(sin + columns, inside, other=0)[None, :]
        return a * c - b * s, b * c + a * s
    else:
        a = _rotated_part(a, columns, source, mask, weight, inverse, cos, sin, ROTARY_DIM, INTERLEAVED)
        b = _rotated_part(b, HALF + columns, source, mask, weight, inverse, cos, sin, ROTARY_DIM, INTERLEAVED)
        return a, b


@jit
def _rotated_part(
    x,  # float32 [GROUP, N], normed
    columns,  # [N]: which of the heads they are
    source,  # [GROUP, 1]: where the heads begin in qkv
    mask,  # like x: what of it are numbers
    weight,  # the norm's weight, or None
    inverse,  # [GROUP, 1]: the norm's other factor, with a weight
    cos,  # [ROTARY_DIM / 2] float32
    sin,  # like cos
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotates those of the columns that are rotated; each one's partner is read again, because it may be in either half."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    if INTERLEAVED:
        is_first, partner, pair = columns % 2 == 0, columns ^ 1, columns // 2
    else:
        is_first = columns < HALF
        partner, pair = tl.where(is_first, columns + HALF, columns - HALF), tl.where(is_first, columns, columns - HALF)
    turns = columns < ROTARY_DIM
    y = tl.load(source + partner[None, :], mask & turns[None, :], other=0).to(tl.float32)
    if weight is not None:
        y = y * inverse * tl.load(weight + partner, turns, other=0).to(tl.float32)[None, :]
    c = tl.load(cos + pair, turns, other=1)
    s = tl.load(sin + pair, turns, other=0)
    return x * c[None, :] + y * tl.where(is_first, -s, s)[None, :]


@jit
def _quantized(
    a,  # float32 [GROUP, HALF_BLOCK]: the heads' first halves
    b,  # like a: their second halves
    inside,  # [1, HALF_BLOCK]
    BITS: tl.constexpr,
):
    """Returns q of a and of b, int32, and scale and least, float16 [GROUP]: quantize_rows of kernels/common/kv_format.py."""
    MAX_Q: tl.constexpr = (1 << BITS) - 1
    low = tl.min(tl.where(inside, tl.minimum(a, b), float("inf")), 1)
    high = tl.max(tl.where(inside, tl.maximum(a, b), float("-inf")), 1)
    least = tl.clamp(low, -65504.0, 65504.0).to(tl.float16)
    base = least.to(tl.float32)
    # Division is rounded as IEEE 754 says, because a small error would round a tie the other way.
    scale = tl.clamp(tl.div_rn(high - base, MAX_Q * 1.0), 0.0, 65504.0).to(tl.float16)
    divisor = tl.where(scale > 0, scale.to(tl.float32), float("inf"))[:, None]
    a = tl.floor(tl.div_rn(a - base[:, None], divisor) + 0.5)
    b = tl.floor(tl.div_rn(b - base[:, None], divisor) + 0.5)
    return tl.clamp(a, 0.0, MAX_Q * 1.0).to(tl.int32), tl.clamp(b, 0.0, MAX_Q * 1.0).to(tl.int32), scale, least


@jit
def _store_quantized(
    target,  # [GROUP, HALF_BLOCK]: where the heads' first bytes go
    a,  # float32 [GROUP, HALF_BLOCK]: the heads' first halves
    b,  # like a: their second halves
    inside,  # [1, HALF_BLOCK]
    mask,  # like a
    HALF: tl.constexpr,
    BITS: tl.constexpr,
):
    """Stores the numbers, and returns the heads' words, int32 [GROUP]."""
    lower, upper, scale, least = _quantized(a, b, inside, BITS)
    if BITS == 4:
        tl.store(target, (lower | upper << 4).to(tl.uint8), mask)
    else:
        tl.store(target, lower.to(tl.uint8), mask)
        tl.store(target + HALF, upper.to(tl.uint8), mask)
    low_half = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low_half | least.to(tl.int16, bitcast=True).to(tl.int32) << 16


@jit
def _kv_append_kernel(
    qkv,  # [tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM]
    positions,  # [tokens] int64
    cos,  # [max_seq_len, ROTARY_DIM / 2] float32, or None
    sin,  # like cos
    query_scales,  # [max_seq_len] float32, or None
    key_shift,  # [KV_HEADS, HEAD_DIM] float32, or None
    cells,  # [tokens] int64
    q_norm,  # [HEAD_DIM], or None
    k_norm,  # [HEAD_DIM], or None
    q,  # [tokens, HEADS, HEAD_DIM]
    pool,  # KVPool.keys [num_blocks, BLOCK_SIZE, KV_HEADS, row], from which strides lead to values
    words,  # KVPool.words [num_blocks, BLOCK_SIZE, 2, KV_HEADS], or None: a plain pool
    eps,
    stride_block,
    stride_token,
    stride_side,
    stride_head,
    stride_value,  # from a token's value to the next one's; stride_token is that of keys
    words_stride_block,
    words_stride_token,
    words_stride_side,
    words_stride_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_BITS: tl.constexpr,  # 8 or 4 for a quantised pool
    VALUE_BITS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,  # 0 without cos
    INTERLEAVED: tl.constexpr,
    ROUNDS: tl.constexpr,  # rounds within a half: turned_halves
    QUERY_FACTOR: tl.constexpr,
    KEY_FACTOR: tl.constexpr,
    GROUP: tl.constexpr,  # heads of a program, a power of two
    HALF_BLOCK: tl.constexpr,  # a power of two, at least HEAD_DIM / 2
):
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_GROUPS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    KV_GROUPS: tl.constexpr = (KV_HEADS + GROUP - 1) // GROUP
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    cell = tl.load(cells + token)
    if cell < 0:
        return
    position = tl.load(positions + token)
    if cos is not None:
        cos += position * (ROTARY_DIM // 2)
        sin += position * (ROTARY_DIM // 2)
    columns = tl.arange(0, HALF_BLOCK)
    inside = (columns < HALF)[None, :]
    row = qkv + token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    if group < Q_GROUPS:
        head = group * GROUP + tl.arange(0, GROUP)
        mask = (head < HEADS)[:, None] & inside
        heads = row + head[:, None] * HEAD_DIM
        source = heads + columns[None, :]
        a = tl.load(source, mask, other=0).to(tl.float32)
        b = tl.load(source + HALF, mask, other=0).to(tl.float32)
        a, b = _rotated(a, b, heads, mask, q_norm, eps, cos, sin, columns, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
        if query_scales is not None:
            query_scale = tl.load(query_scales + position)
            a, b = a * query_scale, b * query_scale
        if words is not None:
            a, b = turned_halves(a, b, ROUNDS, QUERY_FACTOR, GROUP, HALF_BLOCK)
        out = q + token * (HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + columns[None, :]
        tl.store(out, a.to(q.dtype.element_ty), mask)
        tl.store(out + HALF, b.to(q.dtype.element_ty), mask)
    else:
        side = (group - Q_GROUPS) // KV_GROUPS  # 0 key, 1 value
        head = (group - Q_GROUPS) % KV_GROUPS * GROUP + tl.arange(0, GROUP)
        mask = (head < KV_HEADS)[:, None] & inside
        heads = row + (HEADS + side * KV_HEADS + head)[:, None] * HEAD_DIM
        source = heads + columns[None, :]
        a = tl.load(source, mask, other=0).to(tl.float32)
        b = tl.load(source + HALF, mask, other=0).to(tl.float32)
        if side == 0:
            a, b = _rotated(a, b, heads, mask, k_norm, eps, cos, sin, columns, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
            if words is not None:
                if key_shift is not None:
                    shift = key_shift + head[:, None] * HEAD_DIM + columns[None, :]
                    a -= tl.load(shift, mask, other=0)
                    b -= tl.load(shift + HALF, mask, other=0)
                a, b = turned_halves(a, b, ROUNDS, KEY_FACTOR, GROUP, HALF_BLOCK)
        block = cell // BLOCK_SIZE
        offset = cell % BLOCK_SIZE
        stride = stride_token
        if KEY_BITS != VALUE_BITS:
            stride = tl.where(side == 0, stride_token, stride_value)
        place = pool + block * stride_block + offset * stride + side.to(tl.int64) * stride_side
        target = place + head.to(tl.int64)[:, None] * stride_head + columns[None, :]
        if words is None:
            tl.store(target, a.to(pool.dtype.element_ty), mask)
            tl.store(target + HALF, b.to(pool.dtype.element_ty), mask)
        else:
            if KEY_BITS == VALUE_BITS or side == 0:
                word = _store_quantized(target, a, b, inside, mask, HALF, KEY_BITS)
            else:
                word = _store_quantized(target, a, b, inside, mask, HALF, VALUE_BITS)
            word_at = words + block * words_stride_block + offset * words_stride_token
            word_at += side.to(tl.int64) * words_stride_side + head.to(tl.int64) * words_stride_head
            tl.store(word_at, word, head < KV_HEADS)


def variants() -> dict[str, Variant]:
    types = dict.fromkeys(("qkv", "q", "pool"), "*bf16") | dict.fromkeys(("positions", "cells"), "*i64")
    types |= {"eps": "fp32"}
    strides: tuple[str, ...] = ("stride_block", "stride_token", "stride_side", "stride_head")
    strides += ("stride_value", *(f"words_{name}" for name in strides if name != "stride_token"))
    types |= dict.fromkeys(strides, "i32")
    groups = {
        "norms": ("q_norm", "k_norm"),
        "rope": ("cos", "sin"),
        "scales": ("query_scales",),
        "shift": ("key_shift",),
    }

    def variant(heads: int, kv_heads: int, head_dim: int, kv: str, has: tuple[str, ...], rotary_dim: int) -> Variant:
        format = KV_FORMATS[kv]
        config = _config(heads, kv_heads, head_dim)
        num_warps = config.pop("num_warps")
        constants: dict[str, object] = {
            **config,
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": 64,
            "KEY_BITS": format.key_bits,
            "VALUE_BITS": format.value_bits,
            "ROTARY_DIM": rotary_dim,
            "INTERLEAVED": "interleaved" in has,
            "ROUNDS": rounds_of(head_dim)[0],
            "QUERY_FACTOR": factors_of(head_dim)[0],
            "KEY_FACTOR": factors_of(head_dim)[1],
            "words_stride_token": 1,
        }
        its_types = dict(types)
        for group, names in groups.items():
            if group in has or (group == "rope" and rotary_dim):
                its_types |= dict.fromkeys(names, "*bf16" if group == "norms" else "*fp32")
            else:
                constants |= dict.fromkeys(names)
        its_types |= {"pool": "*u8", "words": "*i32"} if format.is_quantised else {}
        constants |= {} if format.is_quantised else {"words": None}
        wide = ("LDG.E.128", "STG.E.64" if format.is_quantised else "STG.E.128")
        instructions = dict.fromkeys((80, 90, 100), wide)
        kernel = _kv_append_kernel
        return Variant(kernel, its_types, constants, num_warps, divisible=strides, instructions=instructions)

    return {
        "plain-128": variant(32, 8, 128, "auto", (), 128),
        "plain-norms-128": variant(32, 8, 128, "auto", ("norms",), 128),
        "plain-80": variant(32, 32, 80, "auto", (), 80),
        "plain-without-rope-128": variant(32, 8, 128, "auto", (), 0),
        "plain-partial-96-of-128": variant(32, 8, 128, "auto", ("norms",), 96),
        "plain-interleaved-scales-128": variant(32, 8, 128, "auto", ("interleaved", "scales"), 128),
        "int8-128": variant(32, 8, 128, "int8", (), 128),
        "int8-scales-128": variant(32, 8, 128, "int8", ("scales",), 128),
        "int8-shift-128": variant(28, 4, 128, "int8", ("shift",), 128),
        "int4-96": variant(32, 32, 96, "int4", (), 96),
        "int4-128": variant(32, 8, 128, "int4", (), 128),
        "k8v4-128": variant(32, 8, 128, "k8v4", (), 128),
        "int4-norms-128-one-kv-head": variant(4, 1, 128, "int4", ("norms",), 128),
        "int4-partial-32-of-128": variant(32, 8, 128, "int4", (), 32),
    }

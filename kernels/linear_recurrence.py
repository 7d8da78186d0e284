"""A matrix of state that each token decays and adds to: the gated delta rule (arXiv:2412.06464), and Mamba 2 (arXiv:2405.21060).

S    = decay_t * S                                     S [key_dim, value_dim] of each value head, float32
e    = strength_t * (v_t - k_t S)                      the delta rule: what S yields for the key is replaced
e    = strength_t * v_t                                otherwise: it is added to
S    = S + k_t e^T ;  o_t = q_t S

Tokens run one by one in the order of their sequence, so that o and S are the same however they are divided among calls.

On a GPU a warp runs all tokens of a row for a slice of the columns of a value head's S, which it holds in registers. The slice
and the warp depend on nothing, because the order in which products with k and q are added follows from them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.state_rows import ROW_NUMBERS, StateRows
from kernels.common.triton_runtime import Variant, jit, next_power_of_two, runs_on, tl

# key heads, value heads, key_dim, value_dim, tokens of each row
CASES = [
    (2, 2, 16, 16, (1, 1)),
    (2, 6, 8, 24, (5, 1)),
    (1, 4, 32, 16, (9,)),
    (4, 4, 64, 64, (1, 3, 1)),
    (1, 2, 80, 4, (6,)),
]
SLICE = 8  # columns of S: 32 bytes, what memory is read in
NUM_WARPS, NUM_STAGES = 1, 3


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    strength: Tensor,
    matrices: Tensor,
    rows: StateRows,
    is_delta: bool,
) -> Tensor:
    """q, k [tokens, key_heads, key_dim], v [tokens, value_heads, value_dim], decay, strength [tokens, value_heads], and
    matrices [states, value_heads, key_dim, value_dim], which are written: all float32. Returns o, like v.
    """
    out = torch.empty_like(v)
    per_key = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(per_key, dim=1) for x in (q, k))
    for row, (source, _, _) in enumerate(rows.numbers.tolist()):
        first, end = rows.starts[row : row + 2].tolist()
        state = matrices.new_zeros(matrices.shape[1:]) if source < 0 else matrices[source].clone()
        due = list(rows.writes_of(row))
        for token in range(first, end):
            state *= decay[token, :, None, None]
            key = k[token, :, :, None]
            value = v[token] - (state * key).sum(1) if is_delta else v[token]
            state += key * (strength[token, :, None] * value)[:, None]
            out[token] = (state * q[token, :, :, None]).sum(1)
            for tokens, place in due:
                if tokens == token - first + 1:
                    matrices[place] = state
    return out


def linear_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    strength: Tensor,
    matrices: Tensor,
    rows: StateRows,
    is_delta: bool,
) -> Tensor:
    """See `reference`."""
    if not runs_on(q):
        return reference(q, k, v, decay, strength, matrices, rows, is_delta)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    (tokens, value_heads, value_dim), (_, key_heads, key_dim) = v.shape, k.shape
    if not tokens:
        return out
    (q, q_stride), (k, k_stride), (v, v_stride) = (_with_stride(x) for x in (q, k, v))
    placed = rows.on(q.device)
    _recurrence_kernel[(-(-value_dim // SLICE), value_heads, len(placed.rows))](
        q, k, v, decay.contiguous(), strength.contiguous(), matrices, placed.rows, placed.pieces, out, q_stride, k_stride,
        v_stride, matrices.stride(0), VALUE_HEADS=value_heads, PER_KEY=value_heads // key_heads, KEY_DIM=key_dim,
        VALUE_DIM=value_dim, IS_DELTA=is_delta, ROW_NUMBERS=ROW_NUMBERS, BLOCK_KEY=next_power_of_two(key_dim),
        SLICE=SLICE, STAGES=NUM_STAGES, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def _with_stride(x: Tensor) -> tuple[Tensor, int]:
    """x [tokens, heads, dim], and the distance of its tokens, whose heads follow each other."""
    _, heads, dim = x.shape
    x = x if x.stride(2) == 1 and x.stride(1) == dim else x.contiguous()
    return x, x.stride(0) if len(x) > 1 else heads * dim  # a single token's stride says nothing


@jit
def _recurrence_kernel(
    q,  # [tokens, key heads, KEY_DIM]
    k,  # like q
    v,  # [tokens, VALUE_HEADS, VALUE_DIM]
    decay,  # [tokens, VALUE_HEADS]
    strength,  # [tokens, VALUE_HEADS]
    matrices,  # [states, VALUE_HEADS, KEY_DIM, VALUE_DIM]
    rows,  # [rows, ROW_NUMBERS] int32
    pieces,  # [pieces, 2] int32
    out,  # [tokens, VALUE_HEADS, VALUE_DIM]
    q_stride,  # between tokens
    k_stride,
    v_stride,
    state_stride,  # between states
    VALUE_HEADS: tl.constexpr,
    PER_KEY: tl.constexpr,  # value heads that share a key head
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    IS_DELTA: tl.constexpr,
    ROW_NUMBERS: tl.constexpr,
    BLOCK_KEY: tl.constexpr,  # a power of two, at least KEY_DIM
    SLICE: tl.constexpr,
    STAGES: tl.constexpr,
):
    head = tl.program_id(1)
    key, value = tl.arange(0, BLOCK_KEY), tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    mask = is_key[:, None] & is_value[None, :]
    states = matrices + head * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
    of_key = head // PER_KEY * KEY_DIM + key
    of_value = head * VALUE_DIM + value

    row = rows + ROW_NUMBERS * tl.program_id(2)
    start, source = tl.load(row), tl.load(row + 1)
    # No branch: what begins a sequence has the same instructions behind it as what goes on.
    state = tl.load(states + source.to(tl.int64) * state_stride, mask & (source >= 0), other=0)
    for piece in range(tl.load(row + 4), tl.load(row + 5)):
        end, target = tl.load(pieces + 2 * piece), tl.load(pieces + 2 * piece + 1)
        for token in tl.range(start, end, num_stages=STAGES):
            at = tl.cast(token, tl.int64)
            key_row = tl.load(k + at * k_stride + of_key, is_key, other=0)[:, None]
            query_row = tl.load(q + at * q_stride + of_key, is_key, other=0)[:, None]
            given = tl.load(v + at * v_stride + of_value, is_value, other=0)
            factor = tl.load(strength + at * VALUE_HEADS + head)
            state *= tl.load(decay + at * VALUE_HEADS + head)
            if IS_DELTA:
                given -= tl.sum(state * key_row, 0)
            state = tl.fma(key_row, (factor * given)[None, :], state)
            o = tl.sum(state * query_row, 0)
            tl.store(out + at * (VALUE_HEADS * VALUE_DIM) + of_value, o, is_value)
        if target >= 0:
            tl.store(states + target.to(tl.int64) * state_stride, state, mask)
        start = end


def variants() -> dict[str, Variant]:
    floats = ("q", "k", "v", "decay", "strength", "matrices", "out")
    strides = ("q_stride", "k_stride", "v_stride", "state_stride")
    types = dict.fromkeys(floats, "*fp32") | {"rows": "*i32", "pieces": "*i32"} | dict.fromkeys(strides, "i32")
    made = {}
    for is_delta, heads, per_key, key_dim, value_dim in (
        (True, 16, 1, 128, 128),
        (True, 32, 2, 128, 128),
        (True, 16, 1, 256, 256),
        (True, 6, 3, 80, 12),
        (False, 64, 64, 128, 64),
    ):
        constants = {"VALUE_HEADS": heads, "PER_KEY": per_key, "KEY_DIM": key_dim, "VALUE_DIM": value_dim}
        constants |= {"IS_DELTA": is_delta, "ROW_NUMBERS": ROW_NUMBERS, "BLOCK_KEY": next_power_of_two(key_dim)}
        constants |= {"SLICE": SLICE, "STAGES": NUM_STAGES}
        name = f"{'delta' if is_delta else 'mamba2'}-{heads}x{key_dim}x{value_dim}"
        ahead = dict.fromkeys((80, 90, 100), ("LDGSTS",))  # the inputs of tokens that follow
        made[name] = Variant(_recurrence_kernel, types, constants, NUM_WARPS, divisible=strides, instructions=ahead)
    return made

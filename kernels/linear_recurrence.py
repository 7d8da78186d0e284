"""A matrix of state that each token decays and adds to: the gated delta rule (arXiv:2412.06464), and Mamba 2 (arXiv:2405.21060).

S    = decay_t * S                                     S [key_dim, value_dim] of each value head, float32
e    = strength_t * (v_t - k_t S)                      the delta rule: what S yields for the key is replaced
e    = strength_t * v_t                                otherwise: it is added to
S    = S + k_t e^T ;  o_t = q_t S

Tokens run one by one in the order of their sequence, so that o and S are the same however they are divided among calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.state_rows import StateRows

# key heads, value heads, key_dim, value_dim, tokens of each row
CASES = [(2, 2, 16, 16, (1, 1)), (2, 6, 8, 24, (5, 1)), (1, 4, 32, 16, (9,)), (4, 4, 64, 64, (1, 3, 1))]


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
    return reference(q, k, v, decay, strength, matrices, rows, is_delta)

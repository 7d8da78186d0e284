"""Rotary position embedding (Su et al., 2021) of the leading rotary_dim dimensions of a head; the others stay as they are.

    angle = position * inv_freq              [num_tokens, half] for half = rotary_dim / 2
    (a, b) -> (a cos - b sin, b cos + a sin) for a = x[..., :half], b = x[..., half:rotary_dim]         Hugging Face's layout
                                             or a = x[..., 0:rotary_dim:2], b = x[..., 1:rotary_dim:2]  where it is interleaved

With the sign in the sine and the partners exchanged this is x * straight + exchanged(x) * crossed; `rope_factors` makes the two
factors. Its Triton form is part of kv_append.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

CASES = [(1, 1, 2), (1, 1, 8), (5, 3, 16), (17, 8, 64), (3, 2, 80)]  # (num_tokens, num_heads, head_dim)


def rope_factors(cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Makes the two factors, each [num_tokens, 1, rotary_dim], of cos and sin [num_tokens, rotary_dim / 2]."""
    if interleaved:
        crossed = torch.stack((-sin, sin), dim=-1).flatten(-2)
        return cos.repeat_interleave(2, dim=-1)[:, None], crossed[:, None]
    return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


def reference(x: Tensor, straight: Tensor, crossed: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates x [num_tokens, heads, head_dim] by factors of `rope_factors` in x's dtype; returns a new tensor."""
    rotary_dim = straight.shape[-1]
    leading, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        exchanged = leading.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        exchanged = leading.roll(rotary_dim // 2, -1)
    rotated = torch.addcmul(leading * straight, exchanged, crossed)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated

"""Rotary position embedding (Su et al., 2021), in Hugging Face's layout: the head's first half pairs with its second.

    angle = position * inv_freq              [num_tokens, head_dim / 2]
    (a, b) -> (a cos - b sin, b cos + a sin) for a = x[..., :half], b = x[..., half:]

With the sign in the sine and the halves exchanged this is x * [cos cos] + roll(x) * [-sin sin]; `rope_factors` makes the two
factors. Its Triton form is part of kv_append.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

CASES = [(1, 1, 2), (1, 1, 8), (5, 3, 16), (17, 8, 64), (3, 2, 80)]  # (num_tokens, num_heads, head_dim)


def rope_factors(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Makes the factors of x and of rolled x, each [num_tokens, 1, head_dim], of cos and sin [num_tokens, head_dim / 2]."""
    return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


def reference(x: Tensor, straight: Tensor, crossed: Tensor) -> Tensor:
    """Rotates x [num_tokens, heads, head_dim] by factors of `rope_factors` in x's dtype; returns a new tensor."""
    return torch.addcmul(x * straight, x.roll(x.shape[-1] // 2, -1), crossed)

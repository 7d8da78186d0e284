"""Rotary position embedding (Su et al., 2021), in Hugging Face's layout: the head's first half pairs with its second half.

    angle = position * inv_freq              [num_tokens, head_dim / 2]
    (a, b) -> (a cos - b sin, b cos + a sin) for a = x[..., :half], b = x[..., half:]
"""

from __future__ import annotations

import torch
from torch import Tensor

CASES = [(1, 1, 8), (5, 3, 16), (17, 8, 64)]  # (num_tokens, num_heads, head_dim)


def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [num_tokens, heads, head_dim]; cos, sin [num_tokens, head_dim / 2] in x's dtype -> x rotated."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return reference(x, cos, sin)

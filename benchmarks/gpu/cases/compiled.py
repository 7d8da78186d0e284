"""torch.compile, only when a peer asks for it: importing its parts takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention as eager

    return torch.compile(eager, dynamic=False)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


@cache
def causal_block_mask(queries: int, keys: int, device: torch.device) -> object:
    """Causal, aligned at the bottom right."""
    from torch.nn.attention.flex_attention import create_block_mask

    offset = keys - queries
    return create_block_mask(lambda b, h, q, k: q + offset >= k, None, None, queries, keys, device=device)

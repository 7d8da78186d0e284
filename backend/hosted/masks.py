"""Learns each layer's attention window from the masks that the library makes.

A token of a decoder sees itself and the window - 1 tokens before it; one of an encoder as many behind it, too.

In the first pass the library is asked for masks, as for its own attention, and every mask becomes a tensor [1, 1, 1, 1] that
holds the window in tokens, 0 for none. So windows are those that the library's reference applies, whatever attention modules say.
In later passes no masks are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from backend.api.errors import ConfigError

Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (batch, head, query, key) -> whether the query sees the key

_OTHER = -1  # a mask that is no window


@contextmanager
def masks_are_windows(name: str, both_sides: bool = False) -> Iterator[None]:
    """Within it, masks for the attention function `name` are windows. `both_sides`: those of an encoder."""
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, partial(_as_window, both_sides))
    try:
        yield
    finally:
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(name)


def window_of(mask: Tensor | None, named: int | None) -> int | None:
    """The window of a layer: its mask's, or the one that its module names where it has no mask. Raises ConfigError."""
    if mask is None:
        return named
    window = int(mask.flatten()[0])
    if window == _OTHER:
        raise ConfigError(
            "the model's attention has a mask that is neither that of whole texts nor a window, which is not supported; use a "
            "model of another family"
        )
    return window or None


def _as_window(both_sides: bool, mask_function: Sees, local_size: int | None = None, **given: Any) -> Tensor:
    window = local_size + both_sides if local_size else 0  # an encoder's size is the largest distance that is seen
    return torch.full((1, 1, 1, 1), window if _is_window(mask_function, window, both_sides) else _OTHER)


def _is_window(sees: Sees, window: int, both_sides: bool) -> bool:
    """Compares at queries around multiples of the window, and at all keys near the edges."""
    unit = window or 64
    zero = torch.zeros((), dtype=torch.int64)
    near = torch.arange(-3, 4)
    queries = torch.cat([unit * times + near for times in (0, 1, 2, 7)]).clamp(min=0).unique()
    for query in queries:
        keys = torch.cat((query + near, query - unit + near, query + unit + near, near)).clamp(min=0).unique()
        expected = (keys <= query) | both_sides
        if window:
            expected &= (keys - query).abs() < window
        found = torch.stack([torch.as_tensor(sees(zero, zero, query, key)) for key in keys])
        if not torch.equal(found.flatten().bool(), expected):
            return False
    return True

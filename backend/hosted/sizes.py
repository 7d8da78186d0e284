"""How large a config.json makes a model of the library, known before memory is taken for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from backend.api.checkpoint.model_files import shown
from backend.api.checkpoint.quantised import FILE
from backend.api.errors import ConfigError

# Elements that a model may have beyond its checkpoint's: tables that the library computes, such as masks and angles.
# 512 MiB in float32; the mask of StarCoder's 8,192 positions has half of them.
MOST_BEYOND = 1 << 27


def check_elements(make: Callable[[], Any], tensors: Mapping[str, Tensor]) -> None:
    """Compare the elements of the module that `make` makes, parameters and tables, with those of the checkpoint's tensors.

    Raises ConfigError when the module has more than twice as many (an element of the checkpoint may hold two packed values, and
    the module may hold a tied weight twice) and MOST_BEYOND besides. No memory is taken for the module's tensors.
    """
    with torch.device("meta"):
        module = make()
    sizes = {name: each.shape for name, each in (*module.named_parameters(), *module.named_buffers())}
    wanted = sum(map(math.prod, sizes.values()))
    limit = MOST_BEYOND
    for name in tensors:
        if wanted <= limit:  # no more files are opened than it takes to know
            return
        limit += 2 * tensors[name].numel()
    if wanted > limit:
        largest = max(sizes, key=lambda name: math.prod(sizes[name]))
        raise ConfigError(
            f"{FILE}: its sizes make a model of {wanted} elements, {shown(largest)} of the shape {list(sizes[largest])} is the "
            f"largest; for this checkpoint {limit} are allowed; correct the sizes, such as max_position_embeddings"
        )

"""Tensors of a GGUF file that hold a matrix of each expert, or of each head, as matrices.

NAME_exps.weight -> NAME_exps.0.weight, ...; those of heads are stacked: [heads, rows, columns] -> [heads * rows, columns]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from backend.api.checkpoint.model_files import shown
from backend.api.errors import ConfigError

if TYPE_CHECKING:
    from backend.api.checkpoint.gguf import TensorPlace

_STACKED = re.compile(r"(blk\.\d{1,6}\.ffn_(?:gate|up|down|gate_up)_exps)\.(weight|bias)")
_SHARED_GATE = re.compile(r"blk\.\d{1,6}\.ffn_gate_inp_shexp\.weight")
_BY_HEAD = re.compile(r"blk\.\d{1,6}\.attn_[kv]_b\.weight")
MAX_EXPERTS = 4096


def experts_apart(tensors: Mapping[str, TensorPlace], file: str) -> dict[str, TensorPlace]:
    """The tensors with those of experts apart, and the gate of a shared expert as a matrix of one row. Raises ConfigError."""
    found: dict[str, TensorPlace] = {}
    for name, place in tensors.items():
        match = _STACKED.fullmatch(name)
        if match is None:
            found[name] = place._replace(shape=_as_matrix(name, place.shape))
            continue
        count = place.shape[0]
        if len(place.shape) != (3 if match[2] == "weight" else 2) or count > MAX_EXPERTS:
            raise ConfigError(
                f"{file}: tensor {name} has shape {shown(list(place.shape))}, one of at most {MAX_EXPERTS} experts has three "
                f"dimensions, and their biases two; use another model"
            )
        size = place.num_bytes // count
        for expert in range(count):
            part = place._replace(shape=place.shape[1:], offset=place.offset + expert * size, num_bytes=size)
            found[f"{match[1]}.{expert}.{match[2]}"] = part
    return found


def _as_matrix(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if _SHARED_GATE.fullmatch(name) and len(shape) == 1:
        return 1, *shape
    if _BY_HEAD.fullmatch(name) and len(shape) == 3:
        return shape[0] * shape[1], shape[2]
    return shape

"""The types of whole files, by llama.cpp's names for them (--type): which type each tensor of a file has.

Source: llama.cpp's src/llama-quant.cpp. Vectors are F32; rows that are no whole blocks get another type (blocks.fitting).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType

from backend.convert.gguf.blocks import fitting

_LAYER = re.compile(r"blk\.(\d+)\.(\w+?)(?:_exps|_shexp)?\.weight")
_VALUES_AND_DOWN = ("attn_v", "attn_qkv", "ffn_down")
_PLAIN = (Type.F32, Type.F16, Type.BF16)


class Place(NamedTuple):
    """A matrix in a file."""

    part: str  # attn_q, ffn_down, ... (also of experts); output or token_embd
    layer: int
    num_layers: int
    is_head: bool  # it gives the logits
    num_experts: int = 0

    @property
    def has_more_bits(self) -> bool:
        """True for the first and the last eighth of the layers, and for every third one between them."""
        eighth = self.num_layers // 8
        return self.layer < eighth or self.layer >= 7 * self.num_layers // 8 or (self.layer - eighth) % 3 == 2


class FileType(NamedTuple):
    number: LlamaFileType
    main: Type
    special: Callable[[Place], Type | None] = lambda place: None  # the type of a matrix that has another one


def _head(place: Place) -> Type | None:
    return Type.Q6_K if place.is_head else None


def _medium(place: Place) -> Type | None:
    """More bits for the head, half of the values and half of the last matrices of the mlp."""
    has_more = place.is_head or (place.part in _VALUES_AND_DOWN and place.has_more_bits)
    return Type.Q6_K if has_more else None


def _small(place: Place) -> Type | None:
    """More bits for the head, and for values and the last matrices of the mlp in the first layers."""
    layers = place.num_layers // 8 if place.part == "ffn_down" else 4
    is_first = place.part in _VALUES_AND_DOWN and place.layer < layers
    return Type.Q6_K if place.is_head else Type.Q5_K if is_first else None


FILE_TYPES: dict[str, FileType] = {
    "F32": FileType(LlamaFileType.ALL_F32, Type.F32),
    "F16": FileType(LlamaFileType.MOSTLY_F16, Type.F16),
    "BF16": FileType(LlamaFileType.MOSTLY_BF16, Type.BF16),
    "Q8_0": FileType(LlamaFileType.MOSTLY_Q8_0, Type.Q8_0),
    "Q6_K": FileType(LlamaFileType.MOSTLY_Q6_K, Type.Q6_K),
    "Q5_K_M": FileType(LlamaFileType.MOSTLY_Q5_K_M, Type.Q5_K, _medium),
    "Q5_K_S": FileType(LlamaFileType.MOSTLY_Q5_K_S, Type.Q5_K, _head),
    "Q4_K_M": FileType(LlamaFileType.MOSTLY_Q4_K_M, Type.Q4_K, _medium),
    "Q4_K_S": FileType(LlamaFileType.MOSTLY_Q4_K_S, Type.Q4_K, _small),
    "Q4_0": FileType(LlamaFileType.MOSTLY_Q4_0, Type.Q4_0, _head),
}


def _of_eight_experts(file_type: FileType, place: Place) -> Type | None:
    """More bits for keys, values and the attention's output of models with eight experts, as of Mixtral."""
    if place.num_experts != 8 or place.is_head or file_type.main in _PLAIN:
        return None
    if place.part == "attn_output":
        return Type.Q5_K if file_type.main is Type.Q4_K else None
    return Type.Q8_0 if place.part in ("attn_k", "attn_v", "attn_qkv") else None


def type_of(
    file_type: FileType, name: str, shape: tuple[int, ...], num_layers: int, has_output: bool, num_experts: int = 0
) -> Type:
    """The type of a tensor of a file, of experts that of each. has_output: the file has a matrix `output`, else the embedding
    gives the logits. Routers and biases stay in float32.
    """
    found = _LAYER.fullmatch(name)
    part = found[2] if found else name.removesuffix(".weight")
    if len(shape) < 2 or part == "ffn_gate_inp" or not name.endswith(".weight"):
        return Type.F32
    is_head = part == ("output" if has_output else "token_embd")
    place = Place(part, int(found[1]) if found else 0, num_layers, is_head, num_experts)
    kind = _of_eight_experts(file_type, place) or file_type.special(place) or file_type.main
    return fitting(kind, shape[-1])

"""The forms in which memory holds the tensors of a GGUF file. The loader follows them, and sizes are computed from them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from backend.api.checkpoint.gguf import AGAIN, GgufHeader
from backend.api.errors import ConfigError

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
INT8 = {"Q8_0", "Q5_0", "Q4_0"}  # int8 and a scale for each 32 columns
SUPER_BLOCKS = {"Q4_K", "Q5_K", "Q6_K"}  # as they are, where the linear layers take them
_INT8_BITS = 8.5
_FUSED = dict(
    **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_qkv"), "qkv"),
    **dict.fromkeys(("ffn_gate", "ffn_up"), "gate_up"),
    **dict(attn_output="out", ffn_down="down"),
)
_PROJECTION = re.compile(rf"(blk\.\d+\.)({'|'.join(_FUSED)})\.weight")


class HeldForms(NamedTuple):
    """The projections that keep their stored numbers; all others become floats. Names are those of the file."""

    kinds: Mapping[str, str]  # tensor -> its type; OUTPUT also where the embedding is the output head
    four_bits: frozenset[str]  # names of the Q4_0 tensors that are held with 4 bits, not as int8

    def bits(self, name: str, float_bytes: int, type_bits: float) -> float:
        """Bits of a weight in memory. `type_bits`: of its type in the file."""
        kind = self.kinds.get(name)
        if kind is None:
            return 8 * float_bytes
        return type_bits if kind in SUPER_BLOCKS or name in self.four_bits else _INT8_BITS


def held_forms(header: GgufHeader, on_gpu: bool, holds_super_blocks: bool) -> HeldForms:
    """Linear layers whose projections are all of types with a form of their own. On a GPU int8 in groups has no kernel.

    An output head that is the embedding, in super-blocks, is held as they are, and the embedding as floats.
    """
    kinds: dict[str, str] = {}
    embedding = header.tensors.get(EMBEDDING)
    if OUTPUT not in header.tensors and holds_super_blocks and embedding is not None:
        kinds |= {OUTPUT: embedding.type.name} if embedding.type.name in SUPER_BLOCKS else {}
    four_bits: set[str] = set()
    fused: dict[str, dict[str, str]] = defaultdict(dict)  # linear layer -> its projections with their types
    for name, place in header.tensors.items():
        if (found := _PROJECTION.fullmatch(name)) is not None:
            fused[f"{found[1]}{_FUSED[found[2]]}"][name] = place.type.name
        elif name == OUTPUT:
            fused[name][name] = place.type.name
    for of in fused.values():
        types = set(of.values())
        if types == {"Q4_0"}:
            four_bits |= set(of)
        if types == {"Q4_0"} or (types <= INT8 and not on_gpu) or (types <= SUPER_BLOCKS and holds_super_blocks):
            kinds |= of
    return HeldForms(kinds, frozenset(four_bits))


def check_sizes(header: GgufHeader, num_layers: int, hidden_size: int) -> None:
    """Raise ConfigError where the settings name other sizes than those of the tensors."""
    embedding = header.tensors.get(EMBEDDING)
    if embedding is None or embedding.shape[-1] != hidden_size:
        has = "there is none" if embedding is None else f"it has rows of {embedding.shape[-1]}"
        raise ConfigError(
            f"{header.name}: its settings ask for a tensor {EMBEDDING} with rows of {hidden_size}, {has}; {AGAIN}"
        )
    layers = {found[1] for name in header.tensors if (found := _PROJECTION.fullmatch(name))}
    if num_layers > len(layers):
        raise ConfigError(f"{header.name}: its settings ask for {num_layers} layers, it has {len(layers)}; {AGAIN}")


def memory_bytes(header: GgufHeader, float_bytes: int) -> int:
    """Memory of the weights on the native CPU kernels. `float_bytes`: of a float in the type that the model computes in.

    The output head is packed apart from an embedding that it is tied to, and a head of floats has an int8 copy besides, from
    which likely tokens are found.
    """
    forms = held_forms(header, on_gpu=False, holds_super_blocks=True)
    total = 0.0
    for name, place in header.tensors.items():
        type_bits = 8 * place.type.num_bytes / place.type.size
        values = place.num_bytes * 8 / type_bits
        total += values * (8 * float_bytes if name == EMBEDDING else forms.bits(name, float_bytes, type_bits))
        is_head = name == OUTPUT or (name == EMBEDDING and OUTPUT not in header.tensors)
        if is_head and name == EMBEDDING:
            total += values * forms.bits(OUTPUT, float_bytes, type_bits)
        if is_head and OUTPUT not in forms.kinds:
            total += values * 8
    return int(total / 8)

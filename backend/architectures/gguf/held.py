"""The forms in which memory holds the tensors of a GGUF file. The loader follows them, and sizes are computed from them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from typing import NamedTuple

from backend.api.checkpoint.gguf import AGAIN, TYPES, GgufHeader
from backend.api.errors import ConfigError

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
INT8 = {"Q8_0", "Q5_0", "Q4_0"}  # int8 and a scale for each 32 columns
FLOATS = {"F32", "F16", "BF16"}
_INT8_BITS = 8.5
# Bits of a weight in memory where the native kernels hold blocks as they are (kernels/common/super_blocks.py), and where the
# rows of a layer are of several types.
_BITS = {
    "Q2_K": 3.125, "Q3_K": 3.5625, "Q4_K": 4.625, "Q5_K": 5.625, "MXFP4": 4.5, "TQ1_0": 2.3125, "TQ2_0": 2.3125,
    "IQ4_XS": 4.375, "IQ3_S": 4.375, "IQ3_XXS": 4.375, "IQ2_XXS": 4.375, "IQ2_XS": 4.625, "IQ2_S": 4.625,
}  # fmt: skip
_K_MIX = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0"}
_GROUPS_OF_16 = {"Q2_K", "Q3_K", "Q6_K", "IQ2_XS", "IQ2_S"}
_K_MIX_BITS, _MIX_32_BITS, _MIX_16_BITS = 7.125, 10.0, 12.0
_FUSED = dict(
    **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_qkv"), "qkv"),
    **dict.fromkeys(("ffn_gate", "ffn_up"), "gate_up"),
    **dict(attn_output="out", ffn_down="down"),
    **dict(attn_q_a="qkv", attn_kv_a_mqa="qkv", attn_q_b="queries", attn_k_b="keys", attn_v_b="values"),
    **dict(attn_gate="qkv", ssm_in="inputs", ssm_out="out"),  # how recurrent layers are named
    **{"shortconv.in_proj": "inputs", "shortconv.out_proj": "out"},
)
# Architectures whose value heads of the delta rule are in another order than the family's: those with the same number beside
# their key heads, one such row of heads after another.
TILED = ("qwen35", "qwen35moe")
# Projections of experts and of a shared expert end in `_exps.`, a number, or `_shexp` (api/checkpoint/gguf_experts.py).
_PROJECTION = re.compile(rf"(blk\.\d+\.)({'|'.join(map(re.escape, _FUSED))})(_exps\.\d+|_shexp|)\.weight")


class HeldForms(NamedTuple):
    """The projections that keep their stored numbers; all others become floats. Names are those of the file."""

    kinds: Mapping[str, str]  # tensor -> its type
    four_bits: frozenset[str]  # names of the Q4_0 tensors that are held with 4 bits, not as int8 or blocks
    held_bits: Mapping[str, float]  # tensor -> bits of a weight in memory

    def bits(self, name: str, float_bytes: int) -> float:
        """Bits of a weight in memory."""
        return self.held_bits.get(name, 8 * float_bytes)


def held_forms(header: GgufHeader, on_gpu: bool, holds_super_blocks: bool) -> HeldForms:
    """Linear layers whose projections are all of types with a form of their own.

    With `holds_super_blocks` these are blocks of every type, and the embedding is held like them. Otherwise they are int8 and
    Q4_0; on a GPU int8 in groups has no kernel.
    """
    kinds: dict[str, str] = {}
    bits: dict[str, float] = {}
    four_bits: set[str] = set()
    for of in _linear_layers(header, holds_super_blocks):
        types = set(of.values())
        if holds_super_blocks:
            is_held, in_memory = not types & FLOATS, held_bits(types)
        else:
            is_held, in_memory = types == {"Q4_0"} or (types <= INT8 and not on_gpu), _INT8_BITS
            if types == {"Q4_0"}:
                four_bits |= set(of)
                in_memory = held_bits(types)
        if is_held:
            kinds |= of
            bits |= dict.fromkeys(of, in_memory)
    return HeldForms(kinds, frozenset(four_bits), bits)


def _linear_layers(header: GgufHeader, with_embedding: bool) -> Iterable[Mapping[str, str]]:
    """Yields the projections of each linear layer, with their types."""
    fused: dict[str, dict[str, str]] = defaultdict(dict)
    moved = _moved_columns(header)
    for name, place in header.tensors.items():
        if moved % place.type.size and name.endswith(".ssm_out.weight"):
            continue  # its blocks hold columns of two heads, which are brought into the family's order
        if (found := _PROJECTION.fullmatch(name)) is not None:
            fused[f"{found[1]}{_FUSED[found[2]]}{found[3]}"][name] = place.type.name
        elif name == OUTPUT or (name == EMBEDDING and with_embedding):
            fused[name][name] = place.type.name
    return fused.values()


def _moved_columns(header: GgufHeader) -> int:
    """Columns of each value head of `ssm_out`, whose heads are in another order than the family's; 0: they are not."""
    name = header.get("general.architecture", str) or ""
    keys, heads, inner = (
        header.get(f"{name}.ssm.{key}", int) or 0 for key in ("group_count", "time_step_rank", "inner_size")
    )
    return inner // heads if name in TILED and heads > 0 and heads != keys else 0


def held_bits(types: set[str]) -> float:
    """Bits of a weight of a layer whose rows are of these types, held as blocks."""
    if len(types) == 1:
        (only,) = types
        own = next(8 * kind.num_bytes / kind.size for kind in TYPES.values() if kind.name == only)
        return _BITS.get(only, own)
    if types <= _K_MIX:
        return _K_MIX_BITS
    return _MIX_16_BITS if types & _GROUPS_OF_16 else _MIX_32_BITS


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

    A head of floats is packed apart from an embedding that it is tied to, and has an int8 copy besides, from which likely tokens
    are found.
    """
    forms = held_forms(header, on_gpu=False, holds_super_blocks=True)
    total = sum(prod(place.shape) * forms.bits(name, float_bytes) for name, place in header.tensors.items())
    head = OUTPUT if OUTPUT in header.tensors else EMBEDDING
    if head not in forms.kinds and (place := header.tensors.get(head)) is not None:
        total += prod(place.shape) * (8 + (8 * float_bytes if head == EMBEDDING else 0))
    return int(total / 8)

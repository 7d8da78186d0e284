"""GGUF files: llama.cpp's tensors under the names, in the shapes and with the order of rows of a Hugging Face checkpoint.

A tensor is read when it is asked for, and a quantised one is turned into floats a slice of rows at a time. Projections need not
become floats (`GgufLayers`): those of Q8_0, Q5_0 and Q4_0 are int8, or 4 bits, with a scale for each 32 columns, and those of
Q4_K, Q5_K and Q6_K keep their super-blocks where the linear layers take them. Q4_1 and Q5_1 have minima that no form holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor

from backend.api.checkpoint.gguf import AGAIN, GgufHeader, TensorPlace
from backend.api.checkpoint.model_files import shown
from backend.api.errors import ConfigError
from backend.architectures.description import ModelConfig
from backend.architectures.gguf_held import EMBEDDING, OUTPUT, SUPER_BLOCKS, held_forms
from backend.models import gguf_blocks
from backend.models.config import of_object
from backend.models.convert import meta_to_hf
from backend.models.gguf_config import ROPE_FACTORS, config_of
from backend.models.linears import LinearOptions
from backend.models.quantized import Held, QuantizedLayers, Scheme, stack
from backend.models.tensors import TensorSource
from kernels.common.quantize import row_slices

BLOCKS = ".blocks"
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HEAD = "lm_head"
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": _HEAD}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def raw_config(header: GgufHeader) -> dict[str, Any]:
    """The content of the config.json that the file stands for. Raises ConfigError."""
    return config_of(header, _rope_factors(header))


def read_config(header: GgufHeader) -> ModelConfig:
    """The model's configuration. Its `quantization` says which types are quantised, if any. Raises ConfigError."""
    config = of_object(raw_config(header))
    _check_tensors(header, config)
    types = {place.type.name for place in header.tensors.values()}
    if types <= set(_FLOATS):
        return config
    return msgspec.structs.replace(config, quantization=GgufLayers({}))


@dataclass(frozen=True)
class GgufLayers(QuantizedLayers):
    """Projections that keep their stored numbers. The others of the file are floats."""

    kinds: Mapping[str, str]  # projection -> its type, one of gguf_held's INT8 or SUPER_BLOCKS
    four_bits: frozenset[str] = frozenset()  # names of the Q4_0 tensors that are held with 4 bits, not as int8

    scheme: ClassVar[Scheme] = "int8"  # type: ignore[misc]
    marker: ClassVar[str] = BLOCKS

    def take(self, source: TensorSource, name: str, n: int, k: int) -> Held:
        kind = self.kinds[name]
        blocks = source.take_raw(name + BLOCKS, (n, gguf_blocks.num_bytes(kind, k)), (torch.uint8,))
        if kind in SUPER_BLOCKS:
            return stack([gguf_blocks.super_blocks(blocks[rows], kind) for rows in row_slices(n, k)])
        return gguf_blocks.four_bits(blocks) if name in self.four_bits else gguf_blocks.int8(blocks, kind)


class GgufTensors(Mapping[str, Tensor]):
    """The tensors by their Hugging Face names; NAME.blocks in the place of NAME.weight for the projections of `layers`."""

    def __init__(
        self,
        header: GgufHeader,
        config: ModelConfig,
        layers: GgufLayers = GgufLayers({}),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Quantised tensors that are read as floats become `dtype`; floats keep their type."""
        self.header = header
        self._dtype = dtype
        self._places: dict[str, tuple[str, TensorPlace]] = {}
        for name, place in header.tensors.items():
            if name != ROPE_FACTORS:
                own = _hf_name(name)
                held = own.removesuffix(".weight")
                self._places[held + BLOCKS if held in layers.kinds else own] = name, place
        if config.tied_embeddings and _HEAD in layers.kinds:
            self._places[_HEAD + BLOCKS] = EMBEDDING, header.tensors[EMBEDDING]
        # Where neighbouring rows rotate together: the number of heads whose rows are to be put in order.
        is_llama = config.architecture in ("LlamaForCausalLM", "MistralForCausalLM")
        self._heads = dict(attn_q=config.num_heads, attn_k=config.num_kv_heads) if is_llama else {}

    def __getitem__(self, name: str) -> Tensor:
        stored, place = self._places[name]
        tensor = self._read(place, stored, as_blocks=name.endswith(BLOCKS))
        heads = self._heads.get(stored.split(".")[-2])
        return tensor if heads is None else meta_to_hf(tensor, heads)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def held_for(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, options: LinearOptions
    ) -> tuple[ModelConfig, GgufTensors]:
        """The configuration and the tensors of a model that computes in `dtype` on `device`, with as many projections in their
        stored form as can be.

        If linear layers are to be quantised while loading, all are floats.
        """
        if options.quantization != "none":
            return msgspec.structs.replace(config, quantization=None), GgufTensors(self.header, config)
        layers = _layers_to_hold(self.header, device, options.holds_super_blocks)
        return msgspec.structs.replace(config, quantization=layers), GgufTensors(self.header, config, layers, dtype)

    def _read(self, place: TensorPlace, name: str, as_blocks: bool) -> Tensor:
        kind, rows, columns = place.type.name, place.shape[0], place.shape[-1]
        if kind in _FLOATS:
            return self._bytes(place, 0, place.num_bytes).view(_FLOATS[kind]).view(place.shape)
        num_bytes = place.num_bytes // rows
        out = torch.empty(rows, num_bytes if as_blocks else columns, dtype=torch.uint8 if as_blocks else self._dtype)
        for part in row_slices(rows, columns):
            count = min(part.stop, rows) - part.start
            blocks = self._bytes(place, part.start * num_bytes, count * num_bytes).view(count, num_bytes)
            scales = gguf_blocks.scales(blocks, kind)
            if not scales.isfinite().all():
                raise ConfigError(
                    f"{self.header.name}: tensor {shown(name)} has a scale that is not finite; quantise the model again"
                )
            out[part] = blocks if as_blocks else gguf_blocks.floats(blocks, kind)
        return out

    def _bytes(self, place: TensorPlace, start: int, count: int) -> Tensor:
        content = torch.empty(count, dtype=torch.uint8)
        try:
            with self.header.path.open("rb", buffering=0) as file:
                file.seek(place.offset + start)
                view = memoryview(content.numpy().data)
                while view and (done := file.readinto(view)):
                    view = view[done:]
        except OSError as error:
            raise ConfigError(f"{self.header.name} cannot be read ({error.strerror}); {AGAIN}") from None
        if view:
            raise ConfigError(f"{self.header.name} has become shorter while it was read; {AGAIN}")
        return content


def _layers_to_hold(header: GgufHeader, device: torch.device, holds_super_blocks: bool) -> GgufLayers:
    """The layers of gguf_held.py, by the names of a Hugging Face checkpoint."""
    forms = held_forms(header, device.type == "cuda", holds_super_blocks)
    named = {name: _hf_name(name).removesuffix(".weight") for name in forms.kinds}
    kinds = {named[name]: kind for name, kind in forms.kinds.items()}
    return GgufLayers(kinds, frozenset(named[name] for name in forms.four_bits))


def _hf_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` for `blk.3.attn_q.weight`."""
    base, _, suffix = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", base)
    return f"{_NAMES[base]}.{suffix}" if layer is None else f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{suffix}"


def _rope_factors(header: GgufHeader) -> list[float] | None:
    """Divisors of the rotary frequencies; None if the file has no such tensor. Raises ConfigError."""
    place = header.tensors.get(ROPE_FACTORS)
    if place is None:
        return None
    if place.type.name != "F32" or len(place.shape) != 1 or place.shape[0] > 1 << 20:
        raise ConfigError(
            f"{header.name}: tensor {ROPE_FACTORS} is {place.type.name} of shape {shown(list(place.shape))}, float32 in one "
            f"dimension is needed; {AGAIN}"
        )
    with header.path.open("rb") as file:
        file.seek(place.offset)
        factors = torch.frombuffer(bytearray(file.read(place.num_bytes)), dtype=torch.float32)
    if not ((factors > 0) & factors.isfinite()).all():
        raise ConfigError(f"{header.name}: tensor {ROPE_FACTORS} holds a number that is no divisor; {AGAIN}")
    return [float(factor) for factor in factors]


def _check_tensors(header: GgufHeader, config: ModelConfig) -> None:
    """Raise ConfigError, before any memory is taken, if the tensors are not those of the model that the settings describe."""
    needed = _shapes(config)
    if config.ropes[0].factors:
        needed[ROPE_FACTORS] = (config.head_dim // 2,)
    for name, shape in needed.items():
        place = header.tensors.get(name)
        if place is None:
            raise ConfigError(f"{header.name} lacks the tensor {name}, which its settings ask for; {AGAIN}")
        if place.shape != shape:
            raise ConfigError(
                f"{header.name}: tensor {name} has shape {shown(list(place.shape))}, its settings ask for {list(shape)}; "
                f"{AGAIN}"
            )
        if len(shape) == 1 and place.type.name not in _FLOATS:
            raise ConfigError(f"{header.name}: tensor {name} is {place.type.name}, a float type is needed; {AGAIN}")
    if left := set(header.tensors) - set(needed):
        raise ConfigError(
            f"{header.name} has {len(left)} tensors that a model of its architecture does not use, {shown(min(left))} among "
            f"them, which is not supported; use another model"
        )


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that a file with this configuration has."""
    hidden, inter, head = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), "output_norm.weight": (hidden,)}
    if not config.tied_embeddings:
        shapes[OUTPUT] = (config.vocab_size, hidden)
    matrices = dict(
        attn_q=(q, hidden, config.block.qkv_bias),
        attn_k=(kv, hidden, config.block.qkv_bias),
        attn_v=(kv, hidden, config.block.qkv_bias),
        attn_output=(hidden, q, config.block.out_bias),
        ffn_gate=(inter, hidden, config.block.mlp_bias),
        ffn_up=(inter, hidden, config.block.mlp_bias),
        ffn_down=(hidden, inter, config.block.mlp_bias),
    )
    norms = dict(attn_norm=hidden, ffn_norm=hidden)
    if config.block.qk_norm != "none":
        norms |= dict(attn_q_norm=head, attn_k_norm=head)
    for index in range(config.num_layers):
        for name, size in norms.items():
            shapes[f"blk.{index}.{name}.weight"] = (size,)
        for name, (n, k, has_bias) in matrices.items():
            shapes[f"blk.{index}.{name}.weight"] = (n, k)
            if has_bias:
                shapes[f"blk.{index}.{name}.bias"] = (n,)
    return shapes

"""GGUF files: llama.cpp's tensors under the names, in the shapes and with the order of rows of a Hugging Face checkpoint.

A tensor is read when it is asked for, and a quantised one is turned into floats a slice of rows at a time. Projections need not
become floats (`GgufLayers`): the native kernels take blocks of every type as they are. Other linear layers take Q8_0, Q5_0 and
Q4_0 as int8, or 4 bits, with a scale for each 32 columns.
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
from backend.architectures.gguf.config import config_of
from backend.architectures.gguf.families import TABLES, gguf_architecture
from backend.architectures.gguf.held import TILED, held_forms
from backend.architectures.gguf.names import as_stored, heads_in_pairs, norms_add_one, tensors_of
from backend.models import gguf_blocks
from backend.models.config import of_object
from backend.models.convert import meta_to_hf
from backend.models.gguf_states import as_family
from backend.models.linears import LinearOptions
from backend.models.quantized import Held, QuantizedLayers, Scheme, stack
from backend.models.tensors import TensorSource
from kernels.common.quantize import row_slices

BLOCKS = ".blocks"
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def raw_config(header: GgufHeader) -> dict[str, Any]:
    """The content of the config.json that the file stands for. Raises ConfigError."""
    tables = {name: table for name in TABLES if (table := _rope_factors(header, name)) is not None}
    return config_of(header, tables)


def read_config(header: GgufHeader) -> ModelConfig:
    """The model's configuration. Its `quantization` says which types are quantised, if any. Raises ConfigError."""
    try:
        config = as_stored(of_object(raw_config(header)), header)
    except ConfigError as error:
        if str(error).startswith(header.name):
            raise
        raise ConfigError(f"{header.name}: what it stands for is not served: {error}") from None
    _check_tensors(header, config)
    types = {place.type.name for place in header.tensors.values()}
    if types <= set(_FLOATS):
        return config
    return msgspec.structs.replace(config, quantization=GgufLayers({}))


@dataclass(frozen=True)
class GgufLayers(QuantizedLayers):
    """Projections that keep their stored numbers. The others of the file are floats."""

    kinds: Mapping[str, str]  # projection -> its type
    as_blocks: bool = False  # as they are; else in eight bits
    four_bits: frozenset[str] = frozenset()  # names of the Q4_0 tensors that are held with 4 bits, not as int8

    scheme: ClassVar[Scheme] = "int8"  # type: ignore[misc]
    marker: ClassVar[str] = BLOCKS

    def take(self, source: TensorSource, name: str, n: int, k: int) -> Held:
        kind = self.kinds[name]
        blocks = source.take_raw(name + BLOCKS, (n, gguf_blocks.num_bytes(kind, k)), (torch.uint8,))
        if self.as_blocks:
            return stack([gguf_blocks.as_super_blocks(blocks[rows], kind) for rows in row_slices(n, k)])
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
        tensors = tensors_of(config, header)
        self._hf = {name: tensor.hf for name, tensor in tensors.items() if not tensor.is_whole}
        wholes = {name: tensor.hf for name, tensor in tensors.items() if tensor.is_whole}
        self._config, self._is_tiled = config, gguf_architecture(header) in TILED
        for name, place in header.tensors.items():
            base, _, suffix = name.rpartition(".")
            if name in wholes:
                self._places[wholes[name]] = name, place
            elif (held := self._hf.get(base)) is not None:
                in_blocks = suffix == "weight" and held in layers.kinds
                self._places[held + (BLOCKS if in_blocks else f".{suffix}")] = name, place
        self._heads, self._adds_one = heads_in_pairs(config, header), norms_add_one(header)

    def __getitem__(self, name: str) -> Tensor:
        stored, place = self._places[name]
        tensor = self._read(place, stored, as_blocks=name.endswith(BLOCKS))
        if self._adds_one and name.endswith("norm.weight") and not stored.endswith(".ssm_norm.weight"):
            return tensor.float() - 1
        tensor = as_family(stored.split(".", 2)[-1], tensor, self._config, self._is_tiled)
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
        layers = self._layers_to_hold(device, options.holds_super_blocks)
        return msgspec.structs.replace(config, quantization=layers), GgufTensors(self.header, config, layers, dtype)

    def _layers_to_hold(self, device: torch.device, holds_super_blocks: bool) -> GgufLayers:
        """The layers of gguf/held.py, by the names of a Hugging Face checkpoint."""
        forms = held_forms(self.header, device.type == "cuda", holds_super_blocks)
        named = {name: self._hf[name.removesuffix(".weight")] for name in forms.kinds}
        kinds = {named[name]: kind for name, kind in forms.kinds.items()}
        four_bits = {named[name] for name in forms.four_bits}
        for stored, parts in self._splits():
            if stored in kinds:
                kinds |= dict.fromkeys(parts, kinds[stored])
                four_bits |= set(parts) if stored in four_bits else set()
        return GgufLayers(kinds, holds_super_blocks, frozenset(four_bits))

    def _splits(self) -> Iterator[tuple[str, list[str]]]:
        """The tensors that are split, with the names of their parts."""
        for index in range(self._config.num_layers):
            prefix = f"{self._config.names.layers}{index}."
            for split in self._config.names.layer.splits:
                yield prefix + split.stored, [prefix + part for part, _ in split.parts]

    def _read(self, place: TensorPlace, name: str, as_blocks: bool) -> Tensor:
        kind, rows, columns = place.type.name, place.shape[0], place.shape[-1]
        if kind in _FLOATS:
            return self._bytes(place, 0, place.num_bytes).view(_FLOATS[kind]).view(place.shape)
        num_bytes = place.num_bytes // rows
        out = torch.empty(rows, num_bytes if as_blocks else columns, dtype=torch.uint8 if as_blocks else self._dtype)
        for part in row_slices(rows, columns):
            count = min(part.stop, rows) - part.start
            blocks = self._bytes(place, part.start * num_bytes, count * num_bytes).view(count, num_bytes)
            if not gguf_blocks.are_finite(blocks, kind):
                raise ConfigError(
                    f"{place.file}: tensor {shown(name)} has a scale that is not finite; quantise the model again"
                )
            out[part] = blocks if as_blocks else gguf_blocks.floats(blocks, kind)
        return out

    def _bytes(self, place: TensorPlace, start: int, count: int) -> Tensor:
        content = torch.empty(count, dtype=torch.uint8)
        try:
            with place.path.open("rb", buffering=0) as file:
                file.seek(place.offset + start)
                view = memoryview(content.numpy().data)
                while view and (done := file.readinto(view)):
                    view = view[done:]
        except OSError as error:
            raise ConfigError(f"{place.file} cannot be read ({error.strerror}); {AGAIN}") from None
        if view:
            raise ConfigError(f"{place.file} has become shorter while it was read; {AGAIN}")
        return content


def _rope_factors(header: GgufHeader, name: str) -> list[float] | None:
    """Divisors of the rotary frequencies; None if the file has no such tensor. Raises ConfigError."""
    place = header.tensors.get(name)
    if place is None:
        return None
    if place.type.name != "F32" or len(place.shape) != 1 or place.shape[0] > 1 << 20:
        raise ConfigError(
            f"{place.file}: tensor {name} is {place.type.name} of shape {shown(list(place.shape))}, float32 in one dimension "
            f"is needed; {AGAIN}"
        )
    with place.path.open("rb") as file:
        file.seek(place.offset)
        factors = torch.frombuffer(bytearray(file.read(place.num_bytes)), dtype=torch.float32)
    if not ((factors > 0) & factors.isfinite()).all():
        raise ConfigError(f"{place.file}: tensor {name} holds a number that is no divisor; {AGAIN}")
    return [float(factor) for factor in factors]


def _check_tensors(header: GgufHeader, config: ModelConfig) -> None:
    """Raise ConfigError, before any memory is taken, if the tensors are not those of the model that the settings describe."""
    needed: dict[str, tuple[int, ...]] = {}
    for base, tensor in tensors_of(config, header).items():
        if tensor.is_whole:
            needed[base] = tensor.shape
        elif tensor.has_weight:
            needed[f"{base}.weight"] = tensor.shape
        if tensor.has_bias:
            needed[f"{base}.bias"] = tensor.shape[:1] if tensor.has_weight else tensor.shape
    for name, shape in needed.items():
        place = header.tensors.get(name)
        if place is None:
            raise ConfigError(f"{header.name} lacks the tensor {name}, which its settings ask for; {AGAIN}")
        if place.shape != shape:
            raise ConfigError(
                f"{place.file}: tensor {name} has shape {shown(list(place.shape))}, its settings ask for {list(shape)}; "
                f"{AGAIN}"
            )
        if len(shape) == 1 and place.type.name not in _FLOATS:
            raise ConfigError(f"{place.file}: tensor {name} is {place.type.name}, a float type is needed; {AGAIN}")
    ignored = re.compile("|".join((r"(?!)", *config.names.unused)))
    if left := {name for name in header.tensors if not ignored.fullmatch(name)} - set(needed) - set(TABLES):
        raise ConfigError(
            f"{header.name} has {len(left)} tensors that a model of its architecture does not use, {shown(min(left))} among "
            f"them, which is not supported; use another model"
        )

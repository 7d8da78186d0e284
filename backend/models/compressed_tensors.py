"""Checkpoints of compressed-tensors, the format that llm-compressor writes and vLLM reads: integers of 8 or 4 bits.

    int-quantized     NAME.weight int8 [n, k]
    pack-quantized    NAME.weight_packed int32 [n, ceil(k / columns)]: 4 columns of 8 bits or 8 of 4 bits a word, the first
                      lowest, each + 128 or + 8;
                      NAME.weight_shape int64 [2]
    both              NAME.weight_scale, float: [n, 1] for strategy channel, [n, ceil(k / group_size)] for group
    asymmetric        NAME.weight_zero_point int32 [ceil(n / 8), groups]: packed as the weight is, but along n; of 4 bits only

weight = (q - zero) * scale, q from -128 to 127 or -8 to 7. Layers of the "ignore" list are stored as floats, without a scale.
Source: the compressed-tensors library, `compressors/` and `quantization/quant_args.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from msgspec import Struct

from backend.api.errors import ConfigError
from backend.api.model_files import convert, shown
from backend.layers.linear import QuantizedFormat, QuantizedWeight
from backend.models.quantized import (
    MAX_GROUP,
    QuantizedLayers,
    Scheme,
    first_obstacle,
    is_group_size_of_4_bits,
    kernel_group,
    nibbles,
    unsupported,
)
from backend.models.tensors import TensorSource
from kernels.w4a16 import Weight4, pack

METHOD = "compressed-tensors"


@dataclass(frozen=True)
class Int8Layers(QuantizedLayers):
    scheme: QuantizedFormat
    is_packed: bool
    group: int | None  # columns that share a scale; None = the whole row

    marker: ClassVar[str] = ".weight_scale"

    def take(self, source: TensorSource, name: str, n: int, k: int) -> QuantizedWeight:
        if self.is_packed:
            words = source.take_raw(name + ".weight_packed", (n, -(-k // 4)), (torch.int32,))
            q = (words.contiguous().view(torch.uint8)[:, :k] ^ 128).view(torch.int8)
            _check_shape(source, name, n, k)
        else:
            q = source.take_raw(name + ".weight", (n, k), (torch.int8,))
        scale = source.take_scales(name + ".weight_scale", (n, -(-k // self.group) if self.group else 1))
        return QuantizedWeight(q, scale.float(), self.group or k, self.scheme)


@dataclass(frozen=True)
class Int4Layers(QuantizedLayers):
    group: int | None  # columns that share a scale; None = the whole row
    is_symmetric: bool

    scheme: Scheme = field(default="w4a16", init=False)
    marker: ClassVar[str] = ".weight_scale"

    def take(self, source: TensorSource, name: str, n: int, k: int) -> Weight4:
        group, repeats = kernel_group(name, self.group, k)
        groups = k // group // repeats
        words = source.take_raw(name + ".weight_packed", (n, -(-k // 8)), (torch.int32,))
        _check_shape(source, name, n, k)
        scales = source.take_scales(name + ".weight_scale", (n, groups)).repeat_interleave(repeats, 1).T.contiguous()
        zeros = None
        if not self.is_symmetric:
            stored = source.take_raw(name + ".weight_zero_point", (-(-n // 8), groups), (torch.int32,))
            zeros = nibbles(stored.T).flatten(1)[:, :n].repeat_interleave(repeats, 0).to(scales.dtype)
        return Weight4(pack(nibbles(words).flatten(1)[:, :k], group), scales, zeros, group)


class _Scheme(Struct):
    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    dynamic: bool | str = False
    actorder: bool | str | None = None


class _Group(Struct):
    targets: list[str]
    weights: _Scheme | None = None
    input_activations: _Scheme | None = None
    output_activations: _Scheme | None = None
    format: str | None = None


class _Config(Struct):
    config_groups: dict[str, Any]
    format: str | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


def parse(section: dict[str, Any]) -> Int8Layers | Int4Layers:
    """Read quantization_config. Raises ConfigError."""
    config = convert(section, _Config, "config.json", "quantization_config")
    if len(config.config_groups) != 1:
        raise unsupported(METHOD, f"{len(config.config_groups)} config_groups")
    ((name, raw),) = config.config_groups.items()
    group = convert(raw, _Group, "config.json", f"quantization_config.config_groups.{shown(name)}")
    format = group.format or config.format
    if format not in ("int-quantized", "pack-quantized"):
        raise unsupported(METHOD, f"format {format}")
    if group.weights is None:
        raise unsupported(METHOD, "no weights")
    if reason := _obstacle(config, group, group.weights, format):
        raise unsupported(METHOD, reason)
    size = group.weights.group_size if group.weights.strategy == "group" else None
    if group.weights.num_bits == 4:
        return Int4Layers(size, group.weights.symmetric)
    return Int8Layers("w8a8" if group.input_activations else "int8", format == "pack-quantized", size)


def _obstacle(config: _Config, group: _Group, weights: _Scheme, format: str) -> str | None:
    """The first thing in this configuration that is not supported; None if all of it is."""
    activations, is_4_bits = group.input_activations, weights.num_bits == 4
    wrong = {
        f"targets {group.targets}": group.targets != ["Linear"],
        f"weights of {weights.num_bits} bits": weights.num_bits not in (8, 4),
        f"weights of type {weights.type}": weights.type != "int",
        f"weights of 4 bits in format {format}": is_4_bits and format != "pack-quantized",
        "asymmetric weights of 8 bits": not weights.symmetric and not is_4_bits,
        f"weight strategy {weights.strategy}": weights.strategy not in ("channel", "group"),
        f"weight group_size {weights.group_size}": (
            weights.strategy == "group" and not 1 <= (weights.group_size or 0) <= MAX_GROUP
        ),
        f"weight group_size {weights.group_size} of 4 bits": (
            is_4_bits and weights.strategy == "group" and not is_group_size_of_4_bits(weights.group_size)
        ),
        f"weight actorder {weights.actorder}": weights.actorder not in (None, False, "weight", "static"),
        "output_activations": group.output_activations is not None,
        "sparsity_config": (config.sparsity_config or {}).get("format", "dense") != "dense",
        "transform_config": bool((config.transform_config or {}).get("config_groups")),
    }
    if activations is not None:
        wrong["activations of 8 bits with weights of 4"] = is_4_bits
        wrong |= {
            f"activations of {activations.num_bits} bits": activations.num_bits != 8,
            f"activations of type {activations.type}": activations.type != "int",
            "asymmetric activations": not activations.symmetric,
            "static activations": activations.dynamic is not True,
            f"activation strategy {activations.strategy}": activations.strategy != "token",
        }
    return first_obstacle(wrong)


def _check_shape(source: TensorSource, name: str, n: int, k: int) -> None:
    """Use up weight_shape. Raises ConfigError."""
    shape = source.take_raw(name + ".weight_shape", (2,), (torch.int64, torch.int32)).tolist()
    if shape != [n, k]:
        raise ConfigError(f"tensor {name}.weight_shape says {shape}, config.json asks for {[n, k]}")

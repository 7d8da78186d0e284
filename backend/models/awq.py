"""AWQ checkpoints (Lin et al., 2023) as AutoAWQ writes them, version "gemm".

    NAME.qweight   int32 [k, n / 8]          NAME.qzeros   int32 [k / group, n / 8]          eight columns of n a word
    NAME.scales    float16 [k / group, n]

weight = (q - zero) * scale, 4 bits. Layers of modules_to_not_convert are stored as floats.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from msgspec import Struct
from torch import Tensor

from backend.api.model_files import convert
from backend.models.quantized import (
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

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class _Config(Struct):
    bits: int
    group_size: int = 128
    zero_point: bool = True
    version: str = "gemm"


@dataclass(frozen=True)
class AwqLayers(QuantizedLayers):
    group: int | None  # columns that share a scale; None = the whole row

    scheme: Scheme = field(default="w4a16", init=False)
    marker: ClassVar[str] = ".qweight"

    def take(self, source: TensorSource, name: str, n: int, k: int) -> Weight4:
        group, repeats = kernel_group(name, self.group, k)
        groups = k // group // repeats
        qweight = source.take_raw(name + ".qweight", (k, n // 8), (torch.int32,))
        qzeros = source.take_raw(name + ".qzeros", (groups, n // 8), (torch.int32,))
        scales = source.take_scales(name + ".scales", (groups, n))
        zeros, scales = (x.repeat_interleave(repeats, 0) for x in (_columns(qzeros), scales))
        return Weight4(pack(_columns(qweight).T.contiguous(), group), scales, zeros.to(scales.dtype), group)


def _columns(words: Tensor) -> Tensor:
    """int32 [rows, columns / 8] -> uint8 [rows, columns]: bits 4i..4i+3 of a word are column ORDER[i] of its eight."""
    inverse = torch.tensor(ORDER, device=words.device).argsort()
    return nibbles(words)[:, :, inverse].flatten(1)


def parse(section: dict[str, Any]) -> AwqLayers:
    """Read quantization_config. Raises ConfigError."""
    config = convert(section, _Config, "config.json", "quantization_config")
    wrong = {
        f"{config.bits} bits": config.bits != 4,
        f"version {config.version}": config.version.lower() != "gemm",
        "without zero points": not config.zero_point,
        f"group_size {config.group_size}": not is_group_size_of_4_bits(config.group_size),
    }
    if reason := first_obstacle(wrong):
        raise unsupported("awq", reason)
    return AwqLayers(None if config.group_size == -1 else config.group_size)

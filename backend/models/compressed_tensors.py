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
from typing import ClassVar

import torch

from backend.api.checkpoint.quantised import Int4Format, Int8Format
from backend.api.errors import ConfigError
from backend.layers.linear import QuantizedWeight
from backend.models.quantized import (
    QuantizedLayers,
    Scheme,
    kernel_group,
    nibbles,
)
from backend.models.tensors import TensorSource
from kernels.w4a16 import Weight4, pack


@dataclass(frozen=True)
class Int8Layers(Int8Format, QuantizedLayers):
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
class Int4Layers(Int4Format, QuantizedLayers):
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


def _check_shape(source: TensorSource, name: str, n: int, k: int) -> None:
    """Use up weight_shape. Raises ConfigError."""
    shape = source.take_raw(name + ".weight_shape", (2,), (torch.int64, torch.int32)).tolist()
    if shape != [n, k]:
        raise ConfigError(f"tensor {name}.weight_shape says {shape}, config.json asks for {[n, k]}")

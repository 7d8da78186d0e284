"""AWQ checkpoints (Lin et al., 2023) as AutoAWQ writes them, version "gemm".

    NAME.qweight   int32 [k, n / 8]          NAME.qzeros   int32 [k / group, n / 8]          eight columns of n a word
    NAME.scales    float16 [k / group, n]

weight = (q - zero) * scale, 4 bits. Layers of modules_to_not_convert are stored as floats.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from backend.api.checkpoint.quantised import AwqFormat
from backend.models.quantized import (
    QuantizedLayers,
    Scheme,
    kernel_group,
    nibbles,
)
from backend.models.tensors import TensorSource
from kernels.w4a16 import Weight4, pack

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class AwqLayers(AwqFormat, QuantizedLayers):
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

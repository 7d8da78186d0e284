"""QoQ checkpoints (QServe, Lin et al., 2024): 4-bit weights, activations in int8.

    both            NAME.qweight   int8 [n, k / 2], in the order of QServe's tiles          NAME.s1_scales  float16 [n]
    per channel     NAME.s1_szeros float16 [n]                                              group_size -1
    per group       NAME.s2_scales, NAME.s2_zeros int8 [k / 128, n]                         group_size 128

Source: OmniServe's converter; kernels/common/qserve_checkpoint.py describes the layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from backend.api.checkpoint.quantised import QoqFormat
from backend.api.errors import ConfigError
from backend.models.quantized import QuantizedLayers, Scheme
from backend.models.tensors import TensorSource
from kernels.common.qserve_checkpoint import from_qserve
from kernels.int8_rows import GROUP
from kernels.w4a8 import Weight4A8


@dataclass(frozen=True)
class QoqLayers(QoqFormat, QuantizedLayers):
    scheme: Scheme = field(default="w4a8", init=False)
    marker: ClassVar[str] = ".qweight"

    def take(self, source: TensorSource, name: str, n: int, k: int) -> Weight4A8:
        if k % GROUP:
            raise ConfigError(
                f"{name} has {k} columns, of 4 bits with int8 activations a multiple of {GROUP} is supported"
            )
        qweight = source.take_raw(name + ".qweight", (n, k // 2), (torch.int8,))
        s1_scales = source.take_scales(name + ".s1_scales", (n,))
        s1_szeros = s2_scales = s2_zeros = None
        if self.is_grouped:
            s2_scales, s2_zeros = (
                source.take_raw(name + suffix, (k // GROUP, n), (torch.int8,)) for suffix in (".s2_scales", ".s2_zeros")
            )
        else:
            s1_szeros = source.take_scales(name + ".s1_szeros", (n,))
        try:
            return from_qserve(qweight, s1_scales, s1_szeros, s2_scales, s2_zeros)
        except ValueError as error:
            raise ConfigError(f"{name} cannot be read as QoQ: {error}") from None

"""MXFP4 as gpt-oss's checkpoints have it (OCP Microscaling Formats 1.0): experts in four bits, all else in floats.

    NAME_blocks   uint8 [experts, n, k / 32, 16]   32 numbers of e2m1, the first of two in the low bits
    NAME_scales   uint8 [experts, n, k / 32]       exponents e: weight = 2^(e - 127) * number

Here an expert's tensors are NAME.blocks and NAME.scales (experts.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from backend.api.checkpoint.quantised import Mxfp4Format
from backend.api.errors import ConfigError
from backend.layers.linear import QuantizedWeight
from backend.models.quantized import Held, QuantizedLayers, Scheme
from backend.models.tensors import TensorSource
from kernels.common.quantize import dequantize
from kernels.common.super_blocks import FP4, SuperBlocks

GROUP = 32
_BIAS = 128  # exponents are relative to it, because FP4 has twice the numbers
_NO_NUMBER = 255


@dataclass(frozen=True)
class Mxfp4Layers(Mxfp4Format, QuantizedLayers):
    held: Literal["blocks", "int8", "floats"] = "blocks"  # native kernels; torch on a CPU; a GPU
    scheme: Scheme = field(default="mxfp4", init=False)
    marker: ClassVar[str] = ".blocks"

    @classmethod
    def held_on(cls, device: torch.device, holds_super_blocks: bool) -> Mxfp4Layers:
        """As the linear layers of a tier take it; no kernel of a GPU reads such blocks."""
        return cls("blocks" if holds_super_blocks else "int8" if device.type == "cpu" else "floats")

    def take(self, source: TensorSource, name: str, n: int, k: int) -> Held:
        if k % GROUP:
            raise ConfigError(
                f"{name} has {k} columns, no multiple of the {GROUP} of an MXFP4 block; use another model"
            )
        blocks = source.take_raw(name + ".blocks", (n, k // GROUP, GROUP // 2), (torch.uint8,))
        exponents = source.take_raw(name + ".scales", (n, k // GROUP), (torch.uint8,))
        if (exponents == _NO_NUMBER).any():
            raise ConfigError(f"tensor {name}.scales holds an exponent that is no number; fetch the checkpoint again")
        q = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
        scale = torch.exp2(exponents.float() - _BIAS)
        if self.held == "blocks":
            return SuperBlocks("MXFP4", q, None, None, scale.bfloat16(), None, FP4)
        values = torch.tensor(FP4, dtype=torch.int8, device=q.device)[q.int()]
        if self.held == "int8":
            return QuantizedWeight(values, scale, GROUP, "int8")
        return dequantize(values, scale, GROUP).to(source.dtype)

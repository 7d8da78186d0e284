"""Linear layers on the Triton kernels, for a GPU.

    W8A8Linear    int8 weights with one scale a row; activations in int8    kernels/w8a8.py
    W4A16Linear   4-bit weights in groups                                   kernels/w4a16.py
    W4A8Linear    4-bit weights in QoQ's format; activations in int8        kernels/w4a8.py

Float weights go through F.linear. int8 weights in groups and 4-bit weights in float32 have no kernel: QuantizedLinear takes them.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from backend.layers.linear import (
    DenseLinear,
    Linear,
    MakeLinear,
    QuantizedLinear,
    QuantizedWeight,
    Weight,
    in_eight_bits,
    make_torch_linear,
    num_bytes_of,
)
from kernels import w4a16, w8a8
from kernels.common.super_blocks import SuperBlocks
from kernels.common.triton_runtime import runs_at
from kernels.int8_rows import Int8Rows
from kernels.w4a8 import Weight4A8, w4a8
from kernels.w4a16 import Weight4

log = logging.getLogger("everbatch.layers")


def make_triton_linear(dtype: torch.dtype) -> MakeLinear:
    """Returns the MakeLinear of a model that computes in `dtype`. Where Triton does not run, it calls make_torch_linear."""
    said: set[str] = set()

    def say(line: str, *values: object) -> None:
        if line not in said:
            said.add(line)
            log.warning(line, *values)

    def make(weight: Weight, bias: Tensor | None) -> Linear:
        assert not isinstance(weight, SuperBlocks), "LinearOptions.holds_super_blocks is for native kernels"
        held = weight if isinstance(weight, Tensor) else weight[0]
        if not runs_at(held.device):
            return make_torch_linear(weight, bias)
        if isinstance(weight, Tensor):
            return DenseLinear(weight, bias)
        if isinstance(weight, Weight4A8):
            return W4A8Linear(weight, bias, dtype)
        if isinstance(weight, Weight4) and dtype in w4a16.MAGIC:
            if rounding := _rounding(weight.scales, dtype):
                say(_ROUNDED, weight.scales.dtype, dtype, rounding)
            return W4A16Linear(weight.to(dtype), bias)
        if (
            isinstance(weight, QuantizedWeight)
            and weight.format == "w8a8"
            and weight.scale.shape[1] == 1
            and not weight.is_rotated
        ):
            return W8A8Linear(weight, bias, dtype)
        say(_SLOW_FLOAT32 if isinstance(weight, Weight4) else _SLOW_GROUPS)
        return QuantizedLinear(in_eight_bits(weight) if isinstance(weight, Weight4) else weight, bias)

    return make


_ROUNDED = "4-bit weights: scales of %s are rounded to %s, by up to %.2g of a scale in the first layer where they are"
_SLOW_FLOAT32 = "4-bit weights in float32 have no GPU kernel and are slow; use --set model.dtype=bfloat16"
_SLOW_GROUPS = (
    "int8 weights that are weight-only or in groups have no GPU kernel and are slow; "
    "w8a8 with one scale a row, w4a16 and w4a8 have one"
)


class W8A8Linear:
    takes_int8 = True

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        """`weight` has one scale a row."""
        self._q, self._scale = weight.q.contiguous(), weight.scale[:, 0].contiguous()
        self._bias, self._dtype = bias, dtype

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self._q.shape
        return n, k

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(self._q, self._scale, self._bias)

    def __call__(self, x: Tensor | Int8Rows) -> Tensor:
        rows = x if isinstance(x, Int8Rows) else w8a8.quantize(x)
        return w8a8.w8a8(rows, self._q, self._scale, self._bias, self._dtype)


class W4A16Linear:
    takes_int8 = False

    def __init__(self, weight: Weight4, bias: Tensor | None) -> None:
        """Scales and zeros of `weight` are in the model's dtype, bfloat16 or float16."""
        zeros = None if weight.zeros is None else weight.zeros.contiguous()
        self._weight = Weight4(weight.packed.contiguous(), weight.scales.contiguous(), zeros, weight.group)
        self._bias = bias

    @property
    def shape(self) -> tuple[int, int]:
        n, half = self._weight.packed.shape
        return n, 2 * half

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(*self._weight[:3], self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        return w4a16.w4a16(x, self._weight, self._bias)


class W4A8Linear:
    takes_int8 = True

    def __init__(self, weight: Weight4A8, bias: Tensor | None, dtype: torch.dtype) -> None:
        scales = None if weight.group_scales is None else weight.group_scales.contiguous()
        packed, scale, zeros = weight.packed.contiguous(), weight.scale.contiguous(), weight.zeros.contiguous()
        self._weight = Weight4A8(packed, scale, scales, zeros)
        self._bias, self._dtype = bias, dtype

    @property
    def shape(self) -> tuple[int, int]:
        n, half = self._weight.packed.shape
        return n, 2 * half

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(*self._weight, self._bias)

    def __call__(self, x: Tensor | Int8Rows) -> Tensor:
        rows = x if isinstance(x, Int8Rows) else w8a8.quantize(x)
        return w4a8(rows, self._weight, self._bias, self._dtype)


def _rounding(scales: Tensor, dtype: torch.dtype) -> float:
    """The largest relative error of `scales` as `dtype`."""
    exact = scales.float()
    error = (scales.to(dtype).float() - exact).abs() / exact.abs().clamp(min=torch.finfo(torch.float32).tiny)
    return error.max().item() if error.numel() else 0.0

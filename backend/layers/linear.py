"""Linear layers: y = x W^T + bias behind one interface, whatever form the weight is held in.

    DenseLinear       F.linear, for any device and dtype
    OneDnnLinear      bfloat16 on a CPU; the weight is held in the order in which oneDNN's product reads it
    QuantizedLinear   int8 weight and scales; slow, and the reference of the quantised kernels
    LinearByHead      floats, of which each head has its rows

A `MakeLinear` chooses among them and owns the weight it is given: a layer that packs it keeps the packed form only. Here 4-bit
weights are held as int8 (`in_eight_bits`), which is exact. The layers for GPUs are in device_linear.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import w4a8, w4a16
from kernels.common import rounding, super_blocks
from kernels.common.quantize import dequantize, quantize_activations, row_slices
from kernels.common.rotation import rotate
from kernels.common.rounding import Rounded
from kernels.common.super_blocks import SuperBlocks
from kernels.w4a8 import Weight4A8
from kernels.w4a16 import Weight4

QuantizedFormat = Literal["int8", "w8a8", "w6a8", "w4a8"]


class QuantizedWeight(NamedTuple):
    """A weight in the format of kernels/common/quantize.py or, for those of ROUNDED, of rounding.py.

    One of a checkpoint may also hold -128.
    """

    q: Tensor  # int8 [n, k]
    scale: Tensor  # float32 [n, ceil(k / group)]
    group: int  # columns; k = one scale a row
    format: QuantizedFormat  # but of int8: activations are quantised as well, per token and group
    is_rotated: bool = False  # w8a8: of kernels/common/rotation.py, which rotates inputs
    minimum: Tensor | None = None  # like scale; of some in ROUNDED


Weight = (
    Tensor | QuantizedWeight | Weight4 | Weight4A8 | SuperBlocks
)  # [n, k]; super-blocks are for native kernels alone


class Linear(Protocol):
    """A linear layer of n outputs and k inputs."""

    takes_int8: bool  # True if it accepts Int8Rows, so that the norm before it can quantise its output

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""

    @property
    def num_bytes(self) -> int:
        """Memory of weight, scales and bias."""

    def __call__(self, x: Any) -> Tensor:
        """x [tokens, k] -> [tokens, n] in the model's dtype.

        x is a Tensor in the model's dtype; where `takes_int8`, it may be Int8Rows instead. No type says that of both.
        """


MakeLinear = Callable[[Weight, Tensor | None], Linear]


def make_torch_linear(weight: Weight, bias: Tensor | None) -> Linear:
    """The fastest form that torch itself has. weight [n, k], bias [n] or None."""
    if isinstance(weight, Weight4 | Weight4A8):
        weight = in_eight_bits(weight)
    if isinstance(weight, QuantizedWeight):
        return QuantizedLinear(weight, bias)
    assert not isinstance(weight, SuperBlocks), "LinearOptions.holds_super_blocks is for native kernels"
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and onednn_packs():
        return OneDnnLinear(weight, bias)
    return DenseLinear(weight, bias)


def in_eight_bits(weight: Weight4 | Weight4A8) -> QuantizedWeight:
    """A 4-bit weight as int8, exactly: 4-bit values less their zero point fit int8, and the scales stay."""
    if isinstance(weight, Weight4A8):
        values, scale = w4a8.as_int8(weight)
        return QuantizedWeight(values, scale[:, None], values.shape[1], "w8a8")
    q: Tensor = w4a16.unpack(weight.packed, weight.group).view(torch.int8).unflatten(1, (-1, weight.group))
    q -= w4a16.SYMMETRIC_ZERO if weight.zeros is None else weight.zeros.T[:, :, None].to(torch.int8)
    return QuantizedWeight(q.flatten(1), weight.scales.T.float().contiguous(), weight.group, "int8")


class DenseLinear:
    """Holds the given tensor itself, not a copy, so that an output head tied to the embedding takes no memory."""

    takes_int8 = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.weight.shape
        return n, k

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(self.weight, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class OneDnnLinear:
    """bfloat16 on a CPU through torch's private oneDNN operators. Call it only where `onednn_packs()` is true."""

    takes_int8 = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self._weight.shape
        return n, k

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(self._weight, self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


class QuantizedLinear:
    """Multiplies in float32 by the dequantised weight; but for int8, x is quantised and dequantised as well.

    The weight is dequantised in slices of rows, which bounds the memory.
    """

    takes_int8 = False

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self._weight.q.shape
        return n, k

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(self._weight.q, self._weight.scale, self._weight.minimum, self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        q, scale, group, format, is_rotated, minimum = self._weight
        inputs = rotate(x) if is_rotated else x.float()
        values = dequantize(*quantize_activations(inputs, group), group) if format != "int8" else inputs
        out = x.new_empty(x.shape[0], q.shape[0])
        for rows in row_slices(*q.shape):
            bias = None if self._bias is None else self._bias[rows].float()
            weight = dequantize(q[rows], scale[rows], group)
            if minimum is not None:
                weight = rounding.floats(Rounded(q[rows], scale[rows], minimum[rows]))
            out[:, rows] = F.linear(values, weight, bias)
        return out


class LinearByHead(DenseLinear):
    """A weight [heads * n, k] as floats, whose rows each head has a part of: x [tokens, heads, k] -> [tokens, heads, n]."""

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        super().__init__(floats_of(weight), bias)

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype).unflatten(0, (x.shape[1], -1))
        return torch.einsum("thk,hnk->thn", x, weight)


def floats_of(weight: Weight) -> Tensor:
    """The numbers [n, k] that a weight stands for; float32 unless it is a Tensor."""
    match weight:
        case Weight4() | Weight4A8():
            return floats_of(in_eight_bits(weight))
        case SuperBlocks():
            return super_blocks.floats(weight)
        case QuantizedWeight(minimum=Tensor()):
            assert weight.minimum is not None
            return rounding.floats(Rounded(weight.q, weight.scale, weight.minimum))
        case QuantizedWeight():
            return dequantize(weight.q, weight.scale, weight.group)
    return weight


@cache
def onednn_packs() -> bool:
    """True if torch's private packed linear exists on this machine and gives the right result for a small random case."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in ((5, 70), (40, 70), (40,)))
    expected = F.linear(x.float(), weight.float(), bias.float())
    try:
        return torch.allclose(OneDnnLinear(weight, bias)(x).float(), expected, rtol=0.01, atol=0.01)
    except (
        AttributeError,
        RuntimeError,
        TypeError,
    ):  # the operators are missing, do not support this CPU, or have changed
        return False


def num_bytes_of(*tensors: Tensor | None) -> int:
    """Bytes of the given tensors together; None counts as 0."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

"""RMSNorm (Zhang and Sennrich, 2019) and LayerNorm (Ba et al., 2016), fused with the addition before and the int8 form after.

r     = factor * x + residual                        (add_norm; rounded to x's type, returned as well)
c     = r - mean(r) for LayerNorm (`centred`), r for RMSNorm
y     = c / sqrt(mean(c^2) + eps) * weight + bias    means over the last dimension, in float32; the bias may be absent
q, scale, sums                                       y as int8 (kernels/int8_rows.py)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import int8_rows
from kernels.common.triton_runtime import Variant, jit, next_power_of_two, runs_on, tl
from kernels.int8_rows import Int8Rows, int8_scales, store_int8

CASES = [(1, 64), (7, 96), (33, 256), (2, 3, 40)]  # shapes of x; the last dimension is normalised


def reference(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None, centred: bool = False) -> Tensor:
    """Normalises x [..., hidden] by weight and bias [hidden]; returns [..., hidden] in x's dtype."""
    if not centred and bias is None and weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    given, weight, bias = x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)
    if centred:
        y = F.layer_norm(given, weight.shape, weight, bias, eps)
    else:
        y = F.rms_norm(given, weight.shape, weight, eps)
        y = y if bias is None else y + bias
    return y.to(x.dtype)


def reference_int8(
    x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None, centred: bool = False
) -> Int8Rows:
    """Normalises and quantises x [rows, hidden]."""
    return int8_rows.reference(reference(x.float(), weight.float(), eps, bias, centred))


def norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None, centred: bool = False) -> Tensor:
    """Normalise the last dimension; returns a new tensor."""
    if not runs_on(x):
        return reference(x, weight, eps, bias, centred)
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, None, weight, eps, bias, centred, out)
    return out


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
    centred: bool = False,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Adds factor * x and residual [..., hidden]; returns two new tensors, the normed sum and the sum."""
    if not runs_on(x):
        total = torch.add(residual, x, alpha=factor)
        return reference(total, weight, eps, bias, centred), total
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, eps, bias, centred, out, total, factor=factor)
    return out, total


def norm_int8(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None, centred: bool = False) -> Int8Rows:
    """Normalises and quantises x [rows, hidden]."""
    if not runs_on(x):
        return reference_int8(x, weight, eps, bias, centred)
    rows = int8_rows.empty(x.shape[0], x.shape[1], x.device)
    _launch(x.contiguous(), None, weight, eps, bias, centred, rows.q, None, rows.scale, rows.sums)
    return rows


def add_norm_int8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
    centred: bool = False,
    factor: float = 1.0,
) -> tuple[Int8Rows, Tensor]:
    """Adds factor * x and residual [rows, hidden]; returns the normed sum, quantised, and the sum."""
    if not runs_on(x):
        total = torch.add(residual, x, alpha=factor)
        return reference_int8(total, weight, eps, bias, centred), total
    rows = int8_rows.empty(x.shape[0], x.shape[1], x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, residual = x.contiguous(), residual.contiguous()
    _launch(x, residual, weight, eps, bias, centred, rows.q, total, rows.scale, rows.sums, factor)
    return rows, total


@jit
def _norm_kernel(
    x,  # [rows, hidden]
    residual,  # like x, or None
    weight,  # [hidden]
    bias,  # [hidden], or None
    out,  # like x, or int8
    total,  # like x, with a residual
    scales,  # [rows] float32, with int8
    sums,  # [rows, ceil(hidden / 128)] int32, with int8
    hidden,
    eps,
    factor,  # factor of x; None: 1
    CENTRED: tl.constexpr,  # LayerNorm
    BLOCK: tl.constexpr,  # a power of two, at least hidden
):
    row = tl.program_id(0).to(tl.int64) * hidden
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    r = tl.load(x + row + columns, mask, other=0).to(tl.float32)
    if factor is not None:
        r *= factor
    if residual is not None:
        r += tl.load(residual + row + columns, mask, other=0).to(tl.float32)
        rounded = r.to(x.dtype.element_ty)
        tl.store(total + row + columns, rounded, mask)
        r = rounded.to(tl.float32)
    w = tl.load(weight + columns, mask, other=0).to(tl.float32)
    if CENTRED:
        r = tl.where(mask, r - tl.sum(r, 0) / hidden, 0.0)
    y = r * tl.rsqrt(tl.sum(r * r, 0) / hidden + eps) * w
    if bias is not None:
        y += tl.load(bias + columns, mask, other=0).to(tl.float32)
    if scales is not None:
        scale, inverse = int8_scales(tl.max(tl.abs(y), 0))
        tl.store(scales + tl.program_id(0), scale)
        row_sums = sums + tl.program_id(0).to(tl.int64) * tl.cdiv(hidden, 128)
        store_int8(y, inverse, out + row, row_sums, 0, hidden, BLOCK)
    else:
        tl.store(out + row + columns, y.to(out.dtype.element_ty), mask)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    bias: Tensor | None,
    centred: bool,
    out: Tensor,
    total: Tensor | None = None,
    scales: Tensor | None = None,
    sums: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    hidden = x.shape[-1]
    block = next_power_of_two(hidden)
    _norm_kernel[(x.numel() // hidden,)](
        x, residual, weight, bias, out, total, scales, sums, hidden, eps, None if factor == 1 else factor,
        CENTRED=centred, BLOCK=block, num_warps=_num_warps(block),
    )  # fmt: skip


def _num_warps(block: int) -> int:
    return min(16, max(1, block // 512))


def variants() -> dict[str, Variant]:
    made = {}
    floats = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "hidden": "i32", "eps": "fp32"}
    int8 = floats | {"out": "*i8", "scales": "*fp32", "sums": "*i32"}
    added = {"residual": "*bf16", "total": "*bf16"}
    layer, scaled = {"bias": "*bf16"}, {"factor": "fp32"}
    kinds = {"plain": floats, "add": floats | added, "int8": int8, "add-int8": int8 | added}
    kinds |= {"layer": floats | layer, "add-layer-int8": int8 | added | layer, "add-scaled": floats | added | scaled}
    arguments = ("residual", "bias", "total", "scales", "sums", "factor")
    for hidden in (576, 4096, 8192):
        block = next_power_of_two(hidden)
        for name, types in kinds.items():
            absent = dict.fromkeys(argument for argument in arguments if argument not in types)
            constants = absent | {"BLOCK": block, "CENTRED": "layer" in name}
            made[f"{name}-{hidden}"] = Variant(_norm_kernel, types, constants, _num_warps(block), divisible=("hidden",))
    return made

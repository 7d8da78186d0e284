"""RMSNorm (Zhang and Sennrich, 2019), fused with the residual addition before it and the int8 quantisation after it.

r     = x + residual                                 (add_rms_norm; rounded to x's type, returned as well)
y     = r / sqrt(mean(r^2) + eps) * weight           mean over the last dimension, in float32
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


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises x [..., hidden] by weight [hidden]; returns [..., hidden] in x's dtype."""
    return F.rms_norm(x, weight.shape, weight, eps)


def reference_int8(x: Tensor, weight: Tensor, eps: float) -> Int8Rows:
    """Normalises and quantises x [rows, hidden]."""
    return int8_rows.reference(F.rms_norm(x.float(), weight.shape, weight.float(), eps))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension; returns a new tensor."""
    if not runs_on(x):
        return reference(x, weight, eps)
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, None, weight, eps, out)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds x and residual [..., hidden]; returns two new tensors, the normed sum and the sum."""
    if not runs_on(x):
        total = x + residual
        return reference(total, weight, eps), total
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, eps, out, total)
    return out, total


def rms_norm_int8(x: Tensor, weight: Tensor, eps: float) -> Int8Rows:
    """Normalises and quantises x [rows, hidden]."""
    if not runs_on(x):
        return reference_int8(x, weight, eps)
    rows = int8_rows.empty(x.shape[0], x.shape[1], x.device)
    _launch(x.contiguous(), None, weight, eps, rows.q, None, rows.scale, rows.sums)
    return rows


def add_rms_norm_int8(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Int8Rows, Tensor]:
    """Adds x and residual [rows, hidden]; returns the normed sum, quantised, and the sum."""
    if not runs_on(x):
        total = x + residual
        return reference_int8(total, weight, eps), total
    rows = int8_rows.empty(x.shape[0], x.shape[1], x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x.contiguous(), residual.contiguous(), weight, eps, rows.q, total, rows.scale, rows.sums)
    return rows, total


@jit
def _rms_norm_kernel(
    x,  # [rows, hidden]
    residual,  # like x, or None
    weight,  # [hidden]
    out,  # like x, or int8
    total,  # like x, with a residual
    scales,  # [rows] float32, with int8
    sums,  # [rows, ceil(hidden / 128)] int32, with int8
    hidden,
    eps,
    BLOCK: tl.constexpr,  # a power of two, at least hidden
):
    row = tl.program_id(0).to(tl.int64) * hidden
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    r = tl.load(x + row + columns, mask, other=0).to(tl.float32)
    if residual is not None:
        r += tl.load(residual + row + columns, mask, other=0).to(tl.float32)
        rounded = r.to(x.dtype.element_ty)
        tl.store(total + row + columns, rounded, mask)
        r = rounded.to(tl.float32)
    w = tl.load(weight + columns, mask, other=0).to(tl.float32)
    y = r * tl.rsqrt(tl.sum(r * r, 0) / hidden + eps) * w
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
    out: Tensor,
    total: Tensor | None = None,
    scales: Tensor | None = None,
    sums: Tensor | None = None,
) -> None:
    hidden = x.shape[-1]
    block = next_power_of_two(hidden)
    _rms_norm_kernel[(x.numel() // hidden,)](
        x, residual, weight, out, total, scales, sums, hidden, eps, BLOCK=block, num_warps=_num_warps(block)
    )


def _num_warps(block: int) -> int:
    return min(16, max(1, block // 512))


def variants() -> dict[str, Variant]:
    common = {"x": "*bf16", "weight": "*bf16", "hidden": "i32", "eps": "fp32"}
    made = {}
    for hidden in (576, 4096, 8192):
        constants = {"BLOCK": next_power_of_two(hidden)}
        num_warps = _num_warps(constants["BLOCK"])
        plain = dict.fromkeys(("residual", "total", "scales", "sums"))
        made[f"plain-{hidden}"] = Variant(
            _rms_norm_kernel, common | {"out": "*bf16"}, constants | plain, num_warps, divisible=("hidden",)
        )
        added = dict.fromkeys(("scales", "sums"))
        types = common | {"out": "*bf16", "residual": "*bf16", "total": "*bf16"}
        made[f"add-{hidden}"] = Variant(_rms_norm_kernel, types, constants | added, num_warps, divisible=("hidden",))
        types = common | {"out": "*i8", "scales": "*fp32", "sums": "*i32"}
        alone = dict.fromkeys(("residual", "total"))
        made[f"int8-{hidden}"] = Variant(_rms_norm_kernel, types, constants | alone, num_warps, divisible=("hidden",))
        types = types | {"residual": "*bf16", "total": "*bf16"}
        made[f"add-int8-{hidden}"] = Variant(_rms_norm_kernel, types, constants, num_warps, divisible=("hidden",))
    return made

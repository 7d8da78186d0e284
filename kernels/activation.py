"""The activation of an MLP, with its gate where it has one: SwiGLU, GeGLU (Shazeer, 2020), or a plain GELU.

y = act(gate) * up           for given = [gate | up] along the last dimension, where it is gated
y = act(given)               otherwise
q, scale, sums               y as int8 (kernels/int8_rows.py), for the down projection

    silu        x / (1 + exp(-x))
    gelu        x * (1 + erf(x / sqrt(2))) / 2                                  (Hendrycks and Gimpel, 2016)
    gelu_tanh   x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2           their approximation

    swiglu_oai  g * sigmoid(1.702 g) * (1 + u)   with g = min(gate, 7), u = up between -7 and 7   (gpt-oss, arXiv:2508.10925)

in float32.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kernels import int8_rows
from kernels.common.triton_runtime import Variant, jit, next_power_of_two, runs_on, tl
from kernels.int8_rows import Int8Rows, int8_scales, store_int8

CASES = [(1, 64), (7, 96), (33, 512), (2, 3, 80), (3, 2 * 1031)]  # shapes of what is given
KINDS = ("silu", "gelu", "gelu_tanh", "swiglu_oai")  # the last one always has a gate

MAX_ROW_BLOCK = 1 << 14  # columns of a row that one program of the int8 form holds in registers
LOOP_BLOCK = 1 << 12  # columns of a longer row that it reads at a time
TILE = 1 << 10  # columns of a program of the plain form


def reference(given: Tensor, kind: str = "silu", gated: bool = True) -> Tensor:
    """given [..., 2 * intermediate] -> [..., intermediate]; without a gate given has the result's shape."""
    x, up = given.chunk(2, dim=-1) if gated else (given, None)
    if kind == "swiglu_oai":
        assert up is not None
        g = x.clamp(max=7.0)
        return g * F.sigmoid(1.702 * g) * (1 + up.clamp(-7.0, 7.0))
    y = F.silu(x) if kind == "silu" else F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
    return y if up is None else y * up


def reference_int8(given: Tensor, kind: str = "silu", gated: bool = True) -> Int8Rows:
    """Like `reference` for given [rows, columns], quantised."""
    return int8_rows.reference(reference(given.float(), kind, gated))


def activate(given: Tensor, kind: str = "silu", gated: bool = True) -> Tensor:
    """given [..., 2 * intermediate] -> a new tensor [..., intermediate]; without a gate given has the result's shape."""
    if not runs_on(given):
        return reference(given, kind, gated)
    intermediate = given.shape[-1] // (2 if gated else 1)
    out = given.new_empty(*given.shape[:-1], intermediate)
    block = _block(intermediate, TILE)
    grid = (out.numel() // intermediate, -(-intermediate // block))
    _activation_kernel[grid](
        given.contiguous(), out, intermediate, KIND=kind, GATED=gated, BLOCK=block, num_warps=_num_warps(block)
    )
    return out


def activate_int8(given: Tensor, kind: str = "silu", gated: bool = True) -> Int8Rows:
    """Like `activate` for given [rows, columns], quantised."""
    if not runs_on(given):
        return reference_int8(given, kind, gated)
    intermediate = given.shape[1] // (2 if gated else 1)
    rows = int8_rows.empty(len(given), intermediate, given.device)
    block = _row_block(intermediate)
    _activation_int8_kernel[(len(given),)](
        given.contiguous(), *rows, intermediate, KIND=kind, GATED=gated,
        BLOCK=block, WHOLE_ROW=block >= intermediate, num_warps=_num_warps(block),
    )  # fmt: skip
    return rows


@jit
def _activated(
    given,  # one row
    columns,
    intermediate,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
):
    """The result at `columns` of one row, float32; 0 beyond its end."""
    mask = columns < intermediate
    x = tl.load(given + columns, mask, other=0).to(tl.float32)
    if GATED:
        up = tl.load(given + intermediate + columns, mask, other=0).to(tl.float32)
    if KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif KIND == "swiglu_oai":
        x = tl.minimum(x, 7.0)
        y = x / (1.0 + tl.exp(-1.702 * x))
        up = 1.0 + tl.maximum(tl.minimum(up, 7.0), -7.0)
    elif KIND == "gelu":
        y = x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    else:  # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z))
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    if GATED:
        y *= up
    return y


@jit
def _activation_kernel(
    given,  # [rows, 2 * intermediate], without a gate [rows, intermediate]
    out,  # [rows, intermediate]
    intermediate,
    KIND: tl.constexpr,  # an entry of KINDS
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * intermediate
    given += row * (2 if GATED else 1)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = _activated(given, columns, intermediate, KIND, GATED)
    tl.store(out + row + columns, y.to(out.dtype.element_ty), columns < intermediate)


@jit
def _activation_int8_kernel(
    given,  # [rows, 2 * intermediate], without a gate [rows, intermediate]
    out,  # [rows, intermediate] int8
    scales,  # [rows] float32
    sums,  # [rows, ceil(intermediate / 128)] int32
    intermediate,
    KIND: tl.constexpr,  # an entry of KINDS
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE_ROW: tl.constexpr,  # True if one BLOCK holds the row; otherwise y is computed twice, reading memory and then the cache
):
    row = tl.program_id(0).to(tl.int64) * intermediate
    row_sums = sums + tl.program_id(0).to(tl.int64) * tl.cdiv(intermediate, 128)
    given += row * (2 if GATED else 1)
    columns = tl.arange(0, BLOCK)
    if WHOLE_ROW:
        y = _activated(given, columns, intermediate, KIND, GATED)
        scale, inverse = int8_scales(tl.max(tl.abs(y), 0))
        store_int8(y, inverse, out + row, row_sums, 0, intermediate, BLOCK)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, intermediate, BLOCK):
            y = _activated(given, start + columns, intermediate, KIND, GATED)
            largest = tl.maximum(largest, tl.abs(y))
        scale, inverse = int8_scales(tl.max(largest, 0))
        for start in range(0, intermediate, BLOCK):
            y = _activated(given, start + columns, intermediate, KIND, GATED)
            store_int8(y, inverse, out + row, row_sums, start, intermediate, BLOCK)
    tl.store(scales + tl.program_id(0), scale)


def _block(columns: int, max_block: int) -> int:
    return min(max_block, next_power_of_two(columns))


def _row_block(intermediate: int) -> int:
    return _block(intermediate, MAX_ROW_BLOCK if intermediate <= MAX_ROW_BLOCK else LOOP_BLOCK)


def _num_warps(block: int) -> int:
    return min(16, max(1, block // 256 if block <= TILE else block // 512))


def variants() -> dict[str, Variant]:
    made = {}
    types = {"given": "*bf16", "out": "*bf16", "intermediate": "i32"}
    wide = dict.fromkeys((80, 90, 100), ("LDG.E.128",))
    block = _block(14336, TILE)
    kinds = {"": ("silu", True), "gelu-tanh-": ("gelu_tanh", True), "gelu-alone-": ("gelu", False)}
    for name, (kind, gated) in kinds.items():
        constants: dict[str, object] = {"BLOCK": block, "KIND": kind, "GATED": gated}
        made[f"{name}plain-14336"] = Variant(
            _activation_kernel, types, constants, _num_warps(block), divisible=("intermediate",), instructions=wide
        )
    types = {"given": "*bf16", "out": "*i8", "scales": "*fp32", "sums": "*i32", "intermediate": "i32"}
    shapes = [("", 1536), ("", 14336), ("", 28672), ("gelu-tanh-", 14336), ("gelu-alone-", 14336)]
    for name, intermediate in shapes:
        block = _row_block(intermediate)
        constants = {"BLOCK": block, "WHOLE_ROW": block >= intermediate}
        constants |= dict(zip(("KIND", "GATED"), kinds[name]))
        made[f"{name}int8-{intermediate}"] = Variant(
            _activation_int8_kernel, types, constants, _num_warps(block),
            divisible=("intermediate",), instructions=wide,
        )  # fmt: skip
    return made

"""The gate of a SwiGLU MLP (Shazeer, 2020).

y = silu(gate) * up          for gate_up = [gate | up] along the last dimension; silu(g) = g / (1 + exp(-g)), in float32
q, scale, sums               y as int8 (kernels/int8_rows.py), for the down projection
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kernels import int8_rows
from kernels.common.triton_runtime import Variant, jit, next_power_of_two, runs_on, tl
from kernels.int8_rows import Int8Rows, int8_scales, store_int8

CASES = [(1, 64), (7, 96), (33, 512), (2, 3, 80), (3, 2 * 1031)]  # shapes of gate_up

MAX_ROW_BLOCK = 1 << 14  # columns of a row that one program of the int8 form holds in registers
LOOP_BLOCK = 1 << 12  # columns of a longer row that it reads at a time
TILE = 1 << 10  # columns of a program of the plain form


def reference(gate_up: Tensor) -> Tensor:
    """Gates gate_up [..., 2 * intermediate]; returns [..., intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def reference_int8(gate_up: Tensor) -> Int8Rows:
    """Gates and quantises gate_up [rows, 2 * intermediate]."""
    return int8_rows.reference(reference(gate_up.float()))


def silu_mul(gate_up: Tensor) -> Tensor:
    """Gates gate_up [..., 2 * intermediate]; returns a new tensor [..., intermediate]."""
    if not runs_on(gate_up):
        return reference(gate_up)
    intermediate = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], intermediate)
    block = _block(intermediate, TILE)
    grid = (out.numel() // intermediate, -(-intermediate // block))
    _silu_mul_kernel[grid](gate_up.contiguous(), out, intermediate, BLOCK=block, num_warps=_num_warps(block))
    return out


def silu_mul_int8(gate_up: Tensor) -> Int8Rows:
    """Gates and quantises gate_up [rows, 2 * intermediate]."""
    if not runs_on(gate_up):
        return reference_int8(gate_up)
    intermediate = gate_up.shape[1] // 2
    rows = int8_rows.empty(len(gate_up), intermediate, gate_up.device)
    block = _row_block(intermediate)
    _silu_mul_int8_kernel[(len(gate_up),)](
        gate_up.contiguous(), *rows, intermediate,
        BLOCK=block, WHOLE_ROW=block >= intermediate, num_warps=_num_warps(block),
    )  # fmt: skip
    return rows


@jit
def _gated(gate_up, columns, intermediate):
    """silu(gate) * up at `columns` of one row, float32; 0 beyond its end."""
    mask = columns < intermediate
    gate = tl.load(gate_up + columns, mask, other=0).to(tl.float32)
    up = tl.load(gate_up + intermediate + columns, mask, other=0).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up


@jit
def _silu_mul_kernel(
    gate_up,  # [rows, 2 * intermediate]
    out,  # [rows, intermediate]
    intermediate,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * intermediate
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = _gated(gate_up + 2 * row, columns, intermediate)
    tl.store(out + row + columns, y.to(out.dtype.element_ty), columns < intermediate)


@jit
def _silu_mul_int8_kernel(
    gate_up,  # [rows, 2 * intermediate]
    out,  # [rows, intermediate] int8
    scales,  # [rows] float32
    sums,  # [rows, ceil(intermediate / 128)] int32
    intermediate,
    BLOCK: tl.constexpr,
    WHOLE_ROW: tl.constexpr,  # True if one BLOCK holds the row; otherwise y is computed twice, reading memory and then the cache
):
    row = tl.program_id(0).to(tl.int64) * intermediate
    row_sums = sums + tl.program_id(0).to(tl.int64) * tl.cdiv(intermediate, 128)
    columns = tl.arange(0, BLOCK)
    if WHOLE_ROW:
        y = _gated(gate_up + 2 * row, columns, intermediate)
        scale, inverse = int8_scales(tl.max(tl.abs(y), 0))
        store_int8(y, inverse, out + row, row_sums, 0, intermediate, BLOCK)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, intermediate, BLOCK):
            largest = tl.maximum(largest, tl.abs(_gated(gate_up + 2 * row, start + columns, intermediate)))
        scale, inverse = int8_scales(tl.max(largest, 0))
        for start in range(0, intermediate, BLOCK):
            y = _gated(gate_up + 2 * row, start + columns, intermediate)
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
    types = {"gate_up": "*bf16", "out": "*bf16", "intermediate": "i32"}
    wide = dict.fromkeys((80, 90, 100), ("LDG.E.128",))
    block = _block(14336, TILE)
    made["plain-14336"] = Variant(
        _silu_mul_kernel, types, {"BLOCK": block}, _num_warps(block), divisible=("intermediate",), instructions=wide
    )
    types = {"gate_up": "*bf16", "out": "*i8", "scales": "*fp32", "sums": "*i32", "intermediate": "i32"}
    for intermediate in (1536, 14336, 28672):
        block = _row_block(intermediate)
        constants = {"BLOCK": block, "WHOLE_ROW": block >= intermediate}
        made[f"int8-{intermediate}"] = Variant(
            _silu_mul_int8_kernel, types, constants, _num_warps(block),
            divisible=("intermediate",), instructions=wide,
        )  # fmt: skip
    return made

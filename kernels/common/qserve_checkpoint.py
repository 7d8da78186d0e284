"""Converts between QServe's stored layout of a W4A8 layer (Lin et al., 2024) and that of kernels/w4a8.py.

    qweight     int8 [n, k / 2]       tiles of 32 rows and 32 columns, one after the other along k, then along n
    s1_scales   float16 [n]           the scale of a row
    s1_szeros   float16 [n]           per channel: zero * s1_scales
    s2_scales   int8 [k / 128, n]     per group: the scale of a group
    s2_zeros    int8 [k / 128, n]     per group: -zero * s2_scales modulo 256, so that w / s1_scales = q * s2_scales + s2_zeros

Byte i of a tile of qweight, counted as [8][4][2][2][4] = [lane_n][lane_k][half_k][half_n][column], holds row 8 * half_n +
lane_n in its low bits and row 8 * half_n + lane_n + 16 in its high bits, of column 16 * half_k + 4 * lane_k + column, as a
lane of mma.m16n8k32 needs them. s2 tensors are in the order of a lane's rows: 0, 8, 16, 24, 1, 9, ... of each 32.

The order of qweight and of its halves, s1_szeros, and the sign of s2_zeros follow DeepCompressor 0.1.0, whose packer is by
QServe's authors. DeepCompressor's s2 tensors are in another order than those of QServe's layers: 0, 8, 1, 9, ..., 7, 15, 16,
24, ... Read in QServe's order, the weights of such a checkpoint exceed int8, and it is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.int8_rows import GROUP
from kernels.w4a8 import MAX_GROUP_SCALE, Weight4A8
from kernels.w4a16 import pack, unpack

TILE = 32  # rows and columns
MIN_8, MAX_8 = -128, 127
NOT_WHOLE = 0.05  # how far a zero point may be off an integer: float16 rounds zero * scale and scale by 2^-11 each


def from_qserve(
    qweight: Tensor,
    s1_scales: Tensor,
    s1_szeros: Tensor | None = None,
    s2_scales: Tensor | None = None,
    s2_zeros: Tensor | None = None,
) -> Weight4A8:
    """Reads a layer: per channel with s1_szeros, per group with s2_scales and s2_zeros. Raises ValueError if it cannot."""
    n, k = len(qweight), 2 * qweight.shape[1]
    _require_whole_tiles(n, k)
    q, scale = _rows(qweight), s1_scales.float()
    if s2_scales is None or s2_zeros is None:
        if s1_szeros is None:
            raise ValueError("a QServe layer has s1_szeros, or s2_scales and s2_zeros: this one has neither")
        return Weight4A8(pack(q, GROUP), scale, None, _channel_zeros(s1_szeros.float(), scale))
    if s2_scales.shape != (k // GROUP, n) or s2_zeros.shape != s2_scales.shape:
        raise ValueError(
            f"s2_scales are {tuple(s2_scales.shape)}, not {(k // GROUP, n)}: groups must have {GROUP} columns"
        )
    group_scales = _in_order(s2_scales)
    _require(group_scales, 1, MAX_GROUP_SCALE, "a group's scale")
    zeros = _group_zeros(_in_order(s2_zeros), group_scales)
    weights = (q.int().unflatten(1, (-1, GROUP)) - zeros.int().T[:, :, None]) * group_scales.int().T[:, :, None]
    _require(weights, MIN_8, MAX_8, "a weight, (q - zero) * s2_scales,")
    return Weight4A8(pack(q, GROUP), scale, group_scales, zeros)


def to_qserve(weight: Weight4A8) -> dict[str, Tensor]:
    """The tensors of a layer by QServe's names; its scales are rounded to float16."""
    n, k = len(weight.packed), 2 * weight.packed.shape[1]
    _require_whole_tiles(n, k)
    scale = weight.scale.half()
    made = {"qweight": _tiles(unpack(weight.packed, GROUP)), "s1_scales": scale}
    if weight.group_scales is None:
        return made | {"s1_szeros": (weight.zeros[0].float() * scale.float()).half()}
    shifts = (-weight.zeros.int() * weight.group_scales.int()).to(torch.int8)  # modulo 256
    return made | {"s2_scales": _by_lanes(weight.group_scales), "s2_zeros": _by_lanes(shifts)}


def _tiles(q: Tensor) -> Tensor:
    """Returns the qweight of q uint8 [n, k], 0..15."""
    n, k = q.shape
    # [tile_n, high bits, half_n, lane_n, tile_k, half_k, lane_k, column]
    parts = q.reshape(n // TILE, 2, 2, 8, k // TILE, 2, 4, 4)
    low, high = parts.permute(1, 0, 4, 3, 6, 5, 2, 7)
    packed: Tensor = low | high << 4
    return packed.reshape(n, k // 2).view(torch.int8)


def _rows(qweight: Tensor) -> Tensor:
    """The inverse of `_tiles`."""
    n, k = len(qweight), 2 * qweight.shape[1]
    # [tile_n, tile_k, lane_n, lane_k, half_k, half_n, column]
    packed = qweight.contiguous().view(torch.uint8).reshape(n // TILE, k // TILE, 8, 4, 2, 2, 4)
    return torch.stack((packed & 15, packed >> 4)).permute(1, 0, 6, 3, 2, 5, 4, 7).reshape(n, k)


def _by_lanes(table: Tensor) -> Tensor:
    """Reorders each 32 rows of a table [groups, n] to 0, 8, 16, 24, 1, 9, and so on."""
    lanes: Tensor = table.unflatten(1, (-1, 4, 8))
    return lanes.transpose(2, 3).flatten(1).contiguous()


def _in_order(table: Tensor) -> Tensor:
    """The inverse of `_by_lanes`."""
    lanes: Tensor = table.unflatten(1, (-1, 8, 4))
    return lanes.transpose(2, 3).flatten(1).contiguous()


def _channel_zeros(szeros: Tensor, scale: Tensor) -> Tensor:
    """Zero points uint8 [1, n]; 0 for a row whose scale is 0. Raises ValueError unless they are integers from 0 to 15."""
    zeros = torch.where(scale > 0, szeros / scale.clamp(min=torch.finfo(scale.dtype).tiny), 0.0)
    off = (zeros - zeros.round()).abs().max().item()
    if off > NOT_WHOLE:
        raise ValueError(
            f"a zero point, s1_szeros / s1_scales, is {off:.2f} off a whole number, at most {NOT_WHOLE} can be read: "
            "quantise the checkpoint with whole zero points"
        )
    _require(zeros.round(), 0, 15, "a zero point, s1_szeros / s1_scales,")
    return zeros.round().to(torch.uint8)[None]


def _group_zeros(shifts: Tensor, group_scales: Tensor) -> Tensor:
    """Zero points uint8 of shifts int8, which are -zero * scale modulo 256. Raises ValueError unless they are 0 to 15."""
    shifts, scales = -shifts.int() & 255, group_scales.int()
    zeros = shifts // scales
    if (zeros * scales != shifts).any():
        raise ValueError(
            "s2_zeros are not multiples of s2_scales: this is no QServe checkpoint, or one in another order of rows"
        )
    _require(zeros, 0, 15, "a zero point, -s2_zeros / s2_scales,")
    return zeros.to(torch.uint8)


def _require_whole_tiles(n: int, k: int) -> None:
    if n % TILE or k % GROUP:
        raise ValueError(
            f"a QServe layer has rows in tiles of {TILE} and columns in groups of {GROUP}, this one is {n} x {k}: pad it"
        )


def _require(values: Tensor, lowest: int, highest: int, what: str) -> None:
    low, high = values.min().item(), values.max().item()
    if low < lowest or high > highest:
        raise ValueError(
            f"{what} is {low if low < lowest else high}, not within {lowest}..{highest}: such a layer cannot be represented; "
            "quantise it again with QoQ's protective range, or store s2 tensors in QServe's order of rows"
        )

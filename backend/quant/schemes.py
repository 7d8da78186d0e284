"""The formats that checkpoints are written in: the grid of a weight, its tensors, and their quantization_config.

    w8a8     compressed-tensors "int-quantized": int8 with one scale a row
    w4a16    compressed-tensors "pack-quantized": 4 bits in groups along k, with scales in the type of the weights. An int32
             has eight numbers, each plus 8, the first in the lowest bits; zero points are packed alike, but along n
    w4a8     QServe's format (kernels/common/qserve_checkpoint.py), groups of 128 with two levels of scales, or one scale a row

The output head and the embedding stay floats in all of them.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from backend.api.errors import ConfigError
from backend.quant.grids import Grid
from kernels.common.qserve_checkpoint import TILE, to_qserve
from kernels.common.quantize import quantize_weight
from kernels.int8_rows import GROUP
from kernels.w4a8 import MAX_8, MAX_GROUP_SCALE, Weight4A8
from kernels.w4a16 import GROUPS, pack

ZERO_ROWS = 8  # zero points are packed along n, eight to a word


class Scheme(Protocol):
    name: str
    bits: int  # bits of a weight
    has_int8_activations: bool

    def groups(self, k: int) -> int:
        """The number of scales of a row of k columns."""

    def grid(self, weight: Tensor, ratio: Tensor) -> Grid:
        """The grid of weight [n, k] float32 that spans `ratio` [n, groups] of the range of each group."""

    def tensors(self, name: str, q: Tensor, grid: Grid) -> dict[str, Tensor]:
        """The checkpoint's tensors of the projection `name`, whose weight is q float32 [n, k] on the grid."""

    def config(self) -> dict[str, Any]:
        """The quantization_config of config.json."""


class W8A8:
    name = "w8a8"
    bits = 8
    has_int8_activations = True

    def groups(self, k: int) -> int:
        return 1

    def grid(self, weight: Tensor, ratio: Tensor) -> Grid:
        _, scale = quantize_weight(ratio * weight, weight.shape[1])  # only the largest weight of a row counts
        zero = torch.zeros_like(scale)
        return Grid(scale, zero, zero - 127, zero + 127)

    def tensors(self, name: str, q: Tensor, grid: Grid) -> dict[str, Tensor]:
        return {name + ".weight": q.to(torch.int8), name + ".weight_scale": grid.step.bfloat16()}

    def config(self) -> dict[str, Any]:
        activations = _arguments(8, "token", None, symmetric=True) | {"dynamic": True, "observer": None}
        return _compressed_tensors("int-quantized", _arguments(8, "channel", None, symmetric=True), activations)


class W4A16:
    name = "w4a16"
    bits = 4
    has_int8_activations = False

    def __init__(self, group: int, has_zeros: bool, dtype: torch.dtype) -> None:
        self._group, self._has_zeros, self._dtype = group, has_zeros, dtype

    def groups(self, k: int) -> int:
        return k // self._group

    def grid(self, weight: Tensor, ratio: Tensor) -> Grid:
        grouped = weight.unflatten(1, (-1, self._group))
        if self._has_zeros:
            low, high = _range(grouped, ratio)
            step = ((high - low) / 15).to(self._dtype).float()
            zero = (-low / _divisor(step)).round().clamp(0, 15)
        else:
            step = (grouped.abs().amax(2) * ratio / 7).to(self._dtype).float()
            zero = torch.full_like(step, 8)
        return Grid(step, zero, torch.zeros_like(step), torch.full_like(step, 15))

    def tensors(self, name: str, q: Tensor, grid: Grid) -> dict[str, Tensor]:
        found = {
            name + ".weight_packed": pack_words(q),
            name + ".weight_scale": grid.step.to(self._dtype),
            name + ".weight_shape": torch.tensor(q.shape),
        }
        if self._has_zeros:
            found[name + ".weight_zero_point"] = pack_words(grid.zero.T).T.contiguous()
        return found

    def config(self) -> dict[str, Any]:
        return _compressed_tensors("pack-quantized", _arguments(4, "group", self._group, not self._has_zeros), None)


class W4A8:
    name = "w4a8"
    bits = 4
    has_int8_activations = True

    def __init__(self, per_group: bool) -> None:
        self._per_group = per_group

    def groups(self, k: int) -> int:
        return k // GROUP if self._per_group else 1

    def grid(self, weight: Tensor, ratio: Tensor) -> Grid:
        if not self._per_group:
            low, high = _range(weight[:, None], ratio)
            step = ((high - low) / 15).half().float()
            zero = (-low / _divisor(step)).round().clamp(0, 15)
            return Grid(step, zero, torch.zeros_like(step), torch.full_like(step, 15))
        scale = (weight.abs().amax(1, keepdim=True) / MAX_8).half().float()
        in_eight_bits = (weight / _divisor(scale)).clamp(-MAX_8, MAX_8).unflatten(1, (-1, GROUP))
        low, high = _range(in_eight_bits, ratio)
        multiple = ((high - low) / 15).ceil().clamp(1, MAX_GROUP_SCALE)
        zero = (-low / multiple).round().clamp(0, 15)
        lowest = (zero - (128 / multiple).floor()).clamp(min=0)
        highest = (zero + (127 / multiple).floor()).clamp(max=15)
        return Grid(multiple * scale, zero, lowest, highest, scale[:, 0])

    def tensors(self, name: str, q: Tensor, grid: Grid) -> dict[str, Tensor]:
        scale, multiples = grid.step[:, 0].contiguous(), None
        if grid.row_scale is not None:
            scale = grid.row_scale
            multiples = (grid.step / _divisor(scale)[:, None]).clamp(min=1).to(torch.int8).T.contiguous()
        packed = pack(q.to(torch.uint8), GROUP)
        weight = Weight4A8(packed, scale, multiples, grid.zero.to(torch.uint8).T.contiguous())
        return {f"{name}.{part}": tensor for part, tensor in to_qserve(weight).items()}

    def config(self) -> dict[str, Any]:
        group = GROUP if self._per_group else -1
        return {"quant_method": "qoq", "wbits": 4, "group_size": group, "ignore": ["lm_head"]}


def make_scheme(name: str, group: int | None, widths: set[tuple[int, int]], dtype: torch.dtype) -> Scheme:
    """The scheme of this name. Raises ConfigError if it does not fit the model.

    `group` is the option --group, None if it was left out; `widths` are the shapes (n, k) of all projections.
    """
    if name == "w8a8":
        if group not in (None, -1):
            raise ConfigError(f"--group is {group}, but w8a8 has one scale a row; leave it out")
        return W8A8()
    columns = sorted({k for _, k in widths})
    if name == "w4a16":
        fitting = [size for size in GROUPS if all(k % size == 0 for k in columns) and group in (None, size)]
        if not fitting:
            asked = f"--group is {group}" if group is not None else "no group of 128, 64 or 32 columns fits"
            raise ConfigError(
                f"{asked}, and the layers have {', '.join(map(str, columns))} columns; w4a16 needs groups of 128, 64 or 32 "
                f"that divide them all: use --scheme w8a8, or leave --group out"
            )
        return W4A16(fitting[0], all(n % ZERO_ROWS == 0 for n, _ in widths), dtype)
    if group not in (None, GROUP, -1):
        raise ConfigError(f"--group is {group}, w4a8 has groups of {GROUP}, or -1 for one scale a row")
    odd = [k for k in columns if k % GROUP]
    if odd:
        raise ConfigError(f"a layer has {odd[0]} columns, w4a8 needs a multiple of {GROUP}; use --scheme w8a8 or w4a16")
    odd = sorted(n for n, _ in widths if n % TILE)
    if odd:
        raise ConfigError(f"a layer has {odd[0]} rows, w4a8 needs a multiple of {TILE}; use --scheme w8a8 or w4a16")
    return W4A8(per_group=group != -1)


def pack_words(q: Tensor) -> Tensor:
    """Pack q [rows, columns], 0..15, to int32 [rows, ceil(columns / 8)]: eight to a word, the first in the lowest bits."""
    rows, columns = q.shape
    words = torch.zeros(rows, -(-columns // 8) * 8, dtype=torch.int64)
    words[:, :columns] = q.long()
    shifts = torch.arange(0, 32, 4)
    packed = (words.unflatten(1, (-1, 8)) << shifts).sum(2)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def _range(grouped: Tensor, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """The range of each group of grouped [n, groups, columns], which includes 0, times `ratio`: (its low end, its high end)."""
    return grouped.amin(2).clamp(max=0) * ratio, grouped.amax(2).clamp(min=0) * ratio


def _divisor(step: Tensor) -> Tensor:
    return torch.where(step > 0, step, torch.inf)


def _arguments(bits: int, strategy: str, group: int | None, symmetric: bool) -> dict[str, Any]:
    """The QuantizationArgs of compressed-tensors."""
    return dict(
        num_bits=bits,
        type="int",
        symmetric=symmetric,
        strategy=strategy,
        group_size=group,
        dynamic=False,
        actorder=None,
        block_structure=None,
        observer="minmax",
        observer_kwargs={},
    )


def _compressed_tensors(format: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = dict(targets=["Linear"], weights=weights, input_activations=activations, output_activations=None)
    return dict(
        quant_method="compressed-tensors",
        format=format,
        quantization_status="compressed",
        config_groups={"group_0": group | {"format": format}},
        ignore=["lm_head"],
        kv_cache_scheme=None,
    )

"""Cuts a rank's part out of a weight, a bias or an adapter, in whatever form; backend/architectures/shards.py says which part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from backend.api.errors import ConfigError
from backend.architectures.description import ModelConfig, Shard
from backend.architectures.shards import Cut, Range, cuts, layers_of
from backend.layers.linear import QuantizedWeight, Weight
from kernels import int8_rows
from kernels.common.adapter import Part
from kernels.common.super_blocks import SuperBlocks
from kernels.w4a8 import Weight4A8
from kernels.w4a16 import Weight4


def cut_weight(weight: Weight, cut: Cut, name: str) -> Weight:
    """The part in memory of its own, without any rounding. name: for errors.

    Raises ConfigError where the cut would go through a group of columns that share a scale.
    """
    if isinstance(weight, Tensor):
        return _rows(weight if cut.columns is None else weight[:, slice(*cut.columns)], cut.rows)
    if isinstance(weight, QuantizedWeight):
        return _of_int8(weight, cut, name)
    if isinstance(weight, Weight4):
        return _of_four_bits(weight, cut, name)
    if isinstance(weight, Weight4A8):
        return _of_two_levels(weight, cut, name)
    return _of_super_blocks(weight, cut, name)


def cut_bias(bias: Tensor, cut: Cut) -> Tensor | None:
    """The bias [n] of the part. None: another rank adds it."""
    return _rows(bias, cut.rows) if cut.has_bias else None


def _of_int8(weight: QuantizedWeight, cut: Cut, name: str) -> QuantizedWeight:
    q, scale, group = weight.q, weight.scale, weight.group
    if cut.columns is not None:
        columns = slice(*cut.columns)
        if group >= q.shape[1]:  # one scale a row, which holds for a part of the row as well
            group = columns.stop - columns.start
        else:
            scale = scale[:, _groups(cut.columns, group, name)]
        q = q[:, columns]
    return weight._replace(q=_rows(q, cut.rows), scale=_rows(scale, cut.rows), group=group)


def _of_four_bits(weight: Weight4, cut: Cut, name: str) -> Weight4:
    packed, scales, zeros = weight.packed, weight.scales, weight.zeros
    if cut.columns is not None:
        groups = _groups(cut.columns, weight.group, name)
        packed = packed[:, cut.columns[0] // 2 : cut.columns[1] // 2]
        scales, zeros = scales[groups], None if zeros is None else zeros[groups]
    zeros = None if zeros is None else _columns(zeros, cut.rows)
    return Weight4(_rows(packed, cut.rows), _columns(scales, cut.rows), zeros, weight.group)


def _of_two_levels(weight: Weight4A8, cut: Cut, name: str) -> Weight4A8:
    packed, of_groups, zeros = weight.packed, weight.group_scales, weight.zeros
    if cut.columns is not None:
        groups = _groups(cut.columns, int8_rows.GROUP, name)
        packed = packed[:, cut.columns[0] // 2 : cut.columns[1] // 2]
        if of_groups is not None:
            of_groups, zeros = of_groups[groups], zeros[groups]
    of_groups = None if of_groups is None else _columns(of_groups, cut.rows)
    return Weight4A8(_rows(packed, cut.rows), _rows(weight.scale, cut.rows), of_groups, _columns(zeros, cut.rows))


def _of_super_blocks(weight: SuperBlocks, cut: Cut, name: str) -> SuperBlocks:
    tables, form = weight.tables, weight.form
    if cut.columns is not None:
        _groups(cut.columns, form.columns, name)
        of_block = form.columns if form.is_super else form.group
        widths = (1, form.group, form.group, of_block, of_block)
        first, end = cut.columns
        tables = tuple(
            None if table is None else table[:, first // width : end // width] for table, width in zip(tables, widths)
        )
    return weight.of_tables(*(None if table is None else _rows(table, cut.rows) for table in tables))


def _groups(columns: Range, group: int, name: str) -> slice:
    """The groups of these columns. Raises ConfigError where an end lies within a group."""
    first, end = columns
    if first % group or end % group:
        raise ConfigError(
            f"{name} would be cut into parts of {end - first} columns, and its weights have a scale for each {group}; use a "
            f"lower workers.tensor_parallel_size, or a float checkpoint with --set model.quantization=..."
        )
    return slice(first // group, end // group)


def _rows(table: Tensor, rows: Sequence[Range]) -> Tensor:
    return torch.cat([table[slice(*part)] for part in rows])


def _columns(table: Tensor, columns: Sequence[Range]) -> Tensor:
    return torch.cat([table[:, slice(*part)] for part in columns], 1)


def adapter_of_rank(
    layers: Sequence[Mapping[str, Sequence[Part]]], config: ModelConfig, shard: Shard
) -> list[dict[str, list[Part]]]:
    """Cut a rank's parts of the layers of its stage out of an adapter. config: the whole model's."""
    return cut_adapter(layers[slice(*layers_of(config, shard))], cuts(config, shard))


def cut_adapter(layers: Sequence[Mapping[str, Sequence[Part]]], of: Mapping[str, Cut]) -> list[dict[str, list[Part]]]:
    """A rank's part of an adapter's layers. `of`: the cut of each linear layer (shards.cuts)."""
    return [{name: _of_parts(parts, of[name]) for name, parts in layer.items()} for layer in layers]


def _of_parts(parts: Sequence[Part], cut: Cut) -> list[Part]:
    """A rank's part of each. Where a layer is cut by rows, it has rows of B, moved to their place in the rank's layer."""
    if cut.columns is not None:
        return [part._replace(a=part.a[:, slice(*cut.columns)].contiguous()) for part in parts]
    found, first = [], 0  # first: where the range begins in the rank's layer
    for start, end in cut.rows:
        for part in parts:
            begin, stop = max(start, part.first), min(end, part.first + len(part.b))
            if begin < stop:
                rows = part.b[begin - part.first : stop - part.first].contiguous()
                found.append(part._replace(first=first + begin - start, b=rows))
        first += end - start
    return found

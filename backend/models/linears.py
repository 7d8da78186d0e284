"""LinearBuilder: makes linear layers of a checkpoint's tensors, fuses projections, and quantises weights if configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from backend.api.config.schema import Quantization
from backend.api.errors import ConfigError
from backend.architectures.shards import Cut
from backend.layers.linear import Linear, MakeLinear, QuantizedFormat, QuantizedWeight, Weight, make_torch_linear
from backend.models.cut import cut_bias, cut_weight
from backend.models.quantized import QuantizedLayers, stack
from backend.models.tensors import TensorSource
from kernels.common import four_bits, rotation
from kernels.common.quantize import DEFAULT_GROUPS, quantize_weight
from kernels.common.rotation import Round

RoundToFourBits = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]  # four_bits.round_weight
Importance = Callable[
    [str], Tensor | None
]  # a projection's name -> the mean square of its inputs [k], if that is known
WHOLE_ROW = -1  # a value of LinearOptions.group: one scale a row


class Rounding(NamedTuple):
    """How float weights of some number of columns are rounded."""

    format: QuantizedFormat
    group: int  # columns that share a scale
    round: Round
    is_rotated: bool = False


class LinearOptions(NamedTuple):
    """How linear layers hold their weights."""

    quantization: Quantization = "none"  # format to which float weights are quantised while loading; none: they are not
    group: int | None = None  # columns that share a scale if quantised here, or WHOLE_ROW; None = what is best
    make: MakeLinear = make_torch_linear
    round_to_four_bits: RoundToFourBits = four_bits.round_weight
    holds_super_blocks: bool = False  # True if `make` takes SuperBlocks; they are floats where it does not
    rotate: rotation.Rotate = rotation.rotate
    importance: Importance = lambda name: None  # for weights that are rounded to four bits

    def rounding(self, columns: int, is_head: bool, importance: Tensor | None = None) -> Rounding:
        """How a weight of `columns` columns is rounded, whose inputs have this importance [columns]. `is_head`: as in
        LinearBuilder.build.
        """
        assert self.quantization != "none"
        format = self.quantization
        if format == "w4a8" and is_head:
            format = "w8a8"  # With fewer bits it would cost more quality than it saves.
        if format == "w4a8":
            return Rounding(format, four_bits.GROUP, lambda w, _: self.round_to_four_bits(w, importance))
        together = rotation.group_of(columns) if format == "w8a8" and self.group is None else None
        if together is not None:
            return Rounding(
                format, together, lambda w, group: rotation.round_weight(w, group, self.rotate, quantize_weight), True
            )
        group = columns if self.group == WHOLE_ROW else self.group or DEFAULT_GROUPS[format]
        return Rounding(format, group, quantize_weight)


class LinearBuilder:
    def __init__(self, source: TensorSource, checkpoint: QuantizedLayers | None, options: LinearOptions) -> None:
        """`checkpoint` is the format of weights that are already quantised. Raises ConfigError if `options` contradict it."""
        if checkpoint is not None and options.quantization not in ("none", checkpoint.scheme):
            raise ConfigError(
                f"model.quantization is {options.quantization}, but the checkpoint is quantised as {checkpoint.scheme}; "
                f"use --set model.quantization=none"
            )
        self._source = source
        self._checkpoint = checkpoint
        self._options = options

    def build(
        self,
        rows: Mapping[str, int],
        columns: int,
        has_bias: bool = False,
        is_head: bool = False,
        cut: Cut | None = None,
        is_rounded: bool = True,
    ) -> Linear:
        """One layer of several projections: name -> rows, stacked in order. Raises ConfigError as TensorSource does.

        `is_head`: it yields the logits, and is held in 8 bits where other layers are quantised to 4. cut: the part of it that
        is made; weights that are rounded here are rounded after they have been cut.
        """
        if self._checkpoint is not None and self._are_quantized(rows, self._checkpoint.marker):
            weight: Weight = stack([self._checkpoint.take(self._source, *each, columns) for each in rows.items()])
            weight = weight if cut is None else cut_weight(weight, cut, next(iter(rows)))
            if not has_bias:  # GPTQ's writers store a bias of zeros for such a layer
                self._source.drop_zeros(name + ".bias" for name in rows)
        elif self._checkpoint is None and self._options.quantization != "none" and is_rounded:
            weight = self._quantize(rows, columns, cut or _all_of(rows), is_head)
        else:
            weight = self._source.take_stacked({name + ".weight": count for name, count in rows.items()}, (columns,))
            weight = weight if cut is None else cut_weight(weight, cut, next(iter(rows)))
        names = {name + ".bias": count for name, count in rows.items()}
        bias = self._source.take_stacked(names, ()) if has_bias else None
        return self._options.make(weight, bias if cut is None or bias is None else cut_bias(bias, cut))

    def holds(self, name: str) -> bool:
        """True if the checkpoint holds this projection quantised."""
        return self._checkpoint is not None and self._source.has(name + self._checkpoint.marker)

    def put_back(self, name: str) -> None:
        """Say that a projection which the checkpoint holds quantised is to be built once more."""
        assert self._checkpoint is not None
        self._source.put_back(name + self._checkpoint.marker)

    def from_tensor(self, weight: Tensor) -> Linear:
        """The output head whose weight [n, k] stays in use elsewhere (a tied embedding)."""
        if self._checkpoint is not None:
            return self._options.make(weight, None)
        return make_linear(weight, None, self._options, is_head=True)

    def _are_quantized(self, rows: Mapping[str, int], marker: str) -> bool:
        """True if the checkpoint holds these projections quantised; layers excluded from quantisation are stored as floats."""
        scaled = [name for name in rows if self._source.has(name + marker)]
        if scaled and len(scaled) < len(rows):
            raise ConfigError(
                f"the checkpoint has {', '.join(scaled)} quantised and others of {', '.join(rows)} not, which is not "
                f"supported; quantise them alike"
            )
        return bool(scaled)

    def _quantize(self, rows: Mapping[str, int], columns: int, cut: Cut, is_head: bool) -> QuantizedWeight:
        """Quantise the stored values, before any rounding to the model's dtype."""
        first, end = cut.columns or (0, columns)
        importance = self._options.importance(next(iter(rows))) if self._options.quantization == "w4a8" else None
        rounding = self._options.rounding(
            end - first, is_head, None if importance is None else importance[first:end].contiguous()
        )
        group, num_rows = rounding.group, sum(stop - start for start, stop in cut.rows)
        for name, count in rows.items():
            self._source.check_shape(name + ".weight", (count, columns))
        device = self._source.device
        q = torch.empty(num_rows, end - first, dtype=torch.int8, device=device)
        scale = torch.empty(num_rows, -(-(end - first) // group), dtype=torch.float32, device=device)
        stacked = made = 0
        for name, count in rows.items():
            stored = self._source.take_raw(name + ".weight", (count, columns))
            for start, stop in cut.within(stacked, count):
                part = slice(made, made + stop - start)
                q[part], scale[part] = rounding.round(stored[start:stop, first:end], group)
                made = part.stop
            stacked += count
        return QuantizedWeight(q, scale, group, rounding.format, rounding.is_rotated)


def _all_of(rows: Mapping[str, int]) -> Cut:
    return Cut(((0, sum(rows.values())),))


def make_linear(weight: Tensor, bias: Tensor | None, options: LinearOptions, is_head: bool = False) -> Linear:
    """A layer of weight [n, k] and bias [n] or None, quantised if `options` say so. `is_head`: as in LinearBuilder.build."""
    if options.quantization == "none":
        return options.make(weight, bias)
    format, group, rounded, is_rotated = options.rounding(weight.shape[1], is_head)
    return options.make(QuantizedWeight(*rounded(weight, group), group, format, is_rotated), bias)

"""LinearBuilder: makes linear layers of a checkpoint's tensors, fuses projections, and quantises weights if configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

from torch import Tensor

from backend.api.errors import ConfigError
from backend.architectures.shards import Cut
from backend.layers.linear import (
    Linear,
    LinearByHead,
    MakeLinear,
    QuantizedFormat,
    QuantizedWeight,
    Weight,
    make_torch_linear,
)
from backend.models.cut import cut_bias, cut_weight
from backend.models.quantized import QuantizedLayers, stack, stack_int8
from backend.models.tensors import TensorSource
from kernels.common import rotation
from kernels.common.quantize import DEFAULT_GROUPS, quantize_weight
from kernels.common.rounding import GROUP, ROUNDED, Round, Rounded, round_weight

Importance = Callable[
    [str], Tensor | None
]  # a projection's name -> the mean square of its inputs [k], if that is known
WHOLE_ROW = -1  # a value of LinearOptions.group: one scale a row


class Rounding(NamedTuple):
    """How float weights of some number of columns are rounded."""

    format: QuantizedFormat
    group: int  # columns that share a scale
    round: Callable[[Tensor], Rounded]  # rows [n, columns] are rounded
    is_rotated: bool = False

    def __call__(self, w: Tensor) -> QuantizedWeight:
        """Rounds w [n, columns] of any float type."""
        q, scale, minimum = self.round(w)
        return QuantizedWeight(q, scale, self.group, self.format, self.is_rotated, minimum)


class LinearOptions(NamedTuple):
    """How linear layers hold their weights."""

    quantization: str = "none"  # model.quantization: how float weights are quantised while loading; none: they are not
    group: int | None = None  # columns that share a scale if quantised here, or WHOLE_ROW; None = what is best
    make: MakeLinear = make_torch_linear
    make_by_head: MakeLinear = LinearByHead  # for weights of which each head has its rows
    round_to_blocks: Round = round_weight
    holds_super_blocks: bool = False  # True if `make` takes SuperBlocks; they are floats where it does not
    rotate: rotation.Rotate = rotation.rotate
    importance: Importance = lambda name: None  # for weights that are rounded to blocks
    choose: Callable[[str], QuantizedFormat] | None = (
        None  # where each layer has a format of its own, by its first name
    )

    def format_of(self, name: str, is_head: bool = False) -> QuantizedFormat:
        """The format of the layer whose first projection has this name. `is_head`: as in LinearBuilder.build."""
        assert self.quantization != "none"
        if is_head and (self.choose is not None or self.quantization in ROUNDED):
            return "w8a8"  # With fewer bits it would cost more quality than it saves.
        return cast(QuantizedFormat, self.quantization) if self.choose is None else self.choose(name)

    def rounding(self, format: QuantizedFormat, columns: int, importance: Tensor | None = None) -> Rounding:
        """How a weight of `columns` columns is rounded, whose inputs have this importance [columns]."""
        if format in ROUNDED:
            return Rounding(format, GROUP, lambda w: self.round_to_blocks(w, format, importance))
        together = rotation.group_of(columns) if format == "w8a8" and self.group is None else None
        if together is not None:
            return Rounding(
                format,
                together,
                lambda w: Rounded(*rotation.round_weight(w, together, self.rotate, quantize_weight), None),
                True,
            )
        group = columns if self.group == WHOLE_ROW else self.group or DEFAULT_GROUPS[format]
        return Rounding(format, group, lambda w: Rounded(*quantize_weight(w, group), None))


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
        by_head: bool = False,
    ) -> Linear:
        """One layer of several projections: name -> rows, stacked in order. Raises ConfigError as TensorSource does.

        is_rounded: False if float weights stay floats. by_head: each head has its rows, and an input of its own.
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
        make = self._options.make_by_head if by_head else self._options.make
        return make(weight, bias if cut is None or bias is None else cut_bias(bias, cut))

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
        (first, end), of_layer = cut.columns or (0, columns), next(iter(rows))
        format = self._options.format_of(of_layer, is_head)
        importance = self._options.importance(of_layer) if format in ROUNDED else None
        rounding = self._options.rounding(
            format, end - first, None if importance is None else importance[first:end].contiguous()
        )
        for name, count in rows.items():
            self._source.check_shape(name + ".weight", (count, columns))
        parts: list[QuantizedWeight] = []
        stacked = 0
        for name, count in rows.items():
            stored = self._source.take_raw(name + ".weight", (count, columns))
            parts += [rounding(stored[start:stop, first:end]) for start, stop in cut.within(stacked, count)]
            stacked += count
        return stack_int8(parts) if len(parts) > 1 else parts[0]


def _all_of(rows: Mapping[str, int]) -> Cut:
    return Cut(((0, sum(rows.values())),))


def make_linear(weight: Tensor, bias: Tensor | None, options: LinearOptions, is_head: bool = False) -> Linear:
    """A layer of weight [n, k] and bias [n] or None, quantised if `options` say so. `is_head`: as in LinearBuilder.build."""
    if options.quantization == "none":
        return options.make(weight, bias)
    return options.make(options.rounding(options.format_of("", is_head), weight.shape[1])(weight), bias)

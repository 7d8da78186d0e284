"""LinearBuilder: makes linear layers of a checkpoint's tensors, fuses projections, and quantises weights if configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from backend.api.config import Quantization
from backend.api.errors import ConfigError
from backend.layers.linear import Linear, MakeLinear, QuantizedFormat, QuantizedWeight, Weight, make_torch_linear
from backend.models.quantized import QuantizedLayers, stack
from backend.models.tensors import TensorSource
from kernels.common import four_bits
from kernels.common.quantize import DEFAULT_GROUPS, quantize_weight

WHOLE_ROW = -1  # a value of LinearOptions.group: one scale a row


Round = Callable[[Tensor, int], tuple[Tensor, Tensor]]  # (weight, group) -> (int8, scales)


class LinearOptions(NamedTuple):
    """How linear layers hold their weights."""

    quantization: Quantization = "none"  # format to which float weights are quantised while loading; none: they are not
    group: int | None = None  # columns that share a scale if quantised here, or WHOLE_ROW; None = DEFAULT_GROUPS
    make: MakeLinear = make_torch_linear
    round_to_four_bits: Round = four_bits.round_weight
    holds_super_blocks: bool = False  # True if `make` takes SuperBlocks; they are floats where it does not

    def columns_per_scale(self, columns: int) -> int:
        """Columns that share a scale in a weight of `columns` columns."""
        return columns if self.group == WHOLE_ROW else self.group or DEFAULT_GROUPS[self.quantization]

    def rounding_to(self, format: QuantizedFormat) -> Round:
        return self.round_to_four_bits if format == "w4a8" else quantize_weight


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

    def build(self, rows: Mapping[str, int], columns: int, has_bias: bool = False, is_head: bool = False) -> Linear:
        """One layer of several projections: name -> rows, stacked in order. Raises ConfigError as TensorSource does.

        `is_head`: it yields the logits, and is held in 8 bits where other layers are quantised to 4.
        """
        if self._checkpoint is not None and self._are_quantized(rows, self._checkpoint.marker):
            weight: Weight = stack([self._checkpoint.take(self._source, *each, columns) for each in rows.items()])
            if not has_bias:  # GPTQ's writers store a bias of zeros for such a layer
                self._source.drop_zeros(name + ".bias" for name in rows)
        elif self._checkpoint is None and self._options.quantization != "none":
            weight = self._quantize(
                rows, columns, _of_head(self._options.quantization) if is_head else self._options.quantization
            )
        else:
            weight = self._source.take_stacked({name + ".weight": count for name, count in rows.items()}, (columns,))
        bias = {name + ".bias": count for name, count in rows.items()}
        return self._options.make(weight, self._source.take_stacked(bias, ()) if has_bias else None)

    def holds(self, name: str) -> bool:
        """True if the checkpoint holds this projection quantised."""
        return self._checkpoint is not None and self._source.has(name + self._checkpoint.marker)

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

    def _quantize(self, rows: Mapping[str, int], columns: int, format: QuantizedFormat) -> QuantizedWeight:
        """Quantise the stored values, before any rounding to the model's dtype."""
        group, num_rows, device = self._options.columns_per_scale(columns), sum(rows.values()), self._source.device
        for name, count in rows.items():
            self._source.check_shape(name + ".weight", (count, columns))
        q = torch.empty(num_rows, columns, dtype=torch.int8, device=device)
        scale = torch.empty(num_rows, -(-columns // group), dtype=torch.float32, device=device)
        start, rounded = 0, self._options.rounding_to(format)
        for name, count in rows.items():
            stored = self._source.take_raw(name + ".weight", (count, columns))
            q[start : start + count], scale[start : start + count] = rounded(stored, group)
            start += count
        return QuantizedWeight(q, scale, group, format)


def make_linear(weight: Tensor, bias: Tensor | None, options: LinearOptions, is_head: bool = False) -> Linear:
    """A layer of weight [n, k] and bias [n] or None, quantised if `options` say so. `is_head`: as in LinearBuilder.build."""
    if options.quantization == "none":
        return options.make(weight, bias)
    format = _of_head(options.quantization) if is_head else options.quantization
    group = options.columns_per_scale(weight.shape[1])
    q, scale = options.rounding_to(format)(weight, group)
    return options.make(QuantizedWeight(q, scale, group, format), bias)


def _of_head(format: QuantizedFormat) -> QuantizedFormat:
    """How the output head is quantised: with fewer bits than 8 it would cost more quality than it saves."""
    return "w8a8" if format == "w4a8" else format

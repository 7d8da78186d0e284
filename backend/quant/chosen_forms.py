"""Which form each layer's weights are rounded to, where `model.quantization=auto:...` gives a budget of bits.

How much a layer matters is measured while one row of the text of importance.py runs through the model: the decoder layer is run
once more with this layer's weights in the fewest bits, and

    sensitivity = mean over the tokens of |difference of the hidden states|^2 / |hidden state|^2

behind it. With another form it is as much less as errors of weights are (ERRORS). Bits then go where a bit takes most of the
sum of all sensitivities away. docs/quantisation.md says what that gains.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from backend.api.config.quantization import budget_of
from backend.api.errors import ConfigError
from backend.architectures.description import WHOLE, ModelConfig
from backend.architectures.shards import WholeLinear, linears
from backend.layers.linear import QuantizedFormat
from backend.models.linears import LinearOptions
from backend.quant.calibration import Calibration
from backend.quant.folds import Layer, kinds, stored_layer
from backend.quant.importance import token_rows
from kernels.common import rotation
from kernels.common.quantize import DEFAULT_GROUPS
from kernels.common.rounding import bits_of, floats

log = logging.getLogger("everbatch.quant")
# The error of weights, squared, in parts of that of w4a8. Rising bits.
ERRORS: dict[QuantizedFormat, float] = {"w4a8": 1.0, "w6a8": 0.2, "w8a8": 0.02}


class Step(NamedTuple):
    """More bits for a layer."""

    gain: float  # how much less the sum of sensitivities is, for each bit
    name: str
    format: QuantizedFormat
    bits: float  # more than before, of all its weights together


class ChosenForms:
    """Callable: the first projection of a layer -> its form. They are chosen at the first call, which raises ConfigError."""

    def __init__(
        self, quantization: str, path: Path, config: ModelConfig, tensors: Mapping[str, Tensor], options: LinearOptions
    ) -> None:
        """path: of the tokenizer. config, tensors: the whole model's. options: how weights are rounded. Raises ConfigError."""
        if config.experts is not None or config.recurrence is not None or config.latent is not None:
            raise ConfigError(
                f"model.quantization is {quantization}, which chooses for models without experts, recurrent layers and latents; "
                f"use w4a8, w6a8 or w8a8"
            )
        self._quantization, self._path, self._config = quantization, path, config
        self._tensors, self._options = tensors, options
        self._found: dict[str, QuantizedFormat] = {}

    def __call__(self, name: str) -> QuantizedFormat:
        if not self._found:
            sizes = linears(self._config, WHOLE)
            budget, row = self._bits(sizes), token_rows(self._path, self._config.vocab_size)[:1]
            self._found = chosen(sizes, sensitivities(self._config, self._tensors, row, self._options), budget)
            log.info("%s: %s", self._quantization, in_words(sizes, self._found))
        return self._found[name]

    def _bits(self, sizes: Mapping[str, WholeLinear]) -> float:
        """The budget in bits of all layers together."""
        budget = budget_of(self._quantization)
        assert budget is not None
        weights = sum(map(num_weights, sizes.values()))
        if budget.num_bytes is None:
            return (budget.bits or 0) * weights
        if 8 * budget.num_bytes < (least := weights * bits_of("w4a8")):
            raise ConfigError(
                f"model.quantization is {self._quantization}, and the decoder layers of this model take at least "
                f"{least / 8 / (1 << 20):.0f} MiB, in {bits_of('w4a8')} bits a weight; give them more, or use a smaller model"
            )
        return 8 * budget.num_bytes


def num_weights(layer: WholeLinear) -> int:
    return sum(layer.rows.values()) * layer.columns


def bits_in(format: QuantizedFormat, columns: int) -> float:
    """Bits of a weight, scales included."""
    if format == "w8a8":
        return 8 + 16 / (rotation.group_of(columns) or DEFAULT_GROUPS["w8a8"])
    return bits_of(format)


def chosen(
    sizes: Mapping[str, WholeLinear], sensitivity: Mapping[str, float], budget: float
) -> dict[str, QuantizedFormat]:
    """First projection -> form. budget: bits of all weights together, enough for the least form."""
    formats = list(ERRORS)
    found = dict.fromkeys(sizes, formats[0])
    left = budget - sum(num_weights(each) * bits_in(formats[0], each.columns) for each in sizes.values())
    steps = [
        Step(sensitivity[name] * (ERRORS[before] - ERRORS[after]) / more, name, after, more)
        for name, each in sizes.items()
        for before, after in zip(formats, formats[1:])
        if (more := num_weights(each) * (bits_in(after, each.columns) - bits_in(before, each.columns))) > 0
    ]
    for step in sorted(steps, key=lambda step: (-step.gain, step.name)):
        comes_next = formats.index(step.format) == formats.index(found[step.name]) + 1
        if comes_next and step.bits <= left:
            found[step.name], left = step.format, left - step.bits
    return found


def in_words(sizes: Mapping[str, WholeLinear], found: Mapping[str, QuantizedFormat]) -> str:
    """How many layers have which form, and the bits of a weight on average."""
    counts: dict[QuantizedFormat, int] = defaultdict(int)
    bits, weights = 0.0, 0
    for name, each in sizes.items():
        counts[found[name]] += 1
        weights += num_weights(each)
        bits += num_weights(each) * bits_in(found[name], each.columns)
    of_each = ", ".join(f"{format}: {counts[format]} layers" for format in ERRORS if counts[format])
    return f"{of_each}; {bits / weights:.2f} bits a weight on average"


@torch.inference_mode()
def sensitivities(
    config: ModelConfig, tensors: Mapping[str, Tensor], rows: Tensor, options: LinearOptions
) -> dict[str, float]:
    """First projection of each layer -> its sensitivity. Raises ConfigError for damaged weights."""
    config = replace(config, quantization=None)
    embedding = tensors[config.names.embedding + ".weight"]
    text = Calibration(config, embedding, rows[:, : config.max_position], has_hessians=False)
    found: dict[str, float] = {}
    for index in range(config.num_layers):
        prefix = f"{config.names.layers}{index}."
        layer = {name: tensor.float() for name, tensor in stored_layer(tensors, config, index).items()}
        before = text.hidden.clone()
        text.advance(index, layer)
        after = text.hidden.clone()
        for names in kinds(config).values():
            text.hidden = before.clone()
            text.advance(index, layer | _rounded(layer, prefix, names, options))
            difference = (text.hidden - after).square().sum(2) / after.square().sum(2)
            found[prefix + names[0]] = difference.mean().item()
        text.hidden = after
    return found


def _rounded(layer: Layer, prefix: str, names: tuple[str, ...], options: LinearOptions) -> Layer:
    """The weights of a layer's projections in the fewest bits."""
    found = {}
    for name in names:
        weight = layer[name + ".weight"]
        found[name + ".weight"] = floats(options.round_to_blocks(weight, "w4a8", options.importance(prefix + name)))
    return found

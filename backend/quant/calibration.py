"""Records statistics of the inputs of a float model's linear layers while it reads a text, layer by layer.

Only one layer's weights are in memory, in float32: a layer is run as a model of one layer, whose embedding table is the hidden
states of all tokens. The statistics of a linear layer's inputs do not grow with the text:

    max_abs    [k]                     max |x| of each channel
    hessian    [k, k]                  the mean of x x^T
    sample     [<= 512, k]             the inputs of some tokens, from all of the text
    keys       [kv_heads, head_dim]    max |key| of each channel, after RoPE
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from backend.api.errors import ConfigError
from backend.architectures.description import ModelConfig
from backend.layers.linear import DenseLinear, Linear, Weight
from backend.models.decoder import Decoder, Follow, StepStates, build_decoder
from backend.models.linears import LinearOptions
from backend.models.parts import Parts
from backend.quant.folds import Layer
from kernels.common.kv_format import PLAIN, KVFormat, KVPool, PlainPool, QuantizedPool
from kernels.common.state_rows import StateRows
from kernels.paged_attention import AttentionRows, plan_attention

ROWS_AT_ONCE = 4
BLOCK_SIZE = 32
SAMPLED = 512  # tokens
ENOUGH = 64  # tokens whose mean squares are taken as they are


class Inputs(NamedTuple):
    """The statistics of the inputs of one linear layer."""

    max_abs: Tensor
    hessian: Tensor
    sample: Tensor

    def divided(self, scale: Tensor) -> Inputs:
        """The statistics of the same inputs, each channel divided by scale [k]."""
        hessian = self.hessian / scale / scale[:, None]
        return Inputs(self.max_abs / scale, hessian, self.sample / scale)


class LayerInputs(NamedTuple):
    qkv: Inputs
    out: Inputs
    gate_up: Inputs
    down: Inputs
    keys: Tensor


def of_layer(config: ModelConfig, index: int) -> ModelConfig:
    """The description of a model that has this decoder layer alone."""
    return msgspec.structs.replace(config, num_layers=1, layers=(config.layers[index],))


class Calibration:
    """A text on its way through the model."""

    def __init__(self, config: ModelConfig, embedding: Tensor, rows: Tensor, *, has_hessians: bool = True) -> None:
        """rows [rows, length] int64: token ids, each row a text of its own. embedding [vocab, hidden]. has_hessians: False if the
        diagonals [k] of the hessians are enough, which take less time and memory.
        """
        self._config, self._has_hessians = config, has_hessians
        scale = config.block.embedding_scale
        self.hidden = F.embedding(rows, embedding).float() * scale  # [rows, length, hidden], before the next layer
        self._sampled_of_each = max(1, SAMPLED // -(-len(rows) // ROWS_AT_ONCE))

    def advance(self, index: int, layer: Layer) -> LayerInputs:
        """Run layer `index`, whose tensors are `layer`; call it for each layer in order. Raises ConfigError."""
        made, keys = self._run(index, layer)
        qkv, out, gate_up, down = (recorder.inputs() for _, recorder in made)
        return LayerInputs(qkv, out, gate_up, down, keys)

    def mean_squares(self, index: int, layer: Layer) -> dict[str, Tensor]:
        """Like `advance`: the mean square of each input [k], by the names of the projections within the layer that read it. Those
        of experts that no token had are left out.
        """
        made, _ = self._run(index, layer)
        prefix = f"{self._config.names.layers}0."
        read = [(names, recorder.mean_square()) for names, recorder in made if recorder.num_tokens]
        return {name.removeprefix(prefix): found for names, found in read for name in names}

    @torch.inference_mode()
    def _run(self, index: int, layer: Layer) -> tuple[list[tuple[tuple[str, ...], _Recorder]], Tensor]:
        """Run layer `index`. Returns its linear layers with the names of their projections, and the greatest keys."""
        config = msgspec.structs.replace(
            of_layer(self._config, index),
            vocab_size=1,
            tied_embeddings=True,
            quantization=None,
            block=msgspec.structs.replace(self._config.block, embedding_scale=1.0),
        )
        hidden, names = config.hidden_size, config.names
        tensors = {f"{names.layers}0.{name}": tensor for name, tensor in layer.items()}
        tensors |= {names.embedding + ".weight": torch.zeros(1, hidden), names.norm + ".weight": torch.ones(hidden)}
        if config.block.norm_bias:
            tensors[names.norm + ".bias"] = torch.zeros(hidden)
        made: list[tuple[tuple[str, ...], _Recorder]] = []

        def make(weight: Weight, bias: Tensor | None) -> _Recorder:
            assert isinstance(weight, Tensor)  # the configuration above says that nothing is quantised
            return _Recorder(weight, bias, self._sampled_of_each, self._has_hessians)

        length = self.hidden.shape[1]
        options, follow = LinearOptions(make=make), Follow(parts=lambda parts: _NamedParts(parts, made))
        model = build_decoder(config, tensors, length, torch.float32, torch.device("cpu"), options, follow)
        keys = torch.zeros(config.num_kv_heads, config.head_dim)
        for part in self.hidden.split(ROWS_AT_ONCE):
            model.embedding = rows = part.flatten(0, 1)
            after, pools = forward_rows(model, torch.arange(len(rows)).view(part.shape[:2]))
            part.copy_(after.view_as(part))
            for pool in pools:  # none of a recurrent layer
                keys = torch.maximum(keys, pool.keys.abs().amax((0, 1)))
        if not self.hidden.isfinite().all():
            raise ConfigError(f"decoder layer {index} makes numbers that are not finite; the checkpoint is damaged")
        return made, keys


class _NamedParts:
    """Hands on the parts of another, and lists its linear layers, without the output head, with their projections' names."""

    def __init__(self, parts: Parts, made: list[tuple[tuple[str, ...], _Recorder]]) -> None:
        self._parts, self._made = parts, made
        self.take, self.embedding, self.head, self.finish = parts.take, parts.embedding, parts.head, parts.finish

    def linear(
        self, rows: Mapping[str, int], columns: int, has_bias: bool, is_rounded: bool = True, by_head: bool = False
    ) -> Linear:
        linear = self._parts.linear(rows, columns, has_bias, is_rounded, by_head)
        if by_head:  # floats, which nothing is rounded of
            return linear
        assert isinstance(linear, _Recorder)
        self._made.append((tuple(rows), linear))
        return linear


class _Recorder(DenseLinear):
    """A float linear layer that records its inputs."""

    def __init__(self, weight: Tensor, bias: Tensor | None, sampled: int, has_hessian: bool) -> None:
        super().__init__(weight, bias)
        self._has_hessian = has_hessian
        k = weight.shape[1]
        self._sampled = sampled
        self.num_tokens = 0
        self._max_abs, self._squares = torch.zeros(k), torch.zeros(0)
        self._samples: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        if not self.num_tokens:
            self._squares = torch.zeros(x.shape[1:] * (1 + self._has_hessian))
        self.num_tokens += len(x)
        self._max_abs = torch.maximum(self._max_abs, x.abs().amax(0))
        if self._has_hessian:
            self._squares.addmm_(x.T, x)
        else:
            self._squares += x.square().sum(0)
        count = min(self._sampled, len(x))
        self._samples.append(x[torch.arange(count) * len(x) // count].clone())
        return super().__call__(x)

    def mean_square(self) -> Tensor:
        """[k]; drawn to that of all channels where few tokens came, as to an expert."""
        squares = self._squares.diagonal() if self._has_hessian else self._squares
        lacking = max(0, ENOUGH - self.num_tokens)
        return (squares + lacking * squares.mean() / self.num_tokens) / (self.num_tokens + lacking)

    def inputs(self) -> Inputs:
        return Inputs(self._max_abs, self._squares / self.num_tokens, torch.cat(self._samples))


def forward_rows(model: Decoder, rows: Tensor, kv: KVFormat = PLAIN) -> tuple[Tensor, list[KVPool]]:
    """rows [rows, length] int64, each a text of its own -> (hidden states [rows * length, hidden], each layer's KV).

    `kv`: in which the KV is attended to.
    """
    config, dtype = model.config, model.dtype
    num_rows, length = rows.shape
    num_blocks = -(-length // BLOCK_SIZE)
    tables = np.arange(num_rows * num_blocks, dtype=np.int32).reshape(num_rows, num_blocks)
    where = AttentionRows(np.arange(num_rows + 1) * length, np.full(num_rows, length), tables)
    plans = plan_attention(where, BLOCK_SIZE, config.windows, config.head_dim, dtype, rows.device)
    sizes = (BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    layout = QuantizedPool(*sizes, kv) if kv.is_quantised else PlainPool(*sizes, dtype)
    shape = (num_rows * num_blocks, *layout.block_shape)
    pools = [layout.view(torch.zeros(shape, dtype=layout.dtype)) for _ in range(config.num_kv_layers)]
    cells = (torch.arange(num_rows)[:, None] * num_blocks * BLOCK_SIZE + torch.arange(length)).flatten()
    positions = torch.arange(length).repeat(num_rows)
    return model.forward(
        rows.flatten(), positions, cells, plans, pools, states=_states(config, num_rows, length)
    ), pools


def _states(config: ModelConfig, num_rows: int, length: int) -> StepStates | None:
    """Rows of texts that begin, and of which no state is kept; None where no layer is recurrent."""
    if config.recurrence is None:
        return None
    numbers = np.tile(np.array([-1, -1, length], dtype=np.int32), (num_rows, 1))
    rows = StateRows(np.arange(num_rows + 1) * length, numbers, np.empty((0, 3), dtype=np.int32))
    return StepStates([torch.zeros(1, config.recurrence.state_size)] * config.num_recurrent_layers, rows)

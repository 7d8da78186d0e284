"""A recurrent layer in the place of attention, see Recurrence: projection, convolution, recurrence, gated norm, output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.architectures.description import Block, Recurrence
from backend.layers.linear import Linear
from kernels.causal_convolution import causal_convolution
from kernels.common.state_rows import StateRows
from kernels.int8_rows import Int8Rows
from kernels.linear_recurrence import linear_recurrence

LENGTH_EPS = 1e-6  # added to the squared length of queries and keys


@dataclass(slots=True)
class RecurrentWeights:
    """All but the projections are float32."""

    settings: Recurrence
    inputs: Linear  # [channels + values, hidden]: what is convolved, the gate; of a convolution B, C and X
    gates: Linear | None  # [value_heads, or twice as many, hidden]: of decay, then of strength
    out: Linear  # [hidden, values]
    taps: Tensor  # [channels, taps]
    conv_bias: Tensor | None  # [channels]
    rate: Tensor | None = None  # [value_heads]: exp(A_log)
    dt_bias: Tensor | None = None  # [value_heads]
    skip: Tensor | None = None  # [value_heads]
    norm: Tensor | None = None  # [value_dim]; of Mamba 2 [values]

    @property
    def linears(self) -> list[Linear]:
        return [linear for linear in (self.inputs, self.gates, self.out) if linear is not None]


class States:
    """The states of all sequences in one recurrent layer."""

    def __init__(self, settings: Recurrence, pool: Tensor) -> None:
        """pool: float32 [states, settings.state_size]."""
        window, matrix = settings.state_shapes
        size = window[0] * window[1]
        self.windows, self.matrices = pool[:, :size].unflatten(1, window), pool[:, size:].unflatten(1, matrix)


def recurrent(x: Tensor | Int8Rows, weights: RecurrentWeights, block: Block, states: States, rows: StateRows) -> Tensor:
    """x [num_tokens, hidden] -> [num_tokens, hidden]. Reads and writes the states that `rows` name."""
    settings = weights.settings
    assert isinstance(x, Tensor)  # the gates read what is not quantised
    projected = weights.inputs(x)
    if settings.kind == "convolution":
        before, after, given = projected.float().chunk(3, 1)
        mixed = after * _convolved(before * given, weights, states, rows)
    else:
        convolved = _convolved(projected[:, : settings.channels].float(), weights, states, rows)
        mixed = _recurred(x, convolved, weights, states, rows)
        mixed = _gated(mixed, projected[:, settings.channels : settings.channels + settings.num_values], weights, block)
    return weights.out(mixed.to(x.dtype))


def _convolved(u: Tensor, weights: RecurrentWeights, states: States, rows: StateRows) -> Tensor:
    is_activated = weights.settings.kind != "convolution"
    return causal_convolution(u, weights.taps, weights.conv_bias, states.windows, rows, is_activated)


def _recurred(x: Tensor, convolved: Tensor, weights: RecurrentWeights, states: States, rows: StateRows) -> Tensor:
    """Returns o, float32 [tokens, value_heads, value_dim]."""
    settings = weights.settings
    assert weights.gates is not None and weights.rate is not None and weights.dt_bias is not None
    gates = weights.gates(x)[:, : settings.num_gates].float()
    step = F.softplus(gates[:, : settings.value_heads] + weights.dt_bias)
    keys = (settings.key_heads, settings.key_dim)
    values = (settings.value_heads, settings.value_dim)
    if settings.kind == "delta":
        q, k, v = convolved.split((settings.num_keys, settings.num_keys, settings.num_values), 1)
        q, k, v = _of_length_one(q.unflatten(1, keys)), _of_length_one(k.unflatten(1, keys)), v.unflatten(1, values)
        q, strength = q * settings.key_dim**-0.5, gates[:, settings.value_heads :].sigmoid()
    else:
        v, k, q = convolved.split((settings.num_values, settings.num_keys, settings.num_keys), 1)
        q, k, v = q.unflatten(1, keys), k.unflatten(1, keys), v.unflatten(1, values)
        step = strength = step.clamp(*settings.limits)
    decay = torch.exp(-weights.rate * step)
    o = linear_recurrence(q, k, v, decay, strength, states.matrices, rows, settings.kind == "delta")
    return o if weights.skip is None else o + weights.skip[:, None] * v


def _of_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + LENGTH_EPS)


def _gated(o: Tensor, gate: Tensor, weights: RecurrentWeights, block: Block) -> Tensor:
    """Returns what the output projection reads, float32 [tokens, values]."""
    settings, opened = weights.settings, F.silu(gate.float())
    if weights.norm is None:
        return o.flatten(1) * opened
    if settings.gates_first:
        groups = (o.flatten(1) * opened).unflatten(1, (settings.norm_groups, -1))
        return F.rms_norm(groups, groups.shape[2:], None, block.norm_eps).flatten(1) * weights.norm
    return F.rms_norm(o, o.shape[2:], weights.norm, block.norm_eps).flatten(1) * opened

"""The SwiGLU MLP with gate and up projections fused."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backend.layers.linear import Linear
from backend.layers.lora import Adapt
from kernels.int8_rows import Int8Rows
from kernels.silu_mul import silu_mul, silu_mul_int8


@dataclass(slots=True)
class MlpWeights:
    gate_up: Linear  # [2 * intermediate, hidden], rows in the order gate, up
    down: Linear  # [hidden, intermediate]


def mlp(x: Tensor | Int8Rows, weights: MlpWeights, may_quantize: bool = True, adapt: Adapt | None = None) -> Tensor:
    """x [num_tokens, hidden] -> [num_tokens, hidden]. adapt: adds LoRA adapters' parts; then nothing may be quantised ahead."""
    gate_up = weights.gate_up(x)
    if adapt is None:
        return weights.down(silu_mul_int8(gate_up) if may_quantize and weights.down.takes_int8 else silu_mul(gate_up))
    assert isinstance(x, Tensor)  # with adapters no activations are quantised ahead
    adapt(gate_up, x, "gate_up")
    activated = silu_mul(gate_up)
    y = weights.down(activated)
    adapt(y, activated, "down")
    return y

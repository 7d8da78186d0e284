"""The MLP of a layer, with gate and up projections fused where it is gated."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backend.architectures.description import Block
from backend.layers.linear import Linear
from backend.layers.lora import Adapt
from kernels.activation import activate, activate_int8
from kernels.int8_rows import Int8Rows


@dataclass(slots=True)
class MlpWeights:
    gate_up: Linear  # [2 * intermediate, hidden], rows in the order gate, up; without a gate up alone, [intermediate, hidden]
    down: Linear  # [hidden, intermediate]


def mlp(
    x: Tensor | Int8Rows, weights: MlpWeights, block: Block, may_quantize: bool = True, adapt: Adapt | None = None
) -> Tensor:
    """x [num_tokens, hidden] -> [num_tokens, hidden]. adapt: adds LoRA adapters' parts; then nothing may be quantised ahead."""
    gate_up, kind = weights.gate_up(x), (block.activation, block.gated)
    if adapt is None:
        quantizes = may_quantize and weights.down.takes_int8
        return weights.down(activate_int8(gate_up, *kind) if quantizes else activate(gate_up, *kind))
    assert isinstance(x, Tensor)  # with adapters no activations are quantised ahead
    adapt(gate_up, x, "gate_up")
    activated = activate(gate_up, *kind)
    y = weights.down(activated)
    adapt(y, activated, "down")
    return y

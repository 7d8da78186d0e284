"""The experts of mixtures of experts: transformers' ExpertsInterface, on the engine's linear layers.

Each token is multiplied with its own experts only, and the parts are added in the order in which its router lists them. So a
token's result does not depend on which experts the tokens beside it have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from backend.hosted.layers import EngineLinear, engine_linear
from backend.models.linears import LinearOptions

NAME = "everbatch"
_PARTS = ("gate_up_proj", "up_proj", "down_proj")


def hold_experts(model: nn.Module, options: LinearOptions) -> None:
    """Replace the stacked weights [experts, n, k] of every expert module by lists of layers, one for each expert."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        if not hasattr(module, "_apply_gate") or not isinstance(getattr(module, "down_proj", None), nn.Parameter):
            continue
        held: dict[str, list[EngineLinear]] = {}
        for name in _PARTS:
            stacked = getattr(module, name, None)
            if not isinstance(stacked, nn.Parameter):
                continue
            biases = getattr(module, name + "_bias", None)
            held[name] = [
                engine_linear(
                    weight, None if biases is None else biases[index], options, is_transposed=module.is_transposed
                )
                for index, weight in enumerate(stacked)
            ]
            delattr(module, name)
            if biases is not None:
                delattr(module, name + "_bias")
        module.engine_experts = held


def run_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, experts of a token] -> [tokens, hidden]."""
    layers = self.engine_experts
    tokens, count = top_k_index.shape
    chosen = top_k_index.reshape(-1)  # expert of each pair (token, place in the token's list)
    order = torch.argsort(chosen, stable=True)
    counts = torch.bincount(chosen, minlength=self.num_experts).tolist()
    parts = hidden_states.new_empty(tokens * count, hidden_states.shape[1])
    start = 0
    for expert, rows in enumerate(counts):
        if not rows:
            continue
        pairs = order[start : start + rows]
        start += rows
        if expert >= self.num_experts:  # a place that the router left empty
            parts[pairs] = 0
            continue
        x = hidden_states[pairs // count]
        x = (
            self._apply_gate(layers["gate_up_proj"][expert](x))
            if self.has_gate
            else self.act_fn(layers["up_proj"][expert](x))
        )
        y = layers["down_proj"][expert](x)
        parts[pairs] = self.post_expert_norm(y) if self.has_post_expert_norm else y
    weighted = parts.view(tokens, count, -1) * top_k_weights[..., None]
    total = weighted[:, 0]
    for place in range(1, count):
        total = total + weighted[:, place]
    return total.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS[NAME] = run_experts

"""Replaces the linear layers of a module tree by those of the engine's tier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from backend.layers.linear import Linear
from backend.models.linears import LinearOptions, make_linear
from kernels.cpu.linear import PackedLinear


class EngineLinear(nn.Module):
    """An nn.Linear on a layer of the engine: x [..., k] -> [..., n] in x's dtype."""

    weight: Tensor  # empty; module code asks it for its dtype and device

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = linear
        if isinstance(linear, PackedLinear):
            linear.threads = torch.get_num_threads()  # fewer are left to torch's own operators while a step runs
        self.out_features, self.in_features = linear.shape
        self.register_buffer("weight", torch.empty(0, dtype=dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if not len(rows):
            return x.new_empty(*x.shape[:-1], self.out_features)
        return self.linear(rows).view(*x.shape[:-1], self.out_features)


def replace_linears(model: nn.Module, head: nn.Module | None, options: LinearOptions) -> None:
    """Replace each nn.Linear and Conv1D below `model`, one after the other, so that an original weight is freed at once.

    `head` yields the logits; it is held in 8 bits where other layers are rounded to 4. Subclasses of nn.Linear with a forward of
    their own stay as they are.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            is_plain = isinstance(child, nn.Linear) and type(child).forward is nn.Linear.forward
            if is_plain or type(child) is Conv1D:  # the latter, of GPT-2, is an nn.Linear whose weight is transposed
                parameters: Any = child
                weight, bias, is_transposed = parameters.weight, parameters.bias, not is_plain
                setattr(module, name, engine_linear(weight, bias, options, child is head, is_transposed))


def engine_linear(
    weight: Tensor, bias: Tensor | None, options: LinearOptions, is_head: bool = False, is_transposed: bool = False
) -> EngineLinear:
    """weight [n, k], or [k, n] if `is_transposed`; bias [n] or None."""
    held = weight.detach().T.contiguous() if is_transposed else weight.detach()
    return EngineLinear(make_linear(held, None if bias is None else bias.detach(), options, is_head), weight.dtype)

"""Replaces the linear layers of a module tree by those of the engine's tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from backend.layers.linear import Linear
from backend.models.linears import LinearOptions, make_linear
from kernels.cpu.linear import PackedLinear

# Names of layers that read the same input where they stand side by side. One that is given another input computes all of them.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class EngineLinear(nn.Module):
    """An nn.Linear on a layer of the engine: x [..., k] -> [..., n] in x's dtype."""

    weight: Tensor  # empty; module code asks it for its dtype and device
    adapt: Callable[[Tensor, Tensor], None] | None = None  # (y [rows, n], x [rows, k]): y += the LoRA adapters' part

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
        y = self.linear(rows)
        if self.adapt is not None:
            self.adapt(y, rows)
        return y.view(*x.shape[:-1], self.out_features)

    @property
    def product(self) -> tuple[EngineLinear, int]:
        """The layer that computes this one's outputs, and the first of its columns that is this one's."""
        return self, 0


class Fused:
    """Linear layers that read one input, as one product, whose parts are kept until every layer has taken its own."""

    def __init__(self, layer: EngineLinear, sizes: Sequence[int]) -> None:
        self.layer, self._sizes = layer, list(sizes)
        self._input: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def take(self, index: int, x: Tensor) -> Tensor:
        if x is not self._input or index not in self._parts:
            self._input = x
            self._parts = dict(enumerate(self.layer(x).split(self._sizes, dim=-1)))
        part = self._parts.pop(index)
        if not self._parts:
            self._input = None
        return part.contiguous()


class FusedLinear(EngineLinear):
    """A layer of a `Fused`."""

    def __init__(self, fused: Fused, index: int, linear: Linear, dtype: torch.dtype) -> None:
        super().__init__(linear, dtype)
        self._fused, self._index = fused, index
        self.out_features = fused._sizes[index]

    @staticmethod
    def are_all_of_one(layers: Sequence[Any]) -> bool:
        """True for all the layers of one `Fused`, in its order."""
        return all(
            isinstance(layer, FusedLinear) and layer._fused is layers[0]._fused and layer._index == index
            for index, layer in enumerate(layers)
        ) and len(layers) == len(layers[0]._fused._sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self._fused.take(self._index, x)

    @property
    def product(self) -> tuple[EngineLinear, int]:
        return self._fused.layer, sum(self._fused._sizes[: self._index])


def replace_linears(model: nn.Module, head: nn.Module | None, options: LinearOptions) -> None:
    """Replace each nn.Linear and Conv1D below `model`, one after the other, so that an original weight is freed at once.

    `head` yields the logits; it is held in 8 bits where other layers are rounded to 4. Subclasses of nn.Linear with a forward of
    their own stay as they are.
    """
    for module in list(model.modules()):
        for names in _TOGETHER:
            _fuse(module, names, options)
        for name, child in list(module.named_children()):
            if (
                _is_plain(child) or type(child) is Conv1D
            ):  # the latter, of GPT-2, is an nn.Linear whose weight is transposed
                parameters: Any = child
                weight, bias, is_transposed = parameters.weight, parameters.bias, type(child) is Conv1D
                setattr(module, name, engine_linear(weight, bias, options, child is head, is_transposed))


def _fuse(module: nn.Module, names: Sequence[str], options: LinearOptions) -> None:
    """Make one product of the children `names`, if they are plain linear layers of one width."""
    children: list[Any] = [getattr(module, name, None) for name in names]
    if not all(isinstance(child, nn.Module) and _is_plain(child) for child in children):
        return
    biases = [child.bias for child in children if child.bias is not None]
    if len({child.in_features for child in children}) > 1 or len(biases) not in (0, len(children)):
        return
    weight = torch.cat([child.weight.detach() for child in children])
    layer = engine_linear(weight, torch.cat(biases) if biases else None, options)
    fused = Fused(layer, [child.out_features for child in children])
    for index, name in enumerate(names):
        setattr(module, name, FusedLinear(fused, index, layer.linear, weight.dtype))


def _is_plain(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def engine_linear(
    weight: Tensor, bias: Tensor | None, options: LinearOptions, is_head: bool = False, is_transposed: bool = False
) -> EngineLinear:
    """weight [n, k], or [k, n] if `is_transposed`; bias [n] or None."""
    held = weight.detach().T.contiguous() if is_transposed else weight.detach()
    return EngineLinear(make_linear(held, None if bias is None else bias.detach(), options, is_head), weight.dtype)

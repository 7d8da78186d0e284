"""Products of matrices that modules compute by themselves, outside of linear layers: routers above all.

While `Products` is active, a product with a parameter runs on a layer of the engine. One of exact single terms (rotary
frequencies times positions) is left to torch, whose bits cannot differ there. Any other kind of product is refused by name: torch
would give a token other bits in another batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from backend.api.errors import ConfigError
from backend.hosted.layers import EngineLinear, engine_linear
from backend.models.linears import LinearOptions

_LINEAR = (F.linear,)
_MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm)
_REFUSED = {
    torch.einsum: "einsum",
    torch.addmm: "addmm",
    torch.baddbmm: "baddbmm",
    torch.addbmm: "addbmm",
    F.conv1d: "conv1d",
    torch.conv1d: "conv1d",
    F.conv2d: "conv2d",
    F.scaled_dot_product_attention: "an attention of its own",
    torch.cumsum: "cumsum",
    Tensor.cumsum: "cumsum",
}


class Products(TorchFunctionMode):
    """Active (`with products:`) in modules that multiply by themselves, and everywhere in the first pass, which finds these."""

    def __init__(self, options: LinearOptions) -> None:
        super().__init__()
        self._options = options
        self._held: dict[int, tuple[Tensor, EngineLinear]] = {}  # by the parameter's id; keeps the parameter
        self.seen = False  # a product was computed since this was set to False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func in _LINEAR:
            self.seen = True
            return self._linear(*args, **given)
        if func in _MATMUL:
            return self._matmul(func, *args, **given)
        if (name := _REFUSED.get(func)) is not None:
            raise ConfigError(
                f"the model's code uses {name}, whose result for a token would depend on the requests beside it; "
                f"use a model of another family"
            )
        return func(*args, **given)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not isinstance(weight, nn.Parameter):  # one that is converted to another type in each call
            return self._layer(weight, bias)(input)
        if id(weight) not in self._held:
            self._held[id(weight)] = weight, self._layer(weight, bias)
        y: Tensor = self._held[id(weight)][1](input)
        return y

    def _matmul(self, func: Callable[..., Any], a: Tensor, b: Tensor, **given: Any) -> Tensor:
        if a.shape[-1] == 1 and not given:  # sums of one term
            y: Tensor = func(a, b)
            return y
        self.seen = True
        if b.dim() == 2 and not given:
            return self._layer(b.T, None)(a)
        raise ConfigError(
            "the model's code multiplies two matrices of activations, so that a token would depend on the requests beside it; "
            "use a model of another family"
        )

    def _layer(self, weight: Tensor, bias: Tensor | None) -> EngineLinear:
        """Not quantised: these products are small, and choose experts."""
        return engine_linear(weight.contiguous(), bias, self._options._replace(quantization="none"))

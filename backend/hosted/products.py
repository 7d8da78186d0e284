"""Makes operators of modules round alike in every batch.

Products of matrices outside of linear layers, in routers above all: while `Products` is active, one with a parameter runs on a
layer of the engine. One of single terms (rotary frequencies times positions) is exact, and left to torch. Any other kind is
refused by name.

Functions such as exp: torch computes most elements of a tensor by vectors and the last few one by one, which differs in the
last bit. Which elements are the last ones depends on the number of tokens, unless a token's row fills whole vectors. While
`Products` is active, narrower rows are filled up.
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
_NAMES = """exp exp2 expm1 log log1p log2 sigmoid tanh sin cos erf pow logsigmoid softplus silu gelu mish elu selu celu logit
sinh cosh atan hardswish"""
_CONVERT = (Tensor.to, Tensor.float, Tensor.type)
_BY_ELEMENT = frozenset(
    getattr(place, name) for name in _NAMES.split() for place in (torch, Tensor, F) if hasattr(place, name)
)
_VECTOR = 32  # elements: a multiple of what any instruction set computes at a time
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
        self._converted: dict[tuple[int, str], Tensor] = {}  # parameters in another type, by their id and that type
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
            return self._linear(*args, **given)
        if func in _CONVERT and isinstance(args[0], nn.Parameter) and args[0].dim() == 2:
            key = id(args[0]), f"{func.__name__} {args[1:]} {given}"
            if key not in self._converted:
                self._converted[key] = nn.Parameter(func(*args, **given), requires_grad=False)
            return self._converted[key]
        if func in _MATMUL:
            return self._matmul(func, *args, **given)
        if (name := _REFUSED.get(func)) is not None:
            raise ConfigError(
                f"the model's code uses {name}, whose result for a token would depend on the requests beside it; "
                f"use a model of another family"
            )
        if func in _BY_ELEMENT and _has_ragged_rows(args):
            self.seen = True
            width = args[0].shape[-1]
            filled = F.pad(args[0], (0, -width % _VECTOR), value=1.0)
            return func(filled, *args[1:], **given)[..., :width]
        return func(*args, **given)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not isinstance(weight, nn.Parameter):  # one that is computed in each call
            return self._multiply(self._layer(weight, bias), input)
        if id(weight) not in self._held:
            self._held[id(weight)] = weight, self._layer(weight, bias)
        return self._multiply(self._held[id(weight)][1], input)

    def _matmul(self, func: Callable[..., Any], a: Tensor, b: Tensor, **given: Any) -> Tensor:
        if a.shape[-1] == 1 and not given:  # sums of one term
            y: Tensor = func(a, b)
            return y
        if b.dim() == 2 and not given:
            return self._multiply(self._layer(b.T, None), a)
        raise ConfigError(
            "the model's code multiplies two matrices of activations, so that a token would depend on the requests beside it; "
            "use a model of another family"
        )

    def _multiply(self, layer: EngineLinear, x: Tensor) -> Tensor:
        self.seen = True
        y: Tensor = layer(x)
        return y

    def _layer(self, weight: Tensor, bias: Tensor | None) -> EngineLinear:
        """Not quantised: these products are small, and choose experts."""
        return engine_linear(weight.contiguous(), bias, self._options._replace(quantization="none"))


def _has_ragged_rows(args: Sequence[Any]) -> bool:
    """True for one tensor whose rows do not fill whole vectors."""
    first, *others = args
    if not isinstance(first, Tensor) or any(isinstance(other, Tensor) for other in others):
        return False
    return bool(first.dim()) and first.is_floating_point() and first.shape[-1] % _VECTOR != 0

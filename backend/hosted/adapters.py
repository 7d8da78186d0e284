"""LoRA adapters of a model that transformers runs: which of its linear layers they may change, and their part of a step.

An adapter may change every linear layer of a numbered layer that reads one row for each token. Which these are, a pass over two
tokens shows. Experts, routers with weights of their own, embeddings and the head are not among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from backend.api.checkpoint.adapter_files import projection_of
from backend.hosted.layers import EngineLinear
from backend.layers.lora import AdaptedTokens
from backend.models.lora import ProjectionPlace, Projections


class AdapterHost:
    """Connects a model's linear layers with the adapters of a step, which sets `step`."""

    def __init__(self, model: nn.Module, architecture: str) -> None:
        self._architecture = architecture
        self._places: dict[tuple[int, str], ProjectionPlace] = {}  # by a projection's layer and its name there
        self._products: dict[tuple[int, str], EngineLinear] = {}  # by layer and the name of their first projection
        self.step: AdaptedTokens | None = None
        names: dict[int, tuple[int, str]] = {}  # a product's id -> its key in _products
        for path, module in model.named_modules():
            if not isinstance(module, EngineLinear) or (found := projection_of(path)) is None or found in self._places:
                continue
            product, first = module.product
            name = names.setdefault(id(product), found)
            self._products[name] = product
            self._places[found] = ProjectionPlace(name[1], first, module.out_features, module.in_features)

    @property
    def projections(self) -> Projections:
        """The projections that adapters may change; they are known when `learning` is over."""
        layers: list[dict[str, ProjectionPlace]] = [
            {} for _ in range(1 + max((layer for layer, _ in self._places), default=-1))
        ]
        for (layer, name), place in self._places.items():
            layers[layer][name] = place
        return Projections(self._architecture, layers)

    @contextmanager
    def learning(self, num_tokens: int) -> Iterator[None]:
        """Run a pass over so many tokens within this context. Layers that the pass does not reach take no adapters then, nor
        do those that read another number of rows, such as one for each head.
        """
        seen = _RowsSeen()
        self.step = seen
        self.enable()
        try:
            yield
        finally:
            self.step = None
            for product in self._products.values():
                product.adapt = None
        self._products = {
            name: product for name, product in self._products.items() if seen.counts.get(name) == {num_tokens}
        }
        self._places = {key: place for key, place in self._places.items() if (key[0], place.linear) in self._products}

    def enable(self) -> None:
        """Let steps have adapters from now on. Modules whose linear layers these can change are not replaced by native calls."""
        for name, product in self._products.items():
            product.adapt = partial(self._add, *name)

    def _add(self, layer: int, linear: str, y: Tensor, x: Tensor) -> None:
        if self.step is not None:
            with torch._C.DisableTorchFunction():  # products of adapters are their own matter
                self.step.add(layer, y, x, linear)


class _RowsSeen:
    """Stands for the adapters of a step, and notes how many rows each linear layer reads."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, str], set[int]] = {}

    def add(self, layer: int, y: Tensor, x: Tensor, linear: str) -> None:
        self.counts.setdefault((layer, linear), set()).add(len(x))

"""Parts: what a decoder is assembled from, by the names of the checkpoint: tensors as they are stored, and linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from backend.architectures.description import ModelConfig
from backend.layers.linear import Linear
from backend.models.linears import LinearBuilder
from backend.models.tensors import TensorSource


class Parts(Protocol):
    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor in the model's dtype on its device."""

    def linear(self, rows: Mapping[str, int], columns: int, has_bias: bool) -> Linear:
        """A linear layer of several projections: name -> rows, stacked in order."""

    def head(self, embedding: Tensor) -> Linear:
        """The layer that yields the logits. `embedding` was taken before."""

    def finish(self) -> None:
        """Called when everything has been taken."""


class CheckpointParts:
    """The parts of a checkpoint. Methods raise ConfigError for missing, misshapen or unused tensors."""

    def __init__(self, config: ModelConfig, source: TensorSource, linears: LinearBuilder) -> None:
        self._config, self._source, self._linears = config, source, linears

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._source.take(name, shape)

    def linear(self, rows: Mapping[str, int], columns: int, has_bias: bool) -> Linear:
        return self._linears.build(rows, columns, has_bias)

    def head(self, embedding: Tensor) -> Linear:
        config, name = self._config, self._config.names.head
        if config.tied_embeddings and not self._linears.holds(name):
            self._source.take_copy(name + ".weight", embedding)
            return self._linears.from_tensor(embedding)
        return self._linears.build({name: config.vocab_size}, config.hidden_size, is_head=True)

    def finish(self) -> None:
        self._source.check_all_used()

"""Parts: what a decoder is assembled from, by the names of the checkpoint: tensors as they are stored, and linear layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import Tensor

from backend.architectures.description import WHOLE, ModelConfig, Shard
from backend.architectures.shards import Cut, experts_of, layers_of, linears, sinks, vocabulary
from backend.layers.linear import Linear
from backend.models.linears import LinearBuilder
from backend.models.tensors import TensorSource


class Parts(Protocol):
    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor in the model's dtype on its device."""

    def linear(
        self, rows: Mapping[str, int], columns: int, has_bias: bool, is_rounded: bool = True, by_head: bool = False
    ) -> Linear:
        """A linear layer of several projections: name -> rows, stacked in order; is_rounded, by_head: LinearBuilder.build."""

    def embedding(self) -> Tensor | Linear:
        """The embeddings of all tokens, [vocab, hidden], in the model's dtype; or as the layer that holds them."""

    def head(self, embedding: Tensor | Linear, rows: int) -> Linear:
        """The layer that yields the logits of `rows` tokens. embedding: was taken before; without rows where it was not."""

    def finish(self) -> None:
        """Called when everything has been taken."""


class CheckpointParts:
    """The parts of a checkpoint, as a rank has them. Methods raise ConfigError for missing, misshapen or unused tensors."""

    def __init__(
        self, config: ModelConfig, source: TensorSource, linears_of: LinearBuilder, shard: Shard = WHOLE
    ) -> None:
        """config: the whole model's."""
        self._config, self._source, self._linears, self._shard = config, source, linears_of, shard
        self._is_cut = shard.size > 1  # else this rank has whole layers
        self._whole = linears(config, shard) if self._is_cut else {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if not self._is_cut or not name.endswith("." + self._config.names.layer.sinks):
            return self._source.take(name, shape)
        first, end = sinks(self._config, self._shard)
        return self._source.take(name, (self._config.num_heads,))[first:end]

    def linear(
        self, rows: Mapping[str, int], columns: int, has_bias: bool, is_rounded: bool = True, by_head: bool = False
    ) -> Linear:
        whole = self._whole.get(next(iter(rows)))
        if whole is None:  # this rank has all of it
            return self._linears.build(rows, columns, has_bias, is_rounded=is_rounded, by_head=by_head)
        return self._linears.build(whole.rows, whole.columns, whole.has_bias, cut=whole.cut)

    def embedding(self) -> Tensor | Linear:
        config, name = self._config, self._config.names.embedding
        if self._linears.holds(name):
            layer = self._linears.build({name: config.vocab_size}, config.hidden_size)
            if config.tied_embeddings and self._is_cut and self._shard.is_last:
                self._linears.put_back(name)  # The head is a part of it.
            return layer
        return self._source.take(name + ".weight", (config.vocab_size, config.hidden_size))

    def head(self, embedding: Tensor | Linear, rows: int) -> Linear:
        config, name = self._config, self._config.names.head
        part = vocabulary(config, self._shard)
        if config.tied_embeddings and not isinstance(embedding, Tensor) and not self._is_cut:
            return embedding
        if config.tied_embeddings and self._linears.holds(config.names.embedding):
            name = config.names.embedding
        elif config.tied_embeddings and not self._linears.holds(name):
            assert isinstance(embedding, Tensor)
            if not self._shard.is_first:
                embedding = self._source.take(
                    config.names.embedding + ".weight", (config.vocab_size, config.hidden_size)
                )
            self._source.take_copy(name + ".weight", embedding)
            return self._linears.from_tensor(embedding[slice(*part)])
        cut = Cut((part,)) if self._is_cut else None
        return self._linears.build({name: config.vocab_size}, config.hidden_size, is_head=True, cut=cut)

    def finish(self) -> None:
        if self._is_cut and self._config.experts is not None:
            self._source.leave_out(tuple(self._experts_of_others()))
        if self._shard.stages > 1:
            names, (first, end) = self._config.names, layers_of(self._config, self._shard)
            others = [index for index in range(self._config.num_layers) if not first <= index < end]
            layers = [f"{names.layers}{index}." for index in others]
            self._source.leave_out((names.embedding + ".", names.head + ".", *layers))
        self._source.check_all_used()

    def _experts_of_others(self) -> Iterator[str]:
        """The prefixes of tensors of experts that other ranks have."""
        names, (first, end) = self._config.names, experts_of(self._config, self._shard)
        count = 0 if self._config.experts is None else self._config.experts.count
        for layer, settings in enumerate(self._config.layers):
            for expert in (*range(first), *range(end, count)) if settings.has_experts else ():
                yield f"{names.layers}{layer}.{names.layer.experts}{expert}."

"""Embeddings that requests give, in the place of those of a hosted model's table.

They enter where transformers takes `inputs_embeds`: behind the table, with the factor that the table's own module has, before
whatever the model does to embeddings besides.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class GivenRows(Protocol):
    """Rows of a flat batch whose embeddings are given."""

    @property
    def where(self) -> Tensor:
        """int64 [n]."""

    @property
    def vectors(self) -> Tensor:
        """[n, width], in the model's dtype."""


class EmbeddingHost:
    """Connects the table of a model with a step, which sets `step`."""

    def __init__(self, module: Any) -> None:
        """`module`: of a causal model of transformers."""
        table = module.get_input_embeddings()
        self.width: int = table.weight.shape[1]
        pad = getattr(module.config, "pad_token_id", None)
        self._filler = pad if isinstance(pad, int) and 0 <= pad < len(table.weight) else 0
        self.step: GivenRows | None = None
        table.register_forward_hook(self._replace)

    def known_ids(self, token_ids: Tensor) -> Tensor:
        """Ids [tokens] for the model's code: padding where an embedding is given, because other modules may read ids too."""
        return token_ids if self.step is None else token_ids.index_fill(0, self.step.where, self._filler)

    def _replace(self, module: Any, args: Any, found: Tensor) -> Tensor | None:
        """`found` [1, tokens, width]."""
        if self.step is None:
            return None
        with torch._C.DisableTorchFunction():
            return found.index_copy(1, self.step.where, self.step.vectors[None].to(found.dtype))

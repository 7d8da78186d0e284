"""Attention of a hosted model: transformers' AttentionInterface, over the engine's paged KV cache.

Every attention module of the model calls `attend`, which finds the `AttentionHost` of the model at the module. In the first pass
the host learns what each layer asks for (`LayerAttention`); in every later one it hands the layer's queries, keys and values
to the `Attention` of the tier, which writes keys and values to the layer's pool and reads all that the queries see.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from backend.api.errors import ConfigError
from backend.hosted.masks import window_of

NAME = "everbatch"
_HOST = "attention_host"
# Arguments of attention functions that have no effect on a causal attention without dropout or cache.
_HARMLESS = {
    "attention_mask", "dropout", "is_causal", "position_ids", "use_cache", "cache_position", "output_attentions",
    "past_key_values", "position_embeddings", "layer_idx", "training", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "deterministic", "output_router_logits", "logits_to_keep", "output_hidden_states", "num_items_in_batch",
}  # fmt: skip


class LayerAttention(NamedTuple):
    """Arguments of a layer's attention, learnt in the first pass."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    softcap: float  # 0: none
    window: int | None  # tokens
    has_sinks: bool


class Attention(Protocol):
    """The attention of one step."""

    def __call__(
        self, index: int, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """q [tokens, heads, dim], k, v [tokens, kv_heads, dim], contiguous -> [tokens, heads, dim].

        dim is the largest key_dim or value_dim of the model; what a head has less is filled with zeros.
        """
        ...


class AttentionHost:
    """Connects a model's attention modules with a step. It learns their arguments in the first pass; a step then sets `step`."""

    def __init__(self, model: nn.Module, is_encoder: bool = False) -> None:
        """`is_encoder`: tokens attend to the whole text, not only to what is before them."""
        self.is_encoder = is_encoder
        self.layers: list[LayerAttention] = []
        self._index: dict[int, int] = {}  # attention module's id -> its layer, in the order of first calls
        self.step: Attention | None = None
        self.dim = self.kv_heads = 0  # the largest of any layer, which the KV pools have
        for module in model.modules():
            setattr(module, _HOST, self)

    def index_of(self, module: nn.Module) -> int | None:
        """The layer that an attention module is of; None for other modules."""
        return self._index.get(id(module))

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """q [1, heads, tokens, dim], k, v [1, kv_heads, tokens, dim] -> [1, tokens, heads, value_dim]."""
        assert self.step is not None  # only after the first pass
        index = self._index[id(module)]
        layer = self.layers[index]
        repeats = self.kv_heads // layer.kv_heads
        if repeats > 1:  # a layer with fewer kv heads than the pools have
            k, v = (side.repeat_interleave(repeats, dim=1) for side in (k, v))
        with torch._C.DisableTorchFunction():  # products of the tier are its own matter
            out = self.step(index, layer, self._rows(q), self._rows(k), self._rows(v), sinks)
        return out[None, ..., : layer.value_dim].contiguous()

    def learn(self, module: nn.Module, layer: LayerAttention, v: Tensor) -> Tensor:
        """Returns values of the shape that `attend` returns. Raises ConfigError for an attention that cannot be served."""
        name = type(module).__name__
        is_causal = getattr(module, "is_causal", True) is not False
        if is_causal == self.is_encoder:
            which = "earlier tokens only" if is_causal else "later tokens"
            raise ConfigError(f"{name} attends to {which}, which is not supported in this family; use another model")
        if self.is_encoder and (layer.softcap or layer.has_sinks):
            raise ConfigError(
                f"{name} has a soft cap or sinks, which is not supported in an encoder; use another model"
            )
        if id(module) not in self._index:
            self._index[id(module)] = len(self.layers)
            self.layers.append(layer)
        elif not self.is_encoder:  # there is a pool for each module; an encoder, which has none, may share its layers
            raise ConfigError(f"{name} attends twice in a pass, which is not supported; use another model")
        self.dim = max(self.dim, layer.key_dim, layer.value_dim)
        self.kv_heads = max(self.kv_heads, layer.kv_heads)
        return v.transpose(1, 2).repeat_interleave(layer.heads // layer.kv_heads, dim=2)

    def _rows(self, side: Tensor) -> Tensor:
        """[1, heads, tokens, d] -> [tokens, heads, dim], contiguous."""
        rows = side[0].transpose(0, 1)
        return F.pad(rows, (0, self.dim - rows.shape[2])) if rows.shape[2] < self.dim else rows.contiguous()


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """The function that attention modules of transformers call. Raises ConfigError for an argument that is not known."""
    host: AttentionHost = getattr(module, _HOST)
    if host.step is not None:
        return host.attend(module, query, key, value, s_aux), None
    for name, value_ in given.items():
        if name not in _HARMLESS and value_ is not None:
            raise ConfigError(f"{type(module).__name__} attends with {name}, which is not supported; use another model")
    layer = LayerAttention(
        query.shape[1],
        key.shape[1],
        key.shape[3],
        value.shape[3],
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        float(softcap or 0.0),
        window_of(attention_mask, sliding_window),
        s_aux is not None,
    )
    return host.learn(module, layer, value), None


ALL_ATTENTION_FUNCTIONS[NAME] = attend

"""A decoder of a ModelConfig as its formulas are written, in float64, token by token: no batch, no cache, no kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backend.architectures.description import LayerConfig, ModelConfig, RopeConfig

Tensors = dict[str, Tensor]


def random_tensors(config: ModelConfig, seed: int = 0) -> Tensors:
    """A checkpoint of this description, each projection in a tensor of its own."""
    generator = torch.Generator().manual_seed(seed)
    block, names, hidden = config.block, config.names, config.hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    made: Tensors = {}

    def add(name: str, *shape: int, spread: float = 1.0, centre: float = 0.0) -> None:
        made[name] = centre + spread * torch.randn(shape, generator=generator)

    def linear(name: str, rows: int, columns: int, has_bias: bool) -> None:
        add(name + ".weight", rows, columns, spread=2 / math.sqrt(columns))
        if has_bias:
            add(name + ".bias", rows, spread=0.3)

    def norm(name: str, size: int, has_bias: bool = block.norm_bias) -> None:
        add(name + ".weight", size, spread=0.3, centre=1 - block.norm_offset)
        if has_bias:
            add(name + ".bias", size, spread=0.3)

    linear(names.embedding, config.vocab_size, hidden, False)
    for index in range(config.num_layers):
        prefix, layer = f"{names.layers}{index}.", names.layer
        qkv_rows = (q, kv, kv) if len(layer.qkv) == 3 else (q + 2 * kv,)
        for name, rows in zip(layer.qkv, qkv_rows, strict=True):
            linear(prefix + name, rows, hidden, block.qkv_bias)
        linear(prefix + layer.out, hidden, q, block.out_bias)
        parts = 2 if block.gated and len(layer.gate_up) == 1 else 1
        for name in layer.gate_up:
            linear(prefix + name, parts * config.intermediate_size, hidden, block.mlp_bias)
        linear(prefix + layer.down, hidden, config.intermediate_size, block.mlp_bias)
        for place in (layer.attention_norm, layer.attention_out_norm, layer.mlp_norm, layer.mlp_out_norm):
            if place is not None:
                norm(prefix + place, hidden)
        if block.qk_norm != "none":
            norm(prefix + layer.q_norm, q if block.qk_norm == "row" else config.head_dim, has_bias=False)
            norm(prefix + layer.k_norm, kv if block.qk_norm == "row" else config.head_dim, has_bias=False)
        if block.attention_sinks:
            add(prefix + layer.sinks, config.num_heads)
    norm(names.norm, hidden)
    if not config.tied_embeddings:
        linear(names.head, config.vocab_size, hidden, False)
    return made


class PlainDecoder:
    def __init__(self, config: ModelConfig, tensors: Tensors) -> None:
        self._config, self._tensors = config, {name: tensor.double() for name, tensor in tensors.items()}

    def logits(self, tokens: list[int]) -> Tensor:
        """Behind each token of a text, float64 [tokens, vocab]."""
        config, names, block = self._config, self._config.names, self._config.block
        h = self._tensors[names.embedding + ".weight"][tokens] * block.embedding_scale
        for index, layer in enumerate(config.layers):
            h = self._layer(h, f"{names.layers}{index}.", layer)
        head = names.embedding if config.tied_embeddings else names.head
        logits = block.logit_scale * self._linear(head, self._norm(names.norm, h))
        return _capped(logits, block.logit_softcap)

    def _layer(self, h: Tensor, prefix: str, layer: LayerConfig) -> Tensor:
        block, names = self._config.block, self._config.names.layer

        def norm(name: str | None, x: Tensor) -> Tensor:
            return x if name is None else self._norm(prefix + name, x)

        if block.parallel:
            attended = self._attention(norm(names.attention_norm, h), prefix, layer)
            moved = self._mlp(norm(names.mlp_norm or names.attention_norm, h), prefix)
            return h + block.residual_scale * (attended + moved)
        attended = self._attention(norm(names.attention_norm, h), prefix, layer)
        h = h + block.residual_scale * norm(names.attention_out_norm, attended)
        moved = self._mlp(norm(names.mlp_norm, h), prefix)
        return h + block.residual_scale * norm(names.mlp_out_norm, moved)

    def _attention(self, x: Tensor, prefix: str, layer: LayerConfig) -> Tensor:
        config, block, names = self._config, self._config.block, self._config.names.layer
        qkv = torch.cat([self._linear(prefix + name, x) for name in names.qkv], dim=1)
        widths = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        q, k, v = qkv.split(widths, dim=1)
        if block.qk_norm == "row":
            q, k = self._norm(prefix + names.q_norm, q), self._norm(prefix + names.k_norm, k)
        q, k, v = (part.unflatten(1, (-1, config.head_dim)) for part in (q, k, v))
        if block.qk_norm == "head":
            q, k = self._norm(prefix + names.q_norm, q), self._norm(prefix + names.k_norm, k)
        if layer.rope is not None:
            q, k = (self._rotated(part, config.ropes[layer.rope]) for part in (q, k))
        out = torch.zeros_like(q)
        for token in range(len(x)):
            for head in range(config.num_heads):
                first = 0 if layer.window is None else max(0, token - layer.window + 1)
                kv_head = head // (config.num_heads // config.num_kv_heads)
                query, keys = q[token, head], k[first : token + 1, kv_head]
                if block.query_scaling is not None:
                    steps = token // block.query_scaling.original_max_position
                    query = query * (1 + block.query_scaling.beta * math.log(1 + steps))
                scale = config.head_dim**-0.5 if block.attention_scale is None else block.attention_scale
                weights = torch.exp(_capped(scale * (keys @ query), block.attention_softcap))
                total = weights.sum()
                if block.attention_sinks:
                    total = total + torch.exp(self._tensors[prefix + names.sinks][head])
                out[token, head] = weights / total @ v[first : token + 1, kv_head]
        return self._linear(prefix + names.out, out.flatten(1))

    def _rotated(self, x: Tensor, rope: RopeConfig) -> Tensor:
        """x [tokens, heads, head_dim], for rope of the kind default."""
        size = rope.rotary_dim or x.shape[-1]
        x = x.clone()
        for token in range(len(x)):
            for pair in range(size // 2):
                interleaved = self._config.block.rope_interleaved
                i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + size // 2)
                angle = token * rope.theta ** (-2 * pair / size)
                a, b = x[token, :, i].clone(), x[token, :, j].clone()
                x[token, :, i] = a * math.cos(angle) - b * math.sin(angle)
                x[token, :, j] = b * math.cos(angle) + a * math.sin(angle)
        return x

    def _mlp(self, x: Tensor, prefix: str) -> Tensor:
        block, names = self._config.block, self._config.names.layer
        given = torch.cat([self._linear(prefix + name, x) for name in names.gate_up], dim=1)
        first = given[:, : self._config.intermediate_size]
        if block.activation == "silu":
            y = first / (1 + torch.exp(-first))
        elif block.activation == "gelu":
            y = first * (1 + torch.erf(first / math.sqrt(2))) / 2
        else:
            y = first * (1 + torch.tanh(math.sqrt(2 / math.pi) * (first + 0.044715 * first**3))) / 2
        if block.gated:
            y = y * given[:, self._config.intermediate_size :]
        return self._linear(prefix + names.down, y)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self._tensors[name + ".weight"].T
        return y + self._tensors[name + ".bias"] if name + ".bias" in self._tensors else y

    def _norm(self, name: str, x: Tensor) -> Tensor:
        block = self._config.block
        if block.norm == "layer":
            x = x - x.mean(-1, keepdim=True)
        y = x / torch.sqrt((x**2).mean(-1, keepdim=True) + block.norm_eps)
        y = y * (self._tensors[name + ".weight"] + block.norm_offset)
        return y + self._tensors[name + ".bias"] if name + ".bias" in self._tensors else y


def _capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap else x

"""The Llama-shaped decoder: Llama 2/3, Mistral, Qwen2, Qwen3. `forward` runs a flat batch and keeps no state between calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from backend.layers.attention import AttentionWeights, attention
from backend.layers.linear import Linear, num_bytes_of
from backend.layers.lora import AdaptedTokens
from backend.layers.mlp import MlpWeights, mlp
from backend.layers.norm import add_norm
from backend.layers.rotary import rotary_tables
from backend.models.config import ModelConfig
from backend.models.linears import LinearBuilder, LinearOptions
from backend.models.tensors import TensorSource
from kernels.common.kv_format import KVPool
from kernels.embedding import embedding
from kernels.paged_attention import Plan
from kernels.rms_norm import rms_norm


@dataclass(slots=True)
class LayerWeights:
    input_norm: Tensor  # [hidden]
    attention: AttentionWeights
    post_norm: Tensor  # [hidden]
    mlp: MlpWeights


class MarkedOutput(NamedTuple):
    """A tensor that the model marks as one that requests may ask for."""

    width: int
    compute: Callable[
        [Tensor, Tensor], Tensor
    ]  # normed hidden states [rows, hidden], logits [rows, vocab] -> [rows, width]


@dataclass(slots=True)
class Llama:
    config: ModelConfig
    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]
    lm_head: Linear  # [vocab, hidden]
    cos: Tensor  # float32 [max_seq_len, head_dim / 2]
    sin: Tensor
    takes_adapters: bool = False  # then products read unquantised inputs, which LoRA needs, in every batch alike
    outputs: dict[str, MarkedOutput] = field(init=False)  # by name

    def __post_init__(self) -> None:
        self.outputs = {
            "hidden_states": MarkedOutput(self.config.hidden_size, lambda hidden, logits: hidden),
            "logits": MarkedOutput(self.config.vocab_size, lambda hidden, logits: logits),
        }

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def num_linear_bytes(self) -> int:
        """Bytes of all linear layers, the output head included: every step that samples reads at least these."""
        return sum(linear.num_bytes for linear in self._linears)

    @property
    def memory(self) -> str:
        """A description of the memory that the weights take."""
        weights = sum(prod(linear.shape) for linear in self._linears)
        return (
            f"linear layers {self.num_linear_bytes / 1e6:,.1f} MB, {8 * self.num_linear_bytes / weights:.2f} bits a weight; "
            f"embedding {num_bytes_of(self.embedding) / 1e6:,.1f} MB"
        )

    @property
    def _linears(self) -> list[Linear]:
        linears = [self.lm_head]
        for layer in self.layers:
            linears += layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down
        return linears

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cells: Tensor,
        plans: Mapping[int | None, Plan],
        pools: Sequence[KVPool],
        embedded: tuple[Tensor, Tensor] | None = None,
        adapted: AdaptedTokens | None = None,
    ) -> Tensor:
        """Run a flat batch of tokens and write their KV.

        token_ids, positions, cells are int64 [num_tokens]. plans holds the attention plan of each window; pools has one pool
        a layer. embedded: the tokens [n] int64 of the batch whose embeddings are given, and these, [n, hidden]. adapted: the
        tokens' LoRA adapters, if any has one. Returns the hidden states before the last norm, [num_tokens, hidden].
        """
        eps, tables = self.config.norm_eps, (self.cos, self.sin)
        x = embedding(self.embedding, token_ids)  # [num_tokens, hidden]
        if embedded is not None:
            x.index_copy_(0, *embedded)
        delta: Tensor | None = None  # like x, and still to be added to it
        may_quantize = not self.takes_adapters
        for index, (layer, pool, window) in enumerate(zip(self.layers, pools, self.config.windows, strict=True)):
            adapt = None if adapted is None else partial(adapted.add, index)
            normed, x = add_norm(x, delta, layer.input_norm, eps, may_quantize and layer.attention.qkv.takes_int8)
            delta = attention(normed, layer.attention, pool, plans[window], positions, cells, tables, eps, adapt)
            normed, x = add_norm(x, delta, layer.post_norm, eps, may_quantize and layer.mlp.gate_up.takes_int8)
            delta = mlp(normed, layer.mlp, may_quantize, adapt)
        return x if delta is None else x + delta

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden] -> [num_rows, vocab] in the model's dtype. Give it only the rows that are wanted."""
        return self.lm_head(rms_norm(hidden, self.norm, self.config.norm_eps))

    def logits_and(self, names: Sequence[str], hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Like `logits`, with the marked outputs of these names, each [num_rows, width]."""
        normed = rms_norm(hidden, self.norm, self.config.norm_eps)
        logits = self.lm_head(normed)
        return logits, {name: self.outputs[name].compute(normed, logits) for name in names}


def build_llama(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    max_seq_len: int,
    dtype: torch.dtype,
    device: torch.device,
    options: LinearOptions,
) -> Llama:
    """Make a model from a checkpoint's tensors, one layer at a time, so that the original of a packed weight is freed at once.

    Raises ConfigError for missing, misshapen or unused tensors.
    """
    source = TensorSource(tensors, dtype, device)
    linears = LinearBuilder(source, config.quantization, options)
    embedding = source.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    if config.tied_embeddings and not linears.holds("lm_head"):
        source.take_copy("lm_head.weight", embedding)
        lm_head = linears.from_tensor(embedding)
    else:
        lm_head = linears.build({"lm_head": config.vocab_size}, config.hidden_size, is_head=True)
    layers = [_layer(config, source, linears, f"model.layers.{index}.") for index in range(config.num_layers)]
    norm = source.take("model.norm.weight", (config.hidden_size,))
    source.check_all_used()
    cos, sin = rotary_tables(config.rope, config.head_dim, max_seq_len, device)
    return Llama(config, embedding, layers, norm, lm_head, cos, sin)


def _layer(config: ModelConfig, source: TensorSource, linears: LinearBuilder, prefix: str) -> LayerWeights:
    hidden, inter, head = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * head, config.num_kv_heads * head
    attn, ffn = prefix + "self_attn.", prefix + "mlp."
    qkv = {attn + "q_proj": q, attn + "k_proj": kv, attn + "v_proj": kv}
    gate_up = {ffn + "gate_proj": inter, ffn + "up_proj": inter}
    return LayerWeights(
        input_norm=source.take(prefix + "input_layernorm.weight", (hidden,)),
        attention=AttentionWeights(
            qkv=linears.build(qkv, hidden, config.qkv_bias),
            out=linears.build({attn + "o_proj": hidden}, q, config.out_bias),
            q_norm=source.take(attn + "q_norm.weight", (head,)) if config.qk_norm else None,
            k_norm=source.take(attn + "k_norm.weight", (head,)) if config.qk_norm else None,
        ),
        post_norm=source.take(prefix + "post_attention_layernorm.weight", (hidden,)),
        mlp=MlpWeights(
            gate_up=linears.build(gate_up, hidden, config.mlp_bias),
            down=linears.build({ffn + "down_proj": hidden}, inter, config.mlp_bias),
        ),
    )

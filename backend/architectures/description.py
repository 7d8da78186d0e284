"""ModelConfig: a decoder described by data. Every tier (native, torch, Triton) reads the same description.

A layer computes, with h the hidden states [tokens, hidden] and each norm absent where its name in `LayerNames` is None:

    sequential    h += residual_scale * out_norm(attention(norm(h)))          attention_norm, attention_out_norm
                  h += residual_scale * out_norm(mlp(norm(h)))                mlp_norm, mlp_out_norm
    parallel      h += residual_scale * (attention(attention_norm(h)) + mlp(norm(h)))
                  the mlp reads mlp_norm(h), or attention_norm(h) where there is no mlp_norm

    attention     q, k = rotate(norm(q)), rotate(norm(k)) ; q *= query_scale(position)
                  out = softmax(softcap(attention_scale * q k^T) + mask) v, with the window of the layer
                  with attention_sinks the softmax of head h has one more score, sinks[h], whose weight no value gets (gpt-oss)
    mlp           gated: down(activation(gate(x)) * up(x)) ; otherwise down(activation(up(x)))
    model         h = embedding[token] * embedding_scale ; logits = softcap(logit_scale * lm_head(norm(h)))
    softcap(x)    cap * tanh(x / cap), or x where the cap is 0 (Gemma 2, arXiv:2408.00118)
"""

from __future__ import annotations

import itertools
from typing import Any, Literal

import msgspec
from msgspec import Struct

from backend.api.config.schema import KvNumbers, Windows

NormKind = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh"]  # gelu: with the error function; gelu_tanh: its approximation
QkNorm = Literal[
    "none", "head", "row"
]  # head: each head on its own (Qwen3); row: all heads of a token together (OLMo 2)


class RopeConfig(Struct, frozen=True):
    """`kind` is transformers' rope_type: default, linear, llama3, yarn or longrope; or factors, which GGUF files have."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[
        float, ...
    ] = ()  # divisors of the frequencies, [rotary_dim / 2]: kind `factors`, and longrope's long ones
    rotary_dim: int | None = None  # leading dimensions of a head that are rotated; None = all
    attention_factor: float = 1.0  # multiplies cos and sin (yarn, longrope)
    beta_fast: float = 32.0  # yarn: pairs that turn more often within original_max_position keep their frequency
    beta_slow: float = 1.0  # yarn: those that turn less often are slowed down by `factor`
    truncate: bool = True  # yarn: the borders between them are rounded to whole pairs
    short_factors: tuple[
        float, ...
    ] = ()  # longrope: `factors` of a server with at most original_max_position positions


class QueryScaling(Struct, frozen=True):
    """Queries grow with their position: 1 + beta * log(1 + floor(position / original_max_position)) (Llama 4)."""

    beta: float
    original_max_position: int


class Block(Struct, frozen=True):
    """Settings of a family, which are alike in all layers of a model."""

    norm: NormKind = "rms"
    norm_eps: float = 1e-6
    norm_bias: bool = False
    norm_offset: float = 0.0  # added to the stored weights of all norms: Gemma stores weights less 1
    qk_norm: QkNorm = "none"
    parallel: bool = False
    activation: Activation = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    rope_interleaved: bool = False  # neighbours 2i, 2i + 1 rotate together; otherwise i and i + rotary_dim / 2
    query_scaling: QueryScaling | None = None
    attention_scale: float | None = None  # None = 1 / sqrt(head_dim)
    attention_softcap: float = 0.0
    attention_sinks: bool = False
    logit_softcap: float = 0.0
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    embedding_scale_is_rounded: bool = False  # to the type that the model computes in, before it is used (Gemma)
    residual_scale: float = 1.0


class LayerConfig(Struct, frozen=True):
    """Settings that differ between the layers of a model."""

    window: int | None = None  # attention window in tokens; None = unlimited
    rope: int | None = 0  # index into ModelConfig.ropes; None = queries and keys are not rotated


class LayerNames(Struct, frozen=True):
    """Names of a layer's tensors in the checkpoint, without `.weight` and `.bias`, behind the layer's prefix.

    A projection with several names is stored in that many tensors, which are stacked in this order.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one fused tensor
    qkv_by_head: bool = False  # a fused tensor holds query, key and value of a head after another (GPT-NeoX)
    out: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # or one fused tensor; without a gate: up
    down: str = "mlp.down_proj"
    attention_norm: str | None = "input_layernorm"
    attention_out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    q_norm: str = "self_attn.q_norm"  # where Block.qk_norm is not none
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"  # where Block.attention_sinks; the whole name, [heads]


class TensorNames(Struct, frozen=True):
    """Names of a checkpoint's tensors."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers."  # prefix of the layers; the index and a dot follow
    norm: str = "model.norm"
    head: str = "lm_head"
    unused: tuple[str, ...] = ()  # regular expressions of names that are no part of the decoder, such as a stored mask
    layer: LayerNames = LayerNames()


class Shard(Struct, frozen=True):
    """Which of several ranks runs the model: of a stage, which has a range of the layers, a part of each of them (shards.py)."""

    rank: int = 0
    size: int = 1
    stage: int = 0
    stages: int = 1

    @property
    def is_first(self) -> bool:
        """True if its stage embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True if its stage has the output head."""
        return self.stage == self.stages - 1

    @property
    def number(self) -> int:
        """The number of this rank among all ranks. The last stage comes first: it has the output head, and rank 0 samples."""
        return (self.stages - 1 - self.stage) * self.size + self.rank


WHOLE = Shard()  # one rank


class ModelConfig(Struct, frozen=True):
    """The description of a whole model, or with fewer heads, KV heads and intermediate size of a rank's part (shards.py).

    A part still describes all layers; `held` says which of them the rank has.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    tied_embeddings: bool
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    dtype: str | None  # None: config.json has none, and the embedding's is taken
    eos_ids: tuple[int, ...]
    quantization: Any  # format of the checkpoint's linear layers (backend/models/quantized.py); None = floats
    kv_cache_dtype: KvNumbers | None  # the type that the checkpoint asks for; None = none named
    block: Block = Block()
    names: TensorNames = TensorNames()
    is_part: bool = False  # True: the checkpoint holds more, such as a vision tower, which is left out
    sink_tokens: int = 0  # first tokens of a sequence, which all others attend to, also from outside of a window
    shard: Shard = WHOLE
    held_layers: tuple[int, int] | None = None  # [first, end); None: all

    @property
    def held(self) -> range:
        """The layers that this rank has."""
        return range(*(self.held_layers or (0, self.num_layers)))

    @property
    def held_settings(self) -> tuple[LayerConfig, ...]:
        """The settings of these layers."""
        return self.layers[self.held.start : self.held.stop]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each layer in tokens; None = unlimited."""
        return tuple(layer.window for layer in self.layers)

    @property
    def sliding_window(self) -> int | None:
        """The widest window if every layer has one; None if any layer attends to all tokens."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if len(windows) == len(self.layers) else None

    @property
    def attention_scale(self) -> float:
        """The factor of queries times keys."""
        scale = self.block.attention_scale
        return float(self.head_dim**-0.5) if scale is None else scale

    def with_windows(self, caps: Windows | None, sink_tokens: int) -> ModelConfig:
        """This model with layers that attend to no more than the last tokens, and to the sink tokens.

        Of several caps layer i has entry i modulo their number, after TensorRT-LLM; None: the windows stay as they are.
        """
        layers = self.layers
        if caps is not None:
            of_layers = itertools.cycle(caps if isinstance(caps, tuple) else (caps,))
            layers = tuple(
                msgspec.structs.replace(layer, window=cap if layer.window is None else min(layer.window, cap))
                for layer, cap in zip(layers, of_layers, strict=False)
            )
        return msgspec.structs.replace(self, layers=layers, sink_tokens=sink_tokens)

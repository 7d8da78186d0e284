"""ModelConfig: a decoder described by data. Every tier (native, torch, Triton) reads the same description.

A layer computes, with h the hidden states [tokens, hidden] and each norm absent where its name in `LayerNames` is None:

    sequential    h += residual_scale * out_norm(attention(norm(h)))          attention_norm, attention_out_norm
                  h += residual_scale * out_norm(mlp(norm(h)))                mlp_norm, mlp_out_norm
    parallel      h += residual_scale * (attention(attention_norm(h)) + mlp(norm(h)))
                  the mlp reads mlp_norm(h), or attention_norm(h) where there is no mlp_norm

    attention     q, k = rotate(norm(q)), rotate(norm(k)) ; q *= query_scale(position)
                  out = softmax(softcap(attention_scale * q k^T) + mask) v, with the window of the layer
                  with attention_sinks the softmax of head h has one more score, sinks[h], whose weight no value gets (gpt-oss)
                  with gates_attention it is multiplied with sigmoid(gate(x)) before the output projection (Qwen3-Next)
    latent        models with `latent` have one of another form in the place of attention (Latent)
    recurrent     layers of `recurrence` have it in the place of attention (Recurrence)
    mlp           gated: down(activation(gate(x)) * up(x)) ; otherwise down(activation(up(x)))
                  in layers with experts: sum over a token's experts e of weight_e * mlp_e(x), and the shared mlp(x) (Experts)
    model         h = embedding[token] * embedding_scale ; logits = softcap(logit_scale * lm_head(norm(h)))
    softcap(x)    cap * tanh(x / cap), or x where the cap is 0 (Gemma 2, arXiv:2408.00118)
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import msgspec
from msgspec import Struct

from backend.api.config.schema import KvNumbers, Windows
from backend.architectures.latent import Latent, LatentNames
from backend.architectures.recurrent_names import RecurrentNames, Split

NormKind = Literal["rms", "layer"]
# gelu: with the error function; gelu_tanh: its approximation; swiglu_oai: gpt-oss's, which is clamped
# relu2: the square of what is positive, without a gate (Nemotron)
Activation = Literal["silu", "gelu", "gelu_tanh", "swiglu_oai", "relu2"]
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
    sections: tuple[
        int, ...
    ] = ()  # pairs that a token's frame, row and column rotate (M-RoPE, arXiv:2409.12191); none: its place rotates all
    sections_take_turns: bool = False  # the pairs of the three go round, and what is left is the frame's (Qwen3-VL)

    @property
    def axes(self) -> tuple[int, ...]:
        """For each rotated pair, which of (frame, row, column) rotates it; none without `sections`."""
        if not self.sections:
            return ()
        if not self.sections_take_turns:
            return tuple(axis for axis, count in enumerate(self.sections) for _ in range(count))
        ends = tuple(3 * count for count in self.sections)
        return tuple(pair % 3 if pair < ends[pair % 3] else 0 for pair in range(sum(self.sections)))


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
    gates_attention: bool = False  # the projection of queries, keys and values has a row more for each query: the gate


class Experts(Struct, frozen=True):
    """A mixture of experts in the place of an mlp (Shazeer et al., 2017). For each token x, in float32:

    score    = softmax or sigmoid of router(x)
    chosen   = the `places` experts with the greatest score + choice_bias (DeepSeek-V3, arXiv:2412.19437), out of the
               `kept_groups` best groups; a group is as good as its best expert, or its two best together
    weight_e = scale * score_e, divided by the sum over those chosen where `is_normalised`
    y        = sum of weight_e * mlp_e(x), the best expert first, + shared(x) * sigmoid(shared_gate(x)) where there are such
    """

    count: int
    places: int  # experts of a token
    intermediate: int  # size of each expert
    scores: Literal["softmax", "sigmoid"] = "softmax"
    is_normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    adds_two_best: bool = False
    has_choice_bias: bool = False
    choice_bias_is_row: bool = False  # it is stored as [1, experts]
    has_bias: bool = False  # experts' products have one
    router_bias: bool = False
    shared: int = 0  # intermediate size of the mlp of all tokens; 0 = there is none
    has_shared_gate: bool = False


RecurrenceKind = Literal["delta", "mamba2", "convolution"]


class Recurrence(Struct, frozen=True):
    """A mixer of tokens with a state of fixed size, in the place of attention (docs/design/state.md). In float32:

    u        = the first rows of inputs(x); convolution: B * X, of inputs(x) = B, C, X
    c_t      = activation(bias + the sum over j < taps of w_j * u at t - taps + 1 + j), channel by channel; silu, or none
    delta    q, k, v = c, with q and k divided by their length, and q by sqrt(key_dim)
             decay = exp(-exp(A_log) * softplus(a + dt_bias)), strength = sigmoid(b), where a, b = gates(x)
             S_t = decay * S + k (strength * (v - k decay S))^T, o = q S_t            the gated delta rule, arXiv:2412.06464
    mamba2   v, k, q = c (x, B, C in arXiv:2405.21060), dt = softplus(a + dt_bias) within `limits`, decay = exp(-exp(A_log) * dt)
             S_t = decay * S + k (dt * v)^T, o = q S_t + skip * v
    y        = out(norm(o) * silu(z)), or out(norm(o * silu(z))) where `gates_first`; z: the other rows of inputs(x)
             convolution: y = out(C * c)                                             LFM2, arXiv:2511.23404

    The state of a sequence is S [value_heads, key_dim, value_dim] and the last taps - 1 inputs of the convolution.
    """

    kind: RecurrenceKind
    taps: int  # how many tokens the convolution reads
    key_heads: int = 0
    value_heads: int = 0  # a multiple of key_heads: neighbours share a key head
    key_dim: int = 0
    value_dim: int = 0
    width: int = 0  # convolution: channels
    has_conv_bias: bool = False
    has_bias: bool = False  # the projections have one
    norm_groups: int = 0  # mamba2: how many parts of o are normed on their own; 0: there is no norm. delta: each head
    gates_first: bool = False
    limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def num_values(self) -> int:
        """Numbers of a token that the mixer yields before its output projection."""
        return self.width or self.value_heads * self.value_dim

    @property
    def num_keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def channels(self) -> int:
        """The channels that the convolution reads."""
        return self.width or 2 * self.num_keys + self.num_values

    @property
    def num_gates(self) -> int:
        """Rows of the projection `gates`."""
        return self.value_heads * (2 if self.kind == "delta" else 1)

    @property
    def state_shapes(self) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """The shapes of the convolution's window and of S, which follow each other in a state."""
        return (self.taps - 1, self.channels), (self.value_heads, self.key_dim, self.value_dim)

    @property
    def state_size(self) -> int:
        """Numbers (float32) of the state of a layer."""
        window, matrix = self.state_shapes
        return math.prod(window) + math.prod(matrix)


class LayerConfig(Struct, frozen=True):
    """Settings that differ between the layers of a model."""

    window: int | None = None  # attention window in tokens; None = unlimited
    rope: int | None = 0  # index into ModelConfig.ropes; None = queries and keys are not rotated
    has_experts: bool = False  # ModelConfig.experts in the place of the mlp
    is_recurrent: bool = False  # ModelConfig.recurrence in the place of attention
    has_mixer: bool = (
        True  # False: neither attention nor a recurrence, and no norm before it; the mlp alone (Nemotron-H)
    )
    has_mlp: bool = True  # False: the mixer alone, with its norm


class Images(Struct, frozen=True):
    """How a model takes images. The transformers library makes features [tokens, hidden] of each, which stand in the place of the
    embeddings of as many tokens `token_id` in a prompt (backend/hosted/images.py).
    """

    token_id: int
    merge: int = 1  # with M-RoPE: patches that a feature stands for, along each side
    added_layers: int = 0  # so many layers add features of their own to what they yield (deepstack, arXiv:2406.04334)
    sees_whole: bool = False  # the tokens of an image see all of each other


class StackedExperts(Struct, frozen=True):
    """Tensors of all experts of a layer [experts, n, k], by their whole names behind the layer's prefix."""

    gate_up: str
    down: str
    gate_up_bias: str = ""  # [experts, n]; where Experts.has_bias
    down_bias: str = ""
    is_transposed: bool = False  # [experts, k, n]
    is_interleaved: bool = False  # rows of gate and up take turns
    is_optional: bool = False  # other checkpoints of the family have a tensor for each expert


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
    router: str = "mlp.gate"  # this and the following: of layers with experts
    choice_bias: str = "mlp.gate.e_score_correction_bias"  # the whole name, [experts]
    experts: str = "mlp.experts."  # the number of an expert and a dot follow
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    stacked: StackedExperts | None = None  # where a tensor holds those of all experts
    shared_gate_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    recurrent: RecurrentNames = RecurrentNames()
    latent: LatentNames = LatentNames()
    splits: tuple[Split, ...] = ()


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
    experts: Experts | None = None  # layers with `has_experts` have them
    held_experts: tuple[int, int] | None = None  # [first, end) of each layer's; None: all
    recurrence: Recurrence | None = None  # layers that are `is_recurrent` have it
    images: Images | None = None  # None: the model takes none
    latent: Latent | None = None  # layers with attention have it

    @property
    def held(self) -> range:
        """The layers that this rank has."""
        return range(*(self.held_layers or (0, self.num_layers)))

    @property
    def held_settings(self) -> tuple[LayerConfig, ...]:
        """The settings of these layers."""
        return self.layers[self.held.start : self.held.stop]

    @property
    def num_kv_layers(self) -> int:
        """The layers of this rank that have KV."""
        return sum(layer.has_mixer and not layer.is_recurrent for layer in self.held_settings)

    @property
    def num_recurrent_layers(self) -> int:
        """The layers of this rank that have a state."""
        return sum(layer.is_recurrent for layer in self.held_settings)

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state in the layers of this rank; 0: the model has none."""
        return 0 if self.recurrence is None else 4 * self.recurrence.state_size * self.num_recurrent_layers

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each layer in tokens; None = unlimited."""
        return tuple(layer.window for layer in self.layers)

    @property
    def sliding_window(self) -> int | None:
        """The widest window if every layer has one; None if any layer attends to all tokens, or has a state of them."""
        if self.recurrence is not None:
            return None
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

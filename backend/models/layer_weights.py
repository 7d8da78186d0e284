"""The weights of a layer, made of the parts of a checkpoint by the names and sizes of its description."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backend.architectures.description import ModelConfig
from backend.architectures.shards import stacked_rows
from backend.layers.attention import AttentionWeights
from backend.layers.experts import ExpertsWeights, MlpWeights
from backend.layers.latent import LatentWeights
from backend.layers.norm import NormWeights
from backend.layers.recurrent import RecurrentWeights
from backend.models.parts import Parts

Mixer = AttentionWeights | LatentWeights | RecurrentWeights


@dataclass(slots=True)
class LayerWeights:
    """Which norms a layer has, LayerNames says; LayerConfig, if it has both of attention and mlp."""

    attention: Mixer | None
    mlp: MlpWeights | ExpertsWeights | None
    attention_norm: NormWeights | None
    attention_out_norm: NormWeights | None
    mlp_norm: NormWeights | None
    mlp_out_norm: NormWeights | None


def layer_weights(config: ModelConfig, parts: Parts, index: int) -> LayerWeights:
    """The weights of the layer of this number."""
    names, prefix, settings = config.names.layer, f"{config.names.layers}{index}.", config.layers[index]

    def norm_of(name: str | None, is_there: bool) -> NormWeights | None:
        return None if name is None or not is_there else norm_weights(config, parts, prefix + name, config.hidden_size)

    mixes, has_mlp = settings.has_mixer, settings.has_mlp
    attention_norm, attention_out_norm = (
        norm_of(name, mixes) for name in (names.attention_norm, names.attention_out_norm)
    )
    mixer = _mixer(config, parts, prefix, settings.is_recurrent) if mixes else None
    mlp_norm, mlp_out_norm = (norm_of(name, has_mlp) for name in (names.mlp_norm, names.mlp_out_norm))
    mlp = (_experts if settings.has_experts else _mlp)(config, parts, prefix) if has_mlp else None
    return LayerWeights(mixer, mlp, attention_norm, attention_out_norm, mlp_norm, mlp_out_norm)


def _mixer(config: ModelConfig, parts: Parts, prefix: str, is_recurrent: bool) -> Mixer:
    if is_recurrent:
        return _recurrent(config, parts, prefix)
    return (_attention if config.latent is None else _latent)(config, parts, prefix)


def _attention(config: ModelConfig, parts: Parts, prefix: str) -> AttentionWeights:
    block, names, hidden, head = config.block, config.names.layer, config.hidden_size, config.head_dim
    q, kv = config.num_heads * head, config.num_kv_heads * head
    qk = {"none": None, "head": (head, head), "row": (q, kv)}[block.qk_norm]
    rows = (q, kv, kv, q) if block.gates_attention else (q, kv, kv)
    return AttentionWeights(
        qkv=parts.linear(stacked_rows(prefix, names.qkv, rows), hidden, block.qkv_bias),
        out=parts.linear({prefix + names.out: hidden}, q, block.out_bias and config.shard.rank == 0),
        q_norm=None if qk is None else _norm_weight(config, parts, prefix + names.q_norm, qk[0]),
        k_norm=None if qk is None else _norm_weight(config, parts, prefix + names.k_norm, qk[1]),
        sinks=parts.take(prefix + names.sinks, (config.num_heads,)).float() if block.attention_sinks else None,
    )


def _latent(config: ModelConfig, parts: Parts, prefix: str) -> LatentWeights:
    of, names, hidden, heads, block = (
        config.latent,
        config.names.layer,
        config.hidden_size,
        config.num_heads,
        config.block,
    )
    assert of is not None
    own, queries = names.latent, heads * of.query_dim
    first = (own.query_down, of.query_rank) if of.query_rank else (own.query, queries)
    rows = {prefix + first[0]: first[1], prefix + own.down: of.rank + of.rotated}
    weights = LatentWeights(
        of,
        inputs=parts.linear(rows, hidden, block.qkv_bias),
        norm=parts.take(f"{prefix}{own.norm}.weight", (of.rank,)),
        keys=parts.linear({prefix + own.keys: heads * of.rank}, of.plain, False, is_rounded=False, by_head=True),
        values=parts.linear(
            {prefix + own.values: heads * of.value_dim}, of.rank, False, is_rounded=False, by_head=True
        ),
        out=parts.linear({prefix + names.out: hidden}, heads * of.value_dim, block.out_bias),
    )
    if of.query_rank:
        weights.query_norm = parts.take(f"{prefix}{own.query_norm}.weight", (of.query_rank,))
        weights.queries = parts.linear({prefix + own.query_up: queries}, of.query_rank, False)
    return weights


def _recurrent(config: ModelConfig, parts: Parts, prefix: str) -> RecurrentWeights:
    settings, names, hidden = config.recurrence, config.names.layer.recurrent, config.hidden_size
    assert settings is not None
    channels, heads = settings.channels, settings.value_heads

    def floats(name: str, *shape: int) -> Tensor:
        return parts.take(prefix + name, shape).float()

    values, keys = settings.num_values, settings.num_keys
    # A convolution has one tensor; others have two, for the convolution and the gate, or four: queries, keys, values, gate.
    sizes = {1: (3 * values,), 2: (channels, values), 4: (keys, keys, values, values)}[len(names.inputs)]
    weights = RecurrentWeights(
        settings,
        inputs=parts.linear(stacked_rows(prefix, names.inputs, sizes), hidden, settings.has_bias),
        gates=None,
        out=parts.linear({prefix + names.out: hidden}, values, settings.has_bias),
        taps=floats(names.convolution + ".weight", channels, 1, settings.taps)[:, 0].contiguous(),
        conv_bias=floats(names.convolution + ".bias", channels) if settings.has_conv_bias else None,
    )
    if settings.kind == "convolution":
        return weights
    gates = dict.fromkeys((prefix + name for name in names.gates), heads)
    weights.gates = parts.linear(gates, hidden, settings.has_bias, is_rounded=False)
    weights.rate, weights.dt_bias = floats(names.log_rate, heads).exp(), floats(names.dt_bias, heads)
    if settings.kind == "mamba2":
        weights.skip = floats(names.skip, heads)
        weights.norm = floats(names.norm + ".weight", values) if settings.norm_groups else None
    else:
        weights.norm = floats(names.norm + ".weight", settings.value_dim)
    return weights


def _mlp(config: ModelConfig, parts: Parts, prefix: str) -> MlpWeights:
    names, has_bias = config.names.layer, config.block.mlp_bias
    adds_bias = has_bias and config.shard.rank == 0
    return _mlp_of(config, parts, prefix, (names.gate_up, names.down), config.intermediate_size, has_bias, adds_bias)


def _mlp_of(
    config: ModelConfig,
    parts: Parts,
    prefix: str,
    names: tuple[tuple[str, ...], str],
    inter: int,
    has_bias: bool,
    adds_bias: bool,
) -> MlpWeights:
    """names: of gate_up and down. inter: the intermediate size. adds_bias: False where another rank adds that of down."""
    inputs = (inter, inter) if config.block.gated else (inter,)
    gate_up, down = stacked_rows(prefix, names[0], inputs), {prefix + names[1]: config.hidden_size}
    return MlpWeights(parts.linear(gate_up, config.hidden_size, has_bias), parts.linear(down, inter, adds_bias))


def _experts(config: ModelConfig, parts: Parts, prefix: str) -> ExpertsWeights:
    experts, names = config.experts, config.names.layer
    assert experts is not None
    rows = {prefix + names.router: experts.count}
    if experts.has_shared_gate:
        rows[prefix + names.shared_gate] = 1
    router = parts.linear(rows, config.hidden_size, experts.router_bias, is_rounded=False)
    bias = None
    if experts.has_choice_bias:
        shape = (1, experts.count) if experts.choice_bias_is_row else (experts.count,)
        bias = parts.take(prefix + names.choice_bias, shape).float().flatten()
    of_expert, inter, has_bias = (names.expert_gate_up, names.expert_down), experts.intermediate, experts.has_bias
    first, end = config.held_experts or (0, experts.count)
    held = [
        _mlp_of(config, parts, f"{prefix}{names.experts}{index}.", of_expert, inter, has_bias, has_bias)
        for index in range(first, end)
    ]
    shared = None
    if experts.shared:
        of_shared, has_bias = (names.shared_gate_up, names.shared_down), config.block.mlp_bias
        adds_bias = has_bias and config.shard.rank == 0
        shared = _mlp_of(config, parts, prefix, of_shared, experts.shared, has_bias, adds_bias)
    return ExpertsWeights(experts, router, bias, held, first, shared)


def norm_weights(config: ModelConfig, parts: Parts, name: str, size: int) -> NormWeights:
    bias = parts.take(name + ".bias", (size,)) if config.block.norm_bias else None
    return NormWeights(_norm_weight(config, parts, name, size), bias)


def _norm_weight(config: ModelConfig, parts: Parts, name: str, size: int) -> Tensor:
    weight = parts.take(name + ".weight", (size,))
    if config.block.norm_offset:  # in float32: the sum would be rounded in the model's dtype
        weight = weight.float() + config.block.norm_offset
    return weight

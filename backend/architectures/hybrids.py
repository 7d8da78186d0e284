"""Families with recurrent layers: most layers keep a state of fixed size in the place of KV, and some attend."""

from __future__ import annotations

from collections.abc import Callable, Collection

from msgspec.structs import replace

from backend.api.checkpoint.model_files import REMEDY, shown
from backend.api.checkpoint.quantised import FILE
from backend.api.errors import ConfigError
from backend.architectures.common import Sizes, describe, read_block, read_sizes
from backend.architectures.description import (
    Block,
    LayerConfig,
    LayerNames,
    ModelConfig,
    Recurrence,
    StackedExperts,
    TensorNames,
)
from backend.architectures.mixtures import QWEN, behind, mixed, read_experts, with_experts
from backend.architectures.recurrent_names import RecurrentNames, Split
from backend.architectures.rope import RopeDefaults, read_rope
from backend.architectures.settings import Epsilon, Factor, Settings, Size

# Keys of LFM2's own trainer, whose values other keys repeat, or that are of its first numbers.
_LFM2_UNUSED = """
    block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init conv_dim
    conv_dim_out conv_use_xavier_init num_heads use_pos_enc
""".split()
_PREDICTORS = (r"mtp\..*",)  # tensors of what predicts further tokens
LFM2 = LayerNames(
    out="self_attn.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    recurrent=RecurrentNames(inputs=("conv.in_proj",), out="conv.out_proj", convolution="conv.conv"),
)
LFM2_MOE = replace(
    LFM2,
    router="feed_forward.gate",
    choice_bias="feed_forward.expert_bias",
    experts="feed_forward.experts.",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
)
# Some checkpoints have a tensor for each expert, others one for all.
QWEN_EXPERTS = replace(
    QWEN, stacked=StackedExperts("mlp.experts.gate_up_proj", "mlp.experts.down_proj", is_optional=True)
)


def read_mixers(
    settings: Settings, num_layers: int, recurrent: tuple[str, ...], attends: Collection[int] | None = None
) -> list[bool]:
    """For each layer of `layer_types`, if it is recurrent: of a type that is named so. Other layers attend to everything.

    attends: the layers that attend, where config.json has no `layer_types`.
    """
    kinds = settings.find("layer_types", list[str])
    if kinds is None and attends is not None:
        return [layer not in attends for layer in range(num_layers)]
    kinds = kinds or []
    others = sorted(set(kinds) - {*recurrent, "full_attention", "attention"})
    if others:
        raise ConfigError(
            f"{FILE}: layer_types: layer type {shown(others[0])} is not supported; supported are {', '.join(recurrent)} and "
            f"full_attention"
        )
    if len(kinds) != num_layers:
        raise ConfigError(f"{FILE}: layer_types has {len(kinds)} entries for num_hidden_layers {num_layers}; {REMEDY}")
    return [kind in recurrent for kind in kinds]


def with_recurrence(config: ModelConfig, recurrence: Recurrence) -> ModelConfig:
    """Raises ConfigError for heads that cannot share keys."""
    if recurrence.key_heads and recurrence.value_heads % recurrence.key_heads:
        raise ConfigError(
            f"{FILE}: {recurrence.value_heads} recurrent value heads are no multiple of {recurrence.key_heads} key heads; "
            f"{REMEDY}"
        )
    return replace(config, recurrence=recurrence)


def qwen3_5(settings: Settings, architecture: str) -> ModelConfig:
    sizes = read_sizes(settings, 256)
    return _qwen(settings, architecture, sizes, LayerNames())


def qwen3_5_moe(settings: Settings, architecture: str) -> ModelConfig:
    """All layers have experts."""
    sizes = read_sizes(settings, 256, inter_key="moe_intermediate_size")
    settings.ignore("intermediate_size")
    settings.only("norm_topk_prob", True)
    return _with_shared_expert(settings, _qwen(settings, architecture, sizes, QWEN_EXPERTS), lambda layer: True)


def qwen3_next(settings: Settings, architecture: str) -> ModelConfig:
    """Like Qwen3.5, with the projections of a key head in groups of rows: its query, its key, and values and gates of it."""
    settings.ignore("use_sliding_window", "max_window_layers", "sliding_window")
    sizes, delta = read_sizes(settings, 256), _read_delta(settings)
    values = delta.value_heads // delta.key_heads
    inputs = (
        ("query", delta.key_dim),
        ("key", delta.key_dim),
        ("value", rows := values * delta.value_dim),
        ("z", rows),
    )
    splits = (
        _split("linear_attn.in_proj_qkvz", delta.key_heads, inputs),
        _split("linear_attn.in_proj_ba", delta.key_heads, (("b", values), ("a", values))),
    )
    recurrent = RecurrentNames(
        inputs=tuple(name for name, _ in splits[0].parts),
        gates=("linear_attn.in_proj_ba.a", "linear_attn.in_proj_ba.b"),
    )
    names = replace(QWEN_EXPERTS, recurrent=recurrent, splits=splits)
    step = settings.get("decoder_sparse_step", Size, 1)
    dense = settings.find("mlp_only_layers", list[int]) or []
    config = _qwen(settings, architecture, sizes, names)
    return _with_shared_expert(
        settings,
        config,
        lambda layer: layer not in dense and (layer + 1) % step == 0,
        settings.get("norm_topk_prob", bool, True),
    )


def _qwen(settings: Settings, architecture: str, sizes: Sizes, names: LayerNames) -> ModelConfig:
    """Three layers of the gated delta rule, then one that attends, whose result is gated; RMS norms store weights less 1."""
    settings.ignore("mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
    unused = (*_PREDICTORS, *behind(sizes.layers, settings.get("mtp_num_hidden_layers", int, 0)))
    settings.only("attn_output_gate", True)
    every = settings.get("full_attention_interval", Size, 4)
    attends = [layer for layer in range(sizes.layers) if (layer + 1) % every == 0]
    kinds = read_mixers(settings, sizes.layers, ("linear_attention",), attends)
    layers = [LayerConfig(is_recurrent=flag) for flag in kinds]
    rope = read_rope(settings, sizes.head_dim, RopeDefaults(partial=0.25))
    bias = settings.get("attention_bias", bool, False)
    block = read_block(settings, qkv_bias=bias, out_bias=bias, qk_norm="head", norm_offset=1.0, gates_attention=True)
    split = _split("self_attn.q_proj", sizes.heads, (("query", sizes.head_dim), ("gate", sizes.head_dim)))
    qkv = ("self_attn.q_proj.query", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj.gate")
    tensors = TensorNames(layer=replace(names, qkv=qkv, splits=(split, *names.splits)), unused=unused)
    config = describe(settings, architecture, sizes, layers, [rope], block, tensors)
    return with_recurrence(config, _read_delta(settings))


def _with_shared_expert(
    settings: Settings, config: ModelConfig, has_experts: Callable[[int], bool], is_normalised: bool = True
) -> ModelConfig:
    mixture = read_experts(
        settings,
        is_normalised=is_normalised,
        intermediate=settings.get("moe_intermediate_size", Size, 512),
        shared=settings.get("shared_expert_intermediate_size", Size, 512),
        has_shared_gate=True,
    )
    return with_experts(replace(config, layers=tuple(mixed(list(config.layers), has_experts))), mixture)


def _split(stored: str, groups: int, parts: tuple[tuple[str, int], ...]) -> Split:
    """parts: the ends of their names, and their rows in a group."""
    return Split(stored, groups, tuple((f"{stored}.{name}", rows) for name, rows in parts))


def _read_delta(settings: Settings) -> Recurrence:
    return Recurrence(
        kind="delta",
        taps=settings.get("linear_conv_kernel_dim", Size, 4),
        key_heads=settings.get("linear_num_key_heads", Size, 16),
        value_heads=settings.get("linear_num_value_heads", Size, 32),
        key_dim=settings.get("linear_key_head_dim", Size, 128),
        value_dim=settings.get("linear_value_head_dim", Size, 128),
    )


def lfm2(settings: Settings, architecture: str) -> ModelConfig:
    """Short convolutions between two gates, and some layers that attend."""
    sizes = read_sizes(settings, inter_key="block_ff_dim" if settings.has("block_ff_dim") else "intermediate_size")
    settings.ignore("intermediate_size")
    sizes = sizes._replace(intermediate=_lfm2_intermediate(settings, sizes))
    return _lfm2(settings, architecture, sizes, LFM2, settings.find("full_attn_idxs", list[int]))


def lfm2_moe(settings: Settings, architecture: str) -> ModelConfig:
    """Sigmoids choose, with a bias; the first layers are dense."""
    config = _lfm2(settings, architecture, read_sizes(settings), LFM2_MOE, None)
    mixture = read_experts(
        settings,
        intermediate=settings.need("moe_intermediate_size", Size),
        scores="sigmoid",
        is_normalised=settings.get("norm_topk_prob", bool, True),
        scale=settings.get("routed_scaling_factor", Factor, 1.0),
        has_choice_bias=settings.get("use_expert_bias", bool, True),
    )
    dense = settings.get("num_dense_layers", int, 2)
    return with_experts(replace(config, layers=tuple(mixed(list(config.layers), lambda at: at >= dense))), mixture)


def _lfm2(
    settings: Settings, architecture: str, sizes: Sizes, names: LayerNames, attends: Collection[int] | None
) -> ModelConfig:
    settings.ignore(*_LFM2_UNUSED)
    layers = [LayerConfig(is_recurrent=flag) for flag in read_mixers(settings, sizes.layers, ("conv",), attends)]
    rope = read_rope(settings, sizes.head_dim, RopeDefaults(theta=1e6))
    tied = settings.get("tie_embedding", bool, True)
    has_bias = settings.get("conv_bias", bool, False)
    block = Block(norm_eps=settings.get("norm_eps", Epsilon, 1e-5), qk_norm="head")
    tensors = TensorNames(norm="model.embedding_norm", layer=names)
    config = describe(settings, architecture, sizes, layers, [rope], block, tensors, tied)
    convolution = Recurrence(
        kind="convolution",
        taps=settings.get("conv_L_cache", Size, 3),
        width=sizes.hidden,
        has_conv_bias=has_bias,
        has_bias=has_bias,
    )
    return with_recurrence(config, convolution)


def _lfm2_intermediate(settings: Settings, sizes: Sizes) -> int:
    """The width of the mlp: two thirds of what config.json says, rounded up to a multiple, where it says so."""
    multiple = settings.get("block_multiple_of", Size, 256)
    factor = settings.get("block_ffn_dim_multiplier", Factor, 1.0)
    if not settings.get("block_auto_adjust_ff_dim", bool, True):
        return sizes.intermediate
    width = int(factor * (2 * sizes.intermediate // 3))
    if not 1 <= width <= 2**40:
        raise settings.unsupported("block_ffn_dim_multiplier", f"it makes the mlp {shown(width)} wide")
    return -(-width // multiple) * multiple

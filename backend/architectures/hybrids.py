"""Families with recurrent layers: most layers keep a state of fixed size in the place of KV, and some attend."""

from __future__ import annotations

from collections.abc import Sequence

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
    RecurrentNames,
    Split,
)
from backend.architectures.rope import RopeDefaults, read_rope
from backend.architectures.settings import Epsilon, Settings, Size

# Keys of LFM2's own trainer, whose values other keys repeat, or that are of its first numbers.
_LFM2_UNUSED = """
    block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init conv_dim
    conv_dim_out conv_use_xavier_init num_heads use_pos_enc
""".split()
_CONVOLUTION = RecurrentNames(inputs=("conv.in_proj",), out="conv.out_proj", convolution="conv.conv")


def read_mixers(
    settings: Settings, num_layers: int, recurrent: str, attends: Sequence[int] | None = None
) -> list[bool]:
    """For each layer of `layer_types`, if it is recurrent: of the type that is named so. Other layers attend to everything.

    attends: the layers that attend, where config.json has no `layer_types`.
    """
    kinds = settings.find("layer_types", list[str])
    if kinds is None and attends is not None:
        return [layer not in attends for layer in range(num_layers)]
    kinds = kinds or []
    others = sorted(set(kinds) - {recurrent, "full_attention", "attention"})
    if others:
        raise ConfigError(
            f"{FILE}: layer_types: layer type {shown(others[0])} is not supported; supported are {recurrent} and full_attention"
        )
    if len(kinds) != num_layers:
        raise ConfigError(f"{FILE}: layer_types has {len(kinds)} entries for num_hidden_layers {num_layers}; {REMEDY}")
    return [kind == recurrent for kind in kinds]


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
    return _qwen(settings, architecture, sizes, _read_delta(settings), LayerNames(splits=(_query_and_gate(sizes),)))


def _qwen(settings: Settings, architecture: str, sizes: Sizes, delta: Recurrence, names: LayerNames) -> ModelConfig:
    """Three layers of the gated delta rule, then one that attends, whose result is gated; RMS norms store weights less 1."""
    every = settings.get("full_attention_interval", Size, 4)
    attends = [layer for layer in range(sizes.layers) if (layer + 1) % every == 0]
    layers = [
        LayerConfig(is_recurrent=flag) for flag in read_mixers(settings, sizes.layers, "linear_attention", attends)
    ]
    rope = read_rope(settings, sizes.head_dim, RopeDefaults(partial=0.25, known=("mrope_section", "mrope_interleaved")))
    bias = settings.get("attention_bias", bool, False)
    block = read_block(settings, qkv_bias=bias, out_bias=bias, qk_norm="head", norm_offset=1.0, gates_attention=True)
    qkv = ("self_attn.q_proj.query", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj.gate")
    config = describe(settings, architecture, sizes, layers, [rope], block, replace(names, qkv=qkv))
    return with_recurrence(config, delta)


def _query_and_gate(sizes: Sizes) -> Split:
    parts = (("self_attn.q_proj.query", sizes.head_dim), ("self_attn.q_proj.gate", sizes.head_dim))
    return Split("self_attn.q_proj", sizes.heads, parts)


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
    settings.ignore(*_LFM2_UNUSED)
    sizes = read_sizes(settings, inter_key="block_ff_dim" if settings.has("block_ff_dim") else "intermediate_size")
    settings.ignore("intermediate_size")
    width = _lfm2_intermediate(settings, sizes)
    attends = settings.find("full_attn_idxs", list[int])
    layers = [LayerConfig(is_recurrent=flag) for flag in read_mixers(settings, sizes.layers, "conv", attends)]
    rope = read_rope(settings, sizes.head_dim, RopeDefaults(theta=1e6))
    tied = settings.get("tie_embedding", bool, True)
    has_bias = settings.get("conv_bias", bool, False)
    names = LayerNames(
        out="self_attn.out_proj",
        gate_up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        attention_norm="operator_norm",
        mlp_norm="ffn_norm",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        recurrent=_CONVOLUTION,
    )
    block = Block(norm_eps=settings.get("norm_eps", Epsilon, 1e-5), qk_norm="head")
    config = describe(settings, architecture, sizes._replace(intermediate=width), layers, [rope], block, names, tied)
    convolution = Recurrence(
        kind="convolution",
        taps=settings.get("conv_L_cache", Size, 3),
        width=sizes.hidden,
        has_conv_bias=has_bias,
        has_bias=has_bias,
    )
    config = replace(config, names=replace(config.names, norm="model.embedding_norm"))
    return with_recurrence(config, convolution)


def _lfm2_intermediate(settings: Settings, sizes: Sizes) -> int:
    """The width of the mlp: two thirds of what config.json says, rounded up to a multiple, where it says so."""
    multiple = settings.get("block_multiple_of", Size, 256)
    factor = settings.get("block_ffn_dim_multiplier", float, 1.0)
    if not settings.get("block_auto_adjust_ff_dim", bool, True):
        return sizes.intermediate
    width = int(factor * (2 * sizes.intermediate // 3))
    return -(-width // multiple) * multiple

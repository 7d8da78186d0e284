"""Families whose checkpoints keep several projections in one tensor: Phi-3 and 4, GLM, Granite 4."""

from __future__ import annotations

from backend.api.checkpoint.model_files import shown
from backend.api.checkpoint.quantised import FILE
from backend.api.errors import ConfigError
from backend.architectures.common import alike, describe, read_activation, read_layer_types, read_sizes, read_window
from backend.architectures.description import Block, LayerConfig, LayerNames, ModelConfig
from backend.architectures.llama import granite_factors
from backend.architectures.rope import RopeDefaults, read_rope
from backend.architectures.settings import Epsilon, Settings

GATE_UP = ("mlp.gate_up_proj",)
# Phi-3's first releases call longrope su, and one of them yarn.
PHI_ROPE = RopeDefaults(partial=1.0, original_max_position=4096, aliases=(("su", "longrope"), ("yarn", "longrope")))


def phi3(settings: Settings, architecture: str) -> ModelConfig:
    sizes, window = read_sizes(settings), read_window(settings)
    rope = read_rope(settings, sizes.head_dim, PHI_ROPE)
    settings.only("interpolate_factor", 1)
    settings.only("full_attn_mod", 1)
    block = Block(norm_eps=settings.get("rms_norm_eps", Epsilon, 1e-5), activation=read_activation(settings))
    names = LayerNames(qkv=("self_attn.qkv_proj",), gate_up=GATE_UP)
    return describe(settings, architecture, sizes, alike(sizes, window), [rope], block, names)


def glm(settings: Settings, architecture: str) -> ModelConfig:
    """GLM 4 has norms of what the attention and the mlp put out, besides those of their inputs."""
    sizes = read_sizes(settings, head_dim=128)
    rope = read_rope(settings, sizes.head_dim, RopeDefaults(partial=0.5))
    block = Block(
        norm_eps=settings.get("rms_norm_eps", Epsilon, 1.5625e-7),
        activation=read_activation(settings),
        qkv_bias=settings.get("attention_bias", bool, True),
        rope_interleaved=True,
    )
    names = LayerNames(gate_up=GATE_UP)
    if architecture == "Glm4ForCausalLM":
        out, mlp_out = "post_self_attn_layernorm", "post_mlp_layernorm"
        names = LayerNames(gate_up=GATE_UP, attention_out_norm=out, mlp_out_norm=mlp_out)
    return describe(settings, architecture, sizes, alike(sizes), [rope], block, names)


def granite4(settings: Settings, architecture: str) -> ModelConfig:
    """Granite 4 without experts and without layers of recurrent state, as its micro size is."""
    settings.only("num_local_experts", 0)
    settings.ignore("num_experts_per_tok", "intermediate_size")
    settings.ignore(*(key for key in settings.content if key.startswith("mamba_")), "time_step_limit")
    settings.only("normalization_function", "rmsnorm")
    settings.only("position_embedding_type", "rope", "nope")
    if "num_local_experts" not in settings.content:  # transformers then takes 8
        raise ConfigError(f"{FILE}: num_local_experts is missing, 0 is supported; use a model without experts")
    sizes = read_sizes(settings, inter_key="shared_intermediate_size")
    types = settings.get("layer_types", list[str], ["mamba"])
    other = set(types) - {"attention", "full_attention"}
    if other:
        raise ConfigError(
            f"{FILE}: layer_types: layer type {shown(min(other))} has recurrent state, which is not supported; use a model "
            f"whose layers all are attention"
        )
    read_layer_types(settings, sizes.layers, lambda layer: False)
    rotates = settings.content.get("position_embedding_type") == "rope"
    bias = settings.get("attention_bias", bool, False)
    block = Block(
        norm_eps=settings.get("rms_norm_eps", Epsilon, 1e-6),
        activation=read_activation(settings),
        qkv_bias=bias,
        out_bias=bias,
        **granite_factors(settings),
    )
    names = LayerNames(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
    layers = (LayerConfig(rope=0 if rotates else None),) * sizes.layers
    return describe(settings, architecture, sizes, layers, [read_rope(settings, sizes.head_dim)], block, names)

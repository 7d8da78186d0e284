"""Families whose checkpoints keep several projections in one tensor: Phi-3 and 4, GLM."""

from __future__ import annotations

from backend.architectures.common import alike, describe, read_activation, read_sizes, read_window
from backend.architectures.description import Block, LayerNames, ModelConfig
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

"""Gemma 1 to 3: norm weights stored less 1, an embedding that grows with the width, a gated mlp of GELU (arXiv:2408.00118)."""

from __future__ import annotations

import math
from typing import Any

from backend.architectures.common import (
    SANDWICH,
    Sizes,
    alike,
    describe,
    read_activation,
    read_layer_types,
    read_pattern,
    read_sizes,
    read_window,
    windowed,
)
from backend.architectures.description import Block, LayerNames, ModelConfig
from backend.architectures.rope import RopeDefaults, read_rope, read_ropes
from backend.architectures.settings import Cap, Epsilon, Factor, Settings

GELU = "gelu_pytorch_tanh"


def gemma(settings: Settings, architecture: str) -> ModelConfig:
    """The first releases say `gelu` and mean its approximation by tanh, which transformers takes as well."""
    sizes = read_sizes(settings, head_dim=256)
    rope = read_rope(settings, sizes.head_dim)
    settings.ignore("hidden_activation")
    settings.only("hidden_act", "gelu", GELU)
    block = _block(settings, sizes, activation="gelu_tanh")
    return describe(settings, architecture, sizes, alike(sizes), [rope], block, tied=True)


def gemma2(settings: Settings, architecture: str) -> ModelConfig:
    """Every second layer has a window; attention scores and logits are capped."""
    sizes, window = read_sizes(settings, head_dim=256), read_window(settings)
    types = read_layer_types(settings, sizes.layers, lambda layer: layer % 2 == 0)
    layers = windowed(types, window)
    rope = read_rope(settings, sizes.head_dim)
    settings.ignore("hidden_act", "sliding_window_size")
    cap = _cap(settings, "attn_logit_softcapping", 50.0)
    block = _block(settings, sizes, attention_softcap=cap, logit_cap=30.0, **_scaled(settings))
    # VaultGemma is Gemma 2 without norms of what the attention and the mlp put out.
    names = LayerNames(mlp_norm="pre_feedforward_layernorm") if architecture.startswith("Vault") else SANDWICH
    return describe(settings, architecture, sizes, layers, [rope], block, names, tied=True)


def gemma3(settings: Settings, architecture: str) -> ModelConfig:
    """Five of six layers have a window, and rotary settings of their own, which are not scaled."""
    sizes, window = read_sizes(settings, head_dim=256), read_window(settings)
    types = read_layer_types(settings, sizes.layers, read_pattern(settings, 6))
    layers = windowed(types, window, full=0, sliding=1)
    local = RopeDefaults(theta=1e4, theta_key="rope_local_base_freq")
    ropes = read_ropes(settings, sizes.head_dim, RopeDefaults(theta=1e6), local)
    settings.ignore("hidden_act")
    block = _block(settings, sizes, qk_norm="head", **_scaled(settings))
    return describe(settings, architecture, sizes, layers, ropes, block, SANDWICH, tied=True)


def _scaled(settings: Settings) -> dict[str, Any]:
    scale = settings.get("query_pre_attn_scalar", Factor, 256.0) ** -0.5
    return dict(attention_scale=scale, activation=read_activation(settings, "hidden_activation", GELU))


def _cap(settings: Settings, key: str, default: float) -> float:
    """`default` is for a file without the key; null turns a cap off."""
    return settings.get(key, Cap, 0.0) if key in settings.content else default


def _block(settings: Settings, sizes: Sizes, logit_cap: float = 0.0, **fields: Any) -> Block:
    """`logit_cap`: where config.json does not say it; `fields`: of Block."""
    bias = settings.get("attention_bias", bool, False)
    return Block(
        norm_eps=settings.get("rms_norm_eps", Epsilon, 1e-6),
        norm_offset=1.0,
        qkv_bias=bias,
        out_bias=bias,
        embedding_scale=math.sqrt(sizes.hidden),
        embedding_scale_is_rounded=True,
        logit_softcap=_cap(settings, "final_logit_softcapping", logit_cap),
        **fields,
    )

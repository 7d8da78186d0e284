"""Families of Llama's shape: RMS norms of the inputs of attention and mlp, a gated mlp, the head dimensions rotated by halves."""

from __future__ import annotations

from typing import Any

from backend.api.checkpoint.model_files import REMEDY
from backend.api.checkpoint.quantised import FILE
from backend.api.errors import ConfigError
from backend.architectures.common import (
    alike,
    describe,
    read_block,
    read_layer_types,
    read_sizes,
    read_window,
    read_window_layers,
    windowed,
)
from backend.architectures.description import LayerConfig, ModelConfig, QueryScaling
from backend.architectures.rope import PLAIN, SECTIONS, RopeDefaults, read_rope
from backend.architectures.settings import Factor, Settings, Size


def llama(settings: Settings, architecture: str) -> ModelConfig:
    settings.ignore("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
    bias = settings.get("attention_bias", bool, False)
    return _dense(settings, architecture, qkv_bias=bias, out_bias=bias, mlp_bias=settings.get("mlp_bias", bool, False))


def mistral(settings: Settings, architecture: str) -> ModelConfig:
    """One window for all layers; `layer_types` may say the same."""
    window = read_window(settings)
    num_layers = settings.need("num_hidden_layers", Size)
    if "layer_types" in settings.content:
        types = read_layer_types(settings, num_layers, lambda layer: window is not None)
        if types != [window is not None] * num_layers:
            raise settings.unsupported("layer_types", "all layers have the window here; MinistralForCausalLM reads it")
    return _dense(settings, architecture, window=window)


def ministral(settings: Settings, architecture: str) -> ModelConfig:
    """Mistral with windows for each layer."""
    window = read_window(settings)
    sizes = read_sizes(settings)
    types = read_layer_types(settings, sizes.layers, lambda layer: window is not None)
    layers = windowed(types, window)
    rope = read_rope(settings, sizes.head_dim)
    return describe(settings, architecture, sizes, layers, [rope], read_block(settings))


def ministral3(settings: Settings, architecture: str) -> ModelConfig:
    """Mistral with YaRN, whose queries grow beyond the positions of the first training."""
    if not any(settings.content.get(key) for key in SECTIONS):
        raise ConfigError(f"{FILE}: it lacks the key {SECTIONS[0]}; {REMEDY}")
    sizes, window = read_sizes(settings, head_dim=128), read_window(settings)
    key = "llama_4_scaling_beta"
    rope = read_rope(settings, sizes.head_dim, RopeDefaults(theta=1e6, known=(key,)))
    section = next(settings.content[name] for name in SECTIONS if settings.content.get(name))
    beta = Settings(section, SECTIONS[0]).get(key, float, 0.0)
    scaling = QueryScaling(beta, rope.original_max_position) if beta else None
    block = read_block(settings, eps=1e-5, query_scaling=scaling)
    return describe(settings, architecture, sizes, alike(sizes, window), [rope], block)


def qwen2(settings: Settings, architecture: str) -> ModelConfig:
    return _qwen(settings, architecture, qkv_bias=True)


def qwen3(settings: Settings, architecture: str) -> ModelConfig:
    bias = settings.get("attention_bias", bool, False)
    return _qwen(settings, architecture, head_dim=128, qkv_bias=bias, out_bias=bias, qk_norm="head")


def granite(settings: Settings, architecture: str) -> ModelConfig:
    """Llama with factors of embedding, attention, branches and logits (arXiv:2203.03466 calls them multipliers)."""
    bias = settings.get("attention_bias", bool, False)
    mlp_bias = settings.get("mlp_bias", bool, False)
    return _dense(settings, architecture, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias, **granite_factors(settings))


def granite_factors(settings: Settings) -> dict[str, Any]:
    """Fields of Block. The logits are divided by `logits_scaling`."""
    return dict(
        embedding_scale=settings.get("embedding_multiplier", Factor, 1.0),
        residual_scale=settings.get("residual_multiplier", Factor, 1.0),
        attention_scale=settings.get("attention_multiplier", Factor, 1.0),
        logit_scale=1 / settings.get("logits_scaling", Factor, 1.0),
    )


def smollm3(settings: Settings, architecture: str) -> ModelConfig:
    """Llama, of which every fourth layer does not rotate (arXiv:2501.18795)."""
    sizes = read_sizes(settings)
    every = settings.get("no_rope_layer_interval", Size, 4)
    rotates = settings.get("no_rope_layers", list[int], [(layer + 1) % every for layer in range(sizes.layers)])
    if len(rotates) != sizes.layers:
        raise ConfigError(
            f"{FILE}: no_rope_layers has {len(rotates)} entries for num_hidden_layers {sizes.layers}; {REMEDY}"
        )
    window = read_window(settings, settings.get("use_sliding_window", bool, False))
    settings.ignore("max_window_layers")
    types = read_layer_types(settings, sizes.layers, lambda layer: window is not None and not rotates[layer])
    layers = [
        LayerConfig(window if has else None, 0 if turn else None) for has, turn in zip(types, rotates, strict=True)
    ]
    bias = settings.get("attention_bias", bool, False)
    block = read_block(settings, qkv_bias=bias, out_bias=bias, mlp_bias=settings.get("mlp_bias", bool, False))
    rope = read_rope(settings, sizes.head_dim, RopeDefaults(theta=2e6))
    return describe(settings, architecture, sizes, layers, [rope], block, tied=True)


def seed_oss(settings: Settings, architecture: str) -> ModelConfig:
    return _dense(
        settings,
        architecture,
        head_dim=128,
        qkv_bias=settings.get("attention_bias", bool, True),
        out_bias=settings.get("attention_out_bias", bool, False),
        mlp_bias=settings.get("mlp_bias", bool, False),
    )


def helium(settings: Settings, architecture: str) -> ModelConfig:
    return _dense(
        settings,
        architecture,
        RopeDefaults(theta=1e5),
        head_dim=128,
        eps=1e-8,
        qkv_bias=settings.get("attention_bias", bool, False),
        mlp_bias=settings.get("mlp_bias", bool, False),
        rope_interleaved=True,
    )


def ernie(settings: Settings, architecture: str) -> ModelConfig:
    bias = settings.get("use_bias", bool, False)
    fields = dict(qkv_bias=bias, out_bias=bias, mlp_bias=bias, rope_interleaved=True)
    return _dense(settings, architecture, RopeDefaults(theta=5e5), tied=True, head_dim=128, eps=1e-5, **fields)


def _dense(
    settings: Settings,
    architecture: str,
    rope: RopeDefaults = PLAIN,
    head_dim: int | None = None,
    window: int | None = None,
    tied: bool = False,
    **block: Any,
) -> ModelConfig:
    """All layers alike. `block`: as `read_block` takes it."""
    sizes = read_sizes(settings, head_dim)
    ropes = [read_rope(settings, sizes.head_dim, rope)]
    return describe(
        settings, architecture, sizes, alike(sizes, window), ropes, read_block(settings, **block), tied=tied
    )


def _qwen(settings: Settings, architecture: str, head_dim: int | None = None, **block: Any) -> ModelConfig:
    sizes = read_sizes(settings, head_dim)
    layers = read_window_layers(settings, sizes)
    rope = read_rope(settings, sizes.head_dim)
    return describe(settings, architecture, sizes, layers, [rope], read_block(settings, **block))

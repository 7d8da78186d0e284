"""Families that norm what the attention and the mlp put out, and not what they read: OLMo 2 and 3, EXAONE 4."""

from __future__ import annotations

from backend.architectures.common import (
    OUTPUTS_ONLY,
    alike,
    describe,
    read_activation,
    read_layer_types,
    read_pattern,
    read_sizes,
    read_window,
    windowed,
)
from backend.architectures.description import Block, ModelConfig, QkNorm
from backend.architectures.rope import RopeDefaults, read_rope, read_ropes
from backend.architectures.settings import Epsilon, Settings


def olmo2(settings: Settings, architecture: str) -> ModelConfig:
    """Queries and keys are normed over all heads of a token together (arXiv:2501.00656)."""
    sizes = read_sizes(settings)
    rope, block = read_rope(settings, sizes.head_dim), _block(settings, "row")
    return describe(settings, architecture, sizes, alike(sizes), [rope], block, OUTPUTS_ONLY)


def olmo3(settings: Settings, architecture: str) -> ModelConfig:
    """OLMo 2, of which three of four layers have a window; only the positions of the others are scaled."""
    sizes, window = read_sizes(settings), read_window(settings)
    types = read_layer_types(settings, sizes.layers, lambda layer: (layer + 1) % 4 != 0)
    layers = windowed(types, window, full=0, sliding=1)
    defaults = RopeDefaults(theta=5e5)
    ropes = read_ropes(settings, sizes.head_dim, defaults, defaults)
    return describe(settings, architecture, sizes, layers, ropes, _block(settings, "row"), OUTPUTS_ONLY)


def exaone4(settings: Settings, architecture: str) -> ModelConfig:
    """Where there are windows, only the layers that have one rotate queries and keys."""
    sizes, window = read_sizes(settings), read_window(settings)
    if "layer_types" in settings.content:
        settings.ignore("sliding_window_pattern")  # the same in fewer words, such as LLLG
    pattern = (lambda layer: False) if window is None or settings.has("layer_types") else read_pattern(settings, 4)
    types = read_layer_types(settings, sizes.layers, pattern)
    layers = windowed(types, window, full=0 if window is None else None)
    rope, block = read_rope(settings, sizes.head_dim), _block(settings, "head")
    return describe(settings, architecture, sizes, layers, [rope], block, OUTPUTS_ONLY)


def _block(settings: Settings, qk_norm: QkNorm) -> Block:
    bias = settings.get("attention_bias", bool, False)
    return Block(
        norm_eps=settings.get("rms_norm_eps", Epsilon, 1e-5),
        activation=read_activation(settings),
        qk_norm=qk_norm,
        qkv_bias=bias,
        out_bias=bias,
    )

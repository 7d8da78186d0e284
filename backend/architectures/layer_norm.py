"""Families with layer norms in the place of RMS norms: Command R, StarCoder 2, StableLM, GPT-NeoX."""

from __future__ import annotations

from collections.abc import Sequence

from backend.architectures.common import (
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
from backend.architectures.description import Block, LayerConfig, LayerNames, ModelConfig, TensorNames
from backend.architectures.rope import RopeDefaults, read_rope
from backend.architectures.settings import Epsilon, Factor, Settings


def cohere(settings: Settings, architecture: str) -> ModelConfig:
    """Command R: attention and mlp read the same normed hidden states; neighbouring dimensions rotate together."""
    sizes = read_sizes(settings)
    return _cohere(settings, architecture, sizes, alike(sizes), theta=5e5)


def cohere2(settings: Settings, architecture: str) -> ModelConfig:
    """Command R7B and A: three of four layers have a window, and only they rotate queries and keys."""
    sizes, window = read_sizes(settings), read_window(settings)
    types = read_layer_types(settings, sizes.layers, read_pattern(settings, 4))
    layers = windowed(types, window, full=None, sliding=None if window is None else 0)
    settings.ignore("layer_switch")  # the pattern of the windows in other words
    settings.only("order_of_interleaved_layers", "local_attn_first")
    return _cohere(settings, architecture, sizes, layers, theta=1e4)


def starcoder2(settings: Settings, architecture: str) -> ModelConfig:
    """Biases everywhere, and an mlp without a gate (arXiv:2402.19173)."""
    sizes, window = read_sizes(settings), read_window(settings)
    settings.ignore("activation_function")  # older writers left it there; transformers reads hidden_act
    settings.only("norm_type", "layer_norm")
    bias = settings.get("use_bias", bool, True)
    block = Block(
        norm="layer",
        norm_bias=True,
        norm_eps=settings.get("norm_epsilon", Epsilon, 1e-5),
        activation=read_activation(settings, default="gelu_pytorch_tanh"),
        gated=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
    )
    names = LayerNames(gate_up=("mlp.c_fc",), down="mlp.c_proj")
    rope = read_rope(settings, sizes.head_dim)
    return describe(settings, architecture, sizes, alike(sizes, window), [rope], block, names, tied=True)


def stablelm(settings: Settings, architecture: str) -> ModelConfig:
    """Llama with layer norms, of whose heads a quarter is rotated."""
    sizes = read_sizes(settings)
    rope = read_rope(settings, sizes.head_dim, RopeDefaults(partial=0.25))
    is_parallel = settings.get("use_parallel_residual", bool, False)
    block = Block(
        norm="layer",
        norm_bias=True,
        norm_eps=settings.get("layer_norm_eps", Epsilon, 1e-5),
        activation=read_activation(settings),
        parallel=is_parallel,
        qkv_bias=settings.get("use_qkv_bias", bool, False),
    )
    names = LayerNames(mlp_norm=None) if is_parallel else LayerNames()
    return describe(settings, architecture, sizes, alike(sizes), [rope], block, names)


def gpt_neox(settings: Settings, architecture: str) -> ModelConfig:
    """GPT-NeoX and Pythia: attention and mlp side by side, each with a norm of its own (arXiv:2204.06745)."""
    sizes = read_sizes(settings)
    rope = RopeDefaults(theta_key="rotary_emb_base", partial=0.25, partial_key="rotary_pct")
    bias = settings.get("attention_bias", bool, True)
    block = Block(
        norm="layer",
        norm_bias=True,
        norm_eps=settings.get("layer_norm_eps", Epsilon, 1e-5),
        parallel=settings.get("use_parallel_residual", bool, True),
        activation=read_activation(settings, default="gelu"),
        gated=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
    )
    layer = LayerNames(
        qkv=("attention.query_key_value",),
        qkv_by_head=True,
        out="attention.dense",
        gate_up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    )
    names = TensorNames(
        embedding="gpt_neox.embed_in",
        layers="gpt_neox.layers.",
        norm="gpt_neox.final_layer_norm",
        head="embed_out",
        unused=(r".*\.attention\.(bias|masked_bias)",),
        layer=layer,
    )
    ropes = [read_rope(settings, sizes.head_dim, rope)]
    return describe(settings, architecture, sizes, alike(sizes), ropes, block, names)


def _cohere(
    settings: Settings, architecture: str, sizes: Sizes, layers: Sequence[LayerConfig], theta: float
) -> ModelConfig:
    for key in ("use_gated_activation", "use_parallel_block"):
        settings.only(key, True)
    settings.only("position_embedding_type", "rope_gptj")
    settings.only("rotary_pct", 1.0)
    bias = settings.get("attention_bias", bool, False)
    block = Block(
        norm="layer",
        norm_eps=settings.get("layer_norm_eps", Epsilon, 1e-5),
        activation=read_activation(settings),
        parallel=True,
        qkv_bias=bias,
        out_bias=bias,
        rope_interleaved=True,
        logit_scale=settings.get("logit_scale", Factor, 0.0625),
    )
    rope = read_rope(settings, sizes.head_dim, RopeDefaults(theta=theta))
    return describe(settings, architecture, sizes, layers, [rope], block, LayerNames(mlp_norm=None), tied=True)

"""Families with latent attention (latent.py): DeepSeek V2 and V3, and those of their shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from backend.api.checkpoint.model_files import REMEDY, shown
from backend.api.checkpoint.quantised import FILE
from backend.api.errors import ConfigError
from backend.architectures.common import alike, describe, read_block, read_sizes
from backend.architectures.description import Experts, LayerNames, ModelConfig, TensorNames
from backend.architectures.latent import Latent
from backend.architectures.mixtures import DeepseekDefaults, behind, mixed, read_deepseek_experts, with_experts
from backend.architectures.rope import read_rope, read_score_factor
from backend.architectures.settings import HeadDim, Settings, Size


def deepseek_v2(settings: Settings, architecture: str) -> ModelConfig:
    """A softmax chooses, out of all experts or of the best groups."""
    settings.only("scoring_func", "softmax")
    settings.only("norm_topk_prob", False)
    method = settings.get("topk_method", str, "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise settings.unsupported("topk_method", "greedy and group_limited_greedy are supported")
    own: dict[str, Any] = dict(scores="softmax", adds_two_best=False, has_choice_bias=False)
    if method == "greedy":
        own |= dict(groups=1, kept_groups=1)
    experts = read_deepseek_experts(settings, DeepseekDefaults(dense=0, shared=2, is_normalised=False), **own)
    dense = settings.get("first_k_dense_replace", int, 0)
    bias = settings.get("mlp_bias", bool, False)
    return _described(settings, architecture, experts, lambda layer: layer >= dense, mlp_bias=bias)


def deepseek_v3(settings: Settings, architecture: str) -> ModelConfig:
    """DeepSeek V3, Kimi K2 and Moonlight."""
    experts = _experts_of_v3(settings, DeepseekDefaults(dense=3, shared=1, is_normalised=True))
    dense = settings.get("first_k_dense_replace", int, 3)
    return _described(settings, architecture, experts, lambda layer: layer >= dense, **_interleaves(settings))


def glm4_moe_lite(settings: Settings, architecture: str) -> ModelConfig:
    """DeepSeek V3 with other sizes, whose mixtures `mlp_layer_types` may name."""
    settings.ignore("partial_rotary_factor")  # All of the rotated part is rotated.
    experts = _experts_of_v3(settings, DeepseekDefaults(dense=1, shared=1, is_normalised=True))
    dense = settings.get("first_k_dense_replace", int, 1)
    kinds = settings.find("mlp_layer_types", list[str])
    if kinds is None:
        return _described(
            settings, architecture, experts, lambda layer: layer >= dense, eps=1e-5, **_interleaves(settings)
        )
    unknown = set(kinds) - {"dense", "sparse"}
    if unknown:
        raise ConfigError(
            f"{FILE}: mlp_layer_types: {shown(min(unknown))} is not known, dense and sparse are; {REMEDY}"
        )
    is_sparse = [kind == "sparse" for kind in kinds]
    return _described(
        settings,
        architecture,
        experts,
        lambda layer: layer < len(is_sparse) and is_sparse[layer],
        eps=1e-5,
        **_interleaves(settings),
    )


def _experts_of_v3(settings: Settings, silent: DeepseekDefaults) -> Experts:
    settings.only("scoring_func", "sigmoid")
    settings.only("topk_method", "noaux_tc")
    return read_deepseek_experts(settings, silent)


def _interleaves(settings: Settings) -> dict[str, bool]:
    return dict(rope_interleaved=settings.get("rope_interleave", bool, True))


def _described(
    settings: Settings,
    architecture: str,
    experts: Experts,
    has_experts: Callable[[int], bool],
    rope_interleaved: bool = True,
    **block: Any,
) -> ModelConfig:
    settings.ignore("head_dim", "qk_head_dim", "num_key_value_heads", "num_mtp_layers")
    settings.only("attention_bias", False)
    latent = Latent(
        rank=settings.need("kv_lora_rank", HeadDim),
        rotated=settings.need("qk_rope_head_dim", HeadDim),
        plain=settings.need("qk_nope_head_dim", HeadDim),
        value_dim=settings.need("v_head_dim", HeadDim),
        query_rank=settings.find("q_lora_rank", Size) or 0,
    )
    sizes = read_sizes(settings, latent.query_dim)._replace(kv_heads=1, head_dim=latent.rotated + latent.rank)
    rope = replace(read_rope(settings, latent.rotated), rotary_dim=latent.rotated)
    scale = latent.query_dim**-0.5 * read_score_factor(settings)
    more = settings.get("num_nextn_predict_layers", int, 1)
    names = TensorNames(layer=LayerNames(), unused=behind(sizes.layers, more))
    form = read_block(settings, rope_interleaved=rope_interleaved, attention_scale=scale, **block)
    config = describe(settings, architecture, sizes, mixed(list(alike(sizes)), has_experts), [rope], form, names)
    return replace(with_experts(config, experts), latent=latent)

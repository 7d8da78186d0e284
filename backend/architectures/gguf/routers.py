"""Mixtures of experts in GGUF files: the keys of config.json that their settings stand for."""

from __future__ import annotations

from typing import Any

from backend.architectures.gguf.settings import GgufSettings
from backend.architectures.settings import Size

Keys = dict[str, Any]  # keys of a config.json with their values
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # llama.cpp's numbers for what becomes of a router's logits


def experts_of(settings: GgufSettings, count: str = "num_experts", places: str = "num_experts_per_tok") -> Keys:
    """count, places: the family's keys for the number of experts, and for the experts of a token."""
    own = {count: settings.need("expert_count", Size), places: settings.need("expert_used_count", Size)}
    return own | dict(moe_intermediate_size=settings.get("expert_feed_forward_length", Size))


def check_router(settings: GgufSettings, normalises: bool, *scores: int) -> None:
    """Raise ConfigError if the file names another router than the family's; most files name none. normalises: a token's weights
    are divided by their sum, so that a softmax over all experts and one over those chosen are the same.
    """
    if normalises and SOFTMAX in scores:
        scores = (*scores, SOFTMAX_OF_CHOSEN)
    if (given := settings.get("expert_gating_func", int)) not in (None, 0, *scores):
        raise settings.unsupported("expert_gating_func", given)
    if (divides := settings.get("expert_weights_norm", bool)) not in (None, normalises):
        raise settings.unsupported("expert_weights_norm", divides)


def sigmoid_experts(settings: GgufSettings, checks: bool = True) -> Keys:
    """DeepSeek-V3's router. Keys that a file lacks are 0 or false, as in llama.cpp. checks: raise ConfigError for another one."""
    normalises = settings.get("expert_weights_norm", bool) or False
    if checks:
        check_router(settings, normalises, SIGMOID)
    return experts_of(settings, "n_routed_experts") | dict(
        n_shared_experts=settings.get("expert_shared_count", int) or 0,
        first_k_dense_replace=settings.get("leading_dense_block_count", int) or 0,
        norm_topk_prob=normalises,
        routed_scaling_factor=settings.get("expert_weights_scale", float) or None,  # 0: there is none
        n_group=settings.get("expert_group_count", Size),
        topk_group=settings.get("expert_group_used_count", Size),
    )

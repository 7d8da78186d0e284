"""Latent attention in GGUF files: the keys of config.json that their settings stand for, and their tensors.

Source: `conversion/deepseek.py` and `src/models/deepseek2.cpp` of llama.cpp. Older files hold the projection to keys and values
in one tensor, attn_kv_b, newer ones in two, of which that of keys is transposed head by head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from backend.api.checkpoint.gguf import GgufHeader
from backend.architectures.description import ModelConfig
from backend.architectures.gguf.recurrent import Named
from backend.architectures.gguf.routers import SIGMOID, SOFTMAX, Keys, check_router, sigmoid_experts
from backend.architectures.gguf.settings import GgufSettings
from backend.architectures.latent import LatentNames
from backend.architectures.settings import Size

_LOG_FACTOR = 0.1  # The converter multiplies mscale_all_dim by it.
_UP = "attn_kv_b.weight"


def deepseek2(settings: GgufSettings) -> Keys:
    """Models whose router is a softmax are read as DeepSeek V2's, others as V3's: GLM-4.7-Flash is one of them."""
    rotated = settings.need("rope.dimension_count", Size)
    key = settings.get("attention.key_length_mla", Size) or settings.need("attention.key_length", Size)
    value = settings.get("attention.value_length_mla", Size) or settings.need("attention.value_length", Size)
    extra = settings.get("nextn_predict_layers", int) or 0
    layers = settings.need("block_count", Size) - extra
    if extra < 0 or layers < 1:
        raise settings.unsupported("nextn_predict_layers", extra)
    if key <= rotated:
        raise settings.unsupported("attention.key_length", f"{key}, of which {rotated} numbers are rotated")
    own: Keys = dict(
        num_hidden_layers=layers,
        num_nextn_predict_layers=extra,
        kv_lora_rank=settings.need("attention.kv_lora_rank", Size),
        q_lora_rank=settings.get("attention.q_lora_rank", Size),
        qk_rope_head_dim=rotated,
        qk_nope_head_dim=key - rotated,
        v_head_dim=value,
    )
    if settings.rows_of("exp_probs_b.bias") is None and settings.get("expert_gating_func", int) != SIGMOID:
        return own | _of_softmax(settings)
    return own | sigmoid_experts(settings)


def _of_softmax(settings: GgufSettings) -> Keys:
    check_router(settings, False, SOFTMAX)
    groups = settings.get("expert_group_count", Size) or 1
    return sigmoid_experts(settings, checks=False) | dict(
        architectures=["DeepseekV2ForCausalLM"], topk_method="greedy" if groups == 1 else "group_limited_greedy"
    )


def log_factor(settings: GgufSettings) -> Keys:
    """The keys of YaRN that stand for `yarn_log_multiplier`: with both alike, cos and sin stay as they are."""
    all_dims = (settings.get("rope.scaling.yarn_log_multiplier", float) or 0.0) / _LOG_FACTOR
    return dict(mscale=all_dims, mscale_all_dim=all_dims) if all_dims else {}


def stored_latent(header: GgufHeader) -> dict[str, Any]:
    """The names of what the file holds, where they are others than the family's."""
    return {} if f"blk.0.{_UP}" in header.tensors else dict(latent=replace(LatentNames(), up=""))


def tensors_of_latent(config: ModelConfig) -> Iterator[tuple[str, Named]]:
    of, names, hidden, heads = config.latent, config.names.layer, config.hidden_size, config.num_heads
    assert of is not None
    own, queries = names.latent, heads * of.query_dim
    if of.query_rank:
        yield "attn_q_a", Named(own.query_down, (of.query_rank, hidden))
        yield "attn_q_a_norm", Named(own.query_norm, (of.query_rank,))
        yield "attn_q_b", Named(own.query_up, (queries, of.query_rank))
    else:
        yield "attn_q", Named(own.query, (queries, hidden))
    yield "attn_kv_a_mqa", Named(own.down, (of.rank + of.rotated, hidden))
    yield "attn_kv_a_norm", Named(own.norm, (of.rank,))
    if own.up:
        yield "attn_kv_b", Named(own.up, (heads * (of.plain + of.value_dim), of.rank))
    else:
        yield "attn_k_b", Named(own.keys, (heads * of.rank, of.plain))
        yield "attn_v_b", Named(own.values, (heads * of.value_dim, of.rank))
    yield "attn_output", Named(names.out, (hidden, heads * of.value_dim), config.block.out_bias)

"""Tiny checkpoints of families with latent attention, as tests/families/tiny.py has them."""

from __future__ import annotations

from typing import Any

SIZES = dict(kv_lora_rank=64, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=32, num_key_value_heads=6)
EXPERTS = dict(
    n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=40, n_shared_experts=2, routed_scaling_factor=1.7
)
YARN = dict(
    rope_type="yarn",
    rope_theta=500.0,
    factor=4.0,
    original_max_position_embeddings=64,
    beta_fast=8.0,
    beta_slow=1.5,
    mscale=0.8,
    mscale_all_dim=0.6,
)
LATENT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek v2": (
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        SIZES
        | EXPERTS
        | dict(
            q_lora_rank=40,
            first_k_dense_replace=1,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            rope_parameters=YARN,
        ),
    ),
    "deepseek v2 lite": (
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        SIZES | EXPERTS | dict(q_lora_rank=None, first_k_dense_replace=1, topk_method="greedy"),
    ),
    "deepseek v3": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        SIZES | EXPERTS | dict(q_lora_rank=40, first_k_dense_replace=1, n_group=4, topk_group=2, rope_parameters=YARN),
    ),
    "glm 4.7 flash": (
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        SIZES | EXPERTS | dict(q_lora_rank=24, mlp_layer_types=["dense", "sparse", "dense"], rope_interleave=False),
    ),
}

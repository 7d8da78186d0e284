"""Tiny checkpoints of families with recurrent layers, in the form of tiny.py's table, which has them too."""

from __future__ import annotations

from typing import Any

from tools.make_random_model import TINY

GRANITE = dict(embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.3, logits_scaling=1.7)
GRANITE_4 = dict(
    num_local_experts=0,
    num_experts_per_tok=0,
    shared_intermediate_size=72,
    layer_types=["attention"] * 3,
    position_embedding_type="rope",
    mamba_n_heads=4,
    mamba_d_head=24,
    mamba_d_state=16,
)
DELTA: dict[str, Any] = dict(
    head_dim=16,
    num_hidden_layers=4,
    layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=32,
    linear_value_head_dim=12,
    rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5),
)
DELTA_EXPERTS = dict(num_experts=7, num_experts_per_tok=3, moe_intermediate_size=40, shared_expert_intermediate_size=56)
QWEN_IMAGES = dict(
    depth=1,
    hidden_size=32,
    intermediate_size=32,
    num_heads=2,
    patch_size=8,
    out_hidden_size=48,
    num_position_embeddings=16,
)
# name -> (transformers' model type, architecture, what differs from tools.make_random_model's TINY)
HYBRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "granite 4": ("granitemoehybrid", "GraniteMoeHybridForCausalLM", GRANITE | GRANITE_4),
    "granite 4 without positions": (
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        GRANITE | GRANITE_4 | dict(position_embedding_type=None, tie_word_embeddings=True),
    ),
    "granite 4 hybrid": (
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        GRANITE
        | GRANITE_4
        | dict(
            layer_types=["mamba", "attention", "mamba"], mamba_n_groups=2, mamba_chunk_size=32, mamba_proj_bias=True
        ),
    ),
    "granite 4 hybrid with experts": (
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        GRANITE
        | GRANITE_4
        | dict(
            layer_types=["mamba", "attention", "mamba"],
            position_embedding_type=None,
            num_local_experts=6,
            num_experts_per_tok=3,
            mamba_conv_bias=False,
            tie_word_embeddings=True,
        ),
    ),
    "bamba": (
        "bamba",
        "BambaForCausalLM",
        dict(
            attn_layer_indices=[1],
            mamba_n_heads=4,
            mamba_n_groups=2,
            mamba_d_state=16,
            mamba_chunk_size=32,
            time_step_limit=(0.01, 0.2),
            rms_norm_eps=1e-4,
        ),
    ),
    "nemotron-h": (
        "nemotron_h",
        "NemotronHForCausalLM",
        dict(
            layers_block_type=["linear_attention", "mlp", "linear_attention", "full_attention", "moe", "moe"],
            head_dim=10,
            mamba_num_heads=4,
            mamba_head_dim=20,
            n_groups=2,
            ssm_state_size=16,
            chunk_size=32,
            time_step_min=0.02,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            moe_intermediate_size=40,
            moe_shared_expert_intermediate_size=56,
            routed_scaling_factor=1.7,
        ),
    ),
    "qwen3.5": ("qwen3_5_text", "Qwen3_5ForCausalLM", DELTA),
    "qwen3.5 moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", DELTA | DELTA_EXPERTS),
    "qwen3.5 with images": (
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        dict(
            text_config=TINY | DELTA | dict(tie_word_embeddings=True),
            vision_config=QWEN_IMAGES,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3.5 moe with images": (
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        dict(text_config=TINY | DELTA | DELTA_EXPERTS, vision_config=QWEN_IMAGES),
    ),
    "qwen3 next": (
        "qwen3_next",
        "Qwen3NextForCausalLM",
        DELTA | DELTA_EXPERTS | dict(mlp_only_layers=[2], norm_topk_prob=True),
    ),
    "lfm2": (
        "lfm2",
        "Lfm2ForCausalLM",
        dict(
            layer_types=["conv", "full_attention", "conv"],
            conv_bias=True,
            conv_L_cache=4,
            block_multiple_of=8,
            tie_word_embeddings=True,
        ),
    ),
    "lfm2 moe": (
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        dict(
            layer_types=["conv", "full_attention", "conv"],
            num_dense_layers=1,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=40,
            routed_scaling_factor=1.3,
            tie_word_embeddings=True,
        ),
    ),
}

"""A tiny random checkpoint of each family, made of transformers' own classes, with a value that matters for each setting.

Windows are shorter than the prompts, caps so low that they bend, factors and shares other than 1, and norms and biases random.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from tests.families.tiny_hybrids import GRANITE, HYBRIDS
from tests.families.tiny_latent import LATENT
from tools.make_random_model import TINY, random_values

VOCAB = TINY["vocab_size"]
WINDOW = 13
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = dict(
    rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=64, beta_fast=8.0, beta_slow=1.5
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
LONG = dict(
    rope_type="longrope",
    rope_theta=500.0,
    partial_rotary_factor=0.75,
    short_factor=[1.0, 1.1, 1.3],
    long_factor=[1.5, 2.5, 4.5],
)
BY_TYPE = dict(
    full_attention=dict(rope_type="linear", rope_theta=5000.0, factor=3.0),
    sliding_attention=dict(rope_type="default", rope_theta=100.0),
)
GEMMA = dict(head_dim=16, tie_word_embeddings=True, rms_norm_eps=1e-4)
LOGIT_CAP = dict(final_logit_softcapping=12.0, query_pre_attn_scalar=5, sliding_window=WINDOW)
IMAGES = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
)
SCALING = dict(llama_4_scaling_beta=0.3)
CAPS = LOGIT_CAP | dict(attn_logit_softcapping=1.5)
# A router of two levels, as DeepSeek-V3 has it.
GROUPED = dict(
    n_routed_experts=8,
    num_local_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=40,
    n_shared_experts=2,
    n_group=4,
    topk_group=2,
    norm_topk_prob=True,
    routed_scaling_factor=1.7,
)
# name -> (transformers' model type, architecture, what differs from tools.make_random_model's TINY)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = (
    {
        "llama": ("llama", "LlamaForCausalLM", dict(attention_bias=True, mlp_bias=True)),
        "llama gelu yarn": ("llama", "LlamaForCausalLM", dict(hidden_act="gelu", rope_parameters=YARN)),
        "llama dynamic": (
            "llama",
            "LlamaForCausalLM",
            dict(rope_parameters=dict(rope_type="dynamic", rope_theta=500.0, factor=4.0)),
        ),
        "mistral": ("mistral", "MistralForCausalLM", dict(head_dim=10, sliding_window=WINDOW)),
        "ministral": ("ministral", "MinistralForCausalLM", dict(head_dim=10, sliding_window=WINDOW, layer_types=MIXED)),
        "ministral 3": (
            "ministral3",
            "Ministral3ForCausalLM",
            dict(head_dim=8, rope_parameters=YARN | dict(llama_4_scaling_beta=0.3, mscale=1.0, mscale_all_dim=0.5)),
        ),
        "qwen2": (
            "qwen2",
            "Qwen2ForCausalLM",
            dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
        ),
        "qwen3": ("qwen3", "Qwen3ForCausalLM", dict(head_dim=16)),
        "gemma": ("gemma", "GemmaForCausalLM", GEMMA),
        "gemma 2": ("gemma2", "Gemma2ForCausalLM", GEMMA | CAPS),
        "vaultgemma": ("vaultgemma", "VaultGemmaForCausalLM", GEMMA | CAPS),
        "gemma 3": (
            "gemma3_text",
            "Gemma3ForCausalLM",
            GEMMA | LOGIT_CAP | dict(rope_parameters=BY_TYPE, layer_types=MIXED, attention_bias=True),
        ),
        "gemma 3 with images": (
            "gemma3",
            "Gemma3ForConditionalGeneration",
            dict(
                text_config=TINY
                | GEMMA
                | LOGIT_CAP
                | dict(rope_parameters=BY_TYPE, layer_types=MIXED, final_logit_softcapping=None),
                vision_config=IMAGES | dict(model_type="siglip_vision_model"),
                tie_word_embeddings=True,
            ),
        ),
        "mistral 3 with images": (
            "mistral3",
            "Mistral3ForConditionalGeneration",
            dict(
                text_config=TINY | dict(model_type="ministral3", head_dim=8, rope_parameters=YARN | SCALING),
                vision_config=IMAGES | dict(model_type="pixtral"),
            ),
        ),
        "phi-3": ("phi3", "Phi3ForCausalLM", dict(sliding_window=WINDOW)),
        "phi-4-mini short": (
            "phi3",
            "Phi3ForCausalLM",
            dict(tie_word_embeddings=True, rope_parameters=LONG, original_max_position_embeddings=512),
        ),
        "phi-4-mini long": (
            "phi3",
            "Phi3ForCausalLM",
            dict(tie_word_embeddings=True, rope_parameters=LONG, original_max_position_embeddings=8),
        ),
        "glm": (
            "glm",
            "GlmForCausalLM",
            dict(head_dim=12, rope_parameters=dict(rope_theta=500.0, partial_rotary_factor=0.5), attention_bias=True),
        ),
        "glm 4": (
            "glm4",
            "Glm4ForCausalLM",
            dict(head_dim=8, rope_parameters=dict(rope_theta=500.0, partial_rotary_factor=0.5)),
        ),
        "granite": ("granite", "GraniteForCausalLM", GRANITE | dict(rope_parameters=LLAMA3, attention_bias=True)),
        "smollm3": (
            "smollm3",
            "SmolLM3ForCausalLM",
            dict(no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED),
        ),
        "olmo 2": ("olmo2", "Olmo2ForCausalLM", dict(rms_norm_eps=1e-4)),
        "olmo 3": (
            "olmo3",
            "Olmo3ForCausalLM",
            dict(
                sliding_window=WINDOW,
                layer_types=MIXED,
                rope_parameters=dict(
                    full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=500.0)
                ),
            ),
        ),
        "exaone 4": ("exaone4", "Exaone4ForCausalLM", dict(sliding_window=WINDOW, layer_types=MIXED)),
        "command r": ("cohere", "CohereForCausalLM", dict(logit_scale=0.3, tie_word_embeddings=True)),
        "command r7b": (
            "cohere2",
            "Cohere2ForCausalLM",
            dict(
                logit_scale=0.3, sliding_window=WINDOW, layer_types=MIXED, layer_norm_eps=1e-3, tie_word_embeddings=True
            ),
        ),
        "starcoder 2": (
            "starcoder2",
            "Starcoder2ForCausalLM",
            dict(sliding_window=WINDOW, norm_epsilon=1e-3, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True),
        ),
        "stablelm": (
            "stablelm",
            "StableLmForCausalLM",
            dict(use_qkv_bias=True, rope_parameters=dict(rope_theta=500.0, partial_rotary_factor=0.5)),
        ),
        "stablelm parallel": (
            "stablelm",
            "StableLmForCausalLM",
            dict(use_parallel_residual=True, rope_parameters=dict(rope_theta=500.0, partial_rotary_factor=0.25)),
        ),
        "gpt-neox": ("gpt_neox", "GPTNeoXForCausalLM", dict(num_key_value_heads=6, rotary_pct=0.25, hidden_act="gelu")),
        "gpt-neox in sequence": (
            "gpt_neox",
            "GPTNeoXForCausalLM",
            dict(
                num_key_value_heads=6,
                rotary_pct=0.5,
                use_parallel_residual=False,
                hidden_act="gelu_new",
                layer_norm_eps=1e-3,
            ),
        ),
        "seed-oss": (
            "seed_oss",
            "SeedOssForCausalLM",
            dict(head_dim=10, attention_bias=True, attention_out_bias=True, mlp_bias=True),
        ),
        "helium": ("helium", "HeliumForCausalLM", dict(head_dim=8, attention_bias=True)),
        "ernie 4.5": ("ernie4_5", "Ernie4_5ForCausalLM", dict(head_dim=12, use_bias=True)),
        "qwen2 moe": (
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            dict(
                num_experts=7,
                num_experts_per_tok=3,
                moe_intermediate_size=40,
                shared_expert_intermediate_size=72,
                decoder_sparse_step=1,
                mlp_only_layers=[1],
            ),
        ),
        "qwen3 moe": (
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            dict(head_dim=16, num_experts=9, num_experts_per_tok=4, moe_intermediate_size=40, norm_topk_prob=True),
        ),
        "mixtral": (
            "mixtral",
            "MixtralForCausalLM",
            # So few experts, of whole panels, that those of a prompt are activated as they are multiplied.
            dict(num_local_experts=3, num_experts_per_tok=2, intermediate_size=96, head_dim=10, sliding_window=WINDOW),
        ),
        "olmoe": (
            "olmoe",
            "OlmoeForCausalLM",
            dict(num_experts=8, num_experts_per_tok=3, rms_norm_eps=1e-4),
        ),
        "granite moe": (
            "granitemoe",
            "GraniteMoeForCausalLM",
            GRANITE | dict(num_local_experts=6, num_experts_per_tok=3, attention_bias=True),
        ),
        "granite moe shared": (
            "granitemoeshared",
            "GraniteMoeSharedForCausalLM",
            GRANITE | dict(num_local_experts=6, num_experts_per_tok=2, shared_intermediate_size=48),
        ),
        "glm 4.5": (
            "glm4_moe",
            "Glm4MoeForCausalLM",
            dict(
                head_dim=12,
                rope_parameters=dict(rope_theta=500.0, partial_rotary_factor=0.5),
                attention_bias=True,
                use_qk_norm=True,
                first_k_dense_replace=1,
                **GROUPED,
            ),
        ),
        "dots 1": ("dots1", "Dots1ForCausalLM", dict(head_dim=12, first_k_dense_replace=2, **GROUPED)),
        "ernie 4.5 moe": (
            "ernie4_5_moe",
            "Ernie4_5_MoeForCausalLM",
            dict(
                head_dim=12,
                moe_num_experts=6,
                moe_k=2,
                moe_intermediate_size=40,
                moe_num_shared_experts=2,
                moe_layer_start_index=1,
                moe_layer_end_index=2,
            ),
        ),
        "minimax m2": (
            "minimax_m2",
            "MiniMaxM2ForCausalLM",
            dict(
                head_dim=12,
                num_local_experts=6,
                num_experts_per_tok=3,
                rope_parameters=dict(rope_theta=500.0, partial_rotary_factor=0.5),
            ),
        ),
        "gpt-oss": (
            "gpt_oss",
            "GptOssForCausalLM",
            dict(
                head_dim=10,
                num_local_experts=6,
                num_experts_per_tok=3,
                sliding_window=WINDOW,
                layer_types=MIXED,
                rope_parameters=YARN | dict(truncate=False),
            ),
        ),
    }
    | HYBRIDS
    | LATENT
)


def make(directory: Path, name: str, dtype: str = "float32", **overrides: Any) -> Path:
    """Write the checkpoint of FAMILIES[name] to `directory`, and return it. `overrides` are keys of config.json."""
    model_type, architecture, differences = FAMILIES[name]
    sizes = {} if "text_config" in differences else TINY
    config = AutoConfig.for_model(model_type, **(sizes | differences | dict(dtype=dtype) | overrides))
    config.architectures = [architecture]
    model = getattr(transformers, architecture)._from_config(config)
    weights = random_values(model.state_dict(), getattr(torch, dtype), seed=len(name))
    if config.tie_word_embeddings:  # both names are of one tensor, and the last one written would count
        weights.pop("lm_head.weight")
        for weight in (weights[key] for key in weights if key.endswith("embed_tokens.weight")):
            weight *= 0.3  # as the head, it gives logits of the usual size
    model.load_state_dict(weights, strict=False)
    model.save_pretrained(directory)
    return directory

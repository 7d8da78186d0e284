"""Tiny random checkpoints of transformers' causal families."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

# Set where the configuration class has the setting. Windows are shorter than the prompts of the tests.
COMMON: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "sliding_window": 8, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "ffn_dim": 96, "word_embed_proj_dim": 64,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 160, "global_head_dim": 16, "n_shared_experts": 1,
    "moe_num_experts": 4, "moe_k": 2,
}  # fmt: skip
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
OWN: dict[str, dict[str, Any]] = {  # what a model type needs besides
    "hunyuan_v1_dense": _ROPE,
    "hunyuan_v1_moe": _ROPE,
    "ministral": _ROPE,
    "longcat_flash": {"head_dim": 8},
    "cohere_compass_text": {
        "rope_parameters": {kind: _ROPE["rope_parameters"] for kind in ("full_attention", "sliding_attention")}
    },
}


def tiny_config(kind: str, **given: Any) -> Any:
    """A small configuration of the model type `kind`; `given` settings come before those of this file."""
    known = transformers.CONFIG_MAPPING[kind]
    default = known()
    chosen = {name: value for name, value in COMMON.items() if _has(default, name)}
    if "qk_rope_head_dim" in chosen:  # multi-head latent attention: keys are of all heads
        chosen.pop("head_dim", None)
        chosen["num_key_value_heads"] = COMMON["num_attention_heads"]
    chosen |= {**OWN.get(kind, {}), **given}
    config = known(**chosen)
    return config.get_text_config(decoder=True)


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # a setting that differs between layers, which the library refuses to read
        return True


def tiny_model(kind: str, seed: int = 0, **given: Any) -> PreTrainedModel:
    """With weights that make every part matter: norms are not 1, biases not 0."""
    torch.manual_seed(seed)
    config = tiny_config(kind, **given)
    config._attn_implementation = "eager"
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    for name, parameter in model.named_parameters():
        spread = 1.0 / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 0.2
        offset = 1.0 if parameter.dim() == 1 and "norm" in name and name.endswith("weight") else 0.0
        parameter.data.normal_(0, spread).add_(offset)
    return model.eval()


def save(model: PreTrainedModel, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory


def content(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())

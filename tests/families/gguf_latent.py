"""GGUF files of models with latent attention, as llama.cpp's converter writes them (`conversion/deepseek.py`); the product writes
none. test_gguf_latent.py says what its own files were compared with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from backend.models.loader import open_tensors
from tests.families.gguf_hybrids import OF_LAYER, OF_MODEL, PROJECTIONS, write_tensors

ARCH = "deepseek2"
NAMES = OF_LAYER | {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "post_attention_layernorm": "ffn_norm",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
NUMBERS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "num_experts_per_tok": "expert_used_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}


def write_latent(directory: Path, file: Path, kind: str = "F32", is_old: bool = False) -> Path:
    """is_old: keys and values are in one tensor, as in files of before 2025-04."""
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(file, ARCH)
    _add_settings(writer, config, is_old)
    write_tensors(writer, dict(_tensors(directory, config, is_old)), kind)
    return file


def _add_settings(writer: gguf.GGUFWriter, config: dict[str, Any], is_old: bool) -> None:
    for key, name in NUMBERS.items():
        if config.get(key) is not None:
            writer.add_uint32(f"{ARCH}.{name}", config[key])
    rank, rotated, heads = config["kv_lora_rank"], config["qk_rope_head_dim"], config["num_attention_heads"]
    lengths = {"_mla" * (not is_old): (config["qk_nope_head_dim"] + rotated, config["v_head_dim"])}
    if not is_old:
        lengths[""] = rank + rotated, rank
    for end, (key_length, value_length) in lengths.items():
        writer.add_uint32(f"{ARCH}.attention.key_length{end}", key_length)
        writer.add_uint32(f"{ARCH}.attention.value_length{end}", value_length)
    writer.add_uint32(f"{ARCH}.attention.head_count_kv", heads if is_old else 1)
    writer.add_float32(f"{ARCH}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32(f"{ARCH}.expert_weights_scale", config["routed_scaling_factor"])
    if config["model_type"] != "deepseek_v2":
        writer.add_uint32(f"{ARCH}.expert_gating_func", 2)
        writer.add_bool(f"{ARCH}.expert_weights_norm", config["norm_topk_prob"])
    rope = config["rope_parameters"]
    writer.add_float32(f"{ARCH}.rope.freq_base", rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_string(f"{ARCH}.rope.scaling.type", "yarn")
        for key, name in (("factor", "factor"), ("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            writer.add_float32(f"{ARCH}.rope.scaling.{name}", rope[key])
        original = rope["original_max_position_embeddings"]
        writer.add_uint32(f"{ARCH}.rope.scaling.original_context_length", original)
        writer.add_float32(f"{ARCH}.rope.scaling.yarn_log_multiplier", 0.1 * rope["mscale_all_dim"])


def _tensors(directory: Path, config: dict[str, Any], is_old: bool) -> Iterator[tuple[str, Tensor]]:
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in open_tensors(sorted(directory.glob("*.safetensors"))).items():
        if (found := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)) is None:
            yield OF_MODEL[name.removesuffix(".weight")] + ".weight", tensor
            continue
        prefix, base = f"blk.{found[1]}.", found[2].removesuffix(".weight")
        if of_expert := re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)", base):
            stored = f"{prefix}ffn_{PROJECTIONS[of_expert[2]]}_exps.weight"
            experts.setdefault(stored, {})[int(of_expert[1])] = tensor
        elif base == "mlp.gate.e_score_correction_bias":
            yield prefix + "exp_probs_b.bias", tensor
        elif base == "self_attn.kv_b_proj" and not is_old:
            by_head = tensor.unflatten(0, (config["num_attention_heads"], -1))
            yield prefix + "attn_k_b.weight", by_head[:, : config["qk_nope_head_dim"]].transpose(1, 2)
            yield prefix + "attn_v_b.weight", by_head[:, config["qk_nope_head_dim"] :]
        else:
            yield f"{prefix}{NAMES[base]}.weight", tensor
    for name, of_each in experts.items():
        yield name, torch.stack([of_each[index] for index in sorted(of_each)])

"""GGUF files of hybrids, as llama.cpp's converter writes them; the product writes none.

Its sources (`conversion/qwen.py`, `lfm2.py`, `granite.py` of llama-cpp-python 0.3.36) are the pattern, and test_gguf_hybrids.py
says what its own files were compared with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from backend.models.convert import hf_to_meta
from backend.models.loader import open_tensors
from tests.model.gguf_files import encoded

OF_MODEL = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "backbone.embeddings": "token_embd",
    "backbone.norm_f": "output_norm",
}
OF_LAYER = {
    "input_layernorm": "attn_norm",
    "operator_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "mamba.in_proj": "ssm_in",
    "mamba.out_proj": "ssm_out",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "norm": "attn_norm",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "conv.conv": "shortconv.conv",
    "ffn_norm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "feed_forward.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
MAMBA = ("in_proj.weight", "out_proj.weight", "conv1d.weight", "conv1d.bias", "norm.weight")
PROJECTIONS = dict(gate_proj="gate", up_proj="up", down_proj="down", w1="gate", w3="up", w2="down")
NUMBERS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "head_dim": "attention.key_length",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "num_dense_layers": "leading_dense_block_count",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "mamba_num_heads": "ssm.time_step_rank",
    "n_groups": "ssm.group_count",
    "ssm_state_size": "ssm.state_size",
    "conv_kernel": "ssm.conv_kernel",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "n_routed_experts": "expert_count",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
    "conv_L_cache": "shortconv.l_cache",
}
FACTORS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}


def write_hybrid(directory: Path, file: Path, arch: str, kind: str = "F32", extra_layer: bool = False) -> Path:
    """extra_layer: one that predicts a further token stands behind the model's own, as in most files of Qwen3.5."""
    config = json.loads((directory / "config.json").read_text())
    config |= config.get("text_config", {})
    if kinds := config.pop("layers_block_type", None):
        config |= dict(layer_types=kinds, num_hidden_layers=len(kinds), num_local_experts=None)
        if "moe" not in kinds:
            config |= dict.fromkeys(("n_routed_experts", "moe_intermediate_size"))
    writer = gguf.GGUFWriter(file, arch)
    tensors = dict(_tensors(directory, arch, config))
    _add_settings(writer, arch, config, tensors, extra_layer)
    if extra_layer:
        number, last = config["num_hidden_layers"], "blk.1."
        tensors |= {f"blk.{number}.{name.removeprefix(last)}": tensors[name] for name in tensors if name[:6] == last}
        tensors[f"blk.{number}.nextn.eh_proj.weight"] = torch.ones(48, 96)
    write_tensors(writer, tensors, kind)
    return file


def write_tensors(writer: gguf.GGUFWriter, tensors: Mapping[str, Tensor], kind: str) -> None:
    """Write the file. Matrices of whole blocks are of type `kind`, all else is float32."""
    for name, tensor in tensors.items():
        values = tensor.float().contiguous().numpy()
        plain = values.ndim == 1 or "conv" in name.split(".")[-2] or "ssm_norm" in name or not name.endswith(".weight")
        used = Type.F32 if plain or "ffn_gate_inp" in name else Type[kind]
        if values.shape[-1] % gguf.GGML_QUANT_SIZES[used][0]:
            used = Type.F32
        writer.add_tensor(name, values if used is Type.F32 else encoded(values, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_settings(
    writer: gguf.GGUFWriter, arch: str, config: dict[str, Any], tensors: dict[str, Tensor], extra_layer: bool
) -> None:
    for key, name in NUMBERS.items():
        if isinstance(config.get(key), int):
            writer.add_uint32(f"{arch}.{name}", config[key] + (extra_layer and key == "num_hidden_layers"))
    for key, name in FACTORS.items():
        if config.get(key) is not None:
            writer.add_float32(f"{arch}.{name}", config[key])
    kinds = config["layer_types"]
    recurrent = [kind != "full_attention" for kind in kinds]
    kv_heads: int = config["num_key_value_heads"]
    rope = config.get("rope_parameters")
    if rope:
        writer.add_float32(f"{arch}.rope.freq_base", rope["rope_theta"])
    if "linear_num_value_heads" in config:
        inner = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        writer.add_uint32(f"{arch}.ssm.inner_size", inner)
        writer.add_uint32(f"{arch}.attention.head_count_kv", kv_heads)
        writer.add_array(f"{arch}.attention.recurrent_layers", recurrent + [False] * extra_layer)
        writer.add_uint32(f"{arch}.rope.dimension_count", int(config["head_dim"] * rope["partial_rotary_factor"]))
        if arch != "qwen3next":
            writer.add_array(f"{arch}.rope.dimension_sections", [11, 11, 10, 0])
        if extra_layer:
            writer.add_uint32(f"{arch}.nextn_predict_layers", 1)
        return
    writer.add_array(f"{arch}.attention.head_count_kv", [0 if each else kv_heads for each in recurrent])
    if "lfm2" in arch:
        if arch == "lfm2moe":
            writer.add_uint32(f"{arch}.expert_gating_func", 2)
        else:  # the width itself
            writer.kv_data[0].pop(f"{arch}.feed_forward_length")
            writer.add_uint32(f"{arch}.feed_forward_length", len(tensors["blk.0.ffn_gate.weight"]))
        return
    if arch.startswith("nemotron"):
        width = config["moe_intermediate_size" if "moe" in kinds else "intermediate_size"]
        writer.kv_data[0].pop(f"{arch}.feed_forward_length")
        writer.add_array(f"{arch}.feed_forward_length", [width if kind in ("mlp", "moe") else 0 for kind in kinds])
        writer.add_uint32(f"{arch}.ssm.inner_size", config["mamba_num_heads"] * config["mamba_head_dim"])
        writer.add_float32(f"{arch}.attention.layer_norm_epsilon", config["layer_norm_epsilon"])
        if "moe" in kinds:
            writer.add_bool(f"{arch}.expert_weights_norm", config["norm_topk_prob"])
            writer.add_float32(f"{arch}.expert_weights_scale", config["routed_scaling_factor"])
        return
    writer.add_uint32(f"{arch}.ssm.inner_size", config["mamba_expand"] * config["hidden_size"])
    writer.add_bool(f"{arch}.rope.scaling.finetuned", False)


def _tensors(directory: Path, arch: str, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in open_tensors(sorted(directory.glob("*.safetensors"))).items():
        name = name.replace("model.language_model.", "model.")
        if name.startswith("model.visual."):
            continue
        if name.endswith("norm.weight") and arch.startswith("qwen") and "linear_attn.norm" not in name:
            tensor = tensor + 1
        if (found := re.fullmatch(r"(?:model|backbone)\.layers\.(\d+)\.(.*)", name)) is None:
            yield OF_MODEL[name.removesuffix(".weight")] + ".weight", tensor
            continue
        prefix = f"blk.{found[1]}."
        if of_expert := re.fullmatch(r"(?:mlp|feed_forward|mixer)\.experts\.(\d+)\.(\w+)\.weight", found[2]):
            stored = f"{prefix}ffn_{PROJECTIONS[of_expert[2]]}_exps.weight"
            experts.setdefault(stored, {})[int(of_expert[1])] = tensor
            continue
        for stored, values in _of_layer(found[2], tensor, arch, config):
            yield prefix + stored, values
    for name, of_each in experts.items():
        yield name, torch.stack([of_each[index] for index in sorted(of_each)])


def _of_layer(name: str, tensor: Tensor, arch: str, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    base, _, suffix = name.rpartition(".")
    if "linear_attn." in name and arch != "qwen3next":
        tensor = _tiled(name, tensor, config)
    is_mamba = not name.startswith("linear_attn.")
    if name.startswith("mixer.") and name.removeprefix("mixer.") in MAMBA:
        name, base = name.replace("mixer.", "mamba."), base.replace("mixer", "mamba")
    if suffix == "A_log":
        yield "ssm_a", -tensor.exp()[:, None] if is_mamba else -tensor.exp()
    elif suffix == "D":
        yield "ssm_d", tensor[:, None]
    elif suffix == "dt_bias":
        yield "ssm_dt.bias", tensor
    elif suffix in ("expert_bias", "e_score_correction_bias"):
        yield "exp_probs_b.bias", tensor
    elif base == "post_attention_layernorm":
        yield ("post_attention_norm" if arch.startswith("qwen") else "ffn_norm") + ".weight", tensor
    elif base == "linear_attn.in_proj_qkvz":
        keys, values = config["linear_key_head_dim"], config["linear_value_head_dim"]
        rows = config["linear_num_value_heads"] // config["linear_num_key_heads"] * values
        parts = tensor.unflatten(0, (config["linear_num_key_heads"], -1)).split((keys, keys, rows, rows), 1)
        yield "attn_qkv.weight", torch.cat([part.flatten(0, 1) for part in parts[:3]])
        yield "attn_gate.weight", parts[3].flatten(0, 1)
    elif base in ("shared_mlp.input_linear", "block_sparse_moe.input_linear"):
        end = "_exps" if "sparse" in base else "_shexp" if config["num_local_experts"] else ""
        gate, up = tensor.chunk(2, -2)
        yield f"ffn_gate{end}.weight", gate
        yield f"ffn_up{end}.weight", up
    elif base == "shared_mlp.output_linear":
        yield f"ffn_down{'_shexp' if config['num_local_experts'] else ''}.weight", tensor
    else:
        if base == "mamba.norm":
            tensor = tensor.unflatten(0, (config["n_groups" if "n_groups" in config else "mamba_n_groups"], -1))
        if suffix == "weight" and base.endswith((".conv1d", "conv.conv")):
            tensor = tensor.squeeze(1)
        if arch == "granitehybrid" and base.endswith(("q_proj", "k_proj")):
            tensor = hf_to_meta(tensor, config["num_attention_heads" if "q_proj" in base else "num_key_value_heads"])
        yield f"{OF_LAYER[base]}.{suffix}", tensor


def _tiled(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """The first value head of each key head, then the second of each, and so on."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    order = torch.arange(heads).view(keys, -1).T.flatten()
    if name.endswith("out_proj.weight"):
        return tensor.unflatten(1, (heads, -1))[:, order].flatten(1)
    if "linear_attn.norm" in name:
        return tensor
    first = 2 * keys * config["linear_key_head_dim"] if "qkv" in name or "conv1d" in name else 0
    return torch.cat([tensor[:first], tensor[first:].unflatten(0, (heads, -1))[order].flatten(0, 1)])

"""Writes what llama.cpp's converter makes of a checkpoint: names by the gguf package's table, the rest by the converter's rules.

Written from `conversion/` of llama.cpp, apart from the reader that it tests. tests/families/test_gguf.py says how it was compared
with the converter itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import MODEL_ARCH as ARCH
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from torch import Tensor

from tests.model.gguf_files import encoded

ARCHITECTURES: dict[str, ARCH] = {
    "LlamaForCausalLM": ARCH.LLAMA,
    "MistralForCausalLM": ARCH.LLAMA,
    "Ministral3ForCausalLM": ARCH.MISTRAL3,
    "Qwen2ForCausalLM": ARCH.QWEN2,
    "Qwen3ForCausalLM": ARCH.QWEN3,
    "GemmaForCausalLM": ARCH.GEMMA,
    "Gemma2ForCausalLM": ARCH.GEMMA2,
    "Gemma3ForCausalLM": ARCH.GEMMA3,
    "Phi3ForCausalLM": ARCH.PHI3,
    "GlmForCausalLM": ARCH.CHATGLM,
    "Glm4ForCausalLM": ARCH.GLM4,
    "GraniteForCausalLM": ARCH.GRANITE,
    "GraniteMoeHybridForCausalLM": ARCH.GRANITE,
    "SmolLM3ForCausalLM": ARCH.SMOLLM3,
    "Olmo2ForCausalLM": ARCH.OLMO2,
    "Olmo3ForCausalLM": ARCH.OLMO2,
    "Exaone4ForCausalLM": ARCH.EXAONE4,
    "CohereForCausalLM": ARCH.COMMAND_R,
    "Cohere2ForCausalLM": ARCH.COHERE2,
    "Starcoder2ForCausalLM": ARCH.STARCODER2,
    "StableLmForCausalLM": ARCH.STABLELM,
    "GPTNeoXForCausalLM": ARCH.GPTNEOX,
    "SeedOssForCausalLM": ARCH.SEED_OSS,
    "Ernie4_5ForCausalLM": ARCH.ERNIE4_5,
}
_PAIRS = (ARCH.LLAMA, ARCH.MISTRAL3, ARCH.GRANITE, ARCH.SMOLLM3)
_GEMMAS = (ARCH.GEMMA, ARCH.GEMMA2, ARCH.GEMMA3)
_SEVERAL_WINDOWS = (ARCH.OLMO2, ARCH.EXAONE4)
# key of config.json -> the writer's method
_NUMBERS = {
    "hidden_size": "add_embedding_length",
    "num_hidden_layers": "add_block_count",
    "num_attention_heads": "add_head_count",
    "num_key_value_heads": "add_head_count_kv",
    "max_position_embeddings": "add_context_length",
    "rms_norm_eps": "add_layer_norm_rms_eps",
    "layer_norm_eps": "add_layer_norm_eps",
    "norm_epsilon": "add_layer_norm_eps",
    "embedding_multiplier": "add_embedding_scale",
    "residual_multiplier": "add_residual_scale",
    "attention_multiplier": "add_attention_scale",
    "logits_scaling": "add_logit_scale",
    "logit_scale": "add_logit_scale",
    "attn_logit_softcapping": "add_attn_logit_softcapping",
    "final_logit_softcapping": "add_final_logit_softcapping",
    "use_parallel_residual": "add_parallel_residual",
}


def convert(directory: Path, file: Path, fuses_qkv: bool = False, kind: str = "F32") -> Path:
    """Write a file whose matrices are of type `kind`, or of F32 where their rows are no whole blocks.

    `fuses_qkv`: as of checkpoints that have one tensor for queries, keys and values.
    """
    config = json.loads((directory / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    _settings(writer, config, arch)
    for name, tensor in _tensors(directory, config, arch, fuses_qkv):
        values = tensor.float().contiguous().numpy()
        used = Type[kind] if values.ndim > 1 and values.shape[1] % GGML_QUANT_SIZES[Type[kind]][0] == 0 else Type.F32
        writer.add_tensor(name, values if used is Type.F32 else encoded(values, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _settings(writer: gguf.GGUFWriter, config: dict[str, Any], arch: ARCH) -> None:
    for key, method in _NUMBERS.items():
        if config.get(key) is not None:
            getattr(writer, method)(config[key])
    writer.add_feed_forward_length(config.get("shared_intermediate_size") or config["intermediate_size"])
    if config.get("head_dim") is not None and arch is not ARCH.CHATGLM:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    window = config.get("sliding_window")
    if window and arch not in (ARCH.LLAMA, ARCH.QWEN2, ARCH.SMOLLM3, ARCH.STARCODER2):
        writer.add_sliding_window(window)
    if window and arch in _SEVERAL_WINDOWS:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    _rope(writer, config, arch)


def _rope(writer: gguf.GGUFWriter, config: dict[str, Any], arch: ARCH) -> None:
    head_dim = _head_dim(config)
    given = config["rope_parameters"]
    rope = given.get("full_attention", given)
    local = given.get("sliding_attention")
    share = rope.get("partial_rotary_factor", config.get("rotary_pct", 1.0))
    if arch not in _GEMMAS:
        writer.add_rope_dimension_count(int(share * head_dim))
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if local is not None:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        if "llama_4_scaling_beta" in rope:
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    elif kind == "longrope":
        original = rope["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0)
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    elif kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3(rope, head_dim))


def _llama3(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    original, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for wavelength in wavelengths:
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _tensors(directory: Path, config: dict[str, Any], arch: ARCH, fuses_qkv: bool) -> Iterator[tuple[str, Tensor]]:
    table = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    fused: dict[str, list[Tensor]] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        for part, changed in _changed(name, tensor, config, arch):
            base, _, suffix = part.rpartition(".")
            stored = table.get_name(base)
            assert stored is not None, f"gguf has no name for {base}"
            if fuses_qkv and stored.endswith((".attn_q", ".attn_k", ".attn_v")):
                group = fused.setdefault(f"{stored[:-2]}_qkv.{suffix}", [])
                group.append(changed)
                continue
            yield f"{stored}.{suffix}", changed
    for stored, parts in fused.items():
        k, q, v = parts  # in the order of their names
        yield stored, torch.cat([q, k, v])


def _changed(name: str, tensor: Tensor, config: dict[str, Any], arch: ARCH) -> Iterator[tuple[str, Tensor]]:
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    if arch in _PAIRS and ".q_proj." in name:
        tensor = _in_pairs(tensor, heads)
    if arch in _PAIRS and ".k_proj." in name:
        tensor = _in_pairs(tensor, kv_heads)
    if arch in _GEMMAS and name.endswith("norm.weight"):
        tensor = tensor + 1
    if "shared_mlp.input_linear" in name:
        gate, up = tensor.chunk(2)
        prefix = name.split("shared_mlp")[0]
        yield f"{prefix}mlp.gate_proj.weight", gate
        yield f"{prefix}mlp.up_proj.weight", up
        return
    name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
    if "attention.query_key_value" in name:
        tensor = tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    yield name, tensor


def _in_pairs(tensor: Tensor, heads: int) -> Tensor:
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)


def _head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]

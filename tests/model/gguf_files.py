"""GGUF files made of Hugging Face checkpoints with llama.cpp's own package, which is also the oracle of what they hold."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

from backend.models.convert import meta_to_hf
from benchmarks.peers.write_gguf import ARCHITECTURES, gguf_name, permute, read_tensors, rope_factors

Kind = Callable[[str], str]  # GGUF name of a matrix -> ggml type
Change = Callable[[gguf.GGUFWriter], object]
FLOATS = ("F32", "F16", "BF16")


def write_gguf(
    model_dir: Path, file: Path, kind: Kind | str = "F32", change: Change = lambda writer: None, part_tensors: int = 0
) -> Path:
    """`change` adds settings, such as a tokenizer's. Vectors are stored in float32.

    part_tensors: of each of several parts, whose names are made of that of `file`; 0: one file.
    """
    config = json.loads((model_dir / "config.json").read_text())
    name, permuted = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(file, name, split_max_tensors=part_tensors)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    _write_settings(writer, config)
    change(writer)
    is_linear = _rope(config).get("rope_type") == "linear"
    factors = None if is_linear else rope_factors(config, _head_dim(config))
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for key, tensor in read_tensors(model_dir):
        stored = gguf_name(key)
        projection = stored.split(".")[-2]
        if permuted and projection in heads:
            tensor = permute(tensor, heads[projection])
        if tensor.ndim == 1:
            writer.add_tensor(stored, tensor)
            continue
        used = Type[kind if isinstance(kind, str) else kind(stored)]
        writer.add_tensor(stored, encoded(np.ascontiguousarray(tensor), used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def encoded(values: np.ndarray, kind: Type) -> np.ndarray:
    """Values in a type: quantised, or where gguf has no quantisation to it, random blocks of the same size."""
    if kind.name in FLOATS or kind.name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        return gguf.quants.quantize(values, kind)
    return random_blocks(values.shape, kind)  # of many types gguf has no quantisation


def random_blocks(shape: tuple[int, ...], kind: Type) -> np.ndarray:
    """Any bytes, but scales that make values of a trained matrix's size: about 1 / sqrt(columns)."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(shape)
    blocks = generator.integers(0, 256, (shape[0], shape[1] // size, num_bytes), dtype=np.uint8)
    if kind is Type.MXFP4:
        blocks[..., 0] = generator.integers(121, 124, blocks.shape[:2])
        return blocks.reshape(shape[0], -1)
    start, largest, largest_minimum = _SCALES.get(kind.name, (0, 31, 0))
    scale = generator.uniform(0.5, 2, (*blocks.shape[:2], 2)) * 2 / largest / shape[1] ** 0.5
    scale[..., 1] *= largest / (largest_minimum or 1) / 2
    halves = scale.astype(np.float16).view(np.uint8)  # [rows, blocks, 4 bytes]
    count = 4 if largest_minimum else 2
    blocks[..., start : start + count] = halves[..., :count]
    return blocks.reshape(shape[0], -1)


# For each type: the byte of a block at which its float16 scales begin, the greatest number that the first one multiplies, and
# that which the second one, of minima, multiplies (0: the type has no minima).
_SCALES: dict[str, tuple[int, float, float]] = {
    "Q4_1": (0, 15, 1),
    "Q5_1": (0, 31, 1),
    "IQ4_NL": (0, 127, 0),
    "Q2_K": (80, 3 * 15, 15),
    "Q3_K": (108, 4 * 32, 0),
    "Q4_K": (0, 15 * 63, 63),
    "Q5_K": (0, 31 * 63, 63),
    "Q6_K": (208, 32 * 127, 0),
    "IQ4_XS": (0, 127 * 32, 0),
    "IQ2_XXS": (0, 43 * 31 / 8, 0),
    "IQ2_XS": (0, 43 * 31 / 8, 0),
    "IQ2_S": (0, 43 * 31 / 8, 0),
    "IQ3_XXS": (0, 62 * 31 / 4, 0),
    "IQ3_S": (0, 15 * 31, 0),
    "TQ1_0": (52, 1, 0),
    "TQ2_0": (64, 1, 0),
}


def as_checkpoint(file: Path, model_dir: Path, output: Path) -> Path:
    """What the gguf package reads and dequantises, as a float32 checkpoint with the configuration of `model_dir`."""
    output.mkdir()
    for path in model_dir.glob("*.json"):
        if not path.name.startswith("model."):
            shutil.copy(path, output)
    config = json.loads((model_dir / "config.json").read_text())
    is_permuted = ARCHITECTURES[config["architectures"][0]][1]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    names = {gguf_name(key): key for key, _ in read_tensors(model_dir)}
    tensors = {}
    for tensor in gguf.GGUFReader(file).tensors:
        if tensor.name == "rope_freqs.weight":
            continue
        key = names[tensor.name]
        values = torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        count = heads.get(key.split(".")[-2]) if is_permuted else None
        tensors[key] = values if count is None else meta_to_hf(values, count).contiguous()
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    return output


def _write_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_freq_base(_rope(config).get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if _rope(config).get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(_rope(config)["factor"])
    if config["architectures"][0] == "MistralForCausalLM":
        writer.add_sliding_window(config["sliding_window"])


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("rope_parameters") or {}


def _head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]

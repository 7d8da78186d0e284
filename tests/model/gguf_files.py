"""GGUF files made of Hugging Face checkpoints by the product's rules, in all types that llama.cpp's package reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

from backend.convert.gguf.families import Rules, whole_config
from backend.models.convert import meta_to_hf
from backend.models.loader import open_tensors

Kind = Callable[[str], str]  # GGUF name of a matrix -> ggml type
Change = Callable[[gguf.GGUFWriter], object]
FLOATS = ("F32", "F16", "BF16")


def write_gguf(
    model_dir: Path,
    file: Path,
    kind: Kind | str = "F32",
    change: Change = lambda writer: None,
    part_tensors: int = 0,
    fuses_qkv: bool = False,
) -> Path:
    """Vectors, routers, and matrices whose rows are no whole blocks, are stored in float32. `change` adds settings, such as a
    tokenizer's.

    part_tensors: of each of several parts, whose names are made of that of `file`; 0: one file. fuses_qkv: as of checkpoints that
    have one tensor for queries, keys and values.
    """
    rules = rules_of(model_dir)
    writer = gguf.GGUFWriter(file, rules.name, split_max_tensors=part_tensors)
    rules.add_settings(writer)
    change(writer)
    for name, values in rules.tables().items():
        writer.add_tensor(name, values)
    fused: dict[str, list[torch.Tensor]] = {}
    experts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for stored in rules.tensors(_tensors(model_dir)):
        base, _, suffix = stored.name.rpartition(".")
        if stored.expert is not None:
            experts.setdefault(stored.name, []).append((stored.expert, stored.values))
        elif fuses_qkv and base.endswith((".attn_q", ".attn_k", ".attn_v")):
            fused.setdefault(f"{base[:-2]}_qkv.{suffix}", []).append(stored.values)
        else:
            _add(writer, stored.name, stored.values, kind)
    for name, (k, q, v) in fused.items():  # in the order of their names
        _add(writer, name, torch.cat([q, k, v]), kind)
    for name, parts in experts.items():
        parts.sort(key=lambda part: part[0])
        _add(writer, name, torch.stack([values for _, values in parts]), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def rules_of(model_dir: Path) -> Rules:
    return Rules(whole_config(json.loads((model_dir / "config.json").read_text())))


def _tensors(model_dir: Path) -> Mapping[str, torch.Tensor]:
    return open_tensors(sorted(model_dir.glob("*.safetensors")))


def _add(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: Kind | str) -> None:
    values = tensor.float().contiguous().numpy()
    is_float = values.ndim == 1 or "ffn_gate_inp" in name or not name.endswith(".weight")
    used = Type.F32 if is_float else Type[kind if isinstance(kind, str) else kind(name)]
    if values.shape[-1] % GGML_QUANT_SIZES[used][0]:
        used = Type.F32
    writer.add_tensor(name, values if used is Type.F32 else encoded(values, used), raw_dtype=used)


def encoded(values: np.ndarray, kind: Type) -> np.ndarray:
    """Values in a type: quantised, or where gguf has no quantisation to it, random blocks of the same size."""
    if kind.name in FLOATS or kind.name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        return gguf.quants.quantize(values, kind)
    return random_blocks(values.shape, kind)  # of many types gguf has no quantisation


def random_blocks(shape: tuple[int, ...], kind: Type) -> np.ndarray:
    """Any bytes, but scales that make values of a trained matrix's size: about 1 / sqrt(columns)."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(shape)
    *rows, columns = shape
    blocks = generator.integers(0, 256, (*rows, columns // size, num_bytes), dtype=np.uint8)
    if kind is Type.MXFP4:
        blocks[..., 0] = generator.integers(121, 124, blocks.shape[:-1])
        return blocks.reshape(*rows, -1)
    start, largest, largest_minimum = _SCALES.get(kind.name, (0, 31, 0))
    scale = generator.uniform(0.5, 2, (*blocks.shape[:-1], 2)) * 2 / largest / columns**0.5
    scale[..., 1] *= largest / (largest_minimum or 1) / 2
    halves = scale.astype(np.float16).view(np.uint8)  # [..., blocks, 4 bytes]
    count = 4 if largest_minimum else 2
    blocks[..., start : start + count] = halves[..., :count]
    return blocks.reshape(*rows, -1)


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
    rules = rules_of(model_dir)
    names = {stored.name: stored.source for stored in rules.tensors(_tensors(model_dir))}
    tensors = {}
    for tensor in gguf.GGUFReader(file).tensors:
        if tensor.name == "rope_freqs.weight":
            continue
        key = names[tensor.name]
        values = torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        count = rules.heads_in_pairs(key)
        tensors[key] = values if count is None else meta_to_hf(values, count).contiguous()
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    return output

"""Checkpoints of 4-bit weights in their published layouts, made by hand from random numbers: what they stand for is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.weight_formats.checkpoints import WEIGHTS, quantization_config
from tools.make_random_model import make_random_model

SIZES = dict(hidden_size=128, head_dim=32, num_attention_heads=4, intermediate_size=256, num_hidden_layers=2)


class Numbers(NamedTuple):
    """weight[n, k] = (q - zero) * group_scale * scale, and what it is multiplied by in 8 bits."""

    q: Tensor  # uint8 [n, k], 0..15
    zero: Tensor  # uint8 [n, groups], 0..15
    scale: Tensor  # float [n, groups] or [n, 1]
    group_scale: Tensor | None = None  # int8 [n, groups]

    def weight(self, scale_dtype: torch.dtype | None = None) -> Tensor:
        """float32 [n, k]; `scale_dtype`: with scales, multiplied together where there are two, rounded to it."""
        (n, k), groups = self.q.shape, self.zero.shape[1]
        steps = (self.q.int() - self.zero.int().repeat_interleave(k // groups, 1)).view(n, groups, -1)
        scale = self.scale.float() if self.group_scale is None else self.scale.float() * self.group_scale
        scale = scale if scale_dtype is None else scale.to(scale_dtype).float()
        return (steps * scale[:, :, None]).view(n, k)


Write = Callable[[str, Numbers], dict[str, Tensor]]


class Layout(NamedTuple):
    """One way to store them: the section of config.json, random numbers of such a kind, and the tensors."""

    section: dict[str, Any]
    write: Write
    group: int | None = 128
    has_zeros: bool = True
    scale_dtype: torch.dtype = torch.float16
    grouped_scales: bool = False  # QoQ's second level

    def numbers(self, n: int, k: int, seed: int) -> Numbers:
        """Weights of about the size that make_random_model gives."""
        generator = torch.Generator().manual_seed(seed)
        groups = k // (self.group or k)
        q = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
        zero = torch.randint(4, 12, (n, groups), generator=generator, dtype=torch.uint8)
        if not self.has_zeros:
            zero.fill_(8)
        size = 0.3 / k**0.5
        if self.grouped_scales:
            group_scale = torch.randint(3, 10, (n, groups), generator=generator, dtype=torch.int8)
            scale = (torch.rand(n, 1, generator=generator) + 0.5) * size / 6
            return Numbers(q, zero, scale.to(self.scale_dtype), group_scale)
        scale = (torch.rand(n, groups, generator=generator) + 0.5) * size
        return Numbers(q, zero, scale.to(self.scale_dtype))


def words(nibbles: Tensor) -> Tensor:
    """Packs [..., 8] numbers 0..15, low bits first, into int32 [...]."""
    return sum(nibbles[..., i].long() << 4 * i for i in range(8)).to(torch.int32)  # keeps the low 32 bits


def write_compressed(name: str, of: Numbers) -> dict[str, Tensor]:
    """compressed-tensors; zero points are stored when one is not 8."""
    n, k = of.q.shape
    stored = {
        name + ".weight_packed": words(of.q.view(n, -1, 8)),
        name + ".weight_scale": of.scale,
        name + ".weight_shape": torch.tensor([n, k]),
    }
    if (of.zero != 8).any():
        padded = torch.cat([of.zero, torch.zeros(-n % 8, of.zero.shape[1], dtype=torch.uint8)])
        stored[name + ".weight_zero_point"] = words(padded.T.unflatten(1, (-1, 8))).T
    return stored


def write_awq(name: str, of: Numbers) -> dict[str, Tensor]:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    qweight, qzeros = (words(each.T.unflatten(1, (-1, 8))[:, :, order]) for each in (of.q, of.zero))
    return {name + ".qweight": qweight, name + ".qzeros": qzeros, name + ".scales": of.scale.T}


def write_gptq(name: str, of: Numbers, version: int = 1) -> dict[str, Tensor]:
    """Writes as AutoGPTQ does: with g_idx and, of every layer, a bias."""
    n, k = of.q.shape
    stored_zero = (of.zero.int() - 1) % 16 if version == 1 else of.zero
    return {
        name + ".qweight": words(of.q.T.view(k // 8, 8, n).transpose(1, 2)),
        name + ".qzeros": words(stored_zero.T.unflatten(1, (-1, 8))),
        name + ".scales": of.scale.T,
        name + ".g_idx": (torch.arange(k) // (k // of.zero.shape[1])).int(),
        name + ".bias": torch.zeros(n, dtype=torch.float16),
    }


def write_gptq_v2(name: str, of: Numbers) -> dict[str, Tensor]:
    return write_gptq(name, of, 2)


def write_qoq(name: str, of: Numbers) -> dict[str, Tensor]:
    """QServe's tiles of 32 rows and 32 columns."""
    n, k = of.q.shape
    tiles = of.q.view(n // 32, 2, 2, 8, k // 32, 2, 4, 4).permute(0, 4, 3, 6, 5, 2, 7, 1)
    stored = {
        name + ".qweight": (tiles[..., 1] << 4 | tiles[..., 0]).contiguous().view(torch.int8).view(n, k // 2),
        name + ".s1_scales": of.scale[:, 0],
    }
    if of.group_scale is None:
        return stored | {name + ".s1_szeros": (of.zero * of.scale.float())[:, 0].to(of.scale.dtype)}
    for suffix, values in (("scales", of.group_scale), ("zeros", -(of.zero.to(torch.int8) * of.group_scale))):
        stored[f"{name}.s2_{suffix}"] = values.T.view(-1, n // 32, 4, 8).transpose(2, 3).reshape(-1, n)
    return stored


def compressed(group: int | None, symmetric: bool, dtype: torch.dtype = torch.bfloat16, **section: Any) -> Layout:
    strategy = dict(strategy="channel") if group is None else dict(strategy="group", group_size=group)
    weights = WEIGHTS | dict(num_bits=4, symmetric=symmetric) | strategy
    config = quantization_config("pack-quantized", weights=weights, **section)
    return Layout(config, write_compressed, group, not symmetric, dtype)


def awq(group: int = 128, **section: Any) -> Layout:
    config = dict(quant_method="awq", bits=4, group_size=group, version="gemm", zero_point=True) | section
    return Layout(config | dict(modules_to_not_convert=None), write_awq, None if group == -1 else group)


def gptq(group: int = 128, sym: bool = False, version: int = 1, **section: Any) -> Layout:
    config = dict(quant_method="gptq", bits=4, group_size=group, desc_act=False, sym=sym, true_sequential=True)
    config |= dict(checkpoint_format="gptq_v2") if version == 2 else {}
    write = write_gptq_v2 if version == 2 else write_gptq
    return Layout(config | section, write, None if group == -1 else group, not sym)


def qoq(group: int, **section: Any) -> Layout:
    config = dict(quant_method="qoq", wbits=4, group_size=group) | section
    return Layout(config, write_qoq, None if group == -1 else group, grouped_scales=group != -1)


LAYOUTS = {
    "compressed-tensors": compressed(128, True),
    "compressed-tensors-zeros": compressed(32, False),
    "compressed-tensors-channel": compressed(None, False, torch.float16),
    "awq": awq(),
    "awq-64": awq(64),
    "awq-channel": awq(-1),
    "gptq": gptq(32),
    "gptq-symmetric": gptq(sym=True),
    "gptq-channel": gptq(-1),
    "gptq_v2": gptq(version=2),
    "qoq-channel": qoq(-1),
    "qoq-128": qoq(128),
}
IN_EIGHT_BITS = [name for name in LAYOUTS if name.startswith("qoq")]  # activations as well
IN_SIXTEEN = [name for name in LAYOUTS if name not in IN_EIGHT_BITS]


class Pair(NamedTuple):
    quantised: Path
    floats: Path  # float32, of the weights that `quantised` stands for
    numbers: dict[str, Numbers]  # numbers by a projection's name


def write_pair(root: Path, layout: Layout, family: str = "llama", **overrides: Any) -> Pair:
    floats = make_random_model(root / "float", family, **SIZES | overrides)
    weights = load_file(floats / "model.safetensors")
    numbers: dict[str, Numbers] = {}
    stored: dict[str, Tensor] = {}
    for seed, (key, tensor) in enumerate(sorted(weights.items())):
        name = key.removesuffix(".weight")
        if not key.endswith(("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")):
            stored[key] = tensor
            continue
        numbers[name] = layout.numbers(*tensor.shape, seed)
        weights[key] = numbers[name].weight()
        stored = layout.write(name, numbers[name]) | stored  # a bias that the model has is not GPTQ's zeros
    save_file(weights, floats / "model.safetensors", {"format": "pt"})
    quantised = root / "quantised"
    quantised.mkdir()
    save_file({key: tensor.contiguous() for key, tensor in stored.items()}, quantised / "model.safetensors")
    raw = json.loads((floats / "config.json").read_text()) | {"quantization_config": layout.section}
    (quantised / "config.json").write_text(json.dumps(raw))
    return Pair(quantised, floats, numbers)

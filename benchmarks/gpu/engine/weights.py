"""Checkpoints that exist nowhere: tensors by their checkpoint names, made when the loader asks for them, on the device."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Shape(NamedTuple):
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The linear layers of one decoder layer: name -> n, k."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (q, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, q),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }


LLAMA_3_8B = Shape(4096, 14336, 32, 32, 8, 128, 128256)
SMALL = Shape(128, 256, 2, 4, 2, 32, 512)
GROUP = 128
MAX_POSITION = 8192


class Format(NamedTuple):
    """How weights and KV are held, and what a roofline needs to know of it."""

    quantization: dict[str, Any] | None  # the section of config.json
    tensors: Callable[[Make, int, int], dict[str, Callable[[], Tensor]]]  # (n, k) -> suffix -> the tensor
    kv_dtype: str  # kv_cache.dtype
    weight_bytes: float  # bytes of one element of a linear layer's weight
    activation_bytes: int  # bytes of one element of its input
    kv_bits: int

    @property
    def rate(self) -> str:
        return "int8" if self.activation_bytes == 1 else "bf16"


class Make(NamedTuple):
    """Random tensors of one name."""

    device: torch.device
    seed: int

    def normal(self, *shape: int, scale: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self._generator(), device=self.device, dtype=dtype).mul_(scale)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        """Integers from low to high - 1."""
        return torch.randint(low, high, shape, generator=self._generator(), device=self.device, dtype=dtype)

    def near(self, value: float, *shape: int, dtype: torch.dtype) -> Tensor:
        """Scales: within a tenth of `value`."""
        return (value * (0.9 + 0.2 * torch.rand(shape, generator=self._generator(), device=self.device))).to(dtype)

    def _generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed)


def _plain(make: Make, n: int, k: int) -> dict[str, Callable[[], Tensor]]:
    return {".weight": lambda: make.normal(n, k, scale=k**-0.5)}


def _int8(make: Make, n: int, k: int) -> dict[str, Callable[[], Tensor]]:
    """The tensors of a layer in the form int-quantized of compressed-tensors."""
    return {
        ".weight": lambda: make.integers(-127, 128, n, k, dtype=torch.int8),
        ".weight_scale": lambda: make.near(k**-0.5 / 73, n, 1, dtype=torch.bfloat16),  # 73: of integers -127..127
    }


def _int4(make: Make, n: int, k: int) -> dict[str, Callable[[], Tensor]]:
    """compressed-tensors, pack-quantized: eight columns a word, each + 8."""
    return {
        ".weight_packed": lambda: make.integers(-(1 << 31), 1 << 31, n, k // 8, dtype=torch.int32),
        ".weight_scale": lambda: make.near(k**-0.5 / 4.6, n, k // GROUP, dtype=torch.bfloat16),
        ".weight_shape": lambda: torch.tensor([n, k], device=make.device),
    }


def _qoq(make: Make, n: int, k: int) -> dict[str, Callable[[], Tensor]]:
    """QServe's, in groups of 128: every byte of its tiles is a pair of weights."""
    scales = lambda: make.integers(1, 9, k // GROUP, n, dtype=torch.int8)
    zeros = lambda: make._replace(seed=make.seed + 1).integers(4, 12, k // GROUP, n, dtype=torch.int8)
    return {
        ".qweight": lambda: make.integers(-128, 128, n, k // 2, dtype=torch.int8),
        ".s1_scales": lambda: make.near(k**-0.5 / 24, n, dtype=torch.float16),
        ".s2_scales": scales,
        ".s2_zeros": lambda: -scales() * zeros(),
    }


def _compressed(bits: int, activations: bool, format: str) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True}
    weights |= {"strategy": "channel"} if bits == 8 else {"strategy": "group", "group_size": GROUP}
    inputs = (
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True} if activations else None
    )
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


FORMATS = {
    "bf16": Format(None, _plain, "auto", 2, 2, 16),
    "w8a8kv8": Format(_compressed(8, True, "int-quantized"), _int8, "int8", 1, 1, 8),
    "w4a8kv4": Format({"quant_method": "qoq", "wbits": 4, "group_size": GROUP}, _qoq, "int4", 0.5 + 2 / GROUP, 1, 4),
    "w4a16kv8": Format(_compressed(4, False, "pack-quantized"), _int4, "int8", 0.5 + 4 / GROUP, 2, 8),
}


def config_json(shape: Shape, format: Format) -> str:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": MAX_POSITION,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    return json.dumps(config | ({"quantization_config": format.quantization} if format.quantization else {}))


class RandomTensors(Mapping[str, Tensor]):
    """A name always gives the same numbers. Nothing is kept."""

    def __init__(self, shape: Shape, format: Format, device: torch.device) -> None:
        self._device = device
        self._make: dict[str, Callable[[], Tensor]] = {}
        hidden = shape.hidden
        self._add("model.embed_tokens.weight", lambda make: make.normal(shape.vocab, hidden, scale=0.5))
        self._add("lm_head.weight", lambda make: make.normal(shape.vocab, hidden, scale=1.5 / math.sqrt(hidden)))
        self._add("model.norm.weight", lambda make: make.near(1.0, hidden, dtype=torch.bfloat16))
        for layer in range(shape.layers):
            prefix = f"model.layers.{layer}."
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self._add(f"{prefix}{norm}.weight", lambda make: make.near(1.0, hidden, dtype=torch.bfloat16))
            for linear, (n, k) in shape.linears.items():
                name = prefix + linear
                for suffix, tensor in format.tensors(self._maker(name), n, k).items():
                    self._make[name + suffix] = tensor

    def _maker(self, name: str) -> Make:
        return Make(self._device, zlib.crc32(name.encode()))

    def _add(self, name: str, make: Callable[[Make], Tensor]) -> None:
        self._make[name] = lambda: make(self._maker(name))

    def __getitem__(self, name: str) -> Tensor:
        return self._make[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._make)

    def __len__(self) -> int:
        return len(self._make)

"""ModelConfig: what config.json says, for the Llama-shaped families. What is not understood is an error, no guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from backend.api.errors import ConfigError
from backend.layers.rotary import RopeConfig
from backend.models.quantization import KvDtype, parse_quantization
from backend.models.quantized import QuantizedLayers

ROPE_KINDS = ("default", "linear", "llama3")
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class ModelConfig(Struct, frozen=True):
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # of each layer, in tokens
    dtype: str | None  # None: not said, then it is that of the embedding
    eos_ids: tuple[int, ...]
    quantization: QuantizedLayers | None  # of the checkpoint's linear layers; None = floats
    kv_cache_dtype: KvDtype | None  # that the checkpoint was calibrated for; None = not said

    @property
    def sliding_window(self) -> int | None:
        """The widest window when every layer has one; None as soon as one layer sees everything."""
        return None if None in self.windows else max(self.windows)


def read_model_config(directory: Path) -> ModelConfig:
    """Read `directory`/config.json. Raises ConfigError naming what is missing or not supported."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"model {directory.name}: config.json: File does not exist; give a Hugging Face checkpoint directory"
        )
    return parse_model_config(path.read_text())


def parse_model_config(text: str) -> ModelConfig:
    """Parse the text of a config.json. Raises ConfigError."""
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"config.json is not JSON at line {error.lineno}: {error.msg}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"config.json holds {type(raw).__name__}, a JSON object is expected")
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"architecture {architecture} is not supported; supported are {', '.join(ARCHITECTURES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {raw['hidden_act']} is not supported; supported is silu")
    try:
        return _build(raw, architecture)
    except KeyError as error:
        raise ConfigError(f"config.json lacks the key {error.args[0]}") from None
    except (msgspec.ValidationError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(f"config.json has a value of the wrong type: {error}") from None


def eos_ids(raw: dict[str, Any]) -> tuple[int, ...]:
    """eos_token_id of a config.json or generation_config.json: absent, one id, or a list."""
    eos = raw.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _build(raw: dict[str, Any], architecture: str) -> ModelConfig:
    heads = raw["num_attention_heads"]
    is_llama, is_qwen2 = architecture == "LlamaForCausalLM", architecture == "Qwen2ForCausalLM"
    attention_bias = bool(raw.get("attention_bias", False)) and architecture != "MistralForCausalLM"
    quantization, kv_cache_dtype = parse_quantization(raw)
    config = dict(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        max_position=raw["max_position_embeddings"],
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=_rope(raw),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=is_qwen2 or attention_bias,
        out_bias=attention_bias and not is_qwen2,
        mlp_bias=is_llama and bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        windows=_windows(raw, architecture),
        dtype=raw.get("dtype") or raw.get("torch_dtype"),
        eos_ids=eos_ids(raw),
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
    )
    return _checked(msgspec.convert(config, ModelConfig))


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "max_position",
)


def _checked(config: ModelConfig) -> ModelConfig:
    for name in _SIZES:
        if getattr(config, name) < 1:
            raise ConfigError(f"config.json: {name} is {getattr(config, name)}, at least 1 is needed")
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {config.num_heads} is no multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    if config.head_dim < 2 or config.head_dim % 2:
        raise ConfigError(f"config.json: head_dim is {config.head_dim}; rotary embedding needs an even number")
    if any(window is not None and window < 1 for window in config.windows):
        raise ConfigError("config.json: sliding_window is less than 1; null turns it off")
    return config


def _rope(raw: dict[str, Any]) -> RopeConfig:
    """transformers 5 writes `rope_parameters`; before it was `rope_theta` and `rope_scaling`."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ConfigError(f"rope type {kind} is not supported; supported are {', '.join(ROPE_KINDS)}")
    if scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError("partial_rotary_factor is not 1, which is not supported")
    theta = scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, scaling["factor"])
    return RopeConfig(
        theta,
        kind,
        scaling["factor"],
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
    )


def _windows(raw: dict[str, Any], architecture: str) -> tuple[int | None, ...]:
    layers, window = raw["num_hidden_layers"], raw.get("sliding_window")
    if window is None or architecture == "LlamaForCausalLM":
        return (None,) * layers
    if architecture == "MistralForCausalLM":
        return (window,) * layers
    if not raw.get("use_sliding_window", False):
        return (None,) * layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw.get("max_window_layers", 28)  # transformers' default
        return tuple(window if layer >= first else None for layer in range(layers))
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ConfigError(
            f"layer type {min(unknown)} is not supported; supported are full_attention and sliding_attention"
        )
    if len(kinds) != layers:
        raise ConfigError(f"config.json: layer_types has {len(kinds)} entries for num_hidden_layers {layers}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)

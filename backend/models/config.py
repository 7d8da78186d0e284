"""Reads a config.json of the Llama-shaped families. Settings that are not supported raise an error."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from backend.api.errors import ConfigError
from backend.api.model_files import REMEDY, convert, parse_object, read_object, shown, token_ids
from backend.api.quantised import FILE
from backend.api.supported import ACTIVATION, architecture, check_support
from backend.architectures.description import Block, LayerConfig, ModelConfig, RopeConfig
from backend.models.quantization import parse_quantization

MAX_LAYERS = 4096  # bounds the memory that config.json's number alone can make the parser take

Size = Annotated[int, Meta(ge=1, le=2**40)]
Factor = Annotated[float, Meta(gt=0, le=1e30)]


class _Raw(Struct):
    """The keys of config.json that are read, as transformers names them."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    num_attention_heads: Size
    max_position_embeddings: Size
    architectures: list[str] | None = None
    hidden_act: str = ACTIVATION
    num_key_value_heads: Size | None = None
    head_dim: Annotated[int, Meta(ge=2, le=2**20, multiple_of=2)] | None = None
    rms_norm_eps: Annotated[float, Meta(ge=0, le=1)] = 1e-6
    rope_theta: Factor | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    tie_word_embeddings: bool | None = False
    attention_bias: bool | None = False
    mlp_bias: bool | None = False
    sliding_window: int | None = None
    use_sliding_window: bool | None = False
    layer_types: list[str] | None = None
    max_window_layers: int | None = 28  # transformers' default
    dtype: str | None = None
    torch_dtype: str | None = None


class _Scaling(Struct):
    """The section `rope_parameters` (transformers 5) or `rope_scaling` (before it)."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Factor | None = None
    partial_rotary_factor: float | None = None


class _Linear(Struct):
    factor: Factor


class _Llama3(Struct):
    factor: Factor
    low_freq_factor: Factor
    high_freq_factor: Factor
    original_max_position_embeddings: Size


class _Factors(Struct):
    factors: list[Factor]


def read_model_config(directory: Path) -> ModelConfig:
    """Read `directory`/config.json. Raises ConfigError naming what is missing or not supported."""
    content = read_object(directory, FILE)
    if content is None:
        raise ConfigError(
            f"model {directory.name}: config.json: File does not exist; give a Hugging Face checkpoint directory"
        )
    return of_object(content)


def parse_model_config(text: str) -> ModelConfig:
    """Parse the text of a config.json. Raises ConfigError."""
    return of_object(parse_object(text, FILE))


def check_eos_ids(ids: tuple[int, ...], config: ModelConfig, name: str) -> tuple[int, ...]:
    """Returns `ids`, the eos_token_id of the file `name`. Raises ConfigError for an id outside the vocabulary."""
    for token_id in ids:
        if token_id >= config.vocab_size:
            raise ConfigError(f"{name}: eos_token_id {token_id} is not below vocab_size {config.vocab_size}; {REMEDY}")
    return ids


def of_object(content: dict[str, Any]) -> ModelConfig:
    """The configuration in the content of a config.json. Raises ConfigError."""
    check_support(content)
    name = architecture(content)
    raw = convert(content, _Raw, FILE)
    quantization, kv_cache_dtype = parse_quantization(content)
    is_llama, is_qwen2 = name == "LlamaForCausalLM", name == "Qwen2ForCausalLM"
    attention_bias = bool(raw.attention_bias) and name != "MistralForCausalLM"
    config = ModelConfig(
        architecture=name,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=raw.head_dim or _head_dim(raw),
        max_position=raw.max_position_embeddings,
        tied_embeddings=bool(raw.tie_word_embeddings),
        layers=tuple(map(LayerConfig, _windows(raw, name))),
        ropes=(_rope(raw, raw.head_dim or _head_dim(raw)),),
        dtype=raw.dtype or raw.torch_dtype,
        eos_ids=token_ids(content, "eos_token_id", FILE),
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        block=Block(
            norm_eps=raw.rms_norm_eps,
            qk_norm="head" if name == "Qwen3ForCausalLM" else "none",
            qkv_bias=is_qwen2 or attention_bias,
            out_bias=attention_bias and not is_qwen2,
            mlp_bias=is_llama and bool(raw.mlp_bias),
        ),
    )
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {config.num_heads} is no multiple of "
            f"num_key_value_heads {config.num_kv_heads}; {REMEDY}"
        )
    return config


def _head_dim(raw: _Raw) -> int:
    """The head dimension of a config.json that has no head_dim."""
    size, rest = divmod(raw.hidden_size, raw.num_attention_heads)
    if rest or size % 2 or size == 0:
        raise ConfigError(
            f"config.json: num_attention_heads {raw.num_attention_heads} does not divide hidden_size {raw.hidden_size} "
            f"into even heads, and there is no head_dim; {REMEDY}"
        )
    return size


def _rope(raw: _Raw, head_dim: int) -> RopeConfig:
    key = "rope_parameters" if raw.rope_parameters else "rope_scaling"
    section = raw.rope_parameters or raw.rope_scaling or {}
    scaling = convert(section, _Scaling, FILE, key)
    kind = scaling.rope_type or scaling.type or "default"
    if any(factor not in (None, 1.0) for factor in (scaling.partial_rotary_factor, raw.partial_rotary_factor)):
        raise ConfigError("config.json: partial_rotary_factor is not 1, which is not supported; use another checkpoint")
    theta = scaling.rope_theta or raw.rope_theta or 10000.0
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, convert(section, _Linear, FILE, key).factor)
    if kind == "factors":
        factors = tuple(convert(section, _Factors, FILE, key).factors)
        if len(factors) != head_dim // 2:
            raise ConfigError(
                f"config.json: {key}: factors has {len(factors)} numbers, {head_dim // 2} are needed, one for each pair of a "
                f"head; {REMEDY}"
            )
        return RopeConfig(theta, kind, factors=factors)
    llama3 = convert(section, _Llama3, FILE, key)
    return RopeConfig(
        theta,
        kind,
        llama3.factor,
        llama3.low_freq_factor,
        llama3.high_freq_factor,
        llama3.original_max_position_embeddings,
    )


def _windows(raw: _Raw, architecture: str) -> tuple[int | None, ...]:
    layers, window = raw.num_hidden_layers, raw.sliding_window
    is_on = architecture == "MistralForCausalLM" or (architecture != "LlamaForCausalLM" and raw.use_sliding_window)
    if window is None or not is_on:
        return (None,) * layers
    if not 1 <= window <= 2**40:
        raise ConfigError(
            f"config.json: sliding_window is {shown(window)}, less than 1 or too large; null turns it off"
        )
    if architecture == "MistralForCausalLM":
        return (window,) * layers
    kinds = raw.layer_types
    if kinds is None:
        first = 28 if raw.max_window_layers is None else raw.max_window_layers
        return tuple(window if layer >= first else None for layer in range(layers))
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ConfigError(
            f"config.json: layer_types: layer type {shown(min(unknown))} is not supported; supported are full_attention "
            f"and sliding_attention"
        )
    if len(kinds) != layers:
        raise ConfigError(f"config.json: layer_types has {len(kinds)} entries for num_hidden_layers {layers}; {REMEDY}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)

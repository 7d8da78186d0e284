"""The settings of a GGUF file as the content of a config.json, which `config.py` reads as that of any other checkpoint."""

from __future__ import annotations

from typing import Any, TypeVar

from backend.api.checkpoint.gguf import AGAIN, GgufHeader, eos_ids
from backend.api.checkpoint.model_files import shown
from backend.api.errors import ConfigError
from backend.architectures.gguf_held import EMBEDDING, OUTPUT
from backend.architectures.registry import GGUF_ARCHITECTURES, gguf_architecture
from backend.architectures.settings import Epsilon, Factor, NumLayers, Size

ROPE_FACTORS = "rope_freqs.weight"
T = TypeVar("T")
# Settings that change what the model computes, and that are not supported unless they have one of these values.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "logit_scale": (0, 1),
    "attention.scale": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.temperature_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "attn_logit_softcapping": (0,),
}


def config_of(header: GgufHeader, rope_factors: list[float] | None) -> dict[str, Any]:
    """The content of the config.json that the file stands for; None for keys that it would not have. Raises ConfigError.

    `rope_factors` are the values of the tensor ROPE_FACTORS.
    """
    name = gguf_architecture(header)
    settings = _Settings(header, name)
    _check_neutral(settings)
    heads, hidden = settings.need("attention.head_count", Size), settings.need("embedding_length", Size)
    head_dim = _head_dim(settings, hidden, heads)
    window = settings.get("attention.sliding_window", Size)
    is_llama = name == "llama"
    if window is not None and not is_llama:
        raise settings.unsupported("attention.sliding_window", window)
    return dict(
        # Mistral's files say llama as well; with a window they are read as Mistral's.
        architectures=["MistralForCausalLM" if is_llama and window else GGUF_ARCHITECTURES[name]],
        vocab_size=_embedding_rows(header),
        hidden_size=hidden,
        intermediate_size=settings.need("feed_forward_length", Size),
        num_hidden_layers=settings.need("block_count", NumLayers),
        num_attention_heads=heads,
        num_key_value_heads=_kv_heads(settings, heads),
        head_dim=head_dim,
        max_position_embeddings=settings.need("context_length", Size),
        rms_norm_eps=settings.need("attention.layer_norm_rms_epsilon", Epsilon),
        rope_parameters=_rope(settings, head_dim, rope_factors),
        tie_word_embeddings=OUTPUT not in header.tensors,
        attention_bias=is_llama and "blk.0.attn_q.bias" in header.tensors,
        mlp_bias=is_llama and "blk.0.ffn_gate.bias" in header.tensors,
        sliding_window=window,
        dtype=_dtype(header),
        bos_token_id=header.get("tokenizer.ggml.bos_token_id", int),
        eos_token_id=list(eos_ids(header)) or None,
    )


class _Settings:
    """The settings of one architecture, by their names without it."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self._header, self._prefix = header, architecture + "."

    def get(self, key: str, kind: type[T]) -> T | None:
        return self._header.get(self._prefix + key, kind)

    def need(self, key: str, kind: type[T]) -> T:
        return self._header.need(self._prefix + key, kind)

    def unsupported(self, key: str, value: object) -> ConfigError:
        return ConfigError(
            f"{self._header.name}: {self._prefix}{key} is {shown(value)}, which is not supported; use another model"
        )


def _check_neutral(settings: _Settings) -> None:
    for key, values in _NEUTRAL.items():
        value = settings.get(key, Any)
        if value is not None and value not in values:
            raise settings.unsupported(key, value)


def _embedding_rows(header: GgufHeader) -> int:
    place = header.tensors.get(EMBEDDING)
    if place is None:
        raise ConfigError(f"{header.name} lacks the tensor {EMBEDDING}; {AGAIN}, or give a file with a language model")
    tokens = header.get("tokenizer.ggml.tokens", list[str]) or []
    if len(tokens) > place.shape[0]:
        raise ConfigError(
            f"{header.name}: tokenizer.ggml.tokens has {len(tokens)} entries, the tensor {EMBEDDING} {place.shape[0]} rows; "
            f"{AGAIN}"
        )
    return place.shape[0]


def _kv_heads(settings: _Settings, heads: int) -> int:
    kv_heads: int = settings.get("attention.head_count_kv", Size) or heads
    if heads % kv_heads:
        raise settings.unsupported("attention.head_count_kv", f"{kv_heads}, which does not divide {heads} heads")
    return kv_heads


def _head_dim(settings: _Settings, hidden: int, heads: int) -> int:
    head_dim: int = settings.get("attention.key_length", Size) or hidden // heads
    if head_dim % 2 or not 2 <= head_dim <= 1 << 20:
        raise settings.unsupported("attention.key_length", f"{head_dim}, which is no even number from 2 to {1 << 20}")
    for key in ("attention.value_length", "rope.dimension_count"):
        if settings.get(key, Size) not in (None, head_dim):
            raise settings.unsupported(key, f"{settings.get(key, Size)}, not the {head_dim} of a head's keys")
    return head_dim


def _rope(settings: _Settings, head_dim: int, factors: list[float] | None) -> dict[str, Any]:
    theta = settings.get("rope.freq_base", Factor) or 10000.0
    kind = settings.get("rope.scaling.type", str) or "linear"
    if kind not in ("none", "linear"):
        raise settings.unsupported("rope.scaling.type", kind)
    factor = 1.0
    if kind == "linear":
        factor = settings.get("rope.scaling.factor", float) or settings.get("rope.scale_linear", float) or 1.0
    if factors is not None:
        if len(factors) != head_dim // 2:
            raise settings.unsupported(
                "rope.dimension_count", f"{head_dim}, and {ROPE_FACTORS} has {len(factors)} values"
            )
        return dict(rope_type="factors", rope_theta=theta, factors=[factor * each for each in factors])
    if factor == 1.0:
        return dict(rope_type="default", rope_theta=theta)
    return dict(rope_type="linear", rope_theta=theta, factor=factor)


def _dtype(header: GgufHeader) -> str:
    """The type to compute in: the matrices' own, and bfloat16 for quantised ones."""
    kinds = {place.type.name for place in header.tensors.values() if len(place.shape) > 1}
    if kinds <= {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"

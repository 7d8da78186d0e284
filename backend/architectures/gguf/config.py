"""The settings of a GGUF file as the content of a config.json, which the families read as that of any other checkpoint."""

from __future__ import annotations

from typing import Any

from backend.api.checkpoint.gguf import AGAIN, GgufHeader, eos_ids
from backend.api.errors import ConfigError
from backend.architectures.gguf.families import GGUF_FAMILIES, gguf_architecture, rope_of
from backend.architectures.gguf.held import EMBEDDING, OUTPUT
from backend.architectures.gguf.settings import GgufSettings
from backend.architectures.settings import Epsilon, HeadDim, NumLayers, Size


def config_of(header: GgufHeader, rope_tables: dict[str, list[float]]) -> dict[str, Any]:
    """The content of the config.json that the file stands for; None for keys that it would not have. Raises ConfigError.

    `rope_tables` are the values of the tensors families.TABLES that the file has.
    """
    name = gguf_architecture(header)
    settings, family = GgufSettings(header, name), GGUF_FAMILIES[name]
    heads, hidden = settings.uniform("attention.head_count", Size), settings.need("embedding_length", Size)
    head_dim = _head_dim(settings, hidden, heads)
    epsilon = "layer_norm_rms_epsilon" if family.epsilon in ("rms_norm_eps", "norm_eps") else "layer_norm_epsilon"
    common = dict(
        architectures=[family.architecture],
        vocab_size=_embedding_rows(header),
        hidden_size=hidden,
        intermediate_size=_intermediate(settings),
        num_hidden_layers=settings.need("block_count", NumLayers),
        num_attention_heads=heads,
        num_key_value_heads=_kv_heads(settings, heads),
        head_dim=head_dim,
        max_position_embeddings=settings.need("context_length", Size),
        rope_parameters=rope_of(settings, head_dim, rope_tables),
        tie_word_embeddings=OUTPUT not in header.tensors,
        dtype=_dtype(header),
        bos_token_id=header.get("tokenizer.ggml.bos_token_id", int),
        eos_token_id=list(eos_ids(header)) or None,
    )
    own = {family.epsilon: settings.need(f"attention.{epsilon}", Epsilon)} if family.epsilon else {}
    own |= family.keys(settings)
    settings.check_neutral()
    return common | own


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


def _intermediate(settings: GgufSettings) -> int | None:
    """Files whose layers all have experts may lack it."""
    given: Any = settings.get("feed_forward_length", Any)
    of_expert: Any = settings.get("expert_feed_forward_length", Any)
    if given is None and of_expert is not None:
        return None
    width: int = settings.uniform("feed_forward_length", Size, skips_zeros=True)
    return width


def _kv_heads(settings: GgufSettings, heads: int) -> int:
    has = settings.get("attention.head_count_kv", Any) is not None
    kv_heads: int = settings.uniform("attention.head_count_kv", Size, skips_zeros=True) if has else heads
    if heads % kv_heads:
        raise settings.unsupported("attention.head_count_kv", f"{kv_heads}, which does not divide {heads} heads")
    return kv_heads


def _head_dim(settings: GgufSettings, hidden: int, heads: int) -> int:
    if settings.get("attention.kv_lora_rank", Size):  # The file's is that of a latent and its rotated key.
        return settings.need("rope.dimension_count", HeadDim)
    head_dim: int = settings.get("attention.key_length", Size) or hidden // heads
    if head_dim % 2 or not 2 <= head_dim <= 1 << 20:
        raise settings.unsupported("attention.key_length", f"{head_dim}, which is no even number from 2 to {1 << 20}")
    if settings.get("attention.value_length", Size) not in (None, head_dim):
        raise settings.unsupported(
            "attention.value_length",
            f"{settings.get('attention.value_length', Size)}, not the {head_dim} of a head's keys",
        )
    return head_dim


def _dtype(header: GgufHeader) -> str:
    """The type to compute in: the matrices' own, and bfloat16 for quantised ones."""
    kinds = {place.type.name for place in header.tensors.values() if len(place.shape) > 1}
    if kinds <= {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"

"""Models that also read images, as text models: the decoder under `text_config` alone. Tensors of other parts are left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from backend.api.checkpoint.model_files import REMEDY, convert, shown
from backend.api.checkpoint.quantised import FILE
from backend.api.errors import ConfigError
from backend.architectures import gemma, hybrids, llama
from backend.architectures.description import ModelConfig, TensorNames
from backend.architectures.settings import Settings

PREFIX = "language_model."
LEFT_OUT = (r"vision_tower\..*", r"multi_modal_projector\..*")
# Keys that concern images, or the place of their tokens.
_OF_IMAGES = """
    vision_config mm_tokens_per_image projector_hidden_act multimodal_projector_bias spatial_merge_size vision_feature_layer
    boi_token_index eoi_token_index image_token_index image_token_id image_seq_length video_token_id vision_start_token_id
    vision_end_token_id
""".split()
_SHARED = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")
# The published files leave these out, because they are the defaults of transformers' class.
_GEMMA3 = dict(vocab_size=262208, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=131072)


def gemma3(settings: Settings, architecture: str) -> ModelConfig:
    text = _text(settings, _GEMMA3)
    return _within(gemma.gemma3(text, architecture), text)


def mistral3(settings: Settings, architecture: str) -> ModelConfig:
    """Mistral Small 3.1 has a Mistral inside, Ministral 3 a Ministral 3."""
    text = _text(settings, {})
    kinds = {"mistral": llama.mistral, "ministral3": llama.ministral3}
    kind = text.get("model_type", str, "mistral")
    if kind not in kinds:
        raise ConfigError(
            f"{FILE}: text_config.model_type {shown(kind)} is not supported here; supported are {' and '.join(kinds)}"
        )
    return _within(kinds[kind](text, architecture), text)


def qwen3_5(settings: Settings, architecture: str) -> ModelConfig:
    return _qwen(settings, architecture, hybrids.qwen3_5)


def qwen3_5_moe(settings: Settings, architecture: str) -> ModelConfig:
    return _qwen(settings, architecture, hybrids.qwen3_5_moe)


def _qwen(settings: Settings, architecture: str, read: Callable[[Settings, str], ModelConfig]) -> ModelConfig:
    """Positions of text are alike in all three parts of a rotation, so that it is a plain one."""
    text = _text(settings, {})
    config = read(text, architecture)
    text.check_all_known(f"{architecture}, under text_config,")
    names = replace(
        config.names,
        embedding="model.language_model.embed_tokens",
        layers="model.language_model.layers.",
        norm="model.language_model.norm",
        unused=(*config.names.unused, r"model\.visual\..*"),
    )
    return replace(config, names=names, is_part=True)


def _text(settings: Settings, defaults: dict[str, Any]) -> Settings:
    settings.ignore("text_config", *_OF_IMAGES, *_SHARED)
    if not settings.has("text_config"):
        raise ConfigError(f"{FILE}: it lacks the key text_config; {REMEDY}")
    content = convert(settings.content["text_config"], dict[str, Any], FILE, "text_config")
    shared = {key: settings.content[key] for key in _SHARED if settings.content.get(key) is not None}
    return Settings(defaults | content | shared)


def _within(config: ModelConfig, text: Settings) -> ModelConfig:
    """The decoder as it is named in the whole checkpoint."""
    text.check_all_known(f"{config.architecture}, under text_config,")
    names = config.names
    inside = TensorNames(
        embedding=PREFIX + names.embedding,
        layers=PREFIX + names.layers,
        norm=PREFIX + names.norm,
        head=PREFIX + names.head,
        unused=LEFT_OUT,
        layer=names.layer,
    )
    return replace(config, names=inside, is_part=True)

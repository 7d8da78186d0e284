"""Models that also read images: the decoder under `text_config`, and how features of images enter it.

The vision tower and what stands between it and the decoder are run by transformers (backend/hosted/images.py); their tensors are
no part of the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from backend.api.checkpoint.model_files import REMEDY, convert, shown
from backend.api.checkpoint.quantised import FILE
from backend.api.errors import ConfigError
from backend.architectures import gemma, hybrids, llama
from backend.architectures.description import Images, ModelConfig, TensorNames
from backend.architectures.settings import Settings, Size

Read = Callable[[Settings, str], ModelConfig]
# Where published checkpoints have the decoder: within a whole model of its own, or beside the tower.
WITHIN = TensorNames(
    "language_model.model.embed_tokens",
    "language_model.model.layers.",
    "language_model.model.norm",
    "language_model.lm_head",
    (r"vision_tower\..*", r"multi_modal_projector\..*", r"image_newline"),
)
BESIDE = TensorNames(
    "model.language_model.embed_tokens",
    "model.language_model.layers.",
    "model.language_model.norm",
    unused=(r"model\.visual\..*",),
)
FIRST = TensorNames(unused=(r"visual\..*",))
TEXT_MODEL = TensorNames(
    "model.text_model.embed_tokens",
    "model.text_model.layers.",
    "model.text_model.norm",
    unused=(r"model\.vision_model\..*", r"model\.connector\..*"),
)
# Keys that concern images, or the place of their tokens, and are the tower's or the processor's.
_OF_IMAGES = """
    vision_config mm_tokens_per_image projector_hidden_act multimodal_projector_bias spatial_merge_size vision_feature_layer
    boi_token_index eoi_token_index image_token_index image_token_id image_seq_length video_token_id vision_start_token_id
    vision_end_token_id vision_token_id scale_factor image_grid_pinpoints vision_feature_select_strategy vision_aspect_ratio
    use_image_newline_parameter downsample_ratio ignore_index video_token_index image_size
""".split()
# Keys of SmolVLM's text_config that its own trainer has written.
_UNUSED = "perceiver_config pixel_shuffle_factor qk_layer_norms use_resampler".split()
_SHARED = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")
# The published files leave these out, because they are the defaults of transformers' class.
_GEMMA3 = dict(vocab_size=262208, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=131072)
_DECODERS: dict[str, Read] = {
    "llama": llama.llama,
    "mistral": llama.mistral,
    "ministral3": llama.ministral3,
    "qwen2": llama.qwen2,
    "qwen3": llama.qwen3,
}

# Names that the families themselves give their decoders.
_OWN_KINDS = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}


def gemma3(settings: Settings, architecture: str) -> ModelConfig:
    """The tokens of an image see all of each other, in layers with a window too, which therefore must not be smaller."""
    text = _text(settings, _GEMMA3)
    config = _with_images(_placed(gemma.gemma3(text, architecture), text, WITHIN), settings, 262144)
    if config.images is None or settings.get("mm_tokens_per_image", Size, 256) > min(
        filter(None, config.windows), default=1 << 30
    ):
        return replace(config, images=None)
    return replace(config, images=replace(config.images, sees_whole=True))


def mistral3(settings: Settings, architecture: str) -> ModelConfig:
    """Mistral Small 3.1 has a Mistral inside, Ministral 3 a Ministral 3."""
    return _read(settings, architecture, WITHIN, "mistral", ("mistral", "ministral3"))


def llava(settings: Settings, architecture: str) -> ModelConfig:
    """LLaVA, LLaVA-OneVision and InternVL."""
    return _read(settings, architecture, WITHIN, "llama", ("llama", "mistral", "qwen2", "qwen3"))


def smolvlm(settings: Settings, architecture: str) -> ModelConfig:
    return _read(settings, architecture, TEXT_MODEL, "llama", ("llama",), default_id=128257)


def qwen2_vl(settings: Settings, architecture: str) -> ModelConfig:
    """Published files have the decoder's keys at the top, newer ones under text_config."""
    return _read(settings, architecture, FIRST, "qwen2", ("qwen2",), default_id=151655)


def qwen3_vl(settings: Settings, architecture: str) -> ModelConfig:
    return _read(settings, architecture, BESIDE, "qwen3", ("qwen3",), default_id=151655)


def qwen3_5(settings: Settings, architecture: str) -> ModelConfig:
    return _hybrid(settings, architecture, hybrids.qwen3_5)


def qwen3_5_moe(settings: Settings, architecture: str) -> ModelConfig:
    return _hybrid(settings, architecture, hybrids.qwen3_5_moe)


def _hybrid(settings: Settings, architecture: str, read: Read) -> ModelConfig:
    text = _text(settings, {})
    return _with_images(_placed(read(text, architecture), text, BESIDE), settings, 248056)


def _read(
    settings: Settings,
    architecture: str,
    names: TensorNames,
    usual: str,
    kinds: tuple[str, ...],
    default_id: int | None = None,
) -> ModelConfig:
    """A decoder of one of `kinds`, `usual` where text_config does not say which. default_id: the token of images, where
    config.json does not say it.
    """
    text = _text(settings, {})
    named = text.get("model_type", str, usual)
    kind = _OWN_KINDS.get(named, named)
    if kind not in kinds:
        raise ConfigError(
            f"{FILE}: text_config.model_type {shown(kind)} is not supported here; supported are {' and '.join(kinds)}"
        )
    text.ignore(*_UNUSED)
    return _with_images(_placed(_DECODERS[kind](text, architecture), text, names), settings, default_id)


def _text(settings: Settings, defaults: dict[str, Any]) -> Settings:
    """The decoder's keys: under text_config, else those of the whole file without the tower's."""
    settings.ignore("text_config", *_OF_IMAGES, *_SHARED)
    if settings.has("text_config"):
        content = convert(settings.content["text_config"], dict[str, Any], FILE, "text_config")
        shared = {key: settings.content[key] for key in _SHARED if settings.content.get(key) is not None}
        return Settings(defaults | content | shared, "text_config")
    if not settings.has("hidden_size"):
        raise ConfigError(f"{FILE}: it lacks the key text_config; {REMEDY}")
    settings.ignore(*settings.content)
    return Settings(defaults | {key: value for key, value in settings.content.items() if key not in _OF_IMAGES})


def _placed(config: ModelConfig, text: Settings, places: TensorNames) -> ModelConfig:
    """The decoder as it is named in the whole checkpoint."""
    text.check_all_known(f"{config.architecture}, under text_config,")
    names = replace(places, layer=config.names.layer, unused=(*config.names.unused, *places.unused))
    return replace(config, names=names, is_part=True)


def _with_images(config: ModelConfig, settings: Settings, default_id: int | None) -> ModelConfig:
    token_id = settings.find("image_token_id", int)
    token_id = (
        settings.get("image_token_index", int, -1 if default_id is None else default_id)
        if token_id is None
        else token_id
    )
    if not 0 <= token_id < config.vocab_size:  # no prompt has a place for an image
        return config
    tower: Mapping[str, Any] = convert(
        settings.content.get("vision_config") or {}, dict[str, Any], FILE, "vision_config"
    )
    of_tower = Settings(dict(tower), "vision_config")
    added = of_tower.get("deepstack_visual_indexes", list[int], [])
    if len(added) > config.num_layers:
        raise of_tower.unsupported("deepstack_visual_indexes", f"the decoder has {config.num_layers} layers; {REMEDY}")
    merge = of_tower.get("spatial_merge_size", Size, 2) if config.ropes and config.ropes[0].sections else 1
    return replace(config, images=Images(token_id, merge, len(added)))

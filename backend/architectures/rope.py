"""Rotary settings of a config.json: transformers 5's `rope_parameters`, before it `rope_theta` and `rope_scaling`.

What the kinds mean stands in backend/layers/rotary.py. A kind that is not known is refused, and so is a key of the section that
is not known and not off.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from backend.api.checkpoint.model_files import REMEDY, convert, shown
from backend.api.checkpoint.quantised import FILE
from backend.api.errors import ConfigError
from backend.architectures.description import RopeConfig
from backend.architectures.settings import Factor, Settings, Size

# `factors` is this project's own: what GGUF files say.
M_ROPE = "mrope"  # an older name of the kind default, in which a token has a frame, a row and a column
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")
ORIGINAL = "original_max_position_embeddings"
SECTIONS = ("rope_parameters", "rope_scaling")
# Keys that some kind of rope reads. Keys of another kind than the section's have no effect, in transformers either.
_KEYS = """
    factor low_freq_factor high_freq_factor original_max_position_embeddings max_position_embeddings factors attention_factor
    beta_fast beta_slow mscale mscale_all_dim truncate short_factor long_factor finetuned
""".split()


class RopeDefaults(msgspec.Struct, frozen=True):
    """Values of a family where config.json has none; they are those of transformers."""

    theta: float = 10000.0
    theta_key: str = "rope_theta"
    original_max_position: int | None = None
    partial: float | None = None  # the share of a head that is rotated; None: the family rotates all of it
    partial_key: str = "partial_rotary_factor"
    aliases: tuple[tuple[str, str], ...] = ()  # (older name, kind)
    known: tuple[str, ...] = ()  # keys of the section that the family reads itself


PLAIN = RopeDefaults()


def read_rope(settings: Settings, head_dim: int, defaults: RopeDefaults = PLAIN) -> RopeConfig:
    """The rotary settings that all layers share. Raises ConfigError."""
    key, section = _section(settings)
    return _rope(settings, Settings(section, key), head_dim, defaults)


def read_ropes(settings: Settings, head_dim: int, full: RopeDefaults, sliding: RopeDefaults) -> tuple[RopeConfig, ...]:
    """The rotary settings of layers that attend to everything, and of those with a window. Raises ConfigError.

    A section that does not name the two types of layers is of the first type; the second's positions are then not scaled.
    """
    key, section = _section(settings)
    types = ("full_attention", "sliding_attention")
    if not any(each in section for each in types):
        section = {types[0]: section}
    outside = set(section) - set(types)
    if outside:
        raise ConfigError(f"{FILE}: {key}.{shown(min(outside))} stands beside types of layers; {REMEDY}")
    given = [convert(section.get(each) or {}, dict[str, Any], FILE, f"{key}.{each}") for each in types]
    return tuple(
        _rope(settings, Settings(each, f"{key}.{name}"), head_dim, defaults)
        for each, name, defaults in zip(given, types, (full, sliding), strict=True)
    )


def _section(settings: Settings) -> tuple[str, dict[str, Any]]:
    settings.ignore(*SECTIONS, ORIGINAL)
    key = SECTIONS[0] if settings.content.get(SECTIONS[0]) else SECTIONS[1]
    return key, dict(convert(settings.content.get(key) or {}, dict[str, Any], FILE, key))


def _rope(settings: Settings, section: Settings, head_dim: int, defaults: RopeDefaults) -> RopeConfig:
    kind = section.get("type", str, "default")
    kind = section.get("rope_type", str, kind)
    kind = dict(defaults.aliases).get(kind, "default" if kind == M_ROPE else kind)
    if kind not in KINDS:
        raise section.unsupported(
            "rope_type" if section.has("rope_type") else "type", f"supported are {', '.join(KINDS)}"
        )
    theta = settings.get(defaults.theta_key, Factor, defaults.theta)
    rotary_dim = _rotary_dim(settings, section, head_dim, defaults)
    common: dict[str, Any] = dict(theta=section.get("rope_theta", Factor, theta), rotary_dim=rotary_dim)
    common.update(_sections(section, (rotary_dim or head_dim) // 2))
    section.ignore(*_KEYS, *defaults.known)
    section.check_all_known(f"rope_type {kind}")
    if kind in (
        "default",
        "dynamic",
    ):  # no sequence is longer than the model's own limit, up to which both are the same
        return RopeConfig(**common)
    if kind == "linear":
        return RopeConfig(**common, kind=kind, factor=section.need("factor", Factor))
    num_pairs = (rotary_dim or head_dim) // 2
    if kind == "factors":
        return RopeConfig(**common, kind=kind, factors=_factors(section, "factors", num_pairs))
    # As in transformers, the number that stands outside of the section is the one that counts.
    outside = settings.get(ORIGINAL, Size, defaults.original_max_position or 0)
    common["original_max_position"] = outside or section.need(ORIGINAL, Size)
    return _scaled(settings, section, kind, common, num_pairs)


def _scaled(settings: Settings, section: Settings, kind: str, common: dict[str, Any], num_pairs: int) -> RopeConfig:
    """The kinds that know the number of positions of the first training."""
    if kind == "llama3":
        return RopeConfig(
            **common,
            kind=kind,
            factor=section.need("factor", Factor),
            low_freq_factor=section.need("low_freq_factor", Factor),
            high_freq_factor=section.need("high_freq_factor", Factor),
        )
    original = common["original_max_position"]
    factor = section.get("factor", Factor, settings.need("max_position_embeddings", Size) / original)
    if kind == "yarn":
        if common["theta"] == 1.0:
            raise section.unsupported("rope_theta", "of 1 no pair of yarn turns faster than another; correct it")
        return RopeConfig(
            **common,
            kind=kind,
            factor=factor,
            attention_factor=section.get("attention_factor", Factor, _yarn_attention(section, factor)),
            beta_fast=section.get("beta_fast", Factor, 32.0),
            beta_slow=section.get("beta_slow", Factor, 1.0),
            truncate=section.get("truncate", bool, True),
        )
    by_length = 1.0 if factor <= 1 or original == 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        **common,
        kind=kind,
        attention_factor=section.get("attention_factor", Factor, by_length),
        factors=_factors(section, "long_factor", num_pairs),
        short_factors=_factors(section, "short_factor", num_pairs),
    )


def _sections(section: Settings, num_pairs: int) -> dict[str, Any]:
    """Which pairs a token's frame, row and column rotate, for models that read images."""
    counts, takes_turns = section.find("mrope_section", list[Size]), section.get("mrope_interleaved", bool, False)
    if counts is None:
        return {}
    if len(counts) != 3 or sum(counts) != num_pairs:
        raise section.unsupported(
            "mrope_section", f"three numbers are needed, {num_pairs} together, as a head has pairs; {REMEDY}"
        )
    return dict(sections=tuple(counts), sections_take_turns=takes_turns)


def _yarn_attention(section: Settings, factor: float) -> float:
    """The factor of cos and sin: YaRN's own, or DeepSeek's quotient of two of them (arXiv:2309.00071, equation 22)."""

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, all_dim = section.get("mscale", float, 0.0), section.get("mscale_all_dim", float, 0.0)
    quotient = scale(mscale) / scale(all_dim) if mscale and all_dim and scale(all_dim) else scale(1.0)
    if not 0 < quotient < 1e30:
        raise section.unsupported("mscale", f"with mscale_all_dim it gives a factor of {quotient:g}; {REMEDY}")
    return quotient


def read_score_factor(settings: Settings) -> float:
    """DeepSeek's factor of the scores for texts longer than those of the first training: what YaRN's attention factor would be
    for `mscale_all_dim`, of queries and of keys.
    """
    key, content = _section(settings)
    section = Settings(content, key)
    all_dim, factor = section.get("mscale_all_dim", float, 0.0), section.get("factor", float, 1.0)
    if section.get("rope_type", str, section.get("type", str, "default")) == "default" or factor <= 1:
        return 1.0
    scale = (0.1 * all_dim * math.log(factor) + 1.0) ** 2
    if not 0 < scale < 1e30:
        raise section.unsupported("mscale_all_dim", f"it gives a factor of {scale:g}; {REMEDY}")
    return scale


def _rotary_dim(settings: Settings, section: Settings, head_dim: int, defaults: RopeDefaults) -> int | None:
    outer = settings.get(defaults.partial_key, float, defaults.partial or 1.0)
    partial = section.get("partial_rotary_factor", float, outer)
    if partial == 1.0:
        return None
    rotary_dim = int(head_dim * partial) if 0 < partial < 1 else 0
    if defaults.partial is None or rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(
            f"{FILE}: partial_rotary_factor is {shown(partial)}, which is not supported for heads of {head_dim} in this "
            f"architecture; use another checkpoint"
        )
    return rotary_dim


def _factors(section: Settings, key: str, num_pairs: int) -> tuple[float, ...]:
    factors = tuple(section.need(key, list[Factor]))
    if len(factors) != num_pairs:
        raise section.unsupported(
            key, f"it has {len(factors)} numbers, {num_pairs} are needed, one for each pair of a head; {REMEDY}"
        )
    return factors

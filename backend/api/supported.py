"""Checks by its settings if a checkpoint is supported: before a server starts, and again in the engine.

Values of a wrong type in config.json are left to the engine, whose parser names them.
"""

from __future__ import annotations

from typing import Any

from backend.api.errors import ConfigError
from backend.api.gguf import GgufHeader
from backend.api.model_files import convert, shown
from backend.api.quantised import FILE, parse_quantisation

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ACTIVATION = "silu"
ROPE_KINDS = ("default", "linear", "llama3", "factors")  # the last one is this project's own: what GGUF files say
# general.architecture of a GGUF file -> the architecture of config.json
GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def check_support(content: dict[str, Any]) -> None:
    """Raise ConfigError where the content of a config.json describes a model that is not supported."""
    architecture(content)
    activation = content.get("hidden_act", ACTIVATION)
    if isinstance(activation, str) and activation != ACTIVATION:
        raise ConfigError(f"{FILE}: hidden_act {shown(activation)} is not supported; supported is {ACTIVATION}")
    parse_quantisation(content)
    _check_rope(content)


def architecture(content: dict[str, Any]) -> str:
    """The first of `architectures`. Raises ConfigError for one that is not supported."""
    given = content.get("architectures")
    names = (None if given is None else convert(given, list[str], FILE, "architectures")) or ["none"]
    if names[0] not in ARCHITECTURES:
        raise ConfigError(
            f"{FILE}: architectures {shown(names)}: {shown(names[0])} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return names[0]


def gguf_architecture(header: GgufHeader) -> str:
    """general.architecture of a GGUF file. Raises ConfigError for one that is not supported."""
    name = header.need("general.architecture", str)
    if name not in GGUF_ARCHITECTURES:
        raise ConfigError(
            f"{header.name}: general.architecture {shown(name)} is not supported; supported are "
            f"{', '.join(GGUF_ARCHITECTURES)}: use a model of one of them"
        )
    return name


def _check_rope(content: dict[str, Any]) -> None:
    key = "rope_parameters" if content.get("rope_parameters") else "rope_scaling"
    section = content.get(key)
    if not isinstance(section, dict):
        return
    kind = section.get("rope_type") or section.get("type") or "default"
    if isinstance(kind, str) and kind not in ROPE_KINDS:
        raise ConfigError(
            f"{FILE}: {key}: rope_type {shown(kind)} is not supported; supported are {', '.join(ROPE_KINDS)}"
        )

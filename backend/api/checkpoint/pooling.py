"""How a checkpoint makes an embedding of a text: the files that sentence-transformers writes beside the weights.

    modules.json                        the steps: Transformer, Pooling, and Normalize where vectors have length 1
    1_Pooling/config.json               which hidden states are pooled: the first or last token's, or the mean of all
    config_sentence_transformers.json   a prompt that stands before each text, where one is the default
    config.json                         matryoshka_dimensions or is_matryoshka: whether vectors may be cut

Without them a decoder is pooled by its last token, an encoder by the mean of all, and normalised. What cannot be computed here
is no error of the checkpoint, which may still generate: `Pooling.refusal` says it, and requests for embeddings are answered
with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from backend.api.checkpoint.model_files import MAX_JSON_BYTES, convert, read_object, read_text, shown
from backend.api.checkpoint.quantised import FILE
from backend.api.errors import ConfigError

MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
Kind = Literal["first", "last", "mean"]
_KINDS: dict[str, Kind] = {"cls": "first", "lasttoken": "last", "mean": "mean"}
_OLDER_KEYS = {  # a flag each, in files of sentence-transformers before 6
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class Pooling(Struct, frozen=True):
    """`dimensions`: the lengths to which a vector may be cut; None: any."""

    kind: Kind = "last"
    normalize: bool = True
    prompt: str = ""  # stands before every text
    is_declared: bool = False  # True if the checkpoint says that it makes embeddings
    dimensions: tuple[int, ...] | None = None
    refusal: str = ""  # why no embedding can be made; "": it can

    def of_model(self, reads_whole_texts: bool) -> Pooling:
        """The pooling for an encoder (`reads_whole_texts`), or for a decoder, whose first token says nothing."""
        if reads_whole_texts:
            return self if self.is_declared else replace(self, kind="mean")
        if self.kind == "first":
            return replace(
                self, refusal="pooling by the first token is not served: in a decoder it sees nothing of the rest"
            )
        return self


class _Module(Struct):
    type: str
    path: str = ""


class _PoolingConfig(Struct):
    pooling_mode: str | list[str] | None = None
    include_prompt: bool = True


class _Settings(Struct):
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None


class _Matryoshka(Struct):
    is_matryoshka: bool | None = None
    matryoshka_dimensions: list[int] | None = None


def read_pooling(directory: Path) -> Pooling:
    """The pooling of a checkpoint directory; a GGUF file has the defaults. Raises ConfigError for an unreadable file."""
    if not directory.is_dir():
        return Pooling()
    dimensions = _dimensions(directory)
    modules = _modules(directory)
    if modules is None:
        return Pooling(dimensions=dimensions)
    try:
        return _declared(directory, modules, dimensions)
    except ConfigError as error:
        return Pooling(is_declared=True, refusal=error.message)


def _modules(directory: Path) -> list[_Module] | None:
    text = read_text(directory, MODULES, MAX_JSON_BYTES)
    if text is None:
        return None
    try:
        return convert(json.loads(text), list[_Module], MODULES)
    except (ValueError, RecursionError):
        raise ConfigError(f"{MODULES} is not JSON; fetch it again") from None


def _declared(directory: Path, modules: list[_Module], dimensions: tuple[int, ...] | None) -> Pooling:
    """Raises ConfigError for a step or a setting that is not computed here."""
    names = [module.type.rsplit(".", 1)[-1] for module in modules]
    unknown = [name for name in names if name not in ("Transformer", "Pooling", "Normalize")]
    if unknown:
        raise ConfigError(
            f"{MODULES}: {shown(unknown[0])} is not served; served are Transformer, Pooling and Normalize"
        )
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConfigError(
            f"{MODULES}: {', '.join(names)[:100]}; served is Transformer, Pooling, then Normalize or nothing"
        )
    prompt = _default_prompt(directory)
    kind = _kind(directory, f"{modules[1].path}/config.json", bool(prompt))
    return Pooling(kind, len(names) == 3, prompt, True, dimensions)


def _kind(directory: Path, name: str, has_prompt: bool) -> Kind:
    content = read_object(directory, name)
    if content is None:
        raise ConfigError(f"{MODULES}: there is no file {shown(name)}; fetch it too")
    config = convert(content, _PoolingConfig, name)
    modes = config.pooling_mode or [mode for key, mode in _OLDER_KEYS.items() if content.get(key)] or "mean"
    modes = [modes] if isinstance(modes, str) else modes
    if len(modes) > 1:
        raise ConfigError(f"{name}: pooling by {', '.join(modes)[:100]} at once is not served; served is one")
    if modes[0] not in _KINDS:
        raise ConfigError(f"{name}: pooling by {shown(modes[0])} is not served; served are {', '.join(_KINDS)}")
    if has_prompt and not config.include_prompt:
        raise ConfigError(f"{name}: include_prompt is false, which is not served beside a default prompt")
    return _KINDS[modes[0]]


def _default_prompt(directory: Path) -> str:
    settings = convert(read_object(directory, SETTINGS) or {}, _Settings, SETTINGS)
    name = settings.default_prompt_name
    if name is None:
        return ""
    if name not in settings.prompts:
        raise ConfigError(f"{SETTINGS}: default_prompt_name {shown(name)} is none of its prompts")
    return settings.prompts[name]


def _dimensions(directory: Path) -> tuple[int, ...] | None:
    content: dict[str, Any] = read_object(directory, FILE) or {}
    found = convert(content, _Matryoshka, FILE)
    if found.matryoshka_dimensions:
        return tuple(sorted(found.matryoshka_dimensions))
    return () if found.is_matryoshka is False else None

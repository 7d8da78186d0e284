"""The sampling that a model's makers recommend, for requests that leave it open: generation_config.json, or what llama.cpp's
converter has made of it in a GGUF file (`general.sampling.*`). vLLM and llama.cpp serve with the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from backend.api.checkpoint.gguf import gguf_file, read_header
from backend.api.checkpoint.model_files import read_object, shown
from backend.api.errors import ConfigError
from backend.api.sampling import SAMPLING_FIELDS

FILE = "generation_config.json"
NONE = "none"


class Recommended(NamedTuple):
    """A field of SamplingConfig that may be recommended. `gguf`: the end of its key there."""

    gguf: str
    is_whole: bool = False


FIELDS = {
    "temperature": Recommended("temp"),
    "top_k": Recommended("top_k", is_whole=True),
    "top_p": Recommended("top_p"),
    "min_p": Recommended("min_p"),
    "repetition_penalty": Recommended("penalty_repeat"),
}
_LIMITS = {field.name: (field.least or 0.0, field.greatest or math.inf) for field in SAMPLING_FIELDS}


def default_sampling(path: Path, settings: Iterable[str]) -> dict[str, float]:
    """Field of SamplingConfig -> what a request has that does not give it.

    path: a checkpoint directory or a GGUF file. settings: `model.default_sampling`. Raises ConfigError.
    """
    chosen = dict(named(settings))
    return ({} if NONE in settings else of_checkpoint(path)) | chosen


def of_checkpoint(path: Path) -> dict[str, float]:
    """The checkpoint's recommendations. Raises ConfigError for a number that the field cannot have."""
    if (file := gguf_file(path)) is not None:
        header = read_header(file)
        keys = {name: f"general.sampling.{field.gguf}" for name, field in FIELDS.items()}
        return _checked({name: header.settings.get(key) for name, key in keys.items()}, header.name)
    return _checked(read_object(path, FILE) or {}, FILE)


def named(settings: Iterable[str]) -> Iterable[tuple[str, float]]:
    """The fields of `model.default_sampling`, which are NAME=VALUE. Raises ConfigError."""
    for each in settings:
        name, _, value = each.partition("=")
        if each == NONE:
            continue
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if name not in FIELDS or not math.isfinite(number):
            raise ConfigError(
                f"model.default_sampling holds {shown(each)!r}; write {NONE}, or NAME=VALUE of {', '.join(FIELDS)}"
            )
        yield from _checked({name: number}, "model.default_sampling").items()


def _checked(found: Mapping[str, Any], source: str) -> dict[str, float]:
    checked = {}
    for name, field in FIELDS.items():
        value = found.get(name)
        if value is None:
            continue
        least, greatest = _LIMITS[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= greatest or (field.is_whole and value != int(value)):
            raise ConfigError(
                f"{source}: {name} is {shown(value)}, allowed is {least:g} to {greatest:g}; correct it, or start with "
                f"--set model.default_sampling={NONE}"
            )
        checked[name] = int(value) if field.is_whole else value
    return checked

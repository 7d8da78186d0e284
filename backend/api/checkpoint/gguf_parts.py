"""GGUF models in several files, as llama.cpp's `llama-gguf-split` writes them: NAME-00001-of-00003.gguf, ... in one directory.

Each part is a GGUF file with headers and data of its own tensors. It says which part it is: `split.no` (from 0), `split.count`,
and in `split.tensors.count` the tensors of all parts. The first part has the model's settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from backend.api.checkpoint.model_files import find_file, shown
from backend.api.errors import ConfigError

if TYPE_CHECKING:
    from backend.api.checkpoint.gguf import GgufHeader, TensorPlace

SUFFIX = ".gguf"
MAX_PARTS = 512
AGAIN = "fetch all parts of it again"
COUNT, NUMBER, NUM_TENSORS = "split.count", "split.no", "split.tensors.count"
# The types of llama-quantize, at the end of a file's name; ".Q4_1", "-UD-Q4_K_XL" and "_bf16" are such ends.
_TYPE_AT_END = re.compile(r"[-._](UD-)?(I?Q\d\w*|TQ\d_\d|MXFP4\w*|B?F16|F32)\Z", re.IGNORECASE)
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


def parts_of(file: Path) -> tuple[Path, ...]:
    """All files of the model that `file` is one of, the first part first: one, unless its name is that of a part.

    Raises ConfigError when a part is missing or must not be read, and for more than MAX_PARTS.
    """
    named = _PART.fullmatch(file.name)
    if named is None or not 1 <= int(named[2]) <= (count := int(named[3])) or count == 1:
        return (file,)
    if count > MAX_PARTS:
        raise ConfigError(
            f"{shown(file.name)} is one of {count} parts, at most {MAX_PARTS} are read; join them with llama.cpp's "
            f"`llama-gguf-split --merge`"
        )
    return tuple(_part(file, f"{named[1]}-{number:05}-of-{count:05}{SUFFIX}", count) for number in range(1, count + 1))


def model_name(file: str) -> str:
    """The name of the model that a file of this name is, or is a part of."""
    named = _PART.fullmatch(file)
    return file.removesuffix(SUFFIX) if named is None else named[1]


def title(model: str) -> str:
    """The name of a model without the type of its weights, as people call it: `Qwen3-4B` of `Qwen3-4B-Q4_K_M`."""
    return _TYPE_AT_END.sub("", model) or model


def merged(headers: Iterator[GgufHeader], count: int) -> GgufHeader:
    """The settings of the first of `count` parts with the tensors of all, which are read one part at a time.

    Raises ConfigError where they are not the parts of one model, in their order.
    """
    first = next(headers)
    if count == 1:
        if (said := first.settings.get(COUNT)) not in (None, 0, 1):
            raise ConfigError(
                f"{first.name} is one of {shown(said)} parts ({COUNT}), and its name does not say which; give the parts "
                f"the names that they had, which end in -00001-of-00003{SUFFIX}"
            )
        return first
    num_tensors = first.need(NUM_TENSORS, int)
    tensors: dict[str, TensorPlace] = {}
    for number, header in enumerate((first, *headers)):
        for key, expected in ((COUNT, count), (NUMBER, number), (NUM_TENSORS, num_tensors)):
            if (value := header.need(key, int)) != expected:
                raise ConfigError(
                    f"{header.name}: {key} is {shown(value)}, by its name and the first part it is {shown(expected)}; {AGAIN}"
                )
        if twice := tensors.keys() & header.tensors.keys():
            raise ConfigError(f"{header.name}: tensor {shown(min(twice))} is in an earlier part, too; {AGAIN}")
        tensors |= header.tensors
        if len(tensors) > num_tensors:  # Before the next part takes memory.
            break
    if len(tensors) != num_tensors:
        raise ConfigError(
            f"{first.name}: {NUM_TENSORS} is {shown(num_tensors)}, its parts have "
            f"{len(tensors)} tensors{' or more' if len(tensors) > num_tensors else ''}; {AGAIN}"
        )
    return first._replace(tensors=tensors)


def _part(file: Path, name: str, count: int) -> Path:
    path = find_file(file.parent, name)
    if path is None:
        raise ConfigError(
            f"{shown(name)} is missing, and {shown(file.name)} is one of {count} parts; fetch all parts into one directory"
        )
    return path

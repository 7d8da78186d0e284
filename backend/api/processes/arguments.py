"""The arguments of a process that another process of this project starts: `--name value` words, read into a Struct.

Such a process starts often and is started by no person, so it does without a library for command lines.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import dropwhile
from typing import TypeVar

import msgspec

Arguments = TypeVar("Arguments", bound=msgspec.Struct)


def arguments_of(kind: type[Arguments], words: Sequence[str] | None = None) -> Arguments:
    """The words (those of this process without them) as the fields of `kind`; words before the first `--name` are left out.

    `--num-ranks 2` is the field num_ranks, a name without a value is true, one with several values a list.
    Raises SystemExit with one sentence for a field that is missing, unknown where `kind` forbids it, or of another type.
    """
    given: dict[str, list[str]] = {}
    for word in dropwhile(lambda word: not word.startswith("--"), sys.argv[1:] if words is None else words):
        if word.startswith("--"):
            values = given[word[2:].replace("-", "_")] = []
        else:
            values.append(word)
    fields = {name: values if len(values) > 1 else values[0] if values else True for name, values in given.items()}
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise SystemExit(f"wrong arguments: {error}") from None

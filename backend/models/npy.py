"""Reads .npy files that are somebody else's: what the header says is compared with the file before memory is taken for it."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np

from backend.api.checkpoint.model_files import find_file, shown
from backend.api.errors import ConfigError

Array = np.ndarray[Any, Any]
_FORMAT: Any = np.lib.format  # it has no annotations
_HEADERS = {(1, 0): _FORMAT.read_array_header_1_0, (2, 0): _FORMAT.read_array_header_2_0}


def read_array(directory: Path, name: str, most_bytes: int) -> Array:
    """An array of numbers. Raises ConfigError."""
    path = find_file(directory, name, most_bytes)
    if path is None:
        raise ConfigError(f"{shown(directory.name)}: {name}: File does not exist")
    try:
        with path.open("rb") as file:
            return _read(file, name)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read ({error.strerror}); let this user read it") from None


def _read(file: BinaryIO, name: str) -> Array:
    try:
        shape, is_transposed, dtype = _HEADERS[_FORMAT.read_magic(file)](file)
    except (
        ValueError,
        TypeError,
        SyntaxError,
        TokenError,
        KeyError,
        RecursionError,
        MemoryError,
    ):  # bytes of a header
        raise ConfigError(f"{name} is no array of numbers in numpy's format; write it with numpy.save") from None
    if dtype.kind not in "biufc":
        raise ConfigError(f"{name} is no array of numbers but of {shown(str(dtype))}; write it with numpy.save")
    needed, there = prod(shape) * dtype.itemsize, os.fstat(file.fileno()).st_size - file.tell()
    if needed != there or min(shape, default=1) < 0:
        raise ConfigError(
            f"{name} says that its shape is {shown(list(shape))} of {dtype}, which takes {shown(needed)} bytes, and {there} "
            f"follow; write it anew"
        )
    array = np.frombuffer(file.read(needed), dtype=dtype)
    return array.reshape(shape[::-1]).T if is_transposed else array.reshape(shape)

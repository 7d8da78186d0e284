"""How much each column of the matrices counts when they are rounded: `imatrix` files of llama.cpp, of both kinds.

    GGUF        tensors NAME.in_sum2 [experts, k] and NAME.counts [experts, 1]; importance = sum / count
    the older   i32 number of entries; each an i32 length, the name, i32 calls, i32 k, and k float32: calls times the mean square

Source: llama.cpp's tools/imatrix and tools/quantize. The file is somebody else's: its counts are compared with its length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.api.checkpoint.gguf import MAGIC, GgufHeader, TensorPlace, read_header
from backend.api.checkpoint.model_files import shown
from backend.api.errors import ConfigError

Floats = NDArray[np.float32]
MAX_BYTES = 1 << 30
MAX_ENTRIES = 1 << 16
_SUMS, _COUNTS = ".in_sum2", ".counts"
_LEAST = 1e-6  # times the mean: a column that was always 0 counts a little


def read_imatrix(path: Path) -> dict[str, Tensor]:
    """Name of a tensor in a GGUF file -> the importance of its columns, float32 [k], positive, 1 in the mean. Of experts
    [experts * k]; where no token came to one, its columns count alike.

    Raises ConfigError.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
            content = b"" if start == MAGIC else start + file.read(MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"--importance {path} cannot be read ({error.strerror}); give an imatrix file") from None
    found = dict(_of_gguf(read_header(path)) if start == MAGIC else _of_older(path, content))
    if not found:
        raise ConfigError(f"--importance {path} holds no importance of any tensor; make it again with llama-imatrix")
    for name, sums in found.items():
        if not np.isfinite(sums).all() or (sums < 0).any() or not sums.any():
            raise ConfigError(
                f"--importance {path}: {shown(name)} has a number that is no mean square; make it again with llama-imatrix"
            )
    return {name: torch.from_numpy(np.maximum(sums / sums.mean(), _LEAST)) for name, sums in found.items()}


def _of_gguf(header: GgufHeader) -> Iterator[tuple[str, Floats]]:
    for name, place in header.tensors.items():
        counts = header.tensors.get(name.removesuffix(_SUMS) + _COUNTS)
        if not name.endswith(_SUMS) or counts is None:
            continue
        sums, count = (_numbers(header, each) for each in (place, counts))
        if len(sums) == count.size and (count > 0).any():
            yield name.removesuffix(_SUMS), (sums / np.maximum(count.reshape(-1, 1), 1)).ravel()


def _numbers(header: GgufHeader, place: TensorPlace) -> Floats:
    if place.type.name != "F32" or len(place.shape) > 2:
        raise ConfigError(f"--importance {header.name} holds a tensor that is no table of float32; make it again")
    with place.path.open("rb") as file:
        file.seek(place.offset)
        return np.frombuffer(file.read(place.num_bytes), np.float32).reshape(-1, place.shape[-1])


def _of_older(path: Path, content: bytes) -> Iterator[tuple[str, Floats]]:
    at = 0

    def number() -> int:
        nonlocal at
        at += 4
        (value,) = struct.unpack_from("<i", content, at - 4)
        if value < 0:
            raise ValueError("a negative number")
        return int(value)

    try:
        entries = number()
        if entries > MAX_ENTRIES:
            raise ValueError("too many entries")
        for _ in range(entries):
            length = number()
            name = content[at : at + length].decode("utf-8")
            at += length
            calls, columns = number(), number()
            values = np.frombuffer(content, "<f4", columns, at)
            at += 4 * columns
            if calls and columns:
                yield name, values.astype(np.float32)
    except (struct.error, ValueError):
        raise ConfigError(
            f"--importance {path} is no imatrix file of llama.cpp, or is cut short; give measured, none or such a file"
        ) from None

"""Tensors of torch's pickle files (.pth, .bin), read without running any code of theirs.

Format: a ZIP archive that torch.save has written: NAME/data.pkl, a pickle, beside NAME/data/0, 1, ..., the bytes of the tensors,
all of them stored without compression. torch's restricted reader (weights_only) accepts tensors and plain containers only; the
tensors are mapped into memory, and read when they are used.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from backend.api.checkpoint.model_files import find_file, shown
from backend.api.errors import ConfigError

MAX_PICKLE_BYTES = 64 << 20
MAX_ENTRIES = 100_000
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
AGAIN = "fetch it again, or save it with torch.save of a dictionary of tensors"


def open_pickle(directory: Path, name: str) -> dict[str, Tensor]:
    """The tensors of one file by their names. Raises ConfigError."""
    path = find_file(directory, name)
    if path is None:
        raise ConfigError(f"{shown(name)}: File does not exist; fetch the checkpoint again")
    _check_archive(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch does not say what its readers raise for a file that is wrong
        raise ConfigError(
            f"{shown(name)} cannot be read as tensors ({type(error).__name__}): code in a pickle is never run; {AGAIN}"
        ) from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{shown(name)} holds a {type(content).__name__}, a dictionary of tensors is needed; {AGAIN}")
    return {key: _checked(name, key, value) for key, value in content.items()}


class PickledTensors(Mapping[str, Tensor]):
    """The tensors of several files. Raises ConfigError for a name that is in two of them."""

    def __init__(self, directory: Path, names: list[str]) -> None:
        self._tensors: dict[str, Tensor] = {}
        for name in names:
            for key, tensor in open_pickle(directory, name).items():
                if key in self._tensors:
                    raise ConfigError(
                        f"tensor {shown(key)} is in two files, {shown(name)} is one; remove what is too much"
                    )
                self._tensors[key] = tensor

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _check_archive(path: Path) -> None:
    """Raise ConfigError for a file whose reading would take more memory than the file has bytes."""
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        raise ConfigError(f"{shown(path.name)} is no archive of torch.save, or is cut short; {AGAIN}") from None
    pickles = [entry for entry in entries if entry.filename.endswith("data.pkl")]
    if len(entries) > MAX_ENTRIES or len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE_BYTES:
        raise ConfigError(
            f"{shown(path.name)} has {len(entries)} entries and {len(pickles)} pickles; at most {MAX_ENTRIES} entries and one "
            f"pickle of {MAX_PICKLE_BYTES} bytes are read; {AGAIN}"
        )
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or sum(e.file_size for e in entries) > size:
        raise ConfigError(f"{shown(path.name)} is compressed, which torch.save never does; {AGAIN}")


def _checked(file: str, name: object, value: object) -> Tensor:
    place = f"{shown(file)}: tensor {shown(name)}"
    if not isinstance(name, str) or not isinstance(value, Tensor):
        raise ConfigError(f"{place} is a {type(value).__name__}, a tensor under a text is needed; {AGAIN}")
    if value.layout != torch.strided or value.dtype not in DTYPES or value.is_quantized or value.device.type != "cpu":
        raise ConfigError(f"{place} has dtype {value.dtype}; a plain tensor of floats is needed; {AGAIN}")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise ConfigError(f"{place} has {value.numel()} numbers, and fewer are stored; {AGAIN}")
    return value.detach()

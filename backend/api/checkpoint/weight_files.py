"""Finds the files that hold a checkpoint's tensors, and checks their headers before any tensor is read.

A safetensors file is 8 bytes with the length of the header, the header as JSON {NAME: {dtype, shape, data_offsets}}, and the
data. An error names the tensor and the value.
"""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from backend.api.checkpoint.model_files import REMEDY, convert, decoded, find_file, read_object, shown
from backend.api.errors import ConfigError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 8 << 20
MAX_DIMENSIONS = 8
METADATA = "__metadata__"
_BITS = dict(
    BOOL=8, U8=8, I8=8, I16=16, U16=16, F16=16, BF16=16, I32=32, U32=32, F32=32, I64=64, U64=64, F64=64, C64=64
)
_BITS |= dict(F4=4, F6_E2M3=6, F6_E3M2=6, F8_E5M2=8, F8_E4M3=8, F8_E8M0=8, F8_E4M3FNUZ=8, F8_E5M2FNUZ=8)


class _Entry(Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those that its index names, if it has one. Raises ConfigError."""
    index = read_object(directory, INDEX)
    if index is not None:
        return [_shard(directory, name) for name in _shard_names(index)]
    path = find_file(directory, WEIGHTS)
    if path is not None:
        return [path]
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")):
        raise ConfigError(f"model {directory.name} has pickle weights (.bin, .pt): refused; convert to safetensors")
    raise ConfigError(f"model {directory.name}: {WEIGHTS}: File does not exist; fetch the checkpoint again")


class StoredTensor(NamedTuple):
    path: Path
    dtype: str  # as safetensors has it
    shape: tuple[int, ...]
    start: int  # in the file
    num_bytes: int


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """The shapes of a file's tensors. Raises ConfigError."""
    return {name: list(place.shape) for name, place in tensor_places(path).items()}


def tensor_places(path: Path) -> dict[str, StoredTensor]:
    """A file's tensors, after checking its header against itself and the file's length. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            header = file.read(_header_bytes(path.name, file.read(8), num_bytes))
    except OSError as error:
        raise ConfigError(
            f"{path.name} cannot be read ({error.strerror}); let this user read it, or fetch it again"
        ) from None
    entries = _entries(path.name, header)
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        end = _check_entry(f"{path.name}: tensor {shown(name)}", entry, end)
    if end != num_bytes - 8 - len(header):
        raise ConfigError(
            f"{path.name} is cut short or too long: its data_offsets end at {end}, and {num_bytes - 8 - len(header)} "
            f"bytes of data follow the header; fetch it again"
        )
    data = 8 + len(header)
    return {
        name: StoredTensor(path, entry.dtype, tuple(entry.shape), data + begin, stop - begin)
        for name, entry in entries.items()
        for begin, stop in [entry.data_offsets]
    }


def _shard_names(index: dict[str, object]) -> list[str]:
    """The file names in an index. Raises ConfigError for paths: an index must not lead out of its directory."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{INDEX} has no weight_map of tensors' names to files' names; fetch it again")
    for tensor, name in weight_map.items():
        place = f"{INDEX}: weight_map: {shown(tensor)}"
        if not isinstance(name, str):
            raise ConfigError(f"{place} is {shown(name)}, the name of a safetensors file is needed; {REMEDY}")
        if "/" in name or "\\" in name or "\0" in name or not name.endswith(".safetensors"):
            given = "an absolute path" if name.startswith("/") else shown(name) or "a file without a name"
            raise ConfigError(
                f"{place} is in {given}, only a name that ends in .safetensors, without a directory, is allowed; {REMEDY}"
            )
    return sorted(set(weight_map.values()))


def _shard(directory: Path, name: str) -> Path:
    path = find_file(directory, name)
    if path is None:
        raise ConfigError(f"model {directory.name}: {shown(name)}: File does not exist, but {INDEX} names it; fetch it")
    return path


def _header_bytes(file: str, start: bytes, num_bytes: int) -> int:
    """The length of the header, from the first 8 bytes of a file."""
    if len(start) < 8:
        raise ConfigError(f"{file} is no safetensors file, or is cut short: it has {num_bytes} bytes; fetch it again")
    length = int.from_bytes(start, "little")
    longest = min(num_bytes - 8, MAX_HEADER_BYTES)
    if not 2 <= length <= longest:
        raise ConfigError(
            f"{file} is no safetensors file, or is cut short: it says that its header has {length} bytes, 2 to {longest} are "
            f"possible; fetch it again"
        )
    return length


def _entries(file: str, header: bytes) -> dict[str, _Entry]:
    text = decoded(header, f"{file}: the header")
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw.pop(METADATA, None)
        entries = {name: _entry(file, name, entry) for name, entry in raw.items()}
    except (msgspec.DecodeError, RecursionError):
        raise ConfigError(f"{file}: the header is no JSON object of tensors; fetch it again") from None
    # If a name occurs twice, the parser keeps the second entry only.
    if text.count('"data_offsets"') != len(entries):
        raise ConfigError(f"{file}: the header names a tensor twice; fetch it again")
    return entries


def _entry(file: str, name: str, raw: msgspec.Raw) -> _Entry:
    try:
        return msgspec.json.decode(raw, type=_Entry)
    except msgspec.ValidationError:
        return convert(msgspec.json.decode(raw), _Entry, f"{file}: tensor {shown(name)}")


def _check_entry(place: str, entry: _Entry, start: int) -> int:
    """Check that a tensor starts at `start`, has a known type, and as many bytes as its shape needs; return where it ends."""
    begin, end = entry.data_offsets
    if entry.dtype not in _BITS:
        raise ConfigError(f"{place}: dtype is {shown(entry.dtype)}, which is not known; {REMEDY}")
    if len(entry.shape) > MAX_DIMENSIONS or any(size < 0 for size in entry.shape):
        raise ConfigError(
            f"{place}: shape is {shown(entry.shape)}, at most {MAX_DIMENSIONS} numbers from 0 are possible; {REMEDY}"
        )
    num_bits = prod(entry.shape) * _BITS[entry.dtype]
    if begin != start or end < begin:
        raise ConfigError(
            f"{place}: data_offsets are [{begin}, {end}], but the tensor before it ends at {start}; fetch it again"
        )
    if num_bits != 8 * (end - begin):
        raise ConfigError(
            f"{place}: shape {shown(entry.shape)} of {entry.dtype} takes {num_bits // 8} bytes, data_offsets "
            f"[{begin}, {end}] hold {end - begin}; fetch it again"
        )
    return end

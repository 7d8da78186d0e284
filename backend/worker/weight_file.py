"""The file in which packed weights are kept: tensors by name, which the next engine maps instead of packing them again.

    8 bytes MAGIC   u64 length of the header   32 bytes SHA-256 of the header   the header, JSON of `_Header`
    each tensor's bytes, from a multiple of ALIGNMENT on

Every PIECE of a tensor has a CRC-32, and all are compared before a tensor is used: a file that was cut short, or changed on the
disk, is recognised. That does not protect from somebody who may write the file, which kernels/cpu/trust.py does. The
file is mapped read-only, so that all engines that use it share its pages, in large pages where the file system has them. It must
never be written in place; it may be removed while it is mapped.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import prod
from typing import BinaryIO, NamedTuple

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

MAGIC = b"EBWEIGHT"
ALIGNMENT = 64  # a cache line
PIECE = 8 << 20
MAX_HEADER_BYTES = 32 << 20
_PREFIX_BYTES = 48  # MAGIC, the length and the hash of the header
_DTYPES = {str(t): t for t in (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8)}


class DamagedWeights(Exception):
    """The file is not what was written; the message says how it differs."""


class _Place(Struct):
    dtype: str
    shape: list[int]
    offset: int  # from the first multiple of ALIGNMENT behind the header
    sums: list[int]  # CRC-32 of each PIECE

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * _DTYPES[self.dtype].itemsize


class _Header(Struct):
    key: str
    numbers: dict[str, list[int]]
    tensors: dict[str, _Place]


class Content(NamedTuple):
    tensors: Mapping[str, Tensor]  # on the CPU
    numbers: Mapping[str, list[int]]  # shape, format and group of each linear layer, by its name

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def write(file: BinaryIO, key: str, content: Content) -> None:
    """key: what `read` will ask for. Raises OSError."""
    views = {name: _bytes_of(tensor) for name, tensor in content.tensors.items()}
    sums, places, offset = _sums(views.values()), {}, 0
    for (name, tensor), own in zip(content.tensors.items(), sums, strict=True):
        places[name] = _Place(str(tensor.dtype), list(tensor.shape), offset, own)
        offset = _aligned(offset + tensor.nbytes)
    header = msgspec.json.encode(_Header(key, dict(content.numbers), places))
    start = _aligned(_PREFIX_BYTES + len(header))
    os.posix_fallocate(file.fileno(), 0, start + offset)  # a full disk is noticed before anything is written
    file.write(MAGIC + len(header).to_bytes(8, "little") + hashlib.sha256(header).digest() + header)
    for name, view in views.items():
        file.seek(start + places[name].offset)
        file.write(view)


def read(file: BinaryIO, key: str) -> Content:
    """Map what `write` has written; the file may be closed then. Raises DamagedWeights and OSError."""
    header, start = _read_header(file)
    if header.key != key:
        raise DamagedWeights("it was written for another model")
    num_bytes = os.fstat(file.fileno()).st_size
    for name, place in header.tensors.items():
        _check(name, place, num_bytes - start)
    mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = memoryview(mapping)[start:]
    views = [whole[place.offset : place.offset + place.num_bytes] for place in header.tensors.values()]
    for (name, place), sums in zip(header.tensors.items(), _sums(views), strict=True):
        if place.sums != sums:
            raise DamagedWeights(f"the checksum of {name} differs")
    tensors = {name: _tensor(view, place) for (name, place), view in zip(header.tensors.items(), views, strict=True)}
    return Content(tensors, header.numbers)


def _read_header(file: BinaryIO) -> tuple[_Header, int]:
    """The header, and where the tensors begin."""
    prefix = file.read(_PREFIX_BYTES)
    if len(prefix) < _PREFIX_BYTES or not prefix.startswith(MAGIC):
        raise DamagedWeights("it does not begin as a file of packed weights does")
    length = int.from_bytes(prefix[8:16], "little")
    if length > MAX_HEADER_BYTES:
        raise DamagedWeights(f"its header is said to have {length} bytes, more than {MAX_HEADER_BYTES}")
    header = file.read(length)
    if hashlib.sha256(header).digest() != prefix[16:]:
        raise DamagedWeights("the checksum of its header differs")
    try:
        return msgspec.json.decode(header, type=_Header), _aligned(_PREFIX_BYTES + length)
    except (msgspec.DecodeError, RecursionError):
        raise DamagedWeights("its header cannot be read") from None


def _check(name: str, place: _Place, most: int) -> None:
    """Raise DamagedWeights where a tensor is not one that lies whole within `most` bytes."""
    if place.dtype not in _DTYPES or not place.shape or min(place.shape) < 1:
        raise DamagedWeights(f"{name} is {place.dtype} {place.shape}, which no packed weight is")
    if place.offset < 0 or place.offset % ALIGNMENT or place.offset + place.num_bytes > most:
        raise DamagedWeights(
            f"it is cut short: {name} ends at {place.offset + place.num_bytes}, and {most} bytes are there"
        )


def _sums(views: Iterable[memoryview]) -> list[list[int]]:
    """CRC-32 of each PIECE of each view, computed on torch's number of threads."""
    crc: Callable[[memoryview], int] = zlib.crc32
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        futures = [[pool.submit(crc, view[at : at + PIECE]) for at in range(0, len(view), PIECE)] for view in views]
        return [[future.result() for future in own] for own in futures]


def _tensor(view: memoryview, place: _Place) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of memory that it may not write, and weights are never written
        flat = torch.frombuffer(view, dtype=_DTYPES[place.dtype])
    return flat.view(place.shape)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT

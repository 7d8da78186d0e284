"""model.safetensors and its index that must be refused."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.model.hostile.base import (
    DOWN,
    INDEX,
    WEIGHTS,
    Case,
    both,
    config,
    deep,
    header,
    index,
    instead,
    put_header,
    read_header,
    remove,
    sparse,
    tensors,
    text,
    weights,
    write,
)

NAMES = sorted(weights())
_SHARD = dict.fromkeys(NAMES, "shard.safetensors")


def _raw(make: Callable[[bytes, bytes], bytes], length: int | None = None) -> Callable[[Path], None]:
    """Another text of the header, made of (the header's text, the data)."""

    def spoil(directory: Path) -> None:
        entries, data = read_header(directory)
        put_header(directory, make(json.dumps(entries).encode(), data), data, length)

    return spoil


def _down(**changes: object) -> Callable[[Path], None]:
    """Another entry for the last projection."""
    return header(lambda entries: entries[DOWN].update(changes))


def _swap(entries: dict[str, Any]) -> None:
    begin, end = entries[DOWN]["data_offsets"]
    entries[DOWN]["data_offsets"] = [begin - 4, end - 4]


def _twice(raw: bytes, data: bytes) -> bytes:
    return raw[:-1] + b', "model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}'


def _six_bits(directory: Path) -> None:
    """The last projection of 6 bits, in the bytes that it has."""
    entries, data = read_header(directory)
    begin, end = entries[DOWN]["data_offsets"]
    for name in entries.keys() - {"__metadata__"}:
        if entries[name]["data_offsets"][0] >= end:
            entries[name]["data_offsets"] = [offset - end + begin + 3072 for offset in entries[name]["data_offsets"]]
    entries[DOWN] |= dict(dtype="F6_E2M3", data_offsets=[begin, begin + 3072])
    put_header(directory, json.dumps(entries).encode(), data[: begin + 3072] + data[end:])


def _unprintable(entries: dict[str, Any]) -> None:
    end = max(entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__")
    entries["a\nb\x1b[31m"] = dict(dtype="F32", shape=[0], data_offsets=[end, end])


HEADERS = [
    Case("weights are missing", remove(WEIGHTS), (WEIGHTS, "File does not exist")),
    Case("weights are empty", text(WEIGHTS, b""), (WEIGHTS, "0 bytes")),
    Case("weights are seven bytes", text(WEIGHTS, b"1234567"), (WEIGHTS, "7 bytes")),
    Case("weights are a directory", instead(WEIGHTS, os.mkdir), (WEIGHTS, "directory")),
    Case("weights are a pipe", instead(WEIGHTS, os.mkfifo), (WEIGHTS, "pipe")),
    Case("weights are a device", instead(WEIGHTS, lambda path: path.symlink_to("/dev/zero")), (WEIGHTS,)),
    Case("weights lead nowhere", instead(WEIGHTS, lambda path: path.symlink_to("gone")), (WEIGHTS, "link")),
    Case("header beyond the file", _raw(lambda raw, data: raw, 1 << 30), (WEIGHTS, "1073741824")),
    Case("header of 2^63 bytes", _raw(lambda raw, data: raw, 1 << 63), (WEIGHTS, "9223372036854775808")),
    Case("header of no bytes", _raw(lambda raw, data: raw, 0), (WEIGHTS, "header")),
    Case(
        "header of a gigabyte",
        both(sparse(WEIGHTS, 1 << 31), lambda d: _patch(d / WEIGHTS, struct.pack("<Q", 1 << 30) + b"{")),
        (WEIGHTS, "1073741824", "8388608"),
    ),
    Case(
        "header is not UTF-8", _raw(lambda raw, data: raw.replace(b"model.norm", b"model.\xff\xfe")), (WEIGHTS, "UTF-8")
    ),
    Case("header is no JSON", _raw(lambda raw, data: raw[:-5]), (WEIGHTS, "header")),
    Case("header is a list", _raw(lambda raw, data: b"[]"), (WEIGHTS, "header")),
    Case("header is 100,000 deep", _raw(lambda raw, data: deep(100_000).encode()), (WEIGHTS, "header")),
    Case("header with a name twice", _raw(_twice), (WEIGHTS, "twice")),
    Case("negative offsets", _down(data_offsets=[-4, 16380]), (WEIGHTS, DOWN, "data_offsets", "-4")),
    Case("offsets that go backwards", _down(data_offsets=[16384, 0]), (WEIGHTS, DOWN, "data_offsets")),
    Case("overlapping offsets", header(_swap), (WEIGHTS, "data_offsets")),
    Case("offsets beyond the file", _down(shape=[64, 1 << 30], data_offsets=[0, 1 << 38]), (WEIGHTS, "data_offsets")),
    Case("offsets of text", _down(data_offsets=["0", "16384"]), (WEIGHTS, DOWN, "data_offsets", "'0'")),
    Case("three offsets", _down(data_offsets=[0, 1, 2]), (WEIGHTS, DOWN, "data_offsets")),
    Case("no offsets", header(lambda entries: entries[DOWN].pop("data_offsets")), (WEIGHTS, DOWN, "data_offsets")),
    Case("a dtype that is none", _down(dtype="F33"), (WEIGHTS, DOWN, "F33")),
    Case(
        "a dtype that torch has not",
        _six_bits,
        (WEIGHTS, DOWN, "float type"),
    ),
    Case("a dtype that is a number", _down(dtype=32), (WEIGHTS, DOWN, "dtype", "32")),
    Case("a shape of another size", _down(shape=[64, 65]), (WEIGHTS, DOWN, "[64, 65]")),
    Case("a shape of 2^64", _down(shape=[1 << 33, 1 << 33]), (WEIGHTS, DOWN, "shape")),
    Case("a negative shape", _down(shape=[-64, -64]), (WEIGHTS, DOWN, "shape", "-64")),
    Case("a shape of a thousand dimensions", _down(shape=[1] * 1000), (WEIGHTS, DOWN, "shape")),
    Case("a shape of text", _down(shape="64"), (WEIGHTS, DOWN, "shape", "'64'")),
    Case("an entry that is a number", header(lambda entries: entries.update({DOWN: 1})), (WEIGHTS, DOWN, "1")),
    Case(
        "a name of a megabyte",
        header(lambda entries: entries.update({"x" * (1 << 20): entries.pop(DOWN) | {"dtype": "F33"}})),
        (WEIGHTS, "xxx", "F33"),
    ),
    Case(
        "a name of control characters",
        header(_unprintable),
        ("a\\nb\\x1b[31m",),
    ),
]


def _patch(path: Path, content: bytes) -> None:
    with path.open("r+b") as file:
        file.write(content)


def _outside(directory: Path, name: str) -> None:
    """A whole checkpoint beside the directory, whose weights the index names."""
    other = write(directory.parent / "other")
    (directory / WEIGHTS).unlink()
    (directory / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(NAMES, name.replace("OTHER", str(other)))}))


def _linked(directory: Path, target: str) -> None:
    other = write(directory.parent / "other")
    (directory / "shard.safetensors").symlink_to(target.replace("OTHER", str(other)))
    index(_SHARD, keep_file=True)(directory)
    (directory / WEIGHTS).unlink()


INDICES = [
    Case("index goes up", lambda d: _outside(d, "../other/" + WEIGHTS), (INDEX, "../other/" + WEIGHTS)),
    Case("index is absolute", lambda d: _outside(d, "OTHER/" + WEIGHTS), (INDEX, "weight_map", "absolute path")),
    Case("index goes down", index(dict.fromkeys(NAMES, "a/b.safetensors")), (INDEX, "a/b.safetensors")),
    Case("index with a link out", lambda d: _linked(d, "OTHER/" + WEIGHTS), ("shard.safetensors", "link")),
    Case("index with a link up", lambda d: _linked(d, "../other/" + WEIGHTS), ("shard.safetensors", "link")),
    Case("index names the directory", index(dict.fromkeys(NAMES, "..")), (INDEX, "..")),
    Case("index names itself", index(dict.fromkeys(NAMES, INDEX)), (INDEX,)),
    Case("index names a pickle", index(dict.fromkeys(NAMES, "a.bin")), (INDEX, "a.bin", "safetensors")),
    Case("index names nothing", index(dict.fromkeys(NAMES, "")), (INDEX, "weight_map")),
    Case("index with a zero byte", index(dict.fromkeys(NAMES, "a\0.safetensors")), (INDEX, "a\\x00")),
    Case("index with a name of 5,000", index(dict.fromkeys(NAMES, "x" * 5000 + ".safetensors")), ("xxx",)),
    Case("index lacks a shard", index(dict.fromkeys(NAMES, "gone.safetensors")), ("gone.safetensors", "File does not")),
    Case("index of numbers", index(dict.fromkeys(NAMES, 3)), (INDEX, "weight_map", "3")),
    Case("index of lists", index(dict.fromkeys(NAMES, ["shard.safetensors"])), (INDEX, "weight_map")),
    Case("index without a map", text(INDEX, "{}"), (INDEX, "weight_map")),
    Case("index with a list for a map", index(["shard.safetensors"]), (INDEX, "weight_map")),
    Case("index with an empty map", index({}), (INDEX, "weight_map")),
    Case("index is deep", text(INDEX, deep(100_000)), (INDEX, "nested", "32")),
    Case("index is not UTF-8", text(INDEX, b'{"weight_map": {"\xff": "a"}}'), (INDEX, "UTF-8")),
    Case("index is a terabyte", sparse(INDEX, 1 << 40), (INDEX, "1099511627776")),
    Case("index is a pipe", instead(INDEX, os.mkfifo), (INDEX, "pipe")),
    Case("index leads nowhere", instead(INDEX, lambda path: path.symlink_to("gone")), (INDEX, "link")),
    Case("index is a directory", instead(INDEX, os.mkdir), (INDEX, "directory")),
    Case(
        "index with a shard that is a pipe",
        both(index(_SHARD), instead("shard.safetensors", os.mkfifo)),
        ("shard.safetensors", "pipe"),
    ),
    Case(
        "a tensor in two shards",
        both(
            index(_SHARD | {"model.norm.weight": "b.safetensors"}),
            lambda d: (d / "b.safetensors").write_bytes((d / "shard.safetensors").read_bytes()),
        ),
        ("shard.safetensors", "b.safetensors"),
    ),
]


def _awq(scale: float, **shapes: tuple[int, ...]) -> Callable[[Path], None]:
    """The last projection as AWQ stores it."""

    def change(held: dict[str, torch.Tensor]) -> None:
        held.pop(DOWN)
        name = DOWN.removesuffix("weight")
        stored = dict(qweight=(64, 8), qzeros=(2, 8), scales=(2, 64)) | shapes
        for suffix in ("qweight", "qzeros"):
            held[name + suffix] = torch.zeros(stored[suffix], dtype=torch.int32)
        held[name + "scales"] = torch.full(stored["scales"], scale, dtype=torch.float16)

    section = dict(quant_method="awq", bits=4, group_size=32)
    return both(config(quantization_config=section), tensors(change))


_SCALES = DOWN.removesuffix("weight") + "scales"
CONTENT = [
    Case("a layer too few", config(num_hidden_layers=2), ("num_hidden_layers", "2", "1")),
    Case("a tensor is missing", tensors(lambda held: held.pop(DOWN)), (DOWN,)),
    Case("no tensor at all", tensors(lambda held: held.clear()), ("num_hidden_layers",)),
    Case(
        "a tensor of another shape", tensors(lambda held: held.update({DOWN: torch.ones(3)})), (DOWN, "[3]", "[64, 64]")
    ),
    Case("a tensor of whole numbers", tensors(lambda h: h.update({DOWN: h[DOWN].to(torch.int64)})), (DOWN, "int64")),
    Case("a tensor too many", tensors(lambda held: held.update(extra=torch.ones(1))), ("extra",)),
    Case(
        "layer 10^9",
        tensors(lambda held: held.update({"model.layers.1000000000.mlp.down_proj.weight": torch.ones(1)})),
        ("model.layers.1000000000",),
    ),
    Case("awq with scales that are NaN", _awq(float("nan")), (_SCALES, "nan")),
    Case("awq with infinite scales", _awq(float("inf")), (_SCALES, "inf")),
    Case("awq with scales of another shape", _awq(0.1, scales=(1, 64)), (_SCALES, "[1, 64]", "[2, 64]")),
    Case(
        "quantised, though nothing is",
        config(quantization_config=dict(quant_method="gptq", bits=4, group_size=7)),
        ("group_size", "7"),
    ),
]
CASES = [*HEADERS, *INDICES, *CONTENT]

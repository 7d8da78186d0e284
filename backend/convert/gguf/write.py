"""Writes one GGUF file: settings, tokenizer and tensors, which are read, encoded and written one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from backend.api.errors import ConfigError
from backend.convert.gguf.blocks import encode
from backend.convert.gguf.families import Rules, Stored
from backend.convert.gguf.types import FILE_TYPES, type_of

Importance = Callable[[Stored], Tensor | None]  # -> [k], positive
Progress = Callable[[Sequence[str]], Iterable[str]]
_DTYPE = np.dtype(np.float32)  # it is not looked at where a type is given


class Written(NamedTuple):
    num_tensors: int
    num_bytes: int
    types: dict[str, int]  # type of matrices -> their bytes


class _Planned(NamedTuple):
    kind: Type
    sources: list[str]  # one, or those of all experts in their order


def write_gguf(
    file: Path,
    rules: Rules,
    tensors: Mapping[str, Tensor],
    tokenizer: Mapping[str, Any],
    type_name: str,
    importance: Importance = lambda stored: None,
    progress: Progress = lambda names: names,
) -> Written:
    """Write a file whose tensors are `tensors`, by their names in the checkpoint. type_name: a key of FILE_TYPES.

    Tensors are read twice, because their shapes stand in front of their numbers, and one of all experts once more. Experts are
    encoded one after the other, so that no more is held than what the file has of a layer's in one tensor. Raises ConfigError,
    also for a type whose numbers they exceed.
    """
    writer = gguf.GGUFWriter(file, rules.name)
    writer.add_file_type(FILE_TYPES[type_name].number)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    rules.add_settings(writer)
    for key, value in tokenizer.items():
        _add(writer, key, value)
    tables = rules.tables()
    for name, values in tables.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    plan = _plan(writer, rules, tensors, type_name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values in tables.values():
        writer.write_tensor_data(values)
    types: dict[str, int] = {}
    for name in progress(list(plan)):
        kind, sources = plan[name]
        parts = [
            encode(stored.values, kind, _weights(importance, stored))
            for source in sources
            for stored in rules.tensors({source: tensors[source]})
            if stored.name == name
        ]
        data = parts[0] if len(parts) == 1 else np.stack(parts)
        writer.write_tensor_data(data)
        if data.ndim > 1:
            types[kind.name] = types.get(kind.name, 0) + data.nbytes
    writer.close()
    return Written(len(plan), file.stat().st_size, types)


def _weights(importance: Importance, stored: Stored) -> Tensor | None:
    weights = importance(stored)
    if weights is not None and len(weights) != stored.values.shape[-1]:
        raise ConfigError(
            f"--importance has {len(weights)} columns for {stored.name}, which has {stored.values.shape[-1]}; it is of another "
            f"model"
        )
    return weights


def _plan(writer: gguf.GGUFWriter, rules: Rules, tensors: Mapping[str, Tensor], type_name: str) -> dict[str, _Planned]:
    """Name the tensors to the writer, and give back what they are made of."""
    found: dict[str, list[Stored]] = {}
    for source in tensors:
        for stored in rules.tensors({source: torch.empty_like(tensors[source], device="meta")}):
            found.setdefault(stored.name, []).append(stored)
    plan = {}
    for name, parts in found.items():
        parts.sort(key=lambda stored: stored.expert or 0)
        shape, is_one = tuple(parts[0].values.shape), parts[0].expert is None
        expected = [None] if is_one else list(range(rules.num_experts))
        if [part.expert for part in parts] != expected:
            raise ConfigError(
                f"the checkpoint has {len(parts)} parts of {name}, {len(expected)} are needed; fetch it again"
            )
        layers, has_output = rules.config["num_hidden_layers"], "output.weight" in found
        kind = type_of(FILE_TYPES[type_name], name, shape, layers, has_output, rules.num_experts)
        plan[name] = _Planned(kind, list(dict.fromkeys(part.source for part in parts)))
        whole = shape if is_one else (len(parts), *shape)
        size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor_info(name, whole, _DTYPE, prod(whole) // size * num_bytes, raw_dtype=kind)
    return plan


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A setting of the tokenizer."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif key.endswith("precompiled_charsmap"):
        writer.add_array(key, bytes(value))
    else:
        writer.add_array(key, list(value))


@contextmanager
def new_file(output: Path) -> Iterator[Path]:
    """Yields the name of a file in the same folder, which is renamed to `output` at the end, or removed after an error."""
    check_new_file(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    scratch = output.with_name(f".{output.name}-{os.getpid()}")
    try:
        yield scratch
        scratch.rename(output)
    finally:
        scratch.unlink(missing_ok=True)


def check_new_file(output: Path) -> None:
    """Raises ConfigError if `output` exists."""
    if os.path.lexists(output):
        raise ConfigError(f"output {output} exists already; give another name, or remove it")

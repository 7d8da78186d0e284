"""Writes one GGUF file: settings, tokenizer and tensors, which are read, encoded and written one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from backend.api.errors import ConfigError
from backend.convert.gguf.blocks import encode
from backend.convert.gguf.families import Rules
from backend.convert.gguf.types import FILE_TYPES, type_of

Importance = Callable[[str, str], Tensor | None]  # names of a tensor in the checkpoint and the file -> [k], positive
Progress = Callable[[Sequence[str]], Iterable[str]]
_DTYPE = np.dtype(np.float32)  # it is not looked at where a type is given


class Written(NamedTuple):
    num_tensors: int
    num_bytes: int
    types: dict[str, int]  # type of matrices -> their bytes


def write_gguf(
    file: Path,
    rules: Rules,
    tensors: Mapping[str, Tensor],
    tokenizer: Mapping[str, Any],
    type_name: str,
    importance: Importance = lambda source, name: None,
    progress: Progress = lambda names: names,
) -> Written:
    """Write a file whose tensors are `tensors`, by their names in the checkpoint. type_name: a key of FILE_TYPES.

    Tensors are read twice, because their shapes stand in front of their numbers. Raises ConfigError, also for a type whose
    numbers they exceed.
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
    kinds = _plan(writer, rules, tensors, type_name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values in tables.values():
        writer.write_tensor_data(values)
    types: dict[str, int] = {}
    for source in progress(list(tensors)):
        for stored in rules.tensors({source: tensors[source]}):
            kind = kinds[stored.name]
            weights = importance(source, stored.name)
            if weights is not None and len(weights) != stored.values.shape[-1]:
                raise ConfigError(
                    f"--importance has {len(weights)} columns for {stored.name}, which has {stored.values.shape[-1]}; it is of "
                    f"another model"
                )
            data = encode(stored.values, kind, weights)
            writer.write_tensor_data(data)
            if stored.values.dim() > 1:
                types[kind.name] = types.get(kind.name, 0) + data.nbytes
    writer.close()
    return Written(len(kinds), file.stat().st_size, types)


def _plan(writer: gguf.GGUFWriter, rules: Rules, tensors: Mapping[str, Tensor], type_name: str) -> dict[str, Type]:
    """Name the tensors to the writer, and give back their types."""
    shapes = {
        stored.name: tuple(stored.values.shape)
        for source in tensors
        for stored in rules.tensors({source: torch.empty_like(tensors[source], device="meta")})
    }
    kinds = {}
    for name, shape in shapes.items():
        kind = type_of(FILE_TYPES[type_name], name, shape, rules.config["num_hidden_layers"], "output.weight" in shapes)
        size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        count = num_bytes
        for length in shape:
            count *= length
        kinds[name] = kind
        writer.add_tensor_info(name, shape, _DTYPE, count // size, raw_dtype=kind)
    return kinds


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

"""Reads a checkpoint's config.json: the decoder that it describes (backend/architectures), and how its weights are quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from backend.api.checkpoint.model_files import REMEDY, parse_object, read_object
from backend.api.checkpoint.quantised import (
    FILE,
    AwqFormat,
    Fp8Format,
    GptqFormat,
    Int4Format,
    Int8Format,
    Mxfp4Format,
    QoqFormat,
    parse_quantisation,
)
from backend.api.config.schema import KvNumbers
from backend.api.errors import ConfigError
from backend.architectures.description import ModelConfig
from backend.architectures.registry import read_config
from backend.models.awq import AwqLayers
from backend.models.compressed_tensors import Int4Layers, Int8Layers
from backend.models.gptq import GptqLayers
from backend.models.mxfp4 import Mxfp4Layers
from backend.models.qoq import QoqLayers
from backend.models.quantized import QuantizedLayers


def read_model_config(directory: Path) -> ModelConfig:
    """Read `directory`/config.json. Raises ConfigError naming what is missing or not supported."""
    content = read_object(directory, FILE)
    if content is None:
        raise ConfigError(
            f"model {directory.name}: config.json: File does not exist; give a Hugging Face checkpoint directory"
        )
    return of_object(content)


def parse_model_config(text: str) -> ModelConfig:
    """Parse the text of a config.json. Raises ConfigError."""
    return of_object(parse_object(text, FILE))


def of_object(content: dict[str, Any]) -> ModelConfig:
    """The configuration in the content of a config.json. Raises ConfigError."""
    config = read_config(content)
    quantization, kv_cache_dtype = parse_quantization(content)
    return msgspec.structs.replace(config, quantization=quantization, kv_cache_dtype=kv_cache_dtype)


def check_eos_ids(ids: tuple[int, ...], config: ModelConfig, name: str) -> tuple[int, ...]:
    """Returns `ids`, the eos_token_id of the file `name`. Raises ConfigError for an id outside the vocabulary."""
    for token_id in ids:
        if token_id >= config.vocab_size:
            raise ConfigError(f"{name}: eos_token_id {token_id} is not below vocab_size {config.vocab_size}; {REMEDY}")
    return ids


_READERS: dict[type, type[QuantizedLayers]] = {
    Int8Format: Int8Layers,
    Int4Format: Int4Layers,
    AwqFormat: AwqLayers,
    GptqFormat: GptqLayers,
    QoqFormat: QoqLayers,
    Mxfp4Format: Mxfp4Layers,
}


def parse_quantization(content: dict[str, Any]) -> tuple[QuantizedLayers | Fp8Format | None, KvNumbers | None]:
    """Returns how linear layers are stored and the type of the KV cache; None means floats. Raises ConfigError."""
    found, kv_dtype = parse_quantisation(content)
    if isinstance(found, Fp8Format):  # Its weights are read as floats (fp8.py).
        return found, kv_dtype
    return (None if found is None else _READERS[type(found)](**vars(found))), kv_dtype

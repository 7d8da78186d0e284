"""The reader of a checkpoint's quantised linear layers, by the format that its config.json names."""

from __future__ import annotations

from typing import Any

from backend.api.checkpoint.quantised import (
    AwqFormat,
    GptqFormat,
    Int4Format,
    Int8Format,
    KvDtype,
    QoqFormat,
    parse_quantisation,
)
from backend.models.awq import AwqLayers
from backend.models.compressed_tensors import Int4Layers, Int8Layers
from backend.models.gptq import GptqLayers
from backend.models.qoq import QoqLayers
from backend.models.quantized import QuantizedLayers

_READERS: dict[type, type[QuantizedLayers]] = {
    Int8Format: Int8Layers,
    Int4Format: Int4Layers,
    AwqFormat: AwqLayers,
    GptqFormat: GptqLayers,
    QoqFormat: QoqLayers,
}


def parse_quantization(content: dict[str, Any]) -> tuple[QuantizedLayers | None, KvDtype | None]:
    """Returns how linear layers are stored and the type of the KV cache; None means floats. Raises ConfigError."""
    found, kv_dtype = parse_quantisation(content)
    return (None if found is None else _READERS[type(found)](**vars(found))), kv_dtype

"""Parses config.json's quantization_config: the format of the linear layers and the type of the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from backend.api.model_files import convert
from backend.models import awq, compressed_tensors, gptq, qoq
from backend.models.quantized import QuantizedLayers, unsupported

KvDtype = Literal["int8", "int4"]

_READERS: dict[str, Callable[[dict[str, Any]], QuantizedLayers]] = {
    "compressed-tensors": compressed_tensors.parse,
    "awq": awq.parse,
    "gptq": gptq.parse,
    "qoq": qoq.parse,
}
# The kv_cache_scheme that `everbatch quantize --kv` writes. It names the quantisation of kernels/common/kv_format.py.
_KV_SCHEME = {"type": "int", "symmetric": False, "strategy": "token_head", "dynamic": True}
_KV_DTYPES: dict[int, KvDtype] = {8: "int8", 4: "int4"}


def parse_quantization(raw: dict[str, Any]) -> tuple[QuantizedLayers | None, KvDtype | None]:
    """Returns how linear layers are stored and the type of the KV cache; None means floats. Raises ConfigError."""
    key = "quantization_config" if raw.get("quantization_config") else "compression_config"
    if raw.get(key) is None:
        return None, None
    section = convert(raw[key], dict[str, Any], "config.json", key)
    if not section:
        return None, None
    method = convert(section.get("quant_method", "unknown"), str, "config.json", f"{key}.quant_method")
    if method not in _READERS:
        raise unsupported(method)
    return _READERS[method](section), _kv_dtype(method, section.get("kv_cache_scheme"))


def _kv_dtype(method: str, scheme: object) -> KvDtype | None:
    if not scheme:
        return None
    given = {key: value for key, value in scheme.items() if value is not None} if isinstance(scheme, dict) else {}
    bits = given.pop("num_bits", 0)
    dtype = _KV_DTYPES.get(bits) if type(bits) is int else None
    if dtype is None or given != _KV_SCHEME:
        raise unsupported(method, "kv_cache_scheme")
    return dtype

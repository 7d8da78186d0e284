"""Which quantised checkpoints this project reads: config.json's quantization_config, checked and reduced to what readers need.

The files themselves are read by backend/models (awq.py, compressed_tensors.py, fp8.py, gptq.py, qoq.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct

from backend.api.checkpoint.model_files import convert, shown
from backend.api.config.schema import KvNumbers
from backend.api.errors import ConfigError

FILE = "config.json"
COMPRESSED = "compressed-tensors"
MAX_GROUP = 1 << 16  # columns that share a scale
LEAST_GROUP = 32  # smallest group of the 4-bit kernels (kernels/w4a16.py)
QOQ_GROUP = 128  # columns of a sum (kernels/int8_rows.py)
FORMATS = (
    "compressed-tensors (int8, symmetric, scaled by channel or group, with activations that are float or dynamic int8 by "
    "token; pack-quantized 4 bits), AWQ (4 bits, version gemm), GPTQ (4 bits, without desc_act), QoQ (4 bits, group_size "
    "-1 or 128), FP8 (e4m3 with scales of blocks, rows or tensors) or MXFP4 (gpt-oss's experts)"
)
# The kv_cache_scheme that `everbatch quantize --kv` writes. It names the quantisation of kernels/common/kv_format.py.
_KV_SCHEME = {"type": "int", "symmetric": False, "strategy": "token_head", "dynamic": True}
_KV_DTYPES: dict[int, KvNumbers] = {8: "int8", 4: "int4"}


@dataclass(frozen=True)
class Int8Format:
    """compressed-tensors, 8 bits. `group`: columns that share a scale; None = the whole row, here and below."""

    scheme: Literal["int8", "w8a8"]
    is_packed: bool
    group: int | None


@dataclass(frozen=True)
class Int4Format:
    """compressed-tensors, 4 bits."""

    group: int | None
    is_symmetric: bool


@dataclass(frozen=True)
class AwqFormat:
    group: int | None


@dataclass(frozen=True)
class GptqFormat:
    group: int | None
    version: int


@dataclass(frozen=True)
class QoqFormat:
    is_grouped: bool


@dataclass(frozen=True)
class Mxfp4Format:
    """Experts alone."""


@dataclass(frozen=True)
class Fp8Format:
    """e4m3. `block`: rows and columns that share a scale; None = all columns of a row, or the whole weight."""

    block: tuple[int, int] | None


Format = Int8Format | Int4Format | AwqFormat | GptqFormat | QoqFormat | Mxfp4Format | Fp8Format


def parse_quantisation(content: dict[str, Any]) -> tuple[Format | None, KvNumbers | None]:
    """How the checkpoint of this config.json stores linear layers, and the type of KV that it asks for; None means floats.

    Raises ConfigError.
    """
    key = "quantization_config" if content.get("quantization_config") else "compression_config"
    if content.get(key) is None:
        return None, None
    section = convert(content[key], dict[str, Any], FILE, key)
    if not section:
        return None, None
    method = convert(section.get("quant_method", "unknown"), str, FILE, f"{key}.quant_method")
    if method not in _PARSERS:
        raise unsupported(method)
    format, scheme = _PARSERS[method](section), section.get("kv_cache_scheme")
    if isinstance(format, Fp8Format) and isinstance(scheme, dict) and scheme.get("type") == "float":
        return format, None  # FP8, in whose place KV has the type that is set
    return format, _kv_dtype(method, scheme)


def unsupported(method: str, reason: str = "") -> ConfigError:
    named = shown(f"{method}: {reason}" if reason else method)
    return ConfigError(
        f"{FILE}: quantization_config: the checkpoint is quantised ({named}), which is not supported; "
        f"use a float checkpoint, or {FORMATS}"
    )


def first_obstacle(wrong: dict[str, bool]) -> str | None:
    """The first reason against a configuration that applies, or None. `wrong`: reason -> True if it applies."""
    return next((reason for reason, is_wrong in wrong.items() if is_wrong), None)


def is_group_size_of_4_bits(size: int | None) -> bool:
    """True if `kernel_group` can cut groups of this size; None and -1 mean a whole row."""
    return size in (None, -1) or (0 < size <= MAX_GROUP and size % LEAST_GROUP == 0)


# ---- methods ----------------------------------------------------------------------------------------------------------


class _Awq(Struct):
    bits: int
    group_size: int = 128
    zero_point: bool = True
    version: str = "gemm"


def _awq(section: dict[str, Any]) -> AwqFormat:
    config = convert(section, _Awq, FILE, "quantization_config")
    wrong = {
        f"{config.bits} bits": config.bits != 4,
        f"version {config.version}": config.version.lower() != "gemm",
        "without zero points": not config.zero_point,
        f"group_size {config.group_size}": not is_group_size_of_4_bits(config.group_size),
    }
    if reason := first_obstacle(wrong):
        raise unsupported("awq", reason)
    return AwqFormat(None if config.group_size == -1 else config.group_size)


class _Gptq(Struct):
    bits: int
    group_size: int = 128
    desc_act: bool = False
    checkpoint_format: str = "gptq"
    is_marlin_format: bool = False
    dynamic: dict[str, Any] | None = None


def _gptq(section: dict[str, Any]) -> GptqFormat:
    config = convert(section, _Gptq, FILE, "quantization_config")
    wrong = {
        f"{config.bits} bits": config.bits != 4,
        "desc_act": config.desc_act,
        f"checkpoint_format {config.checkpoint_format}": config.checkpoint_format not in _GPTQ_VERSIONS,
        "is_marlin_format": config.is_marlin_format,
        "dynamic": bool(config.dynamic),
        f"group_size {config.group_size}": not is_group_size_of_4_bits(config.group_size),
    }
    if reason := first_obstacle(wrong):
        raise unsupported("gptq", reason)
    group = None if config.group_size == -1 else config.group_size
    return GptqFormat(group, _GPTQ_VERSIONS[config.checkpoint_format])


class _Qoq(Struct):
    wbits: int
    group_size: int


def _qoq(section: dict[str, Any]) -> QoqFormat:
    config = convert(section, _Qoq, FILE, "quantization_config")
    wrong = {
        f"{config.wbits} bits": config.wbits != 4,
        f"group_size {config.group_size}": config.group_size not in (-1, QOQ_GROUP),
    }
    if reason := first_obstacle(wrong):
        raise unsupported("qoq", reason)
    return QoqFormat(config.group_size == QOQ_GROUP)


class _Fp8(Struct):
    fmt: str = "e4m3"
    weight_block_size: list[int] | None = None
    activation_scheme: str = "dynamic"


def _fp8(section: dict[str, Any]) -> Fp8Format:
    config = convert(section, _Fp8, FILE, "quantization_config")
    wrong = {
        f"fmt {config.fmt}": config.fmt not in ("e4m3", "float8_e4m3fn"),
        f"weight_block_size {config.weight_block_size}": not _is_block(config.weight_block_size),
    }
    if reason := first_obstacle(wrong):
        raise unsupported("fp8", reason)
    return Fp8Format(_block(config.weight_block_size))


def _is_block(sizes: list[int] | None) -> bool:
    return sizes is None or (len(sizes) == 2 and all(0 < size <= MAX_GROUP for size in sizes))


def _block(sizes: list[int] | None) -> tuple[int, int] | None:
    return None if sizes is None else (sizes[0], sizes[1])


class _ModelOpt(Struct):
    quant_algo: str = "unknown"


def _modelopt(section: dict[str, Any]) -> Fp8Format:
    """NVIDIA's ModelOpt, whose other formats have 4 bits."""
    config = convert(section, _ModelOpt, FILE, "quantization_config")
    if config.quant_algo != "FP8":
        raise unsupported("modelopt", config.quant_algo)
    return Fp8Format(None)


class _Scheme(Struct):
    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: list[int] | None = None
    dynamic: bool | str = False
    actorder: bool | str | None = None


class _Group(Struct):
    targets: list[str]
    weights: _Scheme | None = None
    input_activations: _Scheme | None = None
    output_activations: _Scheme | None = None
    format: str | None = None


class _CompressedTensors(Struct):
    config_groups: dict[str, Any]
    format: str | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


def _compressed_tensors(section: dict[str, Any]) -> Int8Format | Int4Format | Fp8Format:
    config = convert(section, _CompressedTensors, FILE, "quantization_config")
    if len(config.config_groups) != 1:
        raise unsupported(COMPRESSED, f"{len(config.config_groups)} config_groups")
    ((name, raw),) = config.config_groups.items()
    group = convert(raw, _Group, FILE, f"quantization_config.config_groups.{shown(name)}")
    format = group.format or config.format
    if format not in ("int-quantized", "pack-quantized", _FLOATS):
        raise unsupported(COMPRESSED, f"format {format}")
    if group.weights is None:
        raise unsupported(COMPRESSED, "no weights")
    if format == _FLOATS:
        return _floats_of_8_bits(config, group, group.weights)
    if reason := _obstacle(config, group, group.weights, format):
        raise unsupported(COMPRESSED, reason)
    size = group.weights.group_size if group.weights.strategy == "group" else None
    if group.weights.num_bits == 4:
        return Int4Format(size, group.weights.symmetric)
    return Int8Format("w8a8" if group.input_activations else "int8", format == "pack-quantized", size)


def _floats_of_8_bits(config: _CompressedTensors, group: _Group, weights: _Scheme) -> Fp8Format:
    wrong = {
        f"targets {group.targets}": group.targets != ["Linear"],
        f"weights of {weights.num_bits} bits": weights.num_bits != 8,
        f"weights of type {weights.type}": weights.type != "float",
        f"weight strategy {weights.strategy}": weights.strategy not in ("tensor", "channel", "block"),
        f"weight block_structure {weights.block_structure}": not _is_block(weights.block_structure),
        **_extras(config, group),
    }
    if reason := first_obstacle(wrong):
        raise unsupported(COMPRESSED, reason)
    return Fp8Format(_block(weights.block_structure))


def _extras(config: _CompressedTensors, group: _Group) -> dict[str, bool]:
    """What a checkpoint may have besides quantised weights, with whether it has it."""
    return {
        "output_activations": group.output_activations is not None,
        "sparsity_config": (config.sparsity_config or {}).get("format", "dense") != "dense",
        "transform_config": bool((config.transform_config or {}).get("config_groups")),
    }


def _obstacle(config: _CompressedTensors, group: _Group, weights: _Scheme, format: str) -> str | None:
    """The first thing in this configuration that is not supported; None if all of it is."""
    activations, is_4_bits = group.input_activations, weights.num_bits == 4
    wrong = {
        f"targets {group.targets}": group.targets != ["Linear"],
        f"weights of {weights.num_bits} bits": weights.num_bits not in (8, 4),
        f"weights of type {weights.type}": weights.type != "int",
        f"weights of 4 bits in format {format}": is_4_bits and format != "pack-quantized",
        "asymmetric weights of 8 bits": not weights.symmetric and not is_4_bits,
        f"weight strategy {weights.strategy}": weights.strategy not in ("channel", "group"),
        f"weight group_size {weights.group_size}": (
            weights.strategy == "group" and not 1 <= (weights.group_size or 0) <= MAX_GROUP
        ),
        f"weight group_size {weights.group_size} of 4 bits": (
            is_4_bits and weights.strategy == "group" and not is_group_size_of_4_bits(weights.group_size)
        ),
        f"weight actorder {weights.actorder}": weights.actorder not in (None, False, "weight", "static"),
        **_extras(config, group),
    }
    if activations is not None:
        wrong["activations of 8 bits with weights of 4"] = is_4_bits
        wrong |= {
            f"activations of {activations.num_bits} bits": activations.num_bits != 8,
            f"activations of type {activations.type}": activations.type != "int",
            "asymmetric activations": not activations.symmetric,
            "static activations": activations.dynamic is not True,
            f"activation strategy {activations.strategy}": activations.strategy != "token",
        }
    return first_obstacle(wrong)


def _kv_dtype(method: str, scheme: object) -> KvNumbers | None:
    if not scheme:
        return None
    given = {key: value for key, value in scheme.items() if value is not None} if isinstance(scheme, dict) else {}
    bits = given.pop("num_bits", 0)
    dtype = _KV_DTYPES.get(bits) if type(bits) is int else None
    if dtype is None or given != _KV_SCHEME:
        raise unsupported(method, "kv_cache_scheme")
    return dtype


_FLOATS = "float-quantized"
_GPTQ_VERSIONS = {"gptq": 1, "gptq_v2": 2}
_PARSERS: dict[str, Callable[[dict[str, Any]], Format]] = {
    COMPRESSED: _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "qoq": _qoq,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "mxfp4": lambda section: Mxfp4Format(),
}

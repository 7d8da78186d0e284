"""int8 checkpoints of compressed-tensors, the format that llm-compressor writes and vLLM reads.

    int-quantized     NAME.weight int8 [n, k]
    pack-quantized    NAME.weight_packed int32 [n, ceil(k / 4)]: four columns a word, the first lowest, each + 128;
                      NAME.weight_shape int64 [2]
    both              NAME.weight_scale, float: [n, 1] for strategy channel, [n, ceil(k / group_size)] for group

Symmetric: weight = q * scale, q from -128 to 127. Layers of the "ignore" list are stored as floats, without a scale. Source:
the compressed-tensors library, `compressors/` and `quantization/quant_args.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from backend.api.errors import ConfigError
from backend.layers.linear import QuantizedFormat
from backend.models.tensors import TensorSource

SUPPORTED = (
    "compressed-tensors with symmetric int8 weights, scaled by channel or group, and activations that are float or "
    "dynamic int8 by token"
)


class Int8Checkpoint(Struct, frozen=True):
    """How a checkpoint's quantised weights are stored."""

    format: QuantizedFormat
    is_packed: bool
    group: int | None  # columns that share a scale; None = the whole row


class _Scheme(Struct):
    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    dynamic: bool | str = False
    actorder: bool | str | None = None


class _Group(Struct):
    targets: list[str]
    weights: _Scheme | None = None
    input_activations: _Scheme | None = None
    output_activations: _Scheme | None = None
    format: str | None = None


class _Config(Struct):
    config_groups: dict[str, _Group]
    format: str | None = None
    kv_cache_scheme: dict[str, Any] | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


def parse_quantization(raw: dict[str, Any]) -> Int8Checkpoint | None:
    """Read quantization_config of a config.json. Raises ConfigError, msgspec.ValidationError for a wrong type."""
    section = raw.get("quantization_config") or raw.get("compression_config")
    if not section:
        return None
    method = section.get("quant_method", "unknown") if isinstance(section, dict) else "unknown"
    if method != "compressed-tensors":
        raise _unsupported(method)
    config = msgspec.convert(section, _Config)
    if len(config.config_groups) != 1:
        raise _unsupported(method, f"{len(config.config_groups)} config_groups")
    (group,) = config.config_groups.values()
    format = group.format or config.format
    if format not in ("int-quantized", "pack-quantized"):
        raise _unsupported(method, f"format {format}")
    if group.weights is None:
        raise _unsupported(method, "no weights")
    if reason := _obstacle(config, group, group.weights):
        raise _unsupported(method, reason)
    size = group.weights.group_size if group.weights.strategy == "group" else None
    return Int8Checkpoint("w8a8" if group.input_activations else "int8", format == "pack-quantized", size)


def take_int8(source: TensorSource, checkpoint: Int8Checkpoint, name: str, n: int, k: int) -> tuple[Tensor, Tensor]:
    """The projection `name` as (q int8 [n, k], scale float32 [n, groups]). Raises ConfigError."""
    if checkpoint.is_packed:
        q = source.take_raw(name + ".weight_packed", (n, -(-k // 4)), (torch.int32,))
        q = (q.contiguous().view(torch.uint8)[:, :k] ^ 128).view(torch.int8)
        shape = source.take_raw(name + ".weight_shape", (2,), (torch.int64, torch.int32)).tolist()
        if shape != [n, k]:
            raise ConfigError(f"tensor {name}.weight_shape says {shape}, config.json asks for {[n, k]}")
    else:
        q = source.take_raw(name + ".weight", (n, k), (torch.int8,))
    scale = source.take_raw(name + ".weight_scale", (n, -(-k // checkpoint.group) if checkpoint.group else 1))
    return q, scale.float()


def _obstacle(config: _Config, group: _Group, weights: _Scheme) -> str | None:
    """What about this configuration is not supported; None when all is."""
    activations = group.input_activations
    wrong = {
        f"targets {group.targets}": group.targets != ["Linear"],
        f"weights of {weights.num_bits} bits": weights.num_bits != 8,
        f"weights of type {weights.type}": weights.type != "int",
        "asymmetric weights": not weights.symmetric,
        f"weight strategy {weights.strategy}": weights.strategy not in ("channel", "group"),
        f"weight group_size {weights.group_size}": weights.strategy == "group" and (weights.group_size or 0) < 1,
        f"weight actorder {weights.actorder}": weights.actorder not in (None, False, "weight", "static"),
        "output_activations": group.output_activations is not None,
        "kv_cache_scheme": bool(config.kv_cache_scheme),
        "sparsity_config": (config.sparsity_config or {}).get("format", "dense") != "dense",
        "transform_config": bool((config.transform_config or {}).get("config_groups")),
    }
    if activations is not None:
        wrong |= {
            f"activations of {activations.num_bits} bits": activations.num_bits != 8,
            f"activations of type {activations.type}": activations.type != "int",
            "asymmetric activations": not activations.symmetric,
            "static activations": activations.dynamic is not True,
            f"activation strategy {activations.strategy}": activations.strategy != "token",
        }
    return next((reason for reason, is_wrong in wrong.items() if is_wrong), None)


def _unsupported(method: str, reason: str = "") -> ConfigError:
    named = f"{method}: {reason}" if reason else method
    return ConfigError(
        f"the checkpoint is quantised ({named}), which is not supported; use a float checkpoint, or {SUPPORTED}"
    )

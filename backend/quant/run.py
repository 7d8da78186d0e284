"""Makes a quantised checkpoint folder of a float one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backend.api.errors import ConfigError
from backend.architectures.description import ModelConfig
from backend.quant.calibration import Calibration, of_layer
from backend.quant.checkpoint import FloatCheckpoint, Writer, new_folder
from backend.quant.folds import obstacles, parts
from backend.quant.layers import Errors, quantize_layer
from backend.quant.schemes import Scheme, make_scheme
from kernels.common.kv_format import KV_FORMATS


class QuantSettings(NamedTuple):
    scheme: str
    group: int | None = None  # columns that share a scale (--group); None leaves the choice to the scheme
    kv: str | None = None  # the type of the KV cache, int8 or int4; None means the model's own


class Quantised(NamedTuple):
    errors: dict[str, Errors]  # kind of linear layer -> mean over the decoder layers; empty without calibration
    bytes_before: int
    bytes_after: int
    remarks: list[str]  # sentences about linear layers that were not smoothed


@torch.inference_mode()
def quantize_checkpoint(
    directory: Path,
    output: Path,
    wanted: QuantSettings,
    rows: Tensor | None,
    progress: Callable[[Sequence[int]], Iterable[int]] = lambda layers: layers,
) -> Quantised:
    """Write the quantised checkpoint to the folder `output`. Raises ConfigError.

    rows [rows, length] is the calibration text in tokens; without it there is no calibration.
    """
    source = FloatCheckpoint(directory)
    config = source.config
    scheme = make_scheme(wanted.scheme, wanted.group, widths(config), source.layer(0)[1])
    calibration = None if rows is None else Calibration(config, source.embedding(), _checked(rows, config))
    errors: list[dict[str, Errors]] = []
    with new_folder(output, directory) as folder:
        writer = Writer(folder)
        for index in progress(range(config.num_layers)):
            layer, dtype = source.layer(index)
            inputs = None if calibration is None else calibration.advance(index, layer)
            made = quantize_layer(layer, inputs, of_layer(config, index), scheme, dtype, wanted.kv == "int4")
            writer.add({f"{config.names.layers}{index}.{name}": tensor for name, tensor in made.tensors.items()})
            errors.append(made.errors)
        writer.add(source.others())
        writer.finish(source.raw_config() | {"quantization_config": _section(scheme, wanted.kv)})
    is_smoothed = calibration is not None and scheme.has_int8_activations
    return Quantised(_mean(errors), source.num_bytes(), writer.num_bytes, obstacles(config) if is_smoothed else [])


def check_source(directory: Path, wanted: QuantSettings) -> None:
    """Raise ConfigError if `quantize_checkpoint` would refuse this model."""
    source = FloatCheckpoint(directory)
    if source.config.recurrence is not None:
        raise ConfigError(
            f"{source.config.architecture} has recurrent layers, which the formats of quantised checkpoints here do not know; "
            f"quantise it while loading: --set model.quantization=w8a8"
        )
    if source.config.latent is not None:
        raise ConfigError(
            f"{source.config.architecture} has latent attention, which is not quantised to files; quantise it while loading: "
            f"--set model.quantization=w8a8"
        )
    if source.config.names.layer.qkv_by_head:
        raise ConfigError(
            f"{source.config.architecture} holds query, key and value of each head together, which the formats of quantised "
            f"checkpoints do not know; quantise it while loading: --set model.quantization=w8a8"
        )
    make_scheme(wanted.scheme, wanted.group, widths(source.config), source.layer(0)[1])


def widths(config: ModelConfig) -> set[tuple[int, int]]:
    """The shapes (n, k) of the tensors that hold the projections of a layer."""
    q, hidden, inter = config.num_heads * config.head_dim, config.hidden_size, config.intermediate_size
    rows: dict[str, int] = {}
    for name, part in parts(config).values():
        rows[name] = max(rows.get(name, 0), part.stop)
    return {(count, hidden) for count in rows.values()} | {(hidden, q), (hidden, inter)}


def _section(scheme: Scheme, kv: str | None) -> dict[str, Any]:
    """The quantization_config of config.json. Of the KV only its type is stored: it is quantised while serving."""
    section = scheme.config()
    if kv is not None:
        section["kv_cache_scheme"] = dict(
            num_bits=KV_FORMATS[kv].key_bits, type="int", symmetric=False, strategy="token_head", dynamic=True
        )
    return section


def _checked(rows: Tensor, config: ModelConfig) -> Tensor:
    if int(rows.max()) >= config.vocab_size:
        raise ConfigError(
            f"the tokenizer makes token {int(rows.max())}, the model has {config.vocab_size}; they do not belong together"
        )
    return rows


def _mean(of_layers: list[dict[str, Errors]]) -> dict[str, Errors]:
    if not of_layers[0]:
        return {}
    return {kind: Errors(*(sum(e) / len(e) for e in zip(*(of[kind] for of in of_layers)))) for kind in of_layers[0]}

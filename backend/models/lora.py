"""Reads LoRA adapters: PEFT's directories, and TensorRT-LLM's tensors, in a request or as files. All become the layers of
kernels/common/adapter.py.

What is no LoRA of a decoder layer's linear layers cannot be held, and is refused by name: DoRA, biases, embeddings, the output
head, modules_to_save.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backend.api.checkpoint.adapter_files import (
    FUSED,
    MAX_WEIGHTS_BYTES,
    MODULES,
    WEIGHTS,
    check_rank,
    half_tensors,
    peft_weights,
)
from backend.api.checkpoint.model_files import shown
from backend.api.errors import ConfigError, InvalidRequest, Unsupported
from backend.api.lora import ADAPTER_CONFIG, CONFIG_ROWS, LoraConfig, check_lora, read_peft_config
from backend.api.tensor import TensorData
from backend.architectures.description import ModelConfig
from backend.models.loader import open_tensors
from backend.models.npy import Array, read_array
from kernels.common.adapter import Part

CONFIG = ADAPTER_CONFIG
WEIGHT_ROWS = "model.lora_weights.npy"  # beside CONFIG_ROWS
MAX_CONFIG_BYTES = 1 << 20
MAX_ALPHA = 1e9
MAX_NAMES = 12  # projections that an error lists
Layers = list[dict[str, list[Part]]]


class ProjectionPlace(NamedTuple):
    """Where a projection is in the model."""

    linear: str  # the linear layer; in a decoder of this engine one of kernels.common.adapter.LINEARS
    first: int  # its first column in that layer's output
    n: int
    k: int

    def meets(self, other: ProjectionPlace) -> bool:
        """True if they have columns of a linear layer in common."""
        return self.linear == other.linear and self.first < other.first + other.n and other.first < self.first + self.n


class Projections(NamedTuple):
    """The projections of a model that LoRA adapters may change."""

    architecture: str
    layers: Sequence[
        Mapping[str, ProjectionPlace]
    ]  # one for each layer; projection_of (api/checkpoint/adapter_files.py) names its keys

    def place(self, layer: int, name: str) -> ProjectionPlace:
        """Raises InvalidRequest, and Unsupported for a projection that the model does not have."""
        if layer >= len(self.layers):
            count = len(self.layers)
            raise InvalidRequest(f"it has a layer {layer}, the model has {count}: 0 to {count - 1}")
        if (place := self.layers[layer].get(name)) is None:
            names = ", ".join([*self.layers[layer]][:MAX_NAMES]) or "none"
            raise Unsupported(
                f"it has {shown(name)}, which {self.architecture} does not have, or takes no adapters for; in layer {layer} it "
                f"takes them for {names}"
            )
        return place

    def smallest(self, layer: int) -> list[ProjectionPlace]:
        """The projections of a layer, without those that hold smaller ones: all of them can be adapted together."""
        places = self.layers[layer].values()
        return [place for place in places if not any(place.meets(other) and other.n < place.n for other in places)]


def projections_of(config: ModelConfig) -> Projections:
    """The projections of a decoder that this engine runs itself. Adapters cannot change a model with recurrent layers."""
    if config.recurrence is not None:
        return Projections(config.architecture, [{} for _ in config.layers])
    of_all = places(config)
    if config.latent is not None:  # Its projections have other names and sizes.
        of_all = {name: place for name, place in of_all.items() if place.linear not in ("qkv", "out")}
    of_attention = {name: place for name, place in of_all.items() if place.linear in ("qkv", "out")}
    of_layers = [of_attention if layer.has_experts else of_all for layer in config.layers]
    return Projections(config.architecture, of_layers)


def places(config: ModelConfig) -> dict[str, ProjectionPlace]:
    """By the names of projections, and `qkv` for the fused one; besides those of FUSED that the checkpoint holds as one tensor.

    An mlp without a gate has no gate_proj.
    """
    hidden, inter = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    gate = inter if config.block.gated else 0
    found = {
        "qkv": ProjectionPlace("qkv", 0, q + 2 * kv, hidden),
        "qkv_proj": ProjectionPlace("qkv", 0, q + 2 * kv, hidden),
        "q_proj": ProjectionPlace("qkv", 0, q, hidden),
        "k_proj": ProjectionPlace("qkv", q, kv, hidden),
        "v_proj": ProjectionPlace("qkv", q + kv, kv, hidden),
        "o_proj": ProjectionPlace("out", 0, hidden, q),
        "gate_up_proj": ProjectionPlace("gate_up", 0, gate + inter, hidden),
        "gate_proj": ProjectionPlace("gate_up", 0, gate, hidden),
        "up_proj": ProjectionPlace("gate_up", gate, inter, hidden),
        "down_proj": ProjectionPlace("down", 0, hidden, inter),
    }
    held = {name.split(".")[-1] for name in (*config.names.layer.qkv, *config.names.layer.gate_up)}
    return {name: place for name, place in found.items() if place.n and (name in held or name not in FUSED)}


def stack_shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], int]]:
    """For each linear layer: where its projections begin in the output, with the number of outputs at the end; and its inputs."""
    found: dict[str, tuple[tuple[int, ...], int]] = {}
    for name, place in places(config).items():
        if name not in ("qkv", *FUSED):
            offsets, _ = found.get(place.linear, ((0,), 0))
            found[place.linear] = (*offsets, place.first + place.n), place.k
    return found


def read_adapter(lora: LoraConfig, model: Projections, dtype: torch.dtype, max_rank: int) -> Layers:
    """The adapter that a request brings, in `dtype`. Raises InvalidRequest (or Unsupported)."""
    try:
        layers = (_read_directory if lora.path else read_rows)(lora, model, dtype, max_rank)
    except (ConfigError, InvalidRequest) as error:
        kind = Unsupported if isinstance(error, Unsupported) else InvalidRequest
        raise kind(f"LoRA adapter {lora.shown}: {error}") from None
    for part in parts_of(layers):
        if not (part.a.isfinite().all() and (part.b * part.scale).isfinite().all()):
            raise InvalidRequest(f"LoRA adapter {lora.shown} holds numbers that are not finite in {dtype}")
    return layers


def files_of(directory: Path) -> tuple[Path, Path]:
    """The files of the adapter in a directory: its configuration and its weights."""
    is_rows = (directory / CONFIG_ROWS).is_file()
    names = (CONFIG_ROWS, WEIGHT_ROWS) if is_rows else (CONFIG, WEIGHTS)
    return directory / names[0], directory / names[1]


def _read_directory(lora: LoraConfig, model: Projections, dtype: torch.dtype, max_rank: int) -> Layers:
    directory = Path(lora.path)
    if files_of(directory)[0].name == CONFIG:
        return read_peft(directory, model, dtype, max_rank)
    rows = _unbatched(read_array(directory, CONFIG_ROWS, MAX_CONFIG_BYTES))
    weights = _unbatched(read_array(directory, WEIGHT_ROWS, MAX_WEIGHTS_BYTES))
    if rows.ndim != 2 or rows.dtype.kind not in "iu":
        raise ConfigError(f"{CONFIG_ROWS}: {rows.dtype} of shape {list(rows.shape)}, integers [rows, 3] are needed")
    data = TensorData(str(weights.dtype), weights.shape, weights.tobytes())
    tensors = LoraConfig(lora.task_id, data, tuple(map(tuple, rows.tolist())))
    check_lora(tensors, is_enabled=True)
    return read_rows(tensors, model, dtype, max_rank)


def _unbatched(array: Array) -> Array:
    """Without the batch dimension that TensorRT-LLM's have."""
    return array[0] if array.ndim == 3 and len(array) == 1 else array


def read_rows(lora: LoraConfig, model: Projections, dtype: torch.dtype, max_rank: int) -> Layers:
    """TensorRT-LLM's tensors (backend/api/lora.py)."""
    assert lora.weights is not None  # only adapters that bring their weights are read
    weights = torch.frombuffer(bytearray(lora.weights.data), dtype=getattr(torch, lora.weights.dtype))
    rows = weights.view(lora.weights.shape)
    found: dict[tuple[int, str], Part] = {}
    for index, entry in enumerate(lora.config):
        where = f"lora_config row {index} {list(entry)}"
        if len(entry) not in (3, 4) or min(entry) < 0:
            raise InvalidRequest(f"{where}: 3 numbers are needed, module id, layer and rank, and perhaps a 0 (no DoRA)")
        module, layer, rank = entry[:3]
        if any(entry[3:]):
            raise Unsupported(f"{where}: DoRA is not served; send plain LoRA")
        if module >= len(MODULES):
            raise Unsupported(
                f"{where}: module id {module} is not served; 0 to {len(MODULES) - 1} are: {', '.join(MODULES)}"
            )
        place = model.place(layer, MODULES[module])
        size = rank * (place.k + place.n)
        if size > rows.shape[1]:
            raise InvalidRequest(f"{where}: needs {size} weights, lora_weights has rows of {rows.shape[1]}")
        a, b = rows[index, : rank * place.k], rows[index, rank * place.k : size]
        part = Part(place.first, a.view(rank, place.k), b.view(place.n, rank), 1.0)
        _add(found, layer, MODULES[module], part, model, max_rank)
    return _layers(found, model, dtype)


def read_peft(directory: Path, model: Projections, dtype: torch.dtype, max_rank: int) -> Layers:
    """A directory that PEFT's save_pretrained has written. Raises ConfigError, InvalidRequest and Unsupported."""
    raw = read_peft_config(directory)
    path = peft_weights(directory)
    tensors = open_tensors([path])
    halves: dict[tuple[int, str], dict[str, Tensor]] = {}
    names: dict[tuple[int, str], str] = {}  # in the whole model
    for each in half_tensors(path):
        halves.setdefault((each.layer, each.module), {})[each.half] = tensors[each.name]
        names[each.layer, each.module] = each.place
    found: dict[tuple[int, str], Part] = {}
    for (layer, module), pair in halves.items():
        where, place = f"{WEIGHTS}: layer {layer}, {module}", model.place(layer, module)
        if set(pair) != {"A", "B"}:
            raise ConfigError(f"{where} has lora_{min(pair)} only; both lora_A and lora_B are needed")
        a, b = pair["A"], pair["B"]
        if a.dim() != 2 or b.dim() != 2 or a.shape != (len(a), place.k) or b.shape != (place.n, len(a)):
            raise ConfigError(
                f"{where}: lora_A has shape {list(a.shape)} and lora_B {list(b.shape)}, [rank, {place.k}] and "
                f"[{place.n}, rank] are needed; it was trained for another model"
            )
        if len(a):
            part = Part(place.first, a, b, _scale(raw, names[layer, module], len(a)))
            _add(found, layer, module, part, model, max_rank)
    return _layers(found, model, dtype)


def content_of(layers: Layers) -> str:
    """The hash of all that an adapter computes with."""
    digest = hashlib.blake2b(digest_size=32)
    for index, layer in enumerate(layers):
        for linear in sorted(layer):
            for part in layer[linear]:
                digest.update(
                    repr((index, linear, part.first, part.a.dtype, *part.a.shape, *part.b.shape, part.scale)).encode()
                )
                digest.update(part.a.view(torch.uint8).numpy().tobytes())
                digest.update(part.b.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def parts_of(layers: Layers) -> Iterable[Part]:
    return (part for layer in layers for parts in layer.values() for part in parts)


def _scale(raw: Mapping[str, Any], name: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank) for rank-stabilised LoRA; alpha_pattern gives a module an alpha of its own. `name`: the
    module's, in the whole model.
    """
    alpha = raw.get("lora_alpha", 8)
    patterns = raw.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise ConfigError(f"{CONFIG}: alpha_pattern is {shown(patterns)}, an object is needed")
    for pattern, value in patterns.items():
        if pattern == name or name.endswith("." + pattern):
            alpha = value
            break
        if not re.fullmatch(r"[\w.]*", pattern):
            raise Unsupported(f"{CONFIG}: alpha_pattern {shown(pattern)} is an expression; write module names")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= MAX_ALPHA:
        raise ConfigError(f"{CONFIG}: lora_alpha is {shown(alpha)}, a number up to {MAX_ALPHA:g} is needed")
    return float(alpha) / (math.sqrt(rank) if raw.get("use_rslora") else rank)


def _add(
    found: dict[tuple[int, str], Part], layer: int, module: str, part: Part, model: Projections, max_rank: int
) -> None:
    check_rank(part.rank, layer, module, max_rank)
    own = model.place(layer, module)
    if any((layer, each) in found for each, place in model.layers[layer].items() if place.meets(own)):
        raise InvalidRequest(f"it has layer {layer}, {module} twice; leave one out")
    found[layer, module] = part


def _layers(found: Mapping[tuple[int, str], Part], model: Projections, dtype: torch.dtype) -> Layers:
    layers: Layers = [{} for _ in model.layers]
    for (layer, module), part in sorted(found.items()):
        held = part._replace(a=part.a.to(dtype).contiguous(), b=part.b.to(dtype).contiguous())
        if part.rank:
            layers[layer].setdefault(model.layers[layer][module].linear, []).append(held)
    return layers

"""Checks of a LoRA adapter's files that need none of its weights: before a server starts, and in stubs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from backend.api.checkpoint.model_files import find_file, shown
from backend.api.checkpoint.weight_files import tensor_shapes
from backend.api.config.schema import MAX_ADAPTER_NAME
from backend.api.errors import ConfigError, InvalidRequest, Unsupported
from backend.api.lora import CONFIG_ROWS, read_peft_config

WEIGHTS = "adapter_model.safetensors"
MAX_WEIGHTS_BYTES = 8 << 30
MAX_DIRECTORY = 4096  # characters
# TensorRT-LLM's module ids; its names are attn_qkv, attn_q, attn_k, attn_v, attn_dense, mlp_h_to_4h, mlp_4h_to_h, mlp_gate.
MODULES = ("qkv", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "up_proj")
# Names in checkpoints that keep several projections in one tensor, such as Phi-3's.
FUSED = ("qkv_proj", "gate_up_proj")
_BLOCKS = {  # the usual projections of a layer
    "self_attn": ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
}
_NUMBER = re.compile("[0-9]{1,9}")
_HALF = re.compile(r"([AB])(?:\.\w+)?\.weight")  # how a tensor's name ends, behind `.lora_`
_EXPERTS = "experts"


class HalfTensor(NamedTuple):
    """A or B of one projection of one layer."""

    name: str
    layer: int
    module: str  # as `projection_of` names it
    half: str
    shape: list[int]

    @property
    def place(self) -> str:
        """The projection's name in the whole model."""
        return self.name.removeprefix("base_model.model.").partition(".lora_")[0]


def projection_of(name: str) -> tuple[int, str] | None:
    """The layer of a module and its name within that layer, whatever the model calls its list of layers; None for a module of no
    numbered layer, and for experts. The usual projections of self_attn and mlp are called as in MODULES and FUSED.

    model.layers.3.self_attn.q_proj -> 3, q_proj        transformer.h.3.attn.c_attn -> 3, attn.c_attn
    """
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if _NUMBER.fullmatch(part)), len(parts))
    block, *rest = parts[at + 1 :] or [""]
    if not block or _EXPERTS in parts:
        return None
    is_known = len(rest) == 1 and rest[0] in _BLOCKS.get(block, ())
    return int(parts[at]), rest[0] if is_known else ".".join((block, *rest))


def check_adapter_files(directory: Path, max_rank: int) -> None:
    """Raise ConfigError, InvalidRequest or Unsupported for an adapter that cannot be served. The engine checks the files that
    TensorRT-LLM's converter writes.
    """
    if (directory / CONFIG_ROWS).is_file():
        return
    read_peft_config(directory)
    for each in half_tensors(peft_weights(directory)):
        if each.half == "A" and len(each.shape) == 2:
            check_rank(each.shape[0], each.layer, each.module, max_rank)


def check_adapter_name(name: str) -> None:
    """Raise InvalidRequest for a text that cannot be the name of an adapter."""
    if not 1 <= len(name) <= MAX_ADAPTER_NAME or not name.isprintable():
        raise InvalidRequest(
            f"a LoRA adapter cannot be called {shown(name)}; give it a name of 1 to {MAX_ADAPTER_NAME} printable characters"
        )


def allowed_directory(directory: str, allowed: str) -> Path:
    """Resolve a directory below `allowed` (lora.allowed_dir), at which relative paths begin. Raises InvalidRequest for any other
    directory, also if a link leads out. The error is the same whether or not the other directory exists.
    """
    refusal = InvalidRequest(
        f"the directory {shown(directory)} is not one of those that LoRA adapters may be loaded from; put the adapter into "
        f"the server's lora.allowed_dir, and give its path from there"
    )
    if not directory or len(directory) > MAX_DIRECTORY or not directory.isprintable():
        raise refusal
    try:
        root = Path(allowed).resolve(strict=True)
        path = (root / directory).resolve()
        if root not in path.parents or not path.is_dir():
            raise refusal
    except (OSError, ValueError, RuntimeError):  # a loop of links, a name that is too long, text that is no file name
        raise refusal from None
    return path


def peft_weights(directory: Path) -> Path:
    """The file of the weights. Raises ConfigError."""
    path = find_file(directory, WEIGHTS, MAX_WEIGHTS_BYTES)
    if path is None:
        raise ConfigError(f"{shown(directory.name)}: {WEIGHTS}: File does not exist; save it as safetensors")
    return path


def half_tensors(path: Path) -> list[HalfTensor]:
    """All tensors of such a file. Raises ConfigError, and Unsupported for one that is no LoRA of a layer's projection."""
    found: dict[tuple[int, str, str], HalfTensor] = {}
    for name, shape in tensor_shapes(path).items():
        if _EXPERTS in name.split("."):
            raise Unsupported(
                f"{WEIGHTS}: tensor {shown(name)} changes experts, for which no adapters are served; train one without them"
            )
        module, _, end = name.partition(".lora_")
        projection, match = projection_of(module), _HALF.fullmatch(end)
        if projection is None or match is None:
            raise Unsupported(
                f"{WEIGHTS}: tensor {shown(name)} is no LoRA of a decoder layer's projection; leave it out"
            )
        half = HalfTensor(name, *projection, match[1], shape)
        if (other := found.setdefault(half[1:4], half)) is not half:
            raise ConfigError(f"{WEIGHTS}: tensors {shown(other.name)} and {shown(name)} are the same; leave one out")
    return list(found.values())


def check_rank(rank: int, layer: int, module: str, max_rank: int) -> None:
    """Raise InvalidRequest for a rank above the limit."""
    if rank > max_rank:
        raise InvalidRequest(
            f"it has rank {rank} in layer {layer}, {shown(module)}, the limit is {max_rank} (lora.max_rank); use an adapter of a "
            f"lower rank, or ask the server's operator to raise it"
        )

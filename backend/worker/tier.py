"""Tier: how a rank runs the model. It is chosen once, while the model loads.

native    the whole step is one call of the native CPU kernels (kernels/cpu), computed in float32 or bfloat16; a float16 model is
          computed in float32, which holds its weights exactly
triton    Triton kernels on a GPU; steps are queued and replayed as CUDA graphs (device_runner.py)
torch     layer by layer on any device and dtype: torch operators on a CPU, which are the reference, and kernels where Triton runs

`native` and `torch` implement Tier, which ModelRunner calls once a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.api.config.kv_bits import kv_bits
from backend.api.config.schema import KvCacheConfig, ModelConfigSection
from backend.api.errors import ConfigError
from backend.architectures.description import ModelConfig
from backend.core.step import Row
from backend.worker.adapters import DeviceAdapters
from backend.worker.input_batch import InputBatch
from backend.worker.state_storage import StateStorage
from kernels.common.kv_format import PLAIN, KVFormat, PlainPool, PoolLayout, QuantizedPool
from kernels.common.triton_runtime import runs_at
from kernels.cpu import build, isa
from kernels.cpu.decoder import MAX_HEAD_DIM, UNIT
from kernels.cpu.library import load_kernels
from kernels.cpu.recurrence import MOST_TAPS
from kernels.cpu.structs import PANEL
from kernels.paged_attention import KERNEL_BLOCK_SIZES

log = logging.getLogger("everbatch.worker")


class KVBlock(NamedTuple):
    """Shape and dtype of one layer's block in the KV pool; only the tier knows the layout inside."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Tier(Protocol):
    name: str

    @property
    def adapters(self) -> DeviceAdapters[Any]:
        """The LoRA adapters that rows may have."""

    def kv_block(self) -> KVBlock: ...

    def run(
        self,
        batch: InputBatch,
        rows: list[Row],
        num_logits: Sequence[int],
        pools: list[Tensor],
        wants_logits: bool,
        outputs: dict[str, Tensor] | None = None,
        states: StateStorage | None = None,
    ) -> tuple[NDArray[np.int64] | None, Tensor | None]:
        """Run `rows` one after the other as one flat batch, and write their KV and their states.

        num_logits: for each row, how many of its last tokens yield logits. Returns the most likely next token after each of
        those tokens, or None if the tier does not compute it, and the logits [sum of num_logits, vocab] float32, which may be
        None unless `wants_logits`. outputs: by name, the marked outputs of the model that are wanted; each tensor is replaced
        by that of the step, [sum of num_logits, width]. Raises IndexError when a row names a token or a block that its slot
        does not have.
        """
        ...


class TierChoice(NamedTuple):
    """The tier that a model gets."""

    name: str
    library: build.NativeLibrary | None = None  # the compiled kernels, for the native tier
    reason: str = ""  # why it is the torch tier

    def block_size(self, wanted: int) -> int:
        """Tokens of a KV block: as many as are wanted, or the fewest that the tier's kernels take. Both are powers of two."""
        return max(wanted, UNIT) if self.name == "native" else wanted

    def computes_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that the tier computes a model of `dtype` in."""
        return torch.float32 if self.name == "native" and dtype == torch.float16 else dtype


def choose_tier(
    section: ModelConfigSection,
    kv_cache: KvCacheConfig,
    device: torch.device,
    config: ModelConfig,
    progress: Callable[[str], None],
    is_hosted: bool = False,
) -> TierChoice:
    """Choose the tier and log the choice with its reason. is_hosted: transformers runs the model (backend/hosted), and the
    tier's linear layers and attention are in it.

    Raises ConfigError when `model.kernels` names a tier, or EVERBATCH_ISA an instruction set, that cannot run here.
    """
    wanted = section.kernels
    if wanted == "auto":
        wanted = "native" if device.type == "cpu" else "triton"
    reason: str | None = "model.kernels is torch"
    library: build.NativeLibrary | None = None
    if wanted == "triton":
        reason = (
            "transformers runs the model layer by layer" if is_hosted else _triton_objection(kv_cache, device, config)
        )
    elif wanted == "native":
        reason = _native_objection(device, config)
        if reason is None:
            try:
                library = load_kernels(progress=progress)
            except build.NativeUnavailable as error:
                reason = str(error)
            except ValueError as error:  # EVERBATCH_ISA names what this machine does not have
                raise ConfigError(str(error)) from None
    if reason is None:
        log.info("kernels: %s", f"triton, on {device}" if library is None else f"native, for {_variant(library)}")
        return TierChoice(wanted, library)
    if section.kernels == wanted != "torch":
        raise ConfigError(f"model.kernels is {wanted}, which cannot be had: {reason}")
    log.info("kernels: torch, because %s", reason)
    if section.kernels != "torch":
        progress(f"loading the model, on torch operators because {reason}")
    return TierChoice("torch", reason=reason)


def _variant(library: build.NativeLibrary) -> str:
    best = isa.best_isa()
    return (
        library.isa if library.isa == best else f"{library.isa}; the compiler does not know {best}, a newer g++ would"
    )


def kv_format(kv_cache: KvCacheConfig, config: ModelConfig) -> KVFormat:
    """The format of the KV cache: what is configured, or what the checkpoint asks for. Raises ConfigError (kv_bits)."""
    return KVFormat(*kv_bits(kv_cache, config.kv_cache_dtype))


def kv_layout(config: ModelConfig, block_size: int, dtype: torch.dtype, format: KVFormat = PLAIN) -> PoolLayout:
    """The pool layout of the torch and triton tiers. Raises ConfigError if heads cannot be quantised."""
    if not format.is_quantised:
        return PlainPool(block_size, config.num_kv_heads, config.head_dim, dtype)
    if config.head_dim % 8:
        raise ConfigError(
            f"kv_cache.dtype is int{format.value_bits}, which needs heads of a multiple of 8, not {config.head_dim}; use auto"
        )
    return QuantizedPool(block_size, config.num_kv_heads, config.head_dim, format)


def _native_objection(device: torch.device, config: ModelConfig) -> str | None:
    """Why the native kernels do not fit, or None."""
    if device.type != "cpu":
        return f"the device is {device}, and they are for CPUs"
    if config.head_dim > MAX_HEAD_DIM:
        return f"the head dimension is {config.head_dim}, more than {MAX_HEAD_DIM}"
    if config.latent is not None and (config.latent.rank % PANEL or config.latent.value_dim % PANEL):
        return f"its latents of {config.latent.rank} and values of {config.latent.value_dim} numbers are no multiples of {PANEL}"
    if config.recurrence is not None and config.recurrence.taps > MOST_TAPS:
        return f"its convolutions read {config.recurrence.taps} tokens, more than {MOST_TAPS}"
    return None


def _triton_objection(kv_cache: KvCacheConfig, device: torch.device, config: ModelConfig) -> str | None:
    """Why the Triton kernels do not fit, or None."""
    if not runs_at(device):
        return f"the device is {device}, and they are for CUDA devices"
    if kv_cache.block_size not in KERNEL_BLOCK_SIZES:
        sizes = ", ".join(map(str, KERNEL_BLOCK_SIZES))
        return f"kv_cache.block_size is {kv_cache.block_size}; use one of {sizes}"
    if config.head_dim % 8:
        return f"the head dimension is {config.head_dim}, no multiple of 8"
    return None

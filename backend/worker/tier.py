"""Tier: how a rank runs the model. Two of them, behind one interface, chosen once while loading.

native    the whole step is one call of the native CPU kernels (kernels/cpu); float32 and bfloat16 on a CPU
torch     torch operators, layer by layer; any device and dtype; the reference
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from ctypes import CDLL
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.api.config import KvCacheConfig, ModelConfigSection
from backend.api.errors import ConfigError
from backend.core.step import Row
from backend.models.config import ModelConfig
from backend.worker.input_batch import InputBatch
from kernels.cpu import build, isa
from kernels.cpu.decoder import MAX_HEAD_DIM, UNIT
from kernels.cpu.library import load_kernels

log = logging.getLogger("everbatch.worker")


class KVBlock(NamedTuple):
    """How one layer keeps a block of the KV pool; only the tier looks inside."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Tier(Protocol):
    name: str

    def kv_block(self) -> KVBlock: ...

    def run(
        self, batch: InputBatch, rows: list[Row], num_logits: Sequence[int], pools: list[Tensor], wants_logits: bool
    ) -> tuple[NDArray[np.int64] | None, Tensor | None]:
        """Run `rows` one after the other as one flat batch, and write their KV.

        num_logits: of the last tokens of each row. Returns the most likely next token after each of these, where the tier
        knows it without further work, and the logits [sum of num_logits, vocab] float32, which may be None if not wanted.
        Raises IndexError when a row names a token or a block that its slot does not have.
        """
        ...


def native_library(
    section: ModelConfigSection,
    kv_cache: KvCacheConfig,
    device: torch.device,
    config: ModelConfig,
    dtype: torch.dtype,
    progress: Callable[[str], None],
) -> CDLL | None:
    """The native kernels if this model is to run on them, else None; a log line says why.

    Raises ConfigError when the configuration insists on kernels, or on KV, that cannot be had.
    """
    library, reason = None, _objection(section, kv_cache, device, config, dtype)
    if reason is None:
        try:
            library = load_kernels(progress=progress)
        except build.NativeUnavailable as error:
            reason = str(error)
        except ValueError as error:  # EVERBATCH_ISA names what this machine does not have
            raise ConfigError(str(error)) from None
    if library is not None:
        log.info("kernels: native, for %s", isa.best_isa())
        return library
    if section.kernels == "native":
        raise ConfigError(f"model.kernels is native, which cannot be had: {reason}")
    if kv_cache.dtype == "int8":
        raise ConfigError(
            f"kv_cache.dtype is int8, which only the native kernels have, and they cannot be had: {reason}"
        )
    log.info("kernels: torch, because %s", reason)
    return None


def _objection(
    section: ModelConfigSection, kv_cache: KvCacheConfig, device: torch.device, config: ModelConfig, dtype: torch.dtype
) -> str | None:
    """Why the native kernels do not fit, or None."""
    if section.kernels == "torch":
        return "model.kernels is torch"
    if device.type != "cpu":
        return f"the device is {device}, and they are for CPUs"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the dtype is {str(dtype).removeprefix('torch.')}; use --set model.dtype=bfloat16 or float32"
    if kv_cache.block_size % UNIT:
        return f"kv_cache.block_size is {kv_cache.block_size}; use a multiple of {UNIT}"
    if config.head_dim > MAX_HEAD_DIM:
        return f"the head dimension is {config.head_dim}, more than {MAX_HEAD_DIM}"
    return None

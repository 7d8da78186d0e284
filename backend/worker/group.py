"""InProcessWorkerGroup: one rank in the engine's own process, on a CPU or one CUDA device."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from ctypes import CDLL
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from backend.api.config import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.api.errors import ConfigError
from backend.core.step import ModelInfo, StepInput, StepOutput
from backend.layers.linear import make_torch_linear
from backend.models import loader
from backend.models.linears import LinearOptions
from backend.models.llama import Llama
from backend.sampling.sampler import Sampler
from backend.worker.input_batch import InputBatch
from backend.worker.kv_storage import KVStorage
from backend.worker.memory import free_bytes
from backend.worker.model_runner import ModelRunner, full_step
from backend.worker.native_tier import NativeTier, PackLinears
from backend.worker.tier import Tier, native_library
from backend.worker.torch_tier import TorchTier

_DUMMY_BLOCK_SIZE = 32  # tokens


class InProcessWorkerGroup:
    """Implements core.step.WorkerGroup."""

    def __init__(
        self,
        model: ModelConfigSection,
        scheduler: SchedulerConfig,
        kv_cache: KvCacheConfig = KvCacheConfig(),  # noqa: B008 (immutable)
        progress: Callable[[str], None] = lambda line: None,
    ):
        """`progress` is told of what takes long. Raises ConfigError when the checkpoint or the device does not exist."""
        self._section = model
        self._kv_cache = kv_cache
        self._progress = progress
        self._num_slots = scheduler.max_batch_size
        self._max_num_tokens = scheduler.max_num_tokens
        self._buffers: tuple[Mapping[str, Tensor], str] | None = None
        self.model_path = Path() if model.path == "<buffers>" else loader.resolve_model_path(model.path)
        self.device = _device(model.device)
        self.model: Llama | None = None
        self._library: CDLL | None = None
        self._tier: Tier | None = None
        self.runner: ModelRunner | None = None
        self._looks_ahead = self.device.type == "cuda" if scheduler.look_ahead is None else scheduler.look_ahead
        self._in_flight: deque[StepOutput] = deque()

    @classmethod
    def from_buffers(
        cls,
        tensors: Mapping[str, Tensor],
        json_config: str,
        model: ModelConfigSection,
        scheduler: SchedulerConfig,
        kv_cache: KvCacheConfig = KvCacheConfig(),  # noqa: B008 (immutable)
    ) -> InProcessWorkerGroup:
        """A group over tensors in memory, by their checkpoint names, and the text of config.json."""
        group = cls(msgspec.structs.replace(model, path="<buffers>"), scheduler, kv_cache)
        group._buffers = (tensors, json_config)
        return group

    def load(self) -> ModelInfo:
        section = self._section
        torch.set_num_threads(section.num_threads or _physical_cores())
        if self._buffers is not None:
            checkpoint = loader.of_buffers(*self._buffers)
            eos_ids = checkpoint.config.eos_ids
        else:
            checkpoint = loader.open_directory(self.model_path)
            eos_ids = loader.read_eos_ids(self.model_path)
        config, dtype = checkpoint.config, checkpoint.compute_dtype(section.dtype)
        self._library = native_library(section, self._kv_cache, self.device, config, dtype, self._progress)
        make = make_torch_linear if self._library is None else PackLinears(self._library)
        options = LinearOptions(section.quantization, make=make)
        self.model = checkpoint.build(section.max_seq_len, dtype, self.device, options)
        self._tier = self._make_tier(self._kv_cache.block_size)
        return ModelInfo(
            name=self.model_path.name or config.architecture,
            vocab_size=config.vocab_size,
            max_seq_len=self.model.cos.shape[0],
            sliding_window=config.sliding_window,
            kv_bytes_per_token=-(-self._storage(self._tier).bytes_per_block // self._kv_cache.block_size),
            eos_ids=eos_ids,
            dtype=str(dtype).removeprefix("torch."),
            device=str(self.device),
            kernels=self._tier.name,
            looks_ahead=self._looks_ahead,
        )

    def free_memory_bytes(self) -> int:
        if self.device.type == "cuda":
            self._dummy_run()
        return free_bytes(self.device)

    def initialize_kv_cache(self, max_blocks: int, block_size: int, num_blocks: int) -> None:
        if block_size != self._kv_cache.block_size:
            self._tier = self._make_tier(block_size)
        self.runner = self._make_runner(self._tier, block_size, num_blocks)

    def submit(self, step: StepInput) -> None:
        self._in_flight.append(self.runner.execute(step))

    def collect(self) -> StepOutput:
        return self._in_flight.popleft()

    def execute(self, step: StepInput) -> StepOutput:
        """Submit and collect."""
        self.submit(step)
        return self.collect()

    def shutdown(self) -> None:
        self.runner = None
        self._tier = None
        self.model = None

    def _dummy_run(self) -> None:
        """Run one full step on slots and a pool of its own, gone afterwards; warms up kernels and the allocator."""
        step = full_step(self._num_slots, self._max_num_tokens, self.model.cos.shape[0], _DUMMY_BLOCK_SIZE)
        self._make_runner(self._make_tier(_DUMMY_BLOCK_SIZE), _DUMMY_BLOCK_SIZE, step.num_blocks).execute(step)

    def _make_tier(self, block_size: int) -> Tier:
        if self._library is None:
            return TorchTier(self.model, block_size)
        return NativeTier(self.model, self._library, block_size, self._kv_cache.dtype == "int8")

    def _storage(self, tier: Tier) -> KVStorage:
        block = tier.kv_block()
        return KVStorage(self.model.config.num_layers, block.shape, block.dtype, self.device)

    def _make_runner(self, tier: Tier, block_size: int, num_blocks: int) -> ModelRunner:
        storage = self._storage(tier)
        try:
            storage.grow(num_blocks)
        except (MemoryError, torch.OutOfMemoryError):
            gib = num_blocks * storage.bytes_per_block / (1 << 30)
            raise ConfigError(
                f"{gib:.1f} GiB for {num_blocks} KV blocks cannot be had; lower kv_cache.max_tokens"
            ) from None
        batch = InputBatch(self._num_slots, self.model.cos.shape[0], block_size, self.device)
        sampler = Sampler(self._num_slots, self.model.config.vocab_size, self.device, self._library)
        return ModelRunner(tier, storage, batch, sampler)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"model.device is {name}, which torch does not know; use cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"model.device is {name}, but torch finds no CUDA device; use --set model.device=cpu")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"model.device is {name}, supported are cpu and cuda")
    return device


def _physical_cores() -> int:
    """Cores this process may use, hyper-threads counted once where the kernel tells."""
    allowed = os.sched_getaffinity(0)
    cores = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.is_file() else str(cpu))
    return max(1, len(cores))

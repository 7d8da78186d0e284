"""InProcessWorkerGroup: one rank in the engine's own process, on a CPU or one CUDA device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from backend.api.config import ModelConfigSection, SchedulerConfig
from backend.api.errors import ConfigError
from backend.core.step import ModelInfo, StepInput, StepOutput
from backend.models import loader
from backend.models.llama import Llama
from backend.sampling.sampler import Sampler
from backend.worker.input_batch import InputBatch
from backend.worker.kv_storage import KVStorage
from backend.worker.memory import free_bytes
from backend.worker.model_runner import ModelRunner, full_step

_DUMMY_BLOCK_SIZE = 32  # tokens


class InProcessWorkerGroup:
    """Implements core.step.WorkerGroup."""

    def __init__(self, model: ModelConfigSection, scheduler: SchedulerConfig):
        """Raises ConfigError when the checkpoint or the device does not exist. Loads nothing yet."""
        self._section = model
        self._num_slots = scheduler.max_batch_size
        self._max_num_tokens = scheduler.max_num_tokens
        self._buffers: tuple[Mapping[str, Tensor], str] | None = None
        self.model_path = Path() if model.path == "<buffers>" else loader.resolve_model_path(model.path)
        self.device = _device(model.device)
        self.model: Llama | None = None
        self.runner: ModelRunner | None = None

    @classmethod
    def from_buffers(
        cls, tensors: Mapping[str, Tensor], json_config: str, model: ModelConfigSection, scheduler: SchedulerConfig
    ) -> InProcessWorkerGroup:
        """A group over tensors in memory, by their checkpoint names, and the text of config.json."""
        section = ModelConfigSection("<buffers>", model.dtype, model.device, model.max_seq_len, model.num_threads)
        group = cls(section, scheduler)
        group._buffers = (tensors, json_config)
        return group

    def load(self) -> ModelInfo:
        section = self._section
        torch.set_num_threads(section.num_threads or _physical_cores())
        if self._buffers is not None:
            self.model = loader.load_buffers(*self._buffers, section.max_seq_len, section.dtype, self.device)
            eos_ids = self.model.config.eos_ids
        else:
            self.model = loader.load_directory(self.model_path, section.max_seq_len, section.dtype, self.device)
            eos_ids = loader.read_eos_ids(self.model_path)
        config = self.model.config
        dtype = self.model.embedding.dtype
        return ModelInfo(
            name=self.model_path.name or config.architecture,
            vocab_size=config.vocab_size,
            max_seq_len=self.model.cos.shape[0],
            sliding_window=config.sliding_window,
            kv_bytes_per_token=config.num_layers * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize,
            eos_ids=eos_ids,
            dtype=str(dtype).removeprefix("torch."),
            device=str(self.device),
        )

    def free_memory_bytes(self) -> int:
        if self.device.type == "cuda":
            self._dummy_run()
        return free_bytes(self.device)

    def initialize_kv_cache(self, max_blocks: int, block_size: int, num_blocks: int) -> None:
        self.runner = self._make_runner(block_size, num_blocks)

    def execute(self, step: StepInput) -> StepOutput:
        return self.runner.execute(step)

    def shutdown(self) -> None:
        self.runner = None
        self.model = None

    def _dummy_run(self) -> None:
        """Run one full step on slots and a pool of its own, gone afterwards; warms up kernels and the allocator."""
        step = full_step(self._num_slots, self._max_num_tokens, self.model.cos.shape[0], _DUMMY_BLOCK_SIZE)
        self._make_runner(_DUMMY_BLOCK_SIZE, step.num_blocks).execute(step)

    def _make_runner(self, block_size: int, num_blocks: int) -> ModelRunner:
        config = self.model.config
        storage = KVStorage(
            config.num_layers, block_size, config.num_kv_heads, config.head_dim, self.model.embedding.dtype, self.device
        )
        try:
            storage.grow(num_blocks)
        except (MemoryError, torch.OutOfMemoryError):
            gib = num_blocks * storage.bytes_per_block / (1 << 30)
            raise ConfigError(
                f"{gib:.1f} GiB for {num_blocks} KV blocks cannot be had; lower kv_cache.max_tokens"
            ) from None
        batch = InputBatch(self._num_slots, self.model.cos.shape[0], block_size, self.device)
        return ModelRunner(self.model, storage, batch, Sampler(self._num_slots, config.vocab_size, self.device))


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

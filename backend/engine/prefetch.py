"""Adapters that are held from the start: `lora.prefetch_dir`, a directory with a folder for each, named by its task id.

After TensorRT-LLM's lora_prefetch_dir. All clients may name these ids; they leave the cache like others, least recently used
first.
"""

from __future__ import annotations

import logging
from pathlib import Path

from backend.api.checkpoint.adapter_files import check_adapter_files
from backend.api.config.schema import EngineConfig
from backend.api.errors import ConfigError, EverbatchError
from backend.api.lora import UINT64, LoraConfig
from backend.core.step import ModelInfo, WorkerGroup
from backend.kvcache.adapters import AdapterCache

log = logging.getLogger("everbatch.engine")


def make_adapters(config: EngineConfig, model: ModelInfo, workers: WorkerGroup, free_bytes: int) -> AdapterCache:
    """The cache, with the adapters of `lora.prefetch_dir`. Raises ConfigError when one cannot be read or does not fit, and for a
    named adapter (`lora.adapters`) that cannot be served: each is read once, so that the start fails and not every request.
    """
    adapters = AdapterCache(config.lora, model, free_bytes)
    if config.lora.allowed_dir and not Path(config.lora.allowed_dir).is_dir():
        raise ConfigError(
            f"lora.allowed_dir is {config.lora.allowed_dir}: Directory does not exist; make it, or give another"
        )
    for name, directory in config.lora.directories.items():
        try:
            check_adapter_files(Path(directory), config.lora.max_rank)
            adapters.check_fits(workers.prepare_adapter(LoraConfig(0, path=directory, name=name)))
        except EverbatchError as error:
            raise ConfigError(f"lora.adapters: {name}={directory}: {error.message}") from None
    if config.lora.prefetch_dir and not model.lora_module_bytes:
        raise ConfigError("lora.prefetch_dir is given and LoRA is not enabled; set lora.enabled=true, or leave it out")
    for task_id, path in _folders(config.lora.prefetch_dir).items():
        try:
            adapters.put_for_all(task_id, workers.prepare_adapter(LoraConfig(task_id, path=str(path))))
        except EverbatchError as error:
            raise ConfigError(f"lora.prefetch_dir: folder {path.name}: {error.message}") from None
    return adapters


def _folders(directory: str) -> dict[int, Path]:
    """Task id -> folder, in the order of the ids. Raises ConfigError when there is no such directory."""
    if not directory:
        return {}
    if not Path(directory).is_dir():
        raise ConfigError(f"lora.prefetch_dir is {directory}: Directory does not exist")
    found = {}
    for path in Path(directory).iterdir():
        if path.is_dir() and path.name.isascii() and path.name.isdigit() and int(path.name) < UINT64:
            found[int(path.name)] = path
        else:
            log.warning("lora.prefetch_dir: %s is passed over, it is no folder with a task id for its name", path.name)
    return dict(sorted(found.items()))

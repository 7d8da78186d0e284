"""How many KV blocks there will be. Several limits may be given: the smallest holds (docs/features.md 001-32)."""

from __future__ import annotations

from backend.api.config import EngineConfig
from backend.api.errors import ConfigError
from backend.core.step import ModelInfo

DEFAULT_FRACTION_CUDA = 0.9
DEFAULT_FRACTION_CPU = 0.25  # the rest of the machine's memory is not ours


def num_pool_blocks(config: EngineConfig, model: ModelInfo, free_memory_bytes: int) -> int:
    """Blocks of the pool. Raises ConfigError when not even one sequence step would fit."""
    kv = config.kv_cache
    limits: dict[str, int] = {}
    if kv.max_tokens is not None:
        limits["kv_cache.max_tokens"] = kv.max_tokens // kv.block_size
    if kv.num_slots is not None:
        limits["kv_cache.num_slots"] = kv.num_slots * -(-model.max_seq_len // kv.block_size)
    if kv.free_memory_fraction is not None or not limits:
        limits["kv_cache.free_memory_fraction"] = _blocks_in_memory(config, model, free_memory_bytes)
    name, num_blocks = min(limits.items(), key=lambda item: item[1])
    if num_blocks < 1:
        raise ConfigError(
            f"{name} leaves room for {num_blocks} KV blocks of {kv.block_size} tokens ({free_memory_bytes >> 20} MiB are free "
            f"after the weights); at least 1 is needed: raise it, or lower kv_cache.block_size"
        )
    return num_blocks


def _blocks_in_memory(config: EngineConfig, model: ModelInfo, free_memory_bytes: int) -> int:
    default = DEFAULT_FRACTION_CUDA if model.device.startswith("cuda") else DEFAULT_FRACTION_CPU
    fraction = config.kv_cache.free_memory_fraction or default
    block_bytes = max(1, model.kv_bytes_per_token) * config.kv_cache.block_size
    return int(free_memory_bytes * fraction) // block_bytes

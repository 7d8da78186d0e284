"""The size and number of KV blocks. The smallest of several limits holds (docs/features.md 001-32)."""

from __future__ import annotations

from msgspec.structs import replace

from backend.api.config.schema import CPU_MEMORY_FRACTION, SHARE_OF_SNAPSHOTS, EngineConfig, KvCacheConfig
from backend.api.errors import ConfigError
from backend.core.step import ModelInfo

DEFAULT_FRACTION_CUDA = 0.9


def with_usable_blocks(config: EngineConfig, model: ModelInfo) -> EngineConfig:
    """The configuration with a block size that the kernels of the loaded model support."""
    size = model.kv_block_size
    return replace(config, kv_cache=replace(config.kv_cache, block_size=size)) if size else config


def num_pool_blocks(config: EngineConfig, model: ModelInfo, free_memory_bytes: int) -> int:
    """The number of blocks of the pool. Raises ConfigError if not even one fits, or if the pool exceeds the memory."""
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
            f"after the weights); at least 1 is needed: {_remedy(kv.block_size)}"
        )
    num_bytes = num_blocks * block_bytes(config, model)
    if num_bytes > free_memory_bytes:
        raise ConfigError(
            f"{name} asks for {num_blocks} KV blocks of {kv.block_size} tokens, which are {num_bytes >> 20} MiB; "
            f"{free_memory_bytes >> 20} MiB are free after the weights: lower it"
        )
    return num_blocks


def num_swap_blocks(config: EngineConfig, model: ModelInfo) -> int:
    """Blocks of paused sequences that host memory has room for. Raises ConfigError where it is asked for, and holds none."""
    if config.scheduler.preemption != "swap":
        return 0
    if model.state_bytes:
        raise ConfigError(
            f"scheduler.preemption is swap, and {model.name} has recurrent layers, whose state is not swapped; use recompute"
        )
    num_blocks = config.kv_cache.swap_bytes // block_bytes(config, model)
    if not num_blocks:
        raise ConfigError(
            f"scheduler.preemption is swap, and kv_cache.swap_bytes is {config.kv_cache.swap_bytes}, while one block takes "
            f"{block_bytes(config, model)}; raise it, or use recompute"
        )
    return num_blocks


MOST_SNAPSHOTS = 4096
LEAST_INTERVAL = 512  # tokens


def num_snapshots(config: EngineConfig, model: ModelInfo, free_memory_bytes: int) -> int:
    """Snapshots of the states of recurrent layers that are kept. Raises ConfigError if they do not fit beside those of slots."""
    if not model.state_bytes:
        return 0
    slots, wanted = config.scheduler.max_batch_size, config.kv_cache.snapshots
    left = free_memory_bytes - slots * model.state_bytes
    if wanted is None:
        share = int(_pool_bytes(config, model, left) * SHARE_OF_SNAPSHOTS)
        wanted = min(MOST_SNAPSHOTS, max(0, share) // model.state_bytes)
    if wanted * model.state_bytes > left:
        raise ConfigError(
            f"{slots} slots and {wanted} snapshots of {model.state_bytes / 1e6:,.1f} MB of state take "
            f"{(slots + wanted) * model.state_bytes >> 20} MiB; {free_memory_bytes >> 20} MiB are free after the weights: lower "
            f"scheduler.max_batch_size or kv_cache.snapshots"
        )
    return wanted


def snapshot_interval(config: EngineConfig, model: ModelInfo) -> int:
    """Tokens of a prompt from one snapshot to the next, a multiple of the block size; 0 = its end alone has one.

    Unless it is configured, snapshots take no more memory than the KV between them.
    """
    size, wanted = config.kv_cache.block_size, config.kv_cache.snapshot_interval
    if wanted is None:
        wanted = max(LEAST_INTERVAL, model.state_bytes // max(1, model.kv_bytes_per_token or model.state_bytes))
    return -(-wanted // size) * size


def _remedy(block_size: int) -> str:
    usual = KvCacheConfig().block_size  # the native kernels support no smaller blocks
    return f"raise it, or use --set kv_cache.block_size={usual}" if block_size > usual else "raise it"


def _blocks_in_memory(config: EngineConfig, model: ModelInfo, free_memory_bytes: int) -> int:
    return int(_pool_bytes(config, model, free_memory_bytes)) // block_bytes(config, model)


def _pool_bytes(config: EngineConfig, model: ModelInfo, free_memory_bytes: int) -> float:
    default = DEFAULT_FRACTION_CUDA if model.device.startswith("cuda") else CPU_MEMORY_FRACTION
    return free_memory_bytes * (config.kv_cache.free_memory_fraction or default)


def block_bytes(config: EngineConfig, model: ModelInfo) -> int:
    """Bytes that a block of the pool takes on one rank."""
    return max(1, model.kv_bytes_per_token) * config.kv_cache.block_size

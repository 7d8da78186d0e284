"""How large a model is, and how much the memory of this machine holds of its KV: one line, for `doctor --model` and `serve`."""

from __future__ import annotations

import shutil
from pathlib import Path

from backend.api.config.schema import (
    CPU_MEMORY_FRACTION,
    SHARE_OF_SNAPSHOTS,
    EngineConfig,
    Implementation,
    WorkersConfig,
)
from backend.api.errors import ConfigError
from backend.architectures.checkpoint import Checkpoint, examine
from backend.architectures.hosted import ENCODERS
from backend.architectures.shards import check_ranks
from deploy import memory
from deploy.errors import UserError


def examined(config: EngineConfig) -> Checkpoint:
    """The checkpoint of the configuration. Raises UserError in one sentence where it, or the draft model, cannot be served."""
    draft = config.speculation.draft_model
    if draft and Path(draft).exists():  # A hub id is left to the engine.
        _examined("speculation.draft_model", Path(draft), "native")
    checkpoint = _examined("model", Path(config.model.path), config.model.implementation)
    try:
        _check_ranks(checkpoint, config.workers)
    except ConfigError as error:
        raise UserError(f"model {config.model.path}: {error}") from None
    return checkpoint


def _examined(what: str, path: Path, implementation: Implementation) -> Checkpoint:
    try:
        return examine(path, implementation)
    except ConfigError as error:
        raise UserError(f"{what} {path}: {error}") from None


def _check_ranks(checkpoint: Checkpoint, workers: WorkersConfig) -> None:
    """Raise ConfigError for a model that so many ranks cannot share. The engine looks again, at GGUF files and at cores too."""
    size, stages = workers.tensor_parallel_size, workers.pipeline_parallel_size
    if checkpoint.is_hosted and workers.num_ranks > 1:
        raise ConfigError(
            f"workers.tensor_parallel_size x workers.pipeline_parallel_size is {size} x {stages}, and {checkpoint.architecture} "
            f"is run by transformers, in one process only; use 1 for both, or workers.replicas"
        )
    if checkpoint.model is not None:
        check_ranks(checkpoint.model, size, stages)


def on_cpu(config: EngineConfig) -> bool:
    """True if the engine will run on the CPU, as far as is known without torch."""
    device = config.model.device
    return device == "cpu" or (device == "auto" and shutil.which("nvidia-smi") is None)


def described(checkpoint: Checkpoint, config: EngineConfig, available_bytes: int | None = None) -> str:
    """What a server of this model can hold, for example:

    LlamaForCausalLM, weights 9.9 MiB, KV 6.0 KiB a token; memory for about 980,000 tokens, which is 478 sequences of 2,048;
    up to 64 run at once.
    """
    length = checkpoint.max_seq_len(config)
    if checkpoint.architecture in ENCODERS:
        most = min(length, config.scheduler.max_num_tokens)
        name, weights = checkpoint.architecture, size(checkpoint.weight_bytes)
        return f"{name}, weights {weights}; an encoder, which keeps no KV: texts have up to {most:,} tokens"
    cpu = on_cpu(config)
    a_token = checkpoint.kv_bytes_per_token(config, on_cpu=cpu)
    sizes = f"{checkpoint.architecture}, weights {size(checkpoint.weight_bytes)}, KV {size(a_token)} a token"
    if checkpoint.state_bytes:
        sizes += f", a state of {size(checkpoint.state_bytes)} a sequence"
    room = _room(checkpoint, config, a_token, cpu, available_bytes)
    if room is None:
        return f"{sizes}; the KV cache takes what is left of the GPU's memory, sequences have up to {length:,} tokens"
    tokens, is_exact = room
    about = "" if is_exact else "about "
    whole = tokens // length
    sequences = f"{whole:,} sequences of {length:,}" if whole else f"not even one sequence of {length:,}"
    rows = config.scheduler.max_batch_size
    return f"{sizes}; memory for {about}{tokens:,} tokens, which is {sequences}; up to {rows} run at once"


def _room(
    checkpoint: Checkpoint, config: EngineConfig, a_token: int, cpu: bool, available_bytes: int | None
) -> tuple[int, bool] | None:
    """Tokens that the KV pool will hold, and whether that is exact: what is free of the memory changes until it is taken.

    None where only the GPU's memory limits it, which is not known here.
    """
    kv = config.kv_cache
    limits = [] if kv.max_tokens is None else [(kv.max_tokens, True)]
    if kv.num_slots is not None:
        limits.append((kv.num_slots * checkpoint.max_seq_len(config), True))
    if cpu and (kv.free_memory_fraction is not None or not limits):
        available = memory.available_bytes() if available_bytes is None else available_bytes
        free = max(0, available - checkpoint.weight_bytes)
        fraction = kv.free_memory_fraction or CPU_MEMORY_FRACTION
        if checkpoint.state_bytes:  # as backend/kvcache/sizing.py divides it
            free = max(0, free - config.scheduler.max_batch_size * checkpoint.state_bytes)
            wanted = kv.snapshots
            free -= int(free * fraction * SHARE_OF_SNAPSHOTS) if wanted is None else wanted * checkpoint.state_bytes
        limits.append((_two_digits(int(max(0, free) * fraction) // max(1, a_token)), False))
    return min(limits) if limits else None


def _two_digits(number: int) -> int:
    """The number rounded down to its first two digits."""
    digits = str(number)
    return int(digits[:2] + "0" * len(digits[2:]))


def size(num_bytes: float) -> str:
    """A number of bytes for a person: three digits and a unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1000 or unit == "GiB":
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" or num_bytes >= 100 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("the last unit takes every number")

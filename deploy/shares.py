"""Divides memory (for weights and KV) and threads between several models. Checked before anything starts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from backend.api.config.schema import CPU_MEMORY_FRACTION, EngineConfig
from backend.architectures.checkpoint import Checkpoint
from backend.architectures.hosted import ENCODERS
from deploy import memory
from deploy.capacity import on_cpu, size
from deploy.errors import UserError
from deploy.models_file import Entry, told_bytes

GPU_MEMORY_FRACTION = 0.9


class WantedModel(NamedTuple):
    """A model that is to be served."""

    entry: Entry
    config: EngineConfig
    checkpoint: Checkpoint


class Share(NamedTuple):
    """The part of a model: its configuration, with the size of its KV pool and its threads; the bytes of weights and pool."""

    config: EngineConfig
    num_bytes: int


def free_bytes(config: EngineConfig) -> int:
    """Memory that models of this configuration can have: of the machine, or of the GPU with the least that is free."""
    if on_cpu(config):
        return memory.available_bytes()
    try:
        command = [
            shutil.which("nvidia-smi") or "nvidia-smi",
            "--query-gpu=memory.free",
            "--format=csv,noheader,nounits",
        ]
        told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
        return min(int(number) for number in told) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        raise UserError("nvidia-smi does not say how much of the GPU's memory is free; it must work") from None


def divide(models: Mapping[str, WantedModel], available: int, cores: int) -> dict[str, Share]:
    """The share of each model. Raises UserError that names all values where memory does not suffice."""
    told = {name: told_bytes(each.entry, available) for name, each in models.items()}
    open_ = [name for name in models if told[name] is None and _fixed_bytes(models[name]) is None]
    fixed = {name: _fixed_bytes(models[name]) for name in models if told[name] is None and name not in open_}
    weights = sum(models[name].checkpoint.weight_bytes for name in open_)
    left = available - sum(number for number in (*told.values(), *fixed.values()) if number is not None) - weights
    shares = {}
    for name, each in models.items():
        given = told[name]
        if given is None:
            given = fixed.get(name)
        if given is None:
            fraction = CPU_MEMORY_FRACTION if on_cpu(each.config) else GPU_MEMORY_FRACTION
            asked = each.config.kv_cache.free_memory_fraction or fraction
            given = each.checkpoint.weight_bytes + max(0, int(left * asked / len(open_)))
        shares[name] = _share(name, each, given, max(1, cores // len(models)))
    total = sum(share.num_bytes for share in shares.values())
    if total > available:
        listed = ", ".join(f"{name} {size(share.num_bytes)}" for name, share in shares.items())
        raise UserError(
            f"the models need {size(total)} for weights and KV ({listed}), and {size(available)} are free; give them less "
            "`memory` in models.json, or serve fewer"
        )
    return shares


def check_beside(name: str, share: Share, available: int) -> None:
    """Raise UserError where a model does not fit beside what runs now."""
    if share.num_bytes > available:
        raise UserError(
            f"model {name} needs {size(share.num_bytes)} for weights and KV, and {size(available)} are free beside what runs "
            "now; give it less `memory` in models.json, or unload a model first"
        )


def _fixed_bytes(each: WantedModel) -> int | None:
    """Weights and KV of a model whose configuration says how large its pool is; None: it does not."""
    if each.checkpoint.architecture in ENCODERS:
        return each.checkpoint.weight_bytes
    kv = each.config.kv_cache
    limits = [] if kv.max_tokens is None else [kv.max_tokens]
    if kv.num_slots is not None:
        limits.append(kv.num_slots * each.checkpoint.max_seq_len(each.config))
    return each.checkpoint.weight_bytes + min(limits) * _a_token(each) if limits else None


def _a_token(each: WantedModel) -> int:
    return each.checkpoint.kv_bytes_per_token(each.config, on_cpu=on_cpu(each.config))


def _share(name: str, each: WantedModel, num_bytes: int, threads: int) -> Share:
    config = each.config
    threads = each.entry.threads or config.model.num_threads or threads
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, num_threads=threads))
    if each.checkpoint.architecture in ENCODERS:
        return Share(config, each.checkpoint.weight_bytes)
    room, a_token = num_bytes - each.checkpoint.weight_bytes, _a_token(each)
    tokens = room // a_token
    if tokens < config.kv_cache.block_size:
        least = each.checkpoint.weight_bytes + config.kv_cache.block_size * a_token
        raise UserError(
            f"model {name} gets {size(max(0, num_bytes))} of memory, and needs {size(least)} for its weights "
            f"({size(each.checkpoint.weight_bytes)}) and one block of KV; give it more `memory` in models.json"
        )
    if config.kv_cache.max_tokens is not None:
        tokens = min(tokens, config.kv_cache.max_tokens)
    kv = msgspec.structs.replace(config.kv_cache, max_tokens=tokens, free_memory_fraction=None)
    return Share(msgspec.structs.replace(config, kv_cache=kv), each.checkpoint.weight_bytes + tokens * a_token)


def share_again(name: str, each: WantedModel, former: Share, available: int) -> Share:
    """The share of a model that takes the place of one. `available`: of which a share such as '30%' is, as at the start. What
    nothing says stays as it was. Raises UserError.
    """
    num_bytes = told_bytes(each.entry, available)
    if num_bytes is None:
        num_bytes = _fixed_bytes(each)
    assert former.config.model.num_threads is not None, "divide() has set it"
    return _share(name, each, former.num_bytes if num_bytes is None else num_bytes, former.config.model.num_threads)

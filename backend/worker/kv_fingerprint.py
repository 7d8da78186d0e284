"""One hash of everything that the bits of a KV block depend on besides its tokens: blocks may move only between equal ones."""

from __future__ import annotations

import hashlib

import torch

from backend.api.config.schema import ModelConfigSection
from backend.api.errors import ConfigError
from backend.models.loader import CheckpointReader
from backend.worker.fingerprint import content_hash
from backend.worker.loaded_model import LoadedModel
from backend.worker.weight_cache import WeightCache
from kernels.common.kv_rotation import KV_NUMBERS
from kernels.cpu.isa import supported_isas


def kv_fingerprint(checkpoint: object, loaded: LoadedModel, section: ModelConfigSection, block_size: int) -> str:
    """Empty for a model that transformers runs, which may keep more of a prompt than KV. Raises ConfigError."""
    if not isinstance(checkpoint, CheckpointReader):
        return ""
    block, library = loaded.kv_block(block_size), loaded.choice.library
    device = torch.cuda.get_device_name(loaded.device) if loaded.device.type == "cuda" else "cpu"
    kernels = f"torch {torch.__version__} {supported_isas()}" if library is None else library.version
    parts = (
        *(_content(checkpoint, section), loaded.config, loaded.dtype, section.quantization, KV_NUMBERS),
        *(loaded.tier_name, kernels, device, block_size, block.shape, block.dtype, loaded.kv_format),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _content(checkpoint: CheckpointReader, section: ModelConfigSection) -> str:
    """A hash of the weights."""
    try:
        if checkpoint.files:
            return content_hash(checkpoint.files, WeightCache.of(section).directories)
    except OSError as error:
        raise ConfigError(
            f"kv_transfer.enabled is true, and the checkpoint cannot be read ({error.strerror})"
        ) from None
    digest = hashlib.sha256()
    for name in sorted(checkpoint.tensors):
        digest.update(name.encode())
        digest.update(checkpoint.tensors[name].contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

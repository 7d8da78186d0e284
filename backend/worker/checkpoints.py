"""Opens a checkpoint by the implementation that runs it: the engine's own decoder, or transformers (backend/hosted)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from backend.api.checkpoint.gguf import gguf_file
from backend.api.checkpoint.model_files import read_object
from backend.api.checkpoint.quantised import FILE
from backend.api.checkpoint.weight_files import weight_files
from backend.api.config.schema import Implementation, ModelConfigSection
from backend.api.errors import ConfigError
from backend.architectures.hosted import implementation_of
from backend.models import loader
from backend.worker.fingerprint import content_hash
from backend.worker.weight_cache import WeightCache

if TYPE_CHECKING:
    from backend.hosted.checkpoint import HostedCheckpoint


def open_checkpoint(path: Path, implementation: Implementation) -> loader.CheckpointReader | HostedCheckpoint:
    """A checkpoint directory, or a GGUF file. Raises ConfigError."""
    content = None if gguf_file(path) else read_object(path, FILE)
    if content is None or implementation_of(content, implementation) == "native":
        return loader.open_directory(path)
    from backend.hosted.checkpoint import HostedCheckpoint  # imports transformers, which takes seconds

    return HostedCheckpoint(content, loader.open_tensors(weight_files(path)))


def read_eos_ids(path: Path, checkpoint: loader.CheckpointReader | HostedCheckpoint) -> tuple[int, ...]:
    """Token ids that end a text. Raises ConfigError."""
    if isinstance(checkpoint, loader.CheckpointReader):
        return loader.read_eos_ids(path)
    return loader.eos_ids_of(path, checkpoint.config)


def content_of(checkpoint: loader.CheckpointReader, section: ModelConfigSection) -> str:
    """A hash of the weights and of what config.json says. Raises ConfigError."""
    try:
        weights = content_hash(checkpoint.files, WeightCache.of(section).directories)
    except OSError as error:
        raise ConfigError(f"the checkpoint cannot be read ({error.strerror})") from None
    return hashlib.sha256(f"{weights} {checkpoint.config!r}".encode()).hexdigest()

"""Models whose packed weights are kept on disk: how tests load them, and what they compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from backend.api.config.schema import KvCacheConfig, ModelConfigSection
from backend.models import loader
from backend.worker.loaded_model import LoadedModel
from tests.native.harness import CPU, drive, prompt


def load(path: Path, cache: Path, lines: list[str] | None = None, **section: Any) -> LoadedModel:
    section = dict(dtype="bfloat16", quantization="w4a8", kernels="native", device="cpu") | section
    settings = ModelConfigSection(path=str(path), cache_dir=str(cache), **section)
    progress = [].append if lines is None else lines.append
    return LoadedModel(loader.open_directory(path), settings, KvCacheConfig(), CPU, progress)


def logits_of(loaded: LoadedModel) -> torch.Tensor:
    driver = drive(loaded.tier(32), loaded.decoder, loaded.choice.library)
    driver.begin(0, prompt(40, loaded.config.vocab_size))
    return torch.cat([driver.run(0, [30, 10]), driver.generate([0], 5)[0]])


def entry(cache: Path) -> Path:
    (path,) = cache.glob("*.weights")
    return path


def is_mapped(cache: Path, path: Path, **section: Any) -> bool:
    """True if the model was found, and not packed."""
    before = {each: each.stat().st_ino for each in cache.glob("*.weights")}
    loaded = load(path, cache, **section)
    return loaded.mapped_bytes > 0 and before == {each: each.stat().st_ino for each in cache.glob("*.weights")}

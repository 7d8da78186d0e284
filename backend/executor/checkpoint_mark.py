"""A mark of a checkpoint that another one does not have, without reading its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

SUFFIXES = (".safetensors", ".gguf", ".bin", ".json")


def mark_of(checkpoint: Path) -> str:
    """A hash of names, sizes and times of change of the files of a directory, or of one file; empty where there is none."""
    try:
        files = (
            [checkpoint] if checkpoint.is_file() else [each for each in checkpoint.iterdir() if each.suffix in SUFFIXES]
        )
        facts = sorted((each.name, (status := each.stat()).st_size, status.st_mtime_ns) for each in files)
    except OSError:
        return ""
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()

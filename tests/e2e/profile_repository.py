"""A repository of several profiles: links to the directories of their models, beside the model that owns the engine."""

from __future__ import annotations

from pathlib import Path

from deploy import ROOT


def compose(directory: Path, *profiles: str) -> Path:
    directory.mkdir()
    sources = [path for profile in profiles for path in (ROOT / "deploy" / "profiles" / profile).iterdir()]
    for source in (ROOT / "model_repository" / "tensorrt_llm", *sources):
        (directory / source.name).symlink_to(source)
    return directory

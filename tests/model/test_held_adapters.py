"""What is held of adapters: files that are written anew are read anew, and places that are used again hold nothing of before."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from backend.api.lora import LoraConfig
from backend.layers.lora import Stacks
from backend.models import loader
from backend.models.lora import Layers, projections_of, stack_shapes
from backend.worker.adapters import AdapterReader
from kernels.common.adapter import Part
from tests.fakes.adapter_files import write_adapter

MODEL = Path(__file__).resolve().parents[2] / "models" / "default"


@pytest.fixture(scope="module")
def reader() -> AdapterReader:
    model = projections_of(loader.open_directory(MODEL).config)
    return AdapterReader(model, torch.float32, 8, lambda layers: (layers, 100, 100))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", size=loader.open_directory(MODEL).config.hidden_size)


def lora(path: Path) -> LoraConfig:
    return LoraConfig(1, path=str(path))


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_file_that_is_written_anew_in_its_place_is_read_anew(reader: AdapterReader, adapter: Path, name: str) -> None:
    """Of the same size and inode: only the time tells."""
    path, first = adapter / name, reader.prepare(lora(adapter))
    before, written = path.stat(), path.read_bytes()
    other_alpha = b'{"peft_type": "LORA", "lora_alpha": 4}'.ljust(before.st_size)
    path.write_bytes(other_alpha if name.endswith(".json") else written[:-4] + np.float32(5).tobytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    after = path.stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    second = reader.prepare(lora(adapter))
    assert second is not first and second.content != first.content


def test_an_adapter_that_is_held_is_not_read_again_and_one_that_is_not_leaves_nothing(
    reader: AdapterReader, adapter: Path, tmp_path: Path
) -> None:
    first = reader.prepare(lora(adapter))
    assert reader.prepare(lora(adapter)) is first
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (copy / name).write_bytes((adapter / name).read_bytes())
    assert reader.prepare(lora(copy)) is first, "the same content elsewhere"
    del first
    gc.collect()
    assert not len(reader._by_content) and not len(reader._by_files)


def test_files_of_the_same_size_in_other_directories_are_other_adapters(
    reader: AdapterReader, adapter: Path, tmp_path: Path
) -> None:
    other = write_adapter(tmp_path / "other", size=loader.open_directory(MODEL).config.hidden_size)
    path = other / "adapter_model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(path).items()}, path)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        os.utime(other / name, ns=(1, 1))
        os.utime(adapter / name, ns=(1, 1))
    assert reader.prepare(lora(adapter)).content != reader.prepare(lora(other)).content


def test_a_place_that_is_used_again_holds_nothing_of_the_adapter_before() -> None:
    """An adapter of rank 8 on all projections leaves; one of rank 2 on q_proj alone takes its place."""
    config = loader.open_directory(MODEL).config
    shapes = stack_shapes(config)
    stacks = Stacks(shapes, config.num_layers, 8, torch.float32, torch.device("cpu"))
    full: Layers = [
        {name: [Part(0, torch.ones(8, k), torch.ones(offsets[-1], 8), 1.0)] for name, (offsets, k) in shapes.items()}
        for _ in range(config.num_layers)
    ]
    offsets, k = shapes["qkv"]
    small: Layers = [{} for _ in full]
    small[0] = {"qkv": [Part(0, torch.full((2, k), 3.0), torch.full((offsets[1], 2), 5.0), 2.0)]}
    neighbour = stacks.put(full)
    place = stacks.put(full)
    stacks.take(place)
    assert stacks.put(small) == place and stacks._ranks[place] == 2
    for index, layer in enumerate(stacks._layers):
        for name, stack in layer.items():
            a, b = torch.zeros_like(stack.a[:, place]), torch.zeros_like(stack.b[place])
            if (index, name) == (0, "qkv"):
                a[0, :2], b[: offsets[1], :2] = 3.0, 10.0
            assert torch.equal(stack.a[:, place], a) and torch.equal(stack.b[place], b), (index, name)
            assert stack.a[:, neighbour].all() and stack.b[neighbour].all()

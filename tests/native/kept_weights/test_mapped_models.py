"""Packed weights that are kept on disk: what is mapped computes the bits of what is packed, or is packed anew."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.api.config.schema import KvCacheConfig, ModelConfigSection
from backend.api.errors import ConfigError
from backend.models import loader
from backend.worker import fingerprint, native_tier, packed_model, weight_cache
from backend.worker.loaded_model import LoadedModel
from kernels.cpu.build import NativeLibrary
from kernels.cpu.isa import AMX_EMULATED
from tests.model.gguf_files import write_gguf
from tests.native.harness import CPU
from tests.native.kept_weights.harness import entry, is_mapped, load, logits_of
from tools.make_random_model import make_random_model

WIDE = dict(hidden_size=256, intermediate_size=256, num_attention_heads=8, head_dim=32)  # super-blocks have 256 columns
FORMATS: dict[str, dict[str, Any]] = {
    "float32": dict(dtype="float32"),
    "bfloat16": dict(dtype="bfloat16"),
    "bfloat16 tied": dict(dtype="bfloat16"),
    "int8": dict(dtype="float32", quantization="int8"),
    "w8a8": dict(dtype="bfloat16", quantization="w8a8"),
    "w4a8": dict(dtype="bfloat16", quantization="w4a8"),
    "w6a8": dict(dtype="bfloat16", quantization="w6a8"),
    "auto:5": dict(dtype="bfloat16", quantization="auto:5"),
    "w4a8 in two levels": dict(dtype="bfloat16", quantization="w4a8"),
    "Q4_K": dict(dtype="bfloat16"),
    "Q6_K": dict(dtype="float32"),
    "Q8_0": dict(dtype="bfloat16"),
    "Q4_0": dict(dtype="bfloat16"),
}


def of_format(name: str, tmp_path: Path) -> Path:
    if name.startswith("Q"):
        directory = make_random_model(tmp_path / "model", **WIDE)
        return write_gguf(directory, tmp_path / "model.gguf", name)
    if "levels" in name:
        return make_random_model(tmp_path / "model", **WIDE)
    tied = "tied" in name
    return make_random_model(
        tmp_path / "model", "qwen2", vocab_size=700, tie_word_embeddings=tied
    )  # it has biases, and a head that is screened


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_mapped_computes_the_bits_of_what_is_packed(name: str, tmp_path: Path, cache: Path) -> None:
    path, section = of_format(name, tmp_path), dict(quantization="none") | FORMATS[name]
    packed = load(path, cache, cache_max_gb=0, **section)
    assert not list(cache.iterdir()) and packed.mapped_bytes == 0
    expected = logits_of(packed)
    first = load(path, cache, **section)
    assert is_mapped(cache, path, **section)
    mapped = load(path, cache, **section)
    for loaded in (first, mapped):
        assert 0 < loaded.mapped_bytes <= entry(cache).stat().st_size
        assert torch.equal(logits_of(loaded), expected)
        assert loaded.model.memory == packed.model.memory


@pytest.mark.parametrize("family", ["qwen3", "mistral", "llama3"])
def test_every_part_of_a_layer_is_kept(family: str, tmp_path: Path, cache: Path) -> None:
    path = make_random_model(tmp_path / "model", family)
    expected = logits_of(load(path, cache, cache_max_gb=0))
    load(path, cache)
    assert torch.equal(logits_of(load(path, cache)), expected)


def test_a_second_start_neither_rounds_nor_packs_nor_makes_a_screen(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "SETTLED_S", -1.0)  # the checkpoint has just been made
    load(model, cache, quantization="none")

    def refuse(*arguments: object) -> None:
        raise AssertionError("packed again")

    monkeypatch.setattr(native_tier.PackLinears, "__call__", refuse)
    monkeypatch.setattr(native_tier, "make_screen", refuse)
    monkeypatch.setattr(fingerprint, "_hash", refuse)
    assert load(model, cache, quantization="none").tier(32)


def test_lines_say_what_is_done_and_what_was_found(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_model, "QUIET_S", 0.0)
    lines: list[str] = []
    load(model, cache, lines)
    assert lines[0].startswith("measuring the inputs of its layers")
    assert lines[1:3] == ["packing the model: 1 of 3 layers", "packing the model: 2 of 3 layers"]
    again: list[str] = []
    load(model, cache, again)
    assert len(again) == 1 and again[0].startswith("found the packed model: 0.0 GB mapped in 0.")


def test_all_engines_map_the_same_pages_and_nobody_can_write_them(model: Path, cache: Path) -> None:
    load(model, cache)
    loaded = load(model, cache)
    inode = entry(cache).stat().st_ino
    (maps,) = (line for line in Path("/proc/self/maps").read_text().splitlines() if f" {inode} " in line)
    assert maps.split()[1] == "r--s"
    at = loaded.decoder.embedding.data_ptr()
    begin, end = (int(each, 16) for each in maps.split()[0].split("-"))
    assert begin <= at < end


def changed(path: Path, keep_times: bool) -> None:
    """Other weights of the same size, in place."""
    file = path / "model.safetensors"
    before = file.stat()
    weights = load_file(file)
    weights["model.layers.1.mlp.down_proj.weight"].neg_()
    save_file(weights, path / "other", {"format": "pt"})
    file.write_bytes((path / "other").read_bytes())
    if keep_times:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert file.stat().st_size == before.st_size and file.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("keep_times", [True, False])
def test_other_content_is_another_entry_whatever_its_times_say(
    keep_times: bool, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "SETTLED_S", -1.0)  # notes are made at once
    before = logits_of(load(model, cache))
    assert list(cache.glob("*.content"))
    changed(model, keep_times)
    assert not is_mapped(cache, model)
    loaded = load(model, cache)
    assert not torch.equal(logits_of(loaded), before)
    assert torch.equal(logits_of(loaded), logits_of(load(model, cache, cache_max_gb=0)))


def test_a_copied_checkpoint_finds_the_weights_of_the_first(model: Path, tmp_path: Path, cache: Path) -> None:
    load(model, cache)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert is_mapped(cache, copy)


def test_other_formats_descriptions_and_kernels_are_other_entries(
    model: Path, cache: Path, variant: Callable[[str | None], NativeLibrary], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model, cache)
    for section in (dict(quantization="w8a8"), dict(quantization="int8"), dict(dtype="float32")):
        assert not is_mapped(cache, model, **section)
    monkeypatch.setenv("EVERBATCH_ISA", AMX_EMULATED)
    variant(AMX_EMULATED)
    assert not is_mapped(cache, model)
    monkeypatch.delenv("EVERBATCH_ISA")
    monkeypatch.setattr(weight_cache, "code_version", lambda: "other code")
    assert not is_mapped(cache, model)
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-03'))
    assert (model / "config.json").read_text() != config
    assert not is_mapped(cache, model)
    assert len(list(cache.glob("*.weights"))) == 7


def test_windows_and_positions_are_no_part_of_the_key(model: Path, cache: Path) -> None:
    load(model, cache)
    settings = ModelConfigSection(
        path=str(model), cache_dir=str(cache), dtype="bfloat16", quantization="w4a8", max_seq_len=100
    )
    loaded = LoadedModel(loader.open_directory(model), settings, KvCacheConfig(max_attention_window=16), CPU)
    assert loaded.mapped_bytes and len(list(cache.glob("*.weights"))) == 1
    assert loaded.max_seq_len == 100 and loaded.config.windows == (16, 16, 16)
    with pytest.raises(ConfigError, match=r"model.max_seq_len is 1000, the model's own limit is 512"):
        load(model, cache, max_seq_len=1000)

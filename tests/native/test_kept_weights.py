"""Packed weights that are kept on disk: what is mapped computes the bits of what is packed, or is packed anew."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.api.config import KvCacheConfig, LoraSection, ModelConfigSection
from backend.api.errors import ConfigError
from backend.models import loader
from backend.worker import fingerprint, native_tier, packed_model, weight_cache
from backend.worker.group import InProcessWorkerGroup
from backend.worker.loaded_model import LoadedModel, load_draft_model
from kernels.cpu.build import NativeLibrary
from kernels.cpu.isa import AMX_EMULATED
from tests.model.gguf_files import write_gguf
from tests.native.harness import drive, prompt
from tests.native.test_trust import give_away, private  # noqa: F401 (fixture)
from tools.make_random_model import make_random_model

CPU = torch.device("cpu")
WIDE = dict(hidden_size=256, intermediate_size=256, num_attention_heads=8, head_dim=32)  # super-blocks have 256 columns
FORMATS: dict[str, dict[str, Any]] = {
    "float32": dict(dtype="float32"),
    "bfloat16": dict(dtype="bfloat16"),
    "bfloat16 tied": dict(dtype="bfloat16"),
    "int8": dict(dtype="float32", quantization="int8"),
    "w8a8": dict(dtype="bfloat16", quantization="w8a8"),
    "w4a8": dict(dtype="bfloat16", quantization="w4a8"),
    "w4a8 in super-blocks": dict(dtype="bfloat16", quantization="w4a8"),
    "Q4_K": dict(dtype="bfloat16"),
    "Q6_K": dict(dtype="float32"),
    "Q8_0": dict(dtype="bfloat16"),
    "Q4_0": dict(dtype="bfloat16"),
}


@pytest.fixture(autouse=True)
def every_model_is_kept(best_kernels: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_model, "MIN_BYTES", 0)


@pytest.fixture
def cache(private: Path) -> Path:  # noqa: F811
    return private


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_random_model(tmp_path / "model", vocab_size=300)


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


def of_format(name: str, tmp_path: Path) -> Path:
    if name.startswith("Q"):
        directory = make_random_model(tmp_path / "model", **WIDE)
        return write_gguf(directory, tmp_path / "model.gguf", name)
    if "super" in name:
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
    assert lines[:2] == ["packing the model: 1 of 3 layers", "packing the model: 2 of 3 layers"]
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


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100_000)


def flip(offset: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[offset] ^= 4
        path.write_bytes(content)

    return change


def link(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def others_may_write(path: Path) -> None:
    path.chmod(0o666)


HOSTILE = {
    "no magic": (flip(0), "does not begin as a file"),
    "huge header": (flip(14), "its header is said to have"),
    "changed header": (flip(60), "the checksum of its header"),
    "changed weight": (flip(-1000), "the checksum of"),
    "cut short": (cut, "is cut short"),
    "empty": (lambda path: os.truncate(path, 0), "does not begin as a file"),
    "link": (link, "symbolic links"),
    "pipe": (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "of another kind"),
    "others may write": (others_may_write, "may be written by others"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_was_not_written_so_is_told_in_one_line_and_made_anew(
    kind: str, model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits_of(load(model, cache))
    change, reason = HOSTILE[kind]
    path = entry(cache)
    change(path)
    with caplog.at_level(logging.WARNING, "everbatch.worker"):
        loaded = load(model, cache)
    assert reason in caplog.records[0].getMessage() and "made anew" in caplog.records[0].getMessage()
    assert torch.equal(logits_of(loaded), expected)
    assert len(caplog.records) == 1 and is_mapped(cache, model)


def test_weights_and_directories_of_another_user_are_not_used(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model, cache)
    with monkeypatch.context() as patch:
        give_away(entry(cache), patch)
        with caplog.at_level(logging.WARNING, "everbatch.worker"):
            assert not is_mapped(cache, model)
    assert len(caplog.records) == 1 and "belongs to user" in caplog.text
    cache.chmod(0o777)
    assert load(model, cache).mapped_bytes == 0
    assert "may be written by others" in caplog.text


def test_a_place_that_cannot_be_written_costs_one_line(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (cache / "file").touch()
    with caplog.at_level(logging.WARNING, "everbatch.worker"):
        loaded = load(model, cache / "file" / "below")
    assert loaded.mapped_bytes == 0 and len(caplog.records) == 1
    assert "the packed weights are not kept for the next start" in caplog.text


def test_a_full_disk_costs_one_line_and_leaves_nothing(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "everbatch.worker"):
        patch.setattr(os, "posix_fallocate", full)
        assert load(model, cache).mapped_bytes == 0
    assert len(caplog.records) == 1 and "No space left on device" in caplog.text
    assert not list(cache.glob("*.weights")) and not list(cache.glob("*.part"))


def test_an_engine_that_died_while_writing_leaves_what_the_next_one_removes(model: Path, cache: Path) -> None:
    (cache / "0000-left.part").write_bytes(b"half of it")
    load(model, cache)
    assert not list(cache.glob("*.part")) and is_mapped(cache, model)


def test_an_entry_that_is_removed_stays_mapped_by_those_who_use_it(model: Path, cache: Path) -> None:
    load(model, cache)
    loaded = load(model, cache)
    entry(cache).unlink()
    assert torch.equal(logits_of(loaded), logits_of(load(model, cache, cache_max_gb=0)))


def test_files_that_change_while_they_are_packed_are_not_kept(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loader.Checkpoint.build

    def build(self: loader.Checkpoint, *arguments: Any) -> Any:
        made = real(self, *arguments)
        os.utime(model / "model.safetensors")
        return made

    monkeypatch.setattr(loader.Checkpoint, "build", build)
    assert load(model, cache).mapped_bytes == 0 and not list(cache.glob("*.weights"))


def test_small_checkpoints_and_those_in_memory_are_not_kept(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_model, "MIN_BYTES", 1)
    tensors, config = load_file(model / "model.safetensors"), (model / "config.json").read_text()
    settings = ModelConfigSection(cache_dir=str(cache), dtype="bfloat16", kernels="native")
    LoadedModel(loader.of_buffers(tensors, config), settings, KvCacheConfig(), CPU)
    monkeypatch.setattr(packed_model, "MIN_BYTES", 64 << 20)
    assert load(model, cache).mapped_bytes == 0 and not list(cache.iterdir())


def test_drafts_and_models_with_adapters_are_mapped_too(model: Path, cache: Path) -> None:
    load(model, cache)
    settings = ModelConfigSection(path=str(model), cache_dir=str(cache), dtype="bfloat16", quantization="w4a8")
    lora = LoraSection(enabled=True)
    loaded = LoadedModel(loader.open_directory(model), settings, KvCacheConfig(), CPU, lora=lora)
    assert loaded.mapped_bytes and load_draft_model(str(model), loaded, settings, KvCacheConfig()).mapped_bytes


def test_mapped_weights_do_not_count_as_free_memory(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(model, cache)
    from backend.api.config import SchedulerConfig
    from backend.worker import group as group_module

    monkeypatch.setattr(group_module, "free_bytes", lambda device: 1 << 30)
    settings = ModelConfigSection(
        path=str(model), cache_dir=str(cache), dtype="bfloat16", quantization="w4a8", num_threads=1
    )
    group = InProcessWorkerGroup(settings, SchedulerConfig())
    group.load()
    taken = (1 << 30) - group.free_memory_bytes()
    assert 0 < taken <= entry(cache).stat().st_size

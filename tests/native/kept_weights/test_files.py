"""Files of packed weights: a damaged or foreign file is reported in one line, and the model is packed again."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from backend.api.config.schema import KvCacheConfig, LoraSection, ModelConfigSection, SchedulerConfig
from backend.models import loader
from backend.worker import fingerprint, packed_model, weight_cache
from backend.worker import group as group_module
from backend.worker.group import InProcessWorkerGroup
from backend.worker.loaded_model import LoadedModel, load_draft_model
from tests.native.harness import CPU
from tests.native.kept_weights.harness import entry, is_mapped, load, logits_of
from tests.native.test_trust import give_away


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 3 // 4)


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
    real = loader.CheckpointReader.build

    def build(self: loader.CheckpointReader, *arguments: Any) -> Any:
        made = real(self, *arguments)
        os.utime(model / "model.safetensors")
        return made

    monkeypatch.setattr(loader.CheckpointReader, "build", build)
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
    monkeypatch.setattr(group_module, "free_bytes", lambda device: 1 << 30)
    settings = ModelConfigSection(
        path=str(model), cache_dir=str(cache), dtype="bfloat16", quantization="w4a8", num_threads=1
    )
    group = InProcessWorkerGroup(settings, SchedulerConfig())
    group.load()
    taken = (1 << 30) - group.free_memory_bytes()
    assert 0 < taken <= entry(cache).stat().st_size


def test_the_entries_that_were_used_longest_ago_make_room(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    formats = ("w4a8", "w8a8", "int8")
    paths: dict[str, Path] = {}
    for number, quantization in enumerate(formats):
        load(model, cache, quantization=quantization)
        (paths[quantization],) = set(cache.glob("*.weights")) - set(paths.values())
        os.utime(paths[quantization], (number, number))
    assert is_mapped(cache, model, quantization="w4a8")  # now the one that was used last
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    room = sizes["w4a8"] + 2 * sizes["int8"]
    load(model, cache, quantization="none", cache_max_gb=room / 1e9)
    left = set(cache.glob("*.weights"))
    assert paths["w4a8"] in left and paths["w8a8"] not in left and sum(path.stat().st_size for path in left) <= room
    with caplog.at_level(logging.WARNING, "everbatch.worker"):
        assert load(model, cache, dtype="float32", cache_max_gb=1e-5).mapped_bytes == 0
    assert set(cache.glob("*.weights")) == left
    assert "the model takes 0.0 GB, model.cache_max_gb is 0.0" in caplog.text


def test_an_entry_that_would_take_most_of_the_disk_is_not_written(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=100_000)
    monkeypatch.setattr(weight_cache.shutil, "disk_usage", lambda path: usage)
    with caplog.at_level(logging.WARNING, "everbatch.worker"):
        assert load(model, cache).mapped_bytes == 0
    assert not list(cache.glob("*.weights")) and "at most half are taken" in caplog.text


def test_engines_that_start_at_once_all_end_up_with_a_whole_entry(model: Path, cache: Path) -> None:
    expected = logits_of(load(model, cache, cache_max_gb=0))
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: load(model, cache), range(4)))
    assert all(torch.equal(logits_of(each), expected) for each in loaded)
    assert len(list(cache.glob("*.weights"))) == 1 and not list(cache.glob("*.part"))
    assert is_mapped(cache, model)


def test_what_is_being_written_is_not_taken_for_left_over(model: Path, cache: Path) -> None:
    with weight_cache._replacing(cache / "other.weights") as file:
        file.write(b"half")
        load(model, cache)
        assert len(list(cache.glob("*.part"))) == 1
    assert (cache / "other.weights").read_bytes() == b"half"


def test_there_is_no_note_of_a_file_that_has_just_changed(tmp_path: Path, cache: Path) -> None:
    """A second change within the same tick of the file system's clock would not be seen."""
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    now = file.stat().st_ctime
    first = fingerprint.content_hash([file], [cache], lambda: now + 1)
    assert not list(cache.iterdir())
    assert fingerprint.content_hash([file], [cache], lambda: now + 60) == first
    (note,) = cache.iterdir()
    note.write_text("f" * 64)
    assert fingerprint.content_hash([file], [cache]) == "f" * 64
    note.write_text("nonsense")
    assert fingerprint.content_hash([file], [cache]) == first


def test_where_content_is_cut_into_files_makes_a_difference(tmp_path: Path, cache: Path) -> None:
    files = [tmp_path / name for name in "ab"]
    hashes = set()
    for contents in ((b"one", b"two"), (b"onet", b"wo"), (b"two", b"one")):
        for file, content in zip(files, contents):
            file.write_bytes(content)
        hashes.add(fingerprint.content_hash(files, [cache]))
    assert len(hashes) == 3

"""Checkpoints that were made to do harm end in one sentence; those that only look odd are read."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from backend.api.checkpoint import model_files
from backend.api.checkpoint.model_files import (
    MAX_DEPTH,
    MAX_JSON_BYTES,
    find_file,
    parse_object,
    read_object,
    read_text,
    shown,
)
from backend.api.checkpoint.weight_files import tensor_places
from backend.api.errors import ConfigError
from backend.models.linears import LinearOptions
from backend.models.loader import MAX_POSITIONS, open_directory, resolve_model_path
from backend.quant.checkpoint import new_folder
from backend.text import tokenizer
from backend.text.tokenizer import Tokenizer
from tests.model.hostile import CASES, base
from tests.model.hostile.base import WEIGHTS, Case, deep, write, write_json
from tests.model.hostile.readers import fault_of_sentence, interrupted, outcome, read
from tests.model.test_loading import load


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.reader}: {case.name}")
def test_a_hostile_checkpoint_ends_in_one_sentence(case: Case, directory: Path) -> None:
    case.spoil(directory)
    result = outcome(case.reader, directory)
    assert result.fault is None, f"{result.fault}: {result.error!r}"
    sentence = str(result.error)
    assert [word for word in case.tells if word not in sentence] == [], sentence
    assert ";" in sentence or "supported are" in sentence, f"no remedy: {sentence}"


def test_the_corpus_is_large_and_its_names_are_distinct() -> None:
    names = [(case.reader, case.name) for case in CASES]
    assert len(names) >= 200 and len(set(names)) == len(names)


@pytest.mark.parametrize("reader", ["engine", "text"])
def test_the_checkpoint_that_is_spoiled_can_be_read(reader: base.Reader, directory: Path) -> None:
    read(reader, directory)


@pytest.mark.parametrize("reader", ["engine", "text"])
def test_a_snapshot_of_a_hub_s_cache_is_read_through_its_links(reader: base.Reader, directory: Path) -> None:
    snapshot, blobs = directory.parent / "snapshots" / "abc", directory.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    base.index(dict.fromkeys(base.weights(), "shard.safetensors"))(directory)
    for file in list(directory.iterdir()):
        file.rename(blobs / f"sha-of-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/sha-of-{file.name}")
    read(reader, snapshot)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../outside.json")
    shutil.copy(blobs / "sha-of-config.json", directory.parent / "outside.json")
    with pytest.raises(ConfigError, match="config.json is a link out of the model's directory"):
        read("engine", snapshot)


@pytest.mark.parametrize("reader", ["engine", "text"])
def test_links_within_the_directory_and_to_it_are_followed(reader: base.Reader, directory: Path) -> None:
    (directory / "version-1").mkdir()
    for file in [each for each in directory.iterdir() if each.is_file()]:
        file.rename(directory / "version-1" / file.name)
        file.symlink_to(f"version-1/{file.name}")
    (directory.parent / "latest").symlink_to(directory)
    read(reader, directory.parent / "latest")


def test_blobs_count_only_beside_snapshots(directory: Path) -> None:
    (directory.parent.parent / "blobs").mkdir(exist_ok=True)
    (directory.parent.parent / "blobs" / "x").write_text("{}")
    (directory / "x").symlink_to("../../blobs/x")
    with pytest.raises(ConfigError, match="x is a link out"):
        find_file(directory, "x")


def test_a_file_that_may_not_be_read_is_told(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.EACCES, "no", str(directory / "config.json"))

    monkeypatch.setattr(model_files.os, "open", refuse)
    with pytest.raises(ConfigError, match=r"^config.json cannot be read \(Permission denied\); let this user read it"):
        read_object(directory, "config.json")


def test_a_file_that_grows_while_it_is_read_is_cut_off(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "a").write_bytes(b"x" * 11)
    real = os.stat_result((0o100644, 1, 1, 1, 0, 0, 3, 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda self, **_: real)
    with pytest.raises(ConfigError, match="a has more than 10 bytes"):
        read_text(directory, "a", 10)


def test_a_pipe_that_takes_the_place_of_a_file_does_not_hang(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "config.json").unlink()
    os.mkfifo(directory / "config.json")
    monkeypatch.setattr(model_files, "find_file", lambda directory, name, most=None: directory / name)
    with interrupted(), pytest.raises(ConfigError, match="config.json is empty"):
        read_object(directory, "config.json")


@pytest.mark.parametrize("opening, closing", [("[", "]"), ('{"a":', "}")])
def test_json_may_be_nested_as_deep_as_the_limit_and_no_deeper(opening: str, closing: str) -> None:
    assert "a" in parse_object(deep(MAX_DEPTH - 1, opening, closing), "config.json")
    with pytest.raises(ConfigError, match=f"config.json is nested deeper than {MAX_DEPTH} levels"):
        parse_object(deep(MAX_DEPTH, opening, closing), "config.json")


def test_a_file_may_be_as_long_as_the_limit_and_no_longer(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text('{"a": "' + "x" * (MAX_JSON_BYTES - 9) + '"}')
    assert read_object(directory, "config.json") is not None
    path.write_text('{"a": "' + "x" * (MAX_JSON_BYTES - 8) + '"}')
    with pytest.raises(ConfigError, match=f"has {MAX_JSON_BYTES + 1} bytes, at most {MAX_JSON_BYTES} are read"):
        read_object(directory, "config.json")


def test_positions_beyond_what_is_supported_are_refused_unless_fewer_are_asked_for(directory: Path) -> None:
    base.config(max_position_embeddings=MAX_POSITIONS + 1)(directory)
    with pytest.raises(
        ConfigError, match=f"is {MAX_POSITIONS + 1}.*use --set model.max_seq_len={MAX_POSITIONS} or less"
    ):
        load(directory)
    assert load(directory, max_seq_len=100).max_seq_len == 100


def test_an_empty_tensor_and_one_without_dimensions_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(()), "b": torch.ones(0), "c": torch.ones(0, 3)}, tmp_path / WEIGHTS)
    assert sorted(tensor_places(tmp_path / WEIGHTS)) == ["a", "b", "c"]


def test_int8_of_a_projection_that_is_too_small_takes_no_memory_first(directory: Path) -> None:

    base.config(intermediate_size=10**12)(directory)
    with pytest.raises(
        ConfigError, match=r"gate_proj.weight has shape \[64, 64\], config.json asks for \[1000000000000, 64\]"
    ):
        open_directory(directory).build(None, torch.float32, torch.device("cpu"), LinearOptions("int8"))


def test_a_template_s_constants_are_not_computed_while_it_is_loaded(directory: Path) -> None:
    """`9 ** 9 ** 9 ** 9` would never end; this one would only take memory."""
    (directory / "chat_template.jinja").write_text("{{ 'a' * 300000000 }}{{ 'b'|center(300000000) }}")
    result = outcome("text", directory)
    assert result.error is None and result.peak_bytes < 100 << 20


def test_code_that_a_tokenizer_brings_is_neither_run_nor_asked_about(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [case] = [case for case in CASES if case.name == "no tokenizer, but code"]
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody is asked"))
    monkeypatch.chdir(directory)
    case.spoil(directory)
    with pytest.raises(ConfigError, match="add a tokenizer.json"):
        read("text", directory)
    assert not list(directory.rglob("was-run"))


def test_added_tokens_are_compared_once_each(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with each would take hours for as many tokens as are allowed."""
    calls: list[None] = []
    count = 300
    monkeypatch.setattr(tokenizer, "repr", lambda token: calls.append(None) or repr(token), raising=False)
    contents = [f"<{index}>" for index in range(count)]
    flags = dict(special=True, lstrip=False, rstrip=False, single_word=False, normalized=False)
    tokens = {str(28 + index): {"content": content, **flags} for index, content in enumerate(contents)}
    base.merged("tokenizer.json", added_tokens=[{"id": int(key), **token} for key, token in tokens.items()])(directory)
    write_json(directory / "tokenizer_config.json", {"added_tokens_decoder": tokens})
    assert Tokenizer.from_directory(directory).vocab_size == len(base.WORDS) + count
    assert len(calls) <= 3 * count


def test_a_copied_folder_brings_nothing_from_outside(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (directory / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="notes.txt is a link out"), new_folder(tmp_path / "made", directory):
        pass
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "name, tells",
    [
        ("x" * 5000, "File name too long"),
        ("a\nb/c", "File does not exist"),
        ("a/b\0", "File does not exist"),
        ("\udcff/b", "File does not exist"),
        ("../..//x", "File does not exist"),
    ],
)
def test_a_name_that_is_none_of_a_model_ends_in_one_sentence(name: str, tells: str) -> None:
    with pytest.raises(ConfigError, match=tells) as error:
        resolve_model_path(name)
    assert fault_of_sentence(str(error.value)) is None


def test_a_file_in_the_place_of_a_model_is_told(directory: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory and no GGUF file; give the directory of a checkpoint"):
        resolve_model_path(str(directory / "config.json"))


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "null"),
        (True, "true"),
        (3, "3"),
        ("plain", "plain"),
        ("two\nlines", "'two\\nlines'"),
        ("x" * 500, "x" * 97 + "..."),
        ([[[[[1]]]]], "[[[[...]]]]"),
        (float("nan"), "nan"),
    ],
)
def test_a_value_is_shown_on_one_line_and_cut_off(value: object, text: str) -> None:
    assert shown(value) == text

"""--model: what is taken for a checkpoint, and names that are none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from deploy import model_source
from deploy.errors import UserError
from deploy.model_source import HUB_ID, _download, resolve_model


@pytest.fixture(autouse=True)
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(hub_id: str) -> Path:
        raise AssertionError(f"{hub_id!r} was asked of the hub")

    monkeypatch.setattr(model_source, "_download", download)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "owner" / "model"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_text("")
    monkeypatch.chdir(tmp_path)
    return path


@pytest.mark.parametrize("name", ["owner/model", "./owner/model", "owner/../owner/model"])
def test_a_directory_is_found_before_a_hub_is_asked(directory: Path, name: str) -> None:
    assert resolve_model(name) == directory


@pytest.mark.parametrize(
    "name, tells",
    [
        ("nothing", "there is no such directory"),
        ("model.gguf", "there is no such file; give the path of a GGUF file"),
        ("owner/model.gguf", "there is no such file"),
        ("/a/b/model-Q4_K.gguf", "there is no such file"),
        ("../owner/none", "there is no such directory"),
        ("owner/..", "owner/.. is no checkpoint"),
        ("other/..", "there is no such directory"),
        ("a/b/c", "there is no such directory"),
        ("a--b/c", "there is no such directory"),
        ("owner/mod\x1b[31mel", "'owner/mod\\x1b[31mel'"),
        ("owner/none\n", "'owner/none\\n'"),
        ("owner/no\nne", "'owner/no\\nne'"),
        ("owner/mod\0el", "no directory can have this name"),
        ("owner/\udcff", "'owner/\\udcff'"),
        ("öwner/none", "there is no such directory"),
        ("x" * 300, "File name too long"),
        ("owner/" + "x" * 91, "there is no such directory"),
        ("a/" * 5000, "File name too long"),
        ("~no-such-user-here/model", "there is no such user"),
        ("owner/model/config.json", "is no directory"),
        ("owner/model/config.json/x", "there is no such directory"),
        ("owner", "is no checkpoint"),
        ("/dev/null", "is no directory"),
    ],
)
def test_a_name_that_is_no_checkpoint_ends_in_one_sentence(directory: Path, name: str, tells: str) -> None:
    with pytest.raises(UserError) as error:
        resolve_model(name)
    sentence = str(error.value)
    assert tells in sentence and sentence.isprintable() and len(sentence) < 400 and ";" in sentence, sentence
    assert sentence.startswith("--model ")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("config.json")])
def test_a_config_that_is_no_file_makes_no_checkpoint(directory: Path, make: Callable[[Path], object]) -> None:
    (directory / "config.json").unlink()
    make(directory / "config.json")
    with pytest.raises(UserError, match="--model owner/model is no checkpoint"):
        resolve_model("owner/model")


@pytest.mark.parametrize(
    ("files", "lacks"),
    [
        (["model.safetensors"], "it has no config.json"),
        (["config.json"], r"it has no \*.safetensors"),
        (["config.json", "pytorch_model.bin"], "its weights are pickle files .* with ./everbatch convert"),
        (["params.json", "consolidated.00.pth"], "it has Meta's files; make one of them with ./everbatch convert"),
    ],
)
def test_what_a_directory_lacks_is_told(tmp_path: Path, files: list[str], lacks: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=lacks):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("error", [HFValidationError("a\nb"), LocalEntryNotFoundError("/root/x"), OSError("/root/x")])
def test_a_model_that_cannot_be_fetched_ends_in_one_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError) as caught:
        _download("owner/name")
    sentence = str(caught.value)
    assert sentence.startswith("--model owner/name is not in the local cache") and type(error).__name__ in sentence
    assert sentence.isprintable() and "/root" not in sentence


LONGEST = "x/" + "y" * 94
NAMES = "owner/name o/n Qwen/Qwen2.5-0.5B-Instruct a_b/c.d o/n:Q4_K_M o/n:Tiny-UD-Q4_K_XL"
NO_NAMES = "a /a a/ -a/b a/b. a/.b a..b/c a/b--c a/b: a/b:Q4: a/b:Q4/c a:b/c a/b:-Q4 a/b:Q4:Q8"


@pytest.mark.parametrize("name", [*NAMES.split(), LONGEST, LONGEST + ":Q8_0"])
def test_hub_ids_are_told_from_paths(name: str) -> None:
    assert HUB_ID.fullmatch(name)


@pytest.mark.parametrize("name", [*NO_NAMES.split(), "a/b c", LONGEST + "y", "a/b:" + "x" * 97])
def test_what_the_hub_would_not_take_is_not_asked_of_it(name: str) -> None:
    assert not HUB_ID.fullmatch(name)

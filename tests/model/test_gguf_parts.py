"""A model in several GGUF files, written by llama.cpp's own package, is that of one file, whichever part is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from backend.api import EngineConfig
from backend.api.checkpoint.gguf import gguf_file, read_header
from backend.api.checkpoint.gguf_parts import model_name, parts_of
from backend.api.config.schema import ModelConfigSection
from backend.api.errors import ConfigError
from backend.architectures.checkpoint import examine
from backend.executor import Executor
from backend.executor.own_processors import OwnProcessors
from backend.executor.served_engine import mark_of
from backend.models.loader import load_directory, open_directory, resolve_model_path
from backend.text.tokenizer import Tokenizer
from backend.worker.fingerprint import state_of
from benchmarks.quality.perplexity import row_logits
from compat.llm import LLM
from compat.llm.worker import GenerationExecutorProxy
from deploy.model_source import resolve_model
from deploy.serve import ServeOptions
from tests.model.gguf_files import write_gguf
from tests.model.hostile import gguf_parts, ggufs
from tests.text.gguf_tokenizers import add_tokenizer
from tests.text.tokenizers_made import llama3_bpe
from tools.make_random_model import make_random_model

CPU = torch.device("cpu")
NAMES = [f"Tiny-Q8_0-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
SIZES = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, head_dim=32)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(one file, directory with the same model in three parts)"""
    backend, config = llama3_bpe()
    directory = tmp_path_factory.mktemp("parts")
    vocab_size = backend.get_vocab_size()
    model = make_random_model(directory / "model", "llama3", seed=4, vocab_size=vocab_size, eos_token_id=1, **SIZES)
    written = []
    for name, part_tensors in (("whole", 0), ("parts", 8)):
        (directory / name).mkdir()
        file = directory / name / "Tiny-Q8_0.gguf"
        write_gguf(
            model, file, "Q8_0", lambda writer: add_tokenizer(writer, backend, config, pre="llama-bpe"), part_tensors
        )
        written.append(file)
    return written[0], written[1].parent


def test_the_parts_have_the_tensors_of_the_whole_in_files_of_their_own(places: tuple[Path, Path]) -> None:
    whole, parts = places
    assert sorted(path.name for path in parts.iterdir()) == NAMES
    one, several = read_header(whole), read_header(parts / NAMES[1])
    assert list(one.tensors) == list(several.tensors)
    assert {place.path.name for place in several.tensors.values()} == set(NAMES)
    assert one.settings == {key: value for key, value in several.settings.items() if not key.startswith("split.")}


@pytest.mark.parametrize("named", [*NAMES, ""])
def test_any_part_or_their_directory_names_the_model(places: tuple[Path, Path], named: str) -> None:
    whole, parts = places
    found = resolve_model_path(str(parts / named))
    assert found == gguf_file(parts / named) == resolve_model(str(parts / named)) == parts / NAMES[0]
    rows = torch.arange(40)[None]
    expected = row_logits(load_directory(whole, None, "float32", CPU), rows)
    assert torch.equal(row_logits(load_directory(parts / named, None, "float32", CPU), rows), expected)
    assert examine(parts / named) == examine(whole)
    assert Tokenizer.from_directory(parts / named).encode("The quick") == Tokenizer.from_directory(whole).encode(
        "The quick"
    )


def test_each_part_is_seen_by_what_tells_checkpoints_apart(places: tuple[Path, Path], tmp_path: Path) -> None:
    """The cache of packed weights and that of kept sessions."""
    shutil.copytree(places[1], tmp_path / "parts")
    first, last = tmp_path / "parts" / NAMES[0], tmp_path / "parts" / NAMES[2]
    files = open_directory(first).files
    assert [path.name for path in files] == NAMES
    state, mark = state_of(files), mark_of(first)
    content = bytearray(last.read_bytes())
    last.unlink()
    last.write_bytes(content + bytes(32))
    assert state_of(files)[:2] == state[:2] and state_of(files)[2] != state[2]
    assert mark and mark_of(first) != mark


def test_an_llm_of_a_part_saves_all(places: tuple[Path, Path], tmp_path: Path) -> None:
    with LLM(places[1] / NAMES[1], engine_config=EngineConfig(ModelConfigSection(num_threads=1))) as llm:
        llm.save(tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == NAMES


def test_an_engine_of_its_own_is_given_the_name_of_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a hub's cache is a link, whose target has no name that tells the parts."""
    given: list[str] = []
    monkeypatch.setattr(Executor, "launch", lambda config, *_, **__: given.append(config.model.path))
    monkeypatch.chdir(tmp_path)
    Path("sha").touch()
    Path(NAMES[0]).symlink_to("sha")
    GenerationExecutorProxy.start_engine(EngineConfig(ModelConfigSection(path=NAMES[0])), OwnProcessors(), None)[1]()
    assert given == [str(tmp_path / NAMES[0])]


@pytest.mark.parametrize("named", [0, 2])
def test_clients_call_it_by_the_name_of_the_model(places: tuple[Path, Path], named: int) -> None:
    given = str(places[1] / NAMES[named])
    assert ServeOptions(model=given).served_names == ("Tiny", "everbatch", "Tiny-Q8_0", given)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("a-00001-of-00001.gguf", "a"),
        ("a-00012-of-00345.gguf", "a"),
        ("a-1-of-2.gguf", "a-1-of-2"),
        ("-00001-of-00002.gguf", "-00001-of-00002"),
        ("a.gguf", "a"),
        ("a", "a"),
    ],
)
def test_names_of_models(file: str, name: str) -> None:
    assert model_name(file) == name


@pytest.mark.parametrize("name", ["a-00004-of-00003.gguf", "a-00000-of-00003.gguf", "a-00001-of-00001.gguf", "a.gguf"])
def test_a_name_that_is_none_of_several_parts_is_a_file_of_its_own(name: str) -> None:
    assert parts_of(Path(name)) == (Path(name),)


def test_a_first_part_without_tensors_is_read(tmp_path: Path) -> None:
    """As `llama-gguf-split --no-tensor-first-split` writes it."""

    def move(first: ggufs.Gguf, second: ggufs.Gguf) -> None:
        second.tensors, first.tensors = first.tensors | second.tensors, {}

    gguf_parts.two_parts(move)(tmp_path)
    header = read_header(tmp_path / gguf_parts.FIRST)
    assert {place.path.name for place in header.tensors.values()} == {gguf_parts.SECOND}
    load_directory(tmp_path, None, "float32", CPU)


def test_other_files_are_no_parts(tmp_path: Path) -> None:
    gguf_parts.two_parts()(tmp_path)
    (tmp_path / "other.gguf").write_bytes(ggufs.sound().content())
    with pytest.raises(ConfigError, match="2 models in GGUF files, model among them; give the path of one file"):
        gguf_file(tmp_path)
    assert gguf_file(tmp_path / gguf_parts.SECOND) == tmp_path / gguf_parts.FIRST


def test_parts_in_a_folder_of_a_hub_s_snapshot_are_read_through_their_links(tmp_path: Path) -> None:
    folder = tmp_path / "models--a--b" / "snapshots" / "abc" / "Q8_0"
    folder.mkdir(parents=True)
    blobs = folder.parents[2] / "blobs"
    blobs.mkdir()
    gguf_parts.two_parts()(folder)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"sha{number}")
        file.symlink_to(f"../../../blobs/sha{number}")
    found = resolve_model(str(folder / gguf_parts.SECOND))
    assert found == folder / gguf_parts.FIRST
    load_directory(found, None, "float32", CPU)
    (blobs / "sha0").rename(tmp_path / "outside")
    (folder / gguf_parts.FIRST).unlink()
    (folder / gguf_parts.FIRST).symlink_to("../../../../outside")
    with pytest.raises(ConfigError, match="is a link out of the model's directory"):
        gguf_file(folder)

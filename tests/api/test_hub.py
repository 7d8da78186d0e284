"""Hub ids: which files of a repository a name means, what is downloaded, and what the cache holds without a network."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from backend.api.checkpoint.hub import MAX_LISTED, fetch, gguf_files
from backend.api.errors import ConfigError
from backend.models.loader import resolve_model_path
from deploy.errors import UserError
from deploy.model_source import resolve_model
from tests.model.hostile import ggufs

REPOSITORY = "owner/Tiny-GGUF"
PARTS = [f"Tiny-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
SIDES = ["README.md", "config.json", "mmproj-Tiny-Q4_K_M.gguf", "imatrix-Q4_K_M.gguf", "../Q4_K_M.gguf", "/Q4_K_M.gguf"]
SEVERAL = [*SIDES, "Tiny-Q4_K_M.gguf", "Tiny-IQ4_XS.gguf", "Tiny-UD-Q4_K_XL.gguf", "Tiny-f16.gguf", *PARTS]


@pytest.mark.parametrize(
    ("quantisation", "names", "expected"),
    [
        ("Q4_K_M", SEVERAL, ["Tiny-Q4_K_M.gguf"]),
        ("q4_k_m", SEVERAL, ["Tiny-Q4_K_M.gguf"]),
        ("Q8_0", SEVERAL, PARTS),
        ("F16", SEVERAL, ["Tiny-f16.gguf"]),
        ("Q4_K_XL", SEVERAL, ["Tiny-UD-Q4_K_XL.gguf"]),
        ("UD-Q4_K_XL", SEVERAL, ["Tiny-UD-Q4_K_XL.gguf"]),
        ("Tiny-IQ4_XS", SEVERAL, ["Tiny-IQ4_XS.gguf"]),
        ("Q4_0", ["q4_0.gguf", "a/b-Q4_0.gguf"], ["q4_0.gguf"]),
        ("Q4_0", ["tiny.q4_0.gguf", "tiny.iq4_0.gguf"], ["tiny.q4_0.gguf"]),
        ("BF16", ["BF16/Tiny-00001-of-00002.gguf", "BF16/Tiny-00002-of-00002.gguf", "Tiny-F16.gguf"],
         ["BF16/Tiny-00001-of-00002.gguf", "BF16/Tiny-00002-of-00002.gguf"]),
        ("A-Q8_0", ["A-Q8_0.gguf", "B-A-Q8_0.gguf"], ["A-Q8_0.gguf"]),
        ("Q8_0", ["Q8_0/A-1.gguf", "Q8_0_L/A.gguf"], ["Q8_0/A-1.gguf"]),
        ("Q8_0", ["A-Q8_0.gguf", "A-Q8_0-fixed.gguf"], ["A-Q8_0.gguf"]),
        ("Q8_0", ["A-Q8_0-fixed.gguf", "A-Q8_0_L-fixed.gguf", "A.IQ8_0.gguf"], ["A-Q8_0-fixed.gguf"]),
        ("Q4.0", ["A-Q4_0.gguf", "A-Q4.0.gguf"], ["A-Q4.0.gguf"]),
        ("Q8_0", [*PARTS, "model.safetensors"], PARTS),
        ("", SEVERAL, ["Tiny-Q4_K_M.gguf"]),
        ("", [*PARTS, "Tiny-F16.gguf"], PARTS),
        ("", ["README.md", "Tiny-TQ2_0.gguf"], ["Tiny-TQ2_0.gguf"]),
        ("", [*SEVERAL, "model.safetensors"], []),
        ("", ["README.md", "pytorch_model.bin"], []),
    ],
)  # fmt: skip
def test_the_files_that_a_name_means(quantisation: str, names: list[str], expected: list[str]) -> None:
    assert gguf_files(REPOSITORY, quantisation, reversed(names)) == expected


@pytest.mark.parametrize(
    ("quantisation", "names", "told"),
    [
        ("Q5_1", ["a-Q4_K_M.gguf", *PARTS], "has no GGUF file of Q5_1; put one of these .* a colon: Q8_0, Q4_K_M$"),
        ("Q4_K", ["a-Q4_K_M.gguf", "b.gguf"], "of Q4_K; put one of these behind the name and a colon: Q4_K_M, b"),
        ("0", PARTS, "of 0; put"),
        ("K_M", ["a-Q4_K_M.gguf"], "of K_M; put"),
        ("", ["a-F16.gguf", "a-Q2_K.gguf"], "has no GGUF file of Q4_K_M or Q8_0; put one .* colon: F16, Q2_K"),
        ("Q8_0", ["Q8_0/a.gguf", "b-Q8_0.gguf"], "has 2 models of Q8_0; put one .* colon: a, b-Q8_0"),
        ("Q8_0", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "has 2 models of Q8_0; put one .* colon: a-Q8_0, b-Q8_0"),
        ("", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "has 2 models of Q8_0"),
        ("Q8_0", ["model.safetensors", "mmproj-Q8_0.gguf"], "has no GGUF file; leave out :Q8_0"),
        ("Q8_0", ["a-Q8_0.gguf\n"], "has no GGUF file"),
        ("x" * 999, ["a-Q8_0.gguf"], r"of x{97}\.\.\.; put one"),
        ("Q8_0", [f"{number}.gguf" for number in range(99)], f"or one of {99 - MAX_LISTED} more"),
    ],
)  # fmt: skip
def test_a_name_that_means_none_or_several_is_told_what_there_is(
    quantisation: str, names: list[str], told: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{REPOSITORY} .*{told}") as error:
        gguf_files(REPOSITORY, quantisation, names)
    assert str(error.value).isprintable() and len(str(error.value)) < 400


class Hub:
    """A hub with one repository, whose files are sound GGUF files; `asked` are the files that were downloaded."""

    def __init__(self, directory: Path, names: list[str]) -> None:
        self.directory, self.names, self.asked = directory, names, list[str]()

    def list_repo_files(self, repository: str) -> list[str]:
        assert repository == REPOSITORY
        return self.names

    def snapshot_download(self, repository: str, allow_patterns: Iterable[str], local_files_only: bool) -> str:
        assert repository == REPOSITORY and not local_files_only
        for name in self.names:
            if any(fnmatchcase(name, pattern) for pattern in allow_patterns):
                (self.directory / name).parent.mkdir(parents=True, exist_ok=True)
                (self.directory / name).write_bytes(ggufs.sound().content())
                self.asked.append(name)
        return str(self.directory)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], Hub]:
    def make(names: list[str]) -> Hub:
        made = Hub(tmp_path / "snapshot", names)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
        return made

    monkeypatch.chdir(tmp_path)
    return make


@pytest.mark.parametrize("resolve", [resolve_model, resolve_model_path])
@pytest.mark.parametrize(
    ("quantisation", "expected"),
    [(":q4_0", "a[1]-Q4_0.gguf"), (":Q8_0", "Q8/a-Q8_0.gguf"), (":Q6_K", "Q8/a-Q6_K.gguf"), ("", "Q8/a-Q8_0.gguf")],
)
def test_the_launcher_and_a_program_fetch_that_file_alone(
    hub: Callable[[list[str]], Hub], quantisation: str, expected: str, resolve: Callable[[str], Path]
) -> None:
    made = hub(["config.json", "a[1]-Q4_0.gguf", "a1-Q4_0.gguf.md", "Q8/a-Q8_0.gguf", "Q8/a-Q6_K.gguf"])
    assert resolve(REPOSITORY + quantisation) == made.directory / expected
    assert made.asked == [expected]


def test_a_checkpoint_is_fetched_without_its_gguf_files(hub: Callable[[list[str]], Hub]) -> None:
    made = hub(["config.json", "model.safetensors", "a-Q8_0.gguf", "model.py", "pytorch_model.bin", "tokenizer.model"])
    assert resolve_model(REPOSITORY) == resolve_model_path(REPOSITORY) == made.directory
    assert set(made.asked) == {"config.json", "model.safetensors", "tokenizer.model"}


@pytest.mark.parametrize(("resolve", "raised"), [(resolve_model, UserError), (resolve_model_path, ConfigError)])
def test_what_there_is_is_told_by_the_launcher_and_to_a_program(
    hub: Callable[[list[str]], Hub], resolve: Callable[[str], Path], raised: type[Exception]
) -> None:
    hub(["a-Q4_0.gguf", "a-Q8_0.gguf"])
    with pytest.raises(raised, match=rf"^(--)?model {REPOSITORY} has no GGUF file of Q6_K; .*: Q4_0, Q8_0$"):
        resolve(f"{REPOSITORY}:Q6_K")


def test_a_repository_of_neither_is_no_checkpoint(hub: Callable[[list[str]], Hub]) -> None:
    hub(["README.md", "config.json"])
    with pytest.raises(UserError, match="neither a safetensors checkpoint nor a GGUF file of it; choose another model"):
        resolve_model(REPOSITORY)


class TestWithoutNetwork:
    """The hub's own library over a cache that an earlier download has filled."""

    @pytest.fixture(autouse=True)
    def snapshot(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        folder = tmp_path / "models--owner--Tiny-GGUF"
        for name in ("refs", "blobs", "snapshots/abc"):
            (folder / name).mkdir(parents=True)
        (folder / "refs" / "main").write_text("abc")
        return folder / "snapshots" / "abc"

    def put(self, snapshot: Path, *names: str) -> None:
        for name in names:
            (snapshot.parents[1] / "blobs" / name).write_bytes(ggufs.sound().content())
            (snapshot / name).symlink_to(f"../../blobs/{name}")

    @pytest.mark.parametrize("quantisation", ["", ":Q4_0"])
    def test_what_was_fetched_is_served(self, snapshot: Path, quantisation: str) -> None:
        self.put(snapshot, "a-Q4_0.gguf")
        assert fetch(REPOSITORY + quantisation) == snapshot / "a-Q4_0.gguf"
        assert resolve_model(REPOSITORY + quantisation) == snapshot / "a-Q4_0.gguf"

    def test_another_quantisation_is_not_there(self, snapshot: Path) -> None:
        self.put(snapshot, "a-Q4_0.gguf", "b-Q5_0.gguf")
        with pytest.raises(UserError, match="has no GGUF file of Q8_0; put one of these .*: Q4_0, Q5_0"):
            resolve_model(f"{REPOSITORY}:Q8_0")

    def test_a_part_that_was_not_fetched_is_told(self, snapshot: Path) -> None:
        self.put(snapshot, PARTS[1])
        with pytest.raises(UserError, match=f"{PARTS[0]} is missing"):
            resolve_model(f"{REPOSITORY}:Q8_0")

    def test_another_repository_is_not_there(self) -> None:
        with pytest.raises(LocalEntryNotFoundError):
            fetch("owner/other:Q8_0")
        with pytest.raises(UserError, match="owner/other:Q8_0 is not in the local cache and cannot be downloaded"):
            resolve_model("owner/other:Q8_0")


def test_a_net_that_is_down_is_told_whatever_the_library_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its HTTP library has an error of its own, which is no OSError."""

    def fail(*_: object) -> NoReturn:
        raise Exception("connection refused")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)
    with pytest.raises(UserError, match="is not in the local cache and cannot be downloaded .LocalEntryNotFoundError"):
        resolve_model("owner/name:Q8_0")

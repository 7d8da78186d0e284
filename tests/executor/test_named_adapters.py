"""LoRA adapters that get their names, and lose them, while the engine serves: allowed directories only, told to every client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.api import EngineConfig, EngineUnavailable, ErrorCode, InvalidRequest, Response
from backend.api.checkpoint.adapter_files import allowed_directory
from backend.api.config.schema import LoraSection
from backend.api.lora import LoraConfig
from backend.core.step import PreparedAdapter
from backend.engine import names
from backend.engine.names import AdapterNames
from backend.executor import Executor
from tests.fakes.adapter_files import write_adapter
from tests.fakes.hash_worker import HashWorkerGroup


class Reader(HashWorkerGroup):
    """Reads an adapter when the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.read = threading.Event(), []
        self.gate.set()

    def prepare_adapter(self, lora: LoraConfig) -> PreparedAdapter:
        assert self.gate.wait(30)
        self.read.append(lora.path)
        return PreparedAdapter(lora.path, 8, 1000 if "large" in lora.path else 10, 10, None)


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    root = tmp_path / "allowed"
    for name in ("doll", "sheep", "large"):
        write_adapter(root / name)
    write_adapter(root / "high", rank=65)
    write_adapter(root / "head", module="lm_head")
    write_adapter(tmp_path / "outside")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "loop").symlink_to(root / "loop")
    (root / "file").write_text("")
    return root


@pytest.fixture
def workers() -> Reader:
    return Reader()


@pytest.fixture
def executor(allowed: Path, workers: Reader) -> Iterator[Executor]:
    lora = LoraSection(enabled=True, host_bytes=100, allowed_dir=str(allowed), adapters=("old=/loras/old",))
    with make(lora, workers) as executor:
        yield executor


def make(lora: LoraSection, workers: Reader) -> Executor:
    """An executor whose configured adapters are not read at the start: they do not exist."""
    from unittest.mock import patch

    from backend.engine import prefetch

    with patch.object(prefetch, "check_adapter_files"):
        return Executor.in_process(EngineConfig(lora=lora), workers)


def change(executor: Executor, name: str, directory: str | None) -> Response:
    answers: list[Response] = []
    there = threading.Event()

    def on_response(response: Response) -> None:
        answers.append(response)
        there.set()

    executor.name_adapter(name, directory, on_response)
    assert there.wait(30)
    return answers[0]


def test_an_adapter_is_named_once_it_has_been_read_and_until_it_is_unloaded(executor: Executor, allowed: Path) -> None:
    assert executor.adapters == {"old": "/loras/old"}
    assert not change(executor, "doll", "doll").has_error()
    assert executor.adapters == {"old": "/loras/old", "doll": str(allowed / "doll")}
    assert not change(executor, "again", str(allowed / "doll")).has_error()
    assert not change(executor, "doll", "./sheep/../doll").has_error(), "the same adapter under its name"
    taken = change(executor, "doll", "sheep")
    assert (
        taken.error_code is ErrorCode.INVALID_ARGUMENT and "doll has already been loaded; unload it" in taken.error_msg
    )
    assert not change(executor, "doll", None).has_error() and "doll" not in executor.adapters
    assert not change(executor, "old", None).has_error() and set(executor.adapters) == {"again"}
    gone = change(executor, "doll", None)
    assert gone.error_code is ErrorCode.NOT_FOUND and "there is no LoRA adapter doll to unload" in gone.error_msg
    assert not change(executor, "doll", "sheep").has_error()


@pytest.mark.parametrize(
    "directory",
    [
        "",
        ".",
        "..",
        "../outside",
        "/etc",
        "link",
        "loop",
        "file",
        "none",
        "doll\0",
        "doll\n",
        "\ud800",
        "d" * 300,
        "d/" * 5000,
    ],
)
def test_no_other_directory_is_looked_at(executor: Executor, workers: Reader, directory: str) -> None:
    before = list(workers.read)
    refused = change(executor, "evil", directory)
    assert refused.error_code is ErrorCode.INVALID_ARGUMENT
    assert "is not one of those that LoRA adapters may be loaded from; put the adapter into" in refused.error_msg
    assert "allowed/" not in refused.error_msg and workers.read == before and "evil" not in executor.adapters


def test_what_exists_elsewhere_is_refused_as_what_does_not(allowed: Path, tmp_path: Path) -> None:
    sentences = set()
    for directory in (tmp_path / "outside", tmp_path / "missing"):
        with pytest.raises(InvalidRequest) as refusal:
            allowed_directory(str(directory), str(allowed))
        sentences.add(str(refusal.value).replace(str(directory), "it"))
    assert len(sentences) == 1


@pytest.mark.parametrize("name", ["", "n" * 257, "two\nlines", "\ud800"])
def test_names_are_printable(executor: Executor, name: str) -> None:
    assert "give it a name of 1 to 256 printable characters" in change(executor, name, "doll").error_msg


@pytest.mark.parametrize(
    ("directory", "sentence"),
    [
        (
            "head",
            "tensor base_model.model.lm_head.lora_A.weight is no LoRA of a decoder layer's projection; leave it out",
        ),
        ("high", "it has rank 65 in layer 0, q_proj, the limit is 64 (lora.max_rank)"),
        ("large", "takes 1000 bytes, the host cache has 100 (lora.host_bytes)"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused_when_it_is_loaded(
    executor: Executor, directory: str, sentence: str
) -> None:
    refused = change(executor, "new", directory)
    assert sentence in refused.error_msg and "new" not in executor.adapters


@pytest.mark.parametrize("lora", [LoraSection(enabled=True), LoraSection(allowed_dir="/tmp")])
def test_without_an_allowed_directory_nothing_is_changed(workers: Reader, lora: LoraSection) -> None:
    with make(lora, workers) as executor:
        for directory in ("doll", None):
            refused = change(executor, "doll", directory)
            assert refused.error_code is ErrorCode.UNSUPPORTED and "start it with lora.enabled and" in refused.error_msg


def test_loads_that_have_not_ended_are_answered_when_the_engine_stops(executor: Executor, workers: Reader) -> None:
    """One is being read, the others wait behind it."""
    workers.gate.clear()
    answers: list[Response] = []
    for number in range(names.MAX_LOADING):
        executor.name_adapter(f"doll-{number}", "doll", answers.append)
    assert (
        "16 LoRA adapters are being loaded, the limit is 16; try later"
        in change(executor, "one more", "doll").error_msg
    )
    executor.shutdown()
    workers.gate.set()
    assert len(answers) == names.MAX_LOADING
    assert all(each.error_code is ErrorCode.UNAVAILABLE for each in answers)


def test_the_number_of_names_is_bounded(monkeypatch: pytest.MonkeyPatch, executor: Executor) -> None:
    monkeypatch.setattr(names, "MAX_NAMES", 2)
    assert not change(executor, "doll", "doll").has_error()
    assert "2 LoRA adapters have names, the limit is 2; unload one" in change(executor, "sheep", "sheep").error_msg
    assert not change(executor, "old", None).has_error() and not change(executor, "sheep", "sheep").has_error()


def test_a_name_that_two_clients_load_at_once_goes_to_the_first(allowed: Path, workers: Reader) -> None:
    """Both have been accepted before either has been read."""
    told: list[Response] = []
    lora = LoraSection(enabled=True, allowed_dir=str(allowed))
    table = AdapterNames(lora, workers.prepare_adapter, lambda adapter: None, told.append)
    woken = threading.Semaphore(0)
    table.on_outcome(woken.release)
    workers.gate.clear()
    table.change(1, "doll", "doll")
    table.change(2, "doll", "sheep")
    workers.gate.set()
    for _ in range(2):
        assert woken.acquire(timeout=30)
    table.answer()
    assert [each.has_error() for each in told] == [False, True] and "already been loaded" in told[1].error_msg
    assert table.take_change() == {"doll": str(allowed / "doll")} and table.take_change() is None
    workers.gate.clear()
    table.change(3, "late", "sheep")
    table.close(EngineUnavailable("over"))
    workers.gate.set()
    assert [each.error_msg for each in told[2:]] == ["over"]

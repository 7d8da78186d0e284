"""Compiles native/*.cpp on first use and loads the result.

The cache is `$EVERBATCH_CACHE`, else `.run/native` of the checkout, else `~/.cache/everbatch` if the checkout is read-only. An
entry's name contains a hash over sources, headers, flags and compiler. Every entry also ends with that hash, after the last ELF
section, so that a truncated library is recognised: loading it would not raise an error but end the process with SIGBUS.

A library is code. So a cache or an entry that anybody but this user and root could have written is not used
(kernels/cpu/trust.py): the next cache is taken instead, and if there is none, NativeUnavailable says why.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import CDLL
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from kernels.cpu.isa import chosen_isas, compiler_flags
from kernels.cpu.trust import distrust_of_directory, make_private_directory, open_trusted

log = logging.getLogger("everbatch.kernels")
SOURCES = Path(__file__).parent / "native"
CACHE_VARIABLE = "EVERBATCH_CACHE"

COMPILE_TIME = (
    "half a minute to two minutes on two cores"  # 26 to 96 s were seen; docs/cpu.md and the README say the same
)
_FLAGS = "-std=c++17 -fopenmp -fPIC -fno-math-errno -fno-trapping-math -Wall -Wextra".split()
_OPTIMISED = ["-O3"]
_SANITIZED = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address"]
# Only everbatch_* is exported; otherwise all variants in one process would share gcc's unique symbols, inline thread_locals.
_EXPORTS = "{ global: everbatch_*; local: *; };\n"
_CHECKOUT = Path(__file__).resolve().parents[2]


class NativeUnavailable(Exception):
    """The native kernels cannot be built or loaded; the message is one sentence that names the remedy."""


class NativeLibrary(CDLL):
    """The native kernels, compiled for the variant `isa`. Another `version` may pack weights in another way."""

    def __init__(self, path: Path, isa: str, version: str):
        super().__init__(str(path))
        self.isa, self.version = isa, version


def load(
    isa: str | None = None,
    progress: Callable[[str], None] | None = None,
    sanitize: bool = False,
    *,
    sources: Path = SOURCES,
) -> NativeLibrary:
    """The library of variant `isa`, compiled first unless it is in the cache.

    isa: None means EVERBATCH_ISA if set, else the best variant that this machine can run and its compiler knows.
    progress: gets one line before and one after a compilation.
    sanitize: build with AddressSanitizer; this process must have been started with asan_environment().
    sources: the directory of the *.cpp and *.h; functions named everbatch_* are exported.
    Raises NativeUnavailable, and ValueError for a variant that this machine cannot run.
    """
    import torch  # noqa: F401  # The library that is loaded afterwards binds to torch's libgomp.so.1.

    recipe = _best_recipe((isa,) if isa else chosen_isas(), sanitize, sources)
    if sanitize and "libasan" not in Path("/proc/self/maps").read_text():
        raise NativeUnavailable(
            "AddressSanitizer must be there from the start: run this process with asan_environment()"
        )
    path = recipe.cached() or recipe.compile(progress)
    try:
        return NativeLibrary(path, recipe.isa, recipe.name)
    except OSError:  # the cached file is damaged, or its mount forbids execution
        path = recipe.compile(progress, instead_of=path)
    try:
        return NativeLibrary(path, recipe.isa, recipe.name)
    except OSError as error:
        raise NativeUnavailable(
            f"the compiled native kernels cannot be loaded ({error}); "
            f"set {CACHE_VARIABLE} to a directory whose mount allows execution if that is the cause"
        ) from error


def compile_ahead() -> None:
    """Have the cache hold what `load` will ask for. Needs no package; raises NativeUnavailable."""
    recipe = _best_recipe(chosen_isas(), sanitize=False, sources=SOURCES)
    if recipe.cached() is None:
        recipe.compile(progress=None)


def asan_environment() -> dict[str, str]:
    """Environment variables for a process that will call load(sanitize=True). Raises NativeUnavailable without libasan.

    libstdc++ is loaded early too, because AddressSanitizer looks up the function that throws C++ exceptions only once.
    """
    compiler = _find_compiler()
    libraries = [
        _run([*compiler, f"-print-file-name={name}"]).stdout.strip() for name in ("libasan.so", "libstdc++.so.6")
    ]
    if not all(Path(library).is_absolute() for library in libraries):
        raise NativeUnavailable(f"{compiler[0]} has no libasan: install g++ (apt-get install g++) and set CXX=g++")
    return {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}


@dataclass(frozen=True)
class _Recipe:
    """Everything that determines the result of a compilation."""

    isa: str
    label: str  # names the variant; the cache keeps one entry for each label
    key: str
    compiler: list[str]
    flags: list[str]
    sources: Path

    @classmethod
    def of(cls, isa: str, sanitize: bool, sources: Path) -> _Recipe:
        flags = [*_FLAGS, *(_SANITIZED if sanitize else _OPTIMISED), *compiler_flags(isa)]
        compiler = _find_compiler()
        version = _run([*compiler, "--version"])
        if version.returncode:
            raise NativeUnavailable(
                f"{shlex.join(compiler)} --version fails: set CXX to a working C++ compiler such as g++"
            )
        digest = hashlib.sha256(repr((compiler, version.stdout, flags, _EXPORTS)).encode())
        for file in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")]):
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)} ".encode() + content)
        label = f"everbatch_{isa}_asan" if sanitize else f"everbatch_{isa}"
        return cls(isa, label, digest.hexdigest()[:20], compiler, flags, sources)

    @property
    def name(self) -> str:
        return f"{self.label}-{self.key}"

    @property
    def is_known(self) -> bool:
        """True if the compiler knows the flags."""
        return not _run([*self.compiler, *self.flags, "-fsyntax-only", "-x", "c++", os.devnull]).returncode

    def cached(self) -> Path | None:
        """The library, if one of the caches, which may be read-only, holds a complete one."""
        paths = (directory / f"{self.name}.so" for directory in cache_directories() if _is_usable(directory))
        return next((path for path in paths if self._is_whole(path)), None)

    def compile(self, progress: Callable[[str], None] | None, instead_of: Path | None = None) -> Path:
        """Compile into the first cache that can be written, unless another process has just done it.

        instead_of: a library that cannot be loaded and is to be replaced.
        """
        try:
            with self._locked_cache() as directory:
                library = directory / f"{self.name}.so"
                if library == instead_of:
                    library.unlink(missing_ok=True)
                if not self._is_whole(library):
                    started = time.monotonic()
                    if progress:
                        progress(f"compiling the native kernels for {self.isa} (once, {COMPILE_TIME})")
                    self._compile_into(library)
                    self._remove_others(directory)
                    if progress:
                        progress(f"compiled the native kernels in {time.monotonic() - started:.1f} s")
                return library
        except OSError as error:
            raise NativeUnavailable(
                f"the native kernels cannot be compiled ({error}); set {CACHE_VARIABLE} to a directory with free space"
            ) from error

    def _compile_into(self, library: Path) -> None:
        files = sorted(self.sources.glob("*.cpp"))
        log = library.with_suffix(".log")
        with tempfile.TemporaryDirectory(prefix=f"{self.label}-", suffix=".part", dir=library.parent) as name:
            directory = Path(name)
            exports = directory / "exports.map"
            exports.write_text(_EXPORTS)
            objects = [directory / f"{file.stem}.o" for file in files]
            start = [*self.compiler, *self.flags]
            commands = [[*start, "-c", str(file), "-o", str(obj)] for file, obj in zip(files, objects)]
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                done = list(pool.map(_run, commands))
            result = directory / "library.so"
            if not any(process.returncode for process in done):
                only_exports = ["-Xlinker", f"--version-script={exports}"]
                link = [*start, "-shared", *only_exports, *map(str, objects), "-o", str(result)]
                done.append(_run(link))
            log.write_text("\n".join(f"{shlex.join(process.args)}\n{process.stdout}" for process in done))
            failed = next((process for process in done if process.returncode), None)
            if failed is not None:
                raise NativeUnavailable(
                    f"{self.compiler[0]} cannot compile the native kernels for {self.isa}: {_first_error(failed.stdout)} "
                    f"(the whole log is in {log}; a newer g++ may help)"
                )
            with result.open("ab") as file:
                file.write(self.key.encode())
            result.chmod(0o755)  # independent of the umask: others may read it, only this user may write it
            os.replace(result, library)

    def _is_whole(self, library: Path) -> bool:
        """True if the entry is complete, trusted, and made from these sources and flags."""
        try:
            with open_trusted(library) as file:
                file.seek(-len(self.key), os.SEEK_END)
                return file.read() == self.key.encode()
        except OSError:  # it is missing, cut short, or not trusted
            return False

    def _remove_others(self, directory: Path) -> None:
        """Remove older entries of this variant, and files that a killed compilation has left."""
        for path in directory.glob(f"{self.label}-*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.stem != self.name:
                path.unlink(missing_ok=True)

    @contextmanager
    def _locked_cache(self) -> Iterator[Path]:
        """The first cache that is writable and trusted, locked so that no other process compiles this variant in it."""
        directories = cache_directories()
        problem: OSError | str | None = None
        for directory in directories:
            try:
                make_private_directory(directory)
                if reason := distrust_of_directory(directory):
                    log.warning("the cache of native kernels %s is not used: %s", directory, reason)
                    problem = reason
                    continue
                lock = (directory / f"{self.label}.lock").open("a")
            except OSError as error:
                problem = error
                continue
            with lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield directory
            return
        raise NativeUnavailable(
            f"no place for the compiled native kernels, {' nor '.join(map(str, directories))} can be written and trusted "
            f"({problem}): set {CACHE_VARIABLE} to a directory that can"
        )


def _best_recipe(isas: Sequence[str], sanitize: bool, sources: Path) -> _Recipe:
    """The recipe of the first variant that is cached or whose flags the compiler knows; if there is none, of the first one."""
    first = _Recipe.of(isas[0], sanitize, sources)
    recipes = chain([first], (_Recipe.of(isa, sanitize, sources) for isa in isas[1:]))
    return next((recipe for recipe in recipes if recipe.cached() or recipe.is_known), first)


def cache_directories() -> list[Path]:
    """Where compiled kernels may lie, the first choice first. They need not exist."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return [Path(chosen).absolute()]
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    checkout = (
        [_CHECKOUT / ".run" / "native"] if (_CHECKOUT / "pyproject.toml").is_file() else []
    )  # pip leaves that out
    return [*checkout, home / "everbatch"]


def _is_usable(directory: Path) -> bool:
    try:
        return distrust_of_directory(directory) is None
    except OSError:  # it is missing, or this user may not enter it
        return False


def _find_compiler() -> list[str]:
    """The command of the C++ compiler: $CXX, which may have arguments, else the first compiler found by its usual names."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for name in chosen[:1] or ("g++", "c++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            return [path, *chosen[1:]]
    if chosen:
        raise NativeUnavailable(f"CXX names {chosen[0]!r}, which is no program: unset it or set it to a C++ compiler")
    raise NativeUnavailable("no C++ compiler found: install g++ (apt-get install g++) for the native kernels")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a compiler, with its messages in English on `stdout`, and without libraries preloaded into this process."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | {"LC_ALL": "C"}
    return subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if re.search(r"\berror\b", line)), lines[0] if lines else "no message")


if __name__ == "__main__":
    compile_ahead()

"""The native kernels' compiler, cache and variants, on a small source directory of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels.cpu.build import COMPILE_TIME, NativeUnavailable, asan_environment, load
from kernels.cpu.isa import AMX_EMULATED, LADDER, best_isa, compiler_flags, cpu_features, supported_isas

ROOT = Path(__file__).resolve().parents[2]
COMPILER = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "g++", "c++", "clang++"))), None)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: install g++")

HEADER = "#pragma once\n#define ANSWER 41\ninline thread_local int calls = 0;\n"
ANSWER_CPP = """
#include <omp.h>
#include "answer.h"
extern "C" int everbatch_answer() { return ANSWER; }
extern "C" int everbatch_count() { return ++calls; }
extern "C" int everbatch_threads() { return omp_get_max_threads(); }
extern "C" int everbatch_read(int i) { int* p = new int[4](); int x = p[i]; delete[] p; return x; }
extern "C" int everbatch_sum(int n) {
    int sum = 0;
#pragma omp parallel for reduction(+ : sum)
    for (int i = 1; i <= n; i++) sum += i;
    return sum;
}
"""
MACROS_CPP = """
extern "C" int everbatch_macros() {
    int found = 0;
#ifdef __AVX2__
    found |= 1;
#endif
#ifdef __AVX512F__
    found |= 2;
#endif
#ifdef __AVX512BF16__
    found |= 4;
#endif
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
    found |= 8;
#endif
#ifdef EVERBATCH_EMULATE_AMX
    found |= 16;
#endif
    return found;
}
"""
MACROS = {"generic": 0, "avx2": 1, "avx512": 3, "avx512bf16": 7, "amx": 15}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "sources"
    directory.mkdir()
    (directory / "answer.h").write_text(HEADER)
    (directory / "answer.cpp").write_text(ANSWER_CPP)
    (directory / "macros.cpp").write_text(MACROS_CPP)
    monkeypatch.setenv("EVERBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EVERBATCH_ISA", raising=False)
    return directory


@pytest.fixture
def start(sources: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a Python process: a script that finds `load`, `sources` and its arguments in `sys.argv[1:]`."""

    def start(script: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
        head = f"import sys\nfrom pathlib import Path\nfrom kernels.cpu.build import load\nsources = Path({str(sources)!r})\n"
        return subprocess.Popen(
            [sys.executable, "-c", head + script, *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def entries(sources: Path, pattern: str = "*.so") -> list[Path]:
    return sorted((sources.parent / "cache").glob(pattern))


def test_a_library_is_compiled_once_and_then_taken_from_the_cache(sources: Path) -> None:
    lines: list[str] = []
    assert load(progress=lines.append, sources=sources).everbatch_answer() == 41
    assert lines[0] == f"compiling the native kernels for {best_isa()} (once, {COMPILE_TIME})"
    assert len(lines) == 2 and lines[1].endswith(" s")
    assert load(progress=lines.append, sources=sources).everbatch_sum(100) == 5050
    assert len(lines) == 2 and len(entries(sources)) == 1


def test_a_changed_header_is_compiled_anew_and_the_older_library_goes(sources: Path) -> None:
    load(sources=sources)
    other = load("generic" if best_isa() != "generic" else AMX_EMULATED, sources=sources)
    left_by_a_killed_process = sources.parent / "cache" / f"everbatch_{best_isa()}-x.part"
    left_by_a_killed_process.mkdir()
    (sources / "answer.h").write_text(HEADER.replace("41", "42"))
    library = load(sources=sources)
    assert library.everbatch_answer() == 42
    assert entries(sources) == sorted([Path(library._name), Path(other._name)])
    assert not entries(sources, "*.part")


def test_two_processes_at_once_compile_once(
    sources: Path, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    script = "print('ready', flush=True); input(); print(load(progress=print, sources=sources).everbatch_answer())"
    processes = [start(script) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate() for process in processes]
    lines = [output.splitlines() for output, _ in outputs]
    assert [own[-1] for own in lines] == ["41", "41"], outputs
    assert sorted(len(own) for own in lines) == [1, 3]
    assert len(entries(sources)) == 1


def test_a_missing_compiler_is_named_with_its_remedy(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(NativeUnavailable, match="CXX names 'no-such-compiler'.*unset it"):
        load(sources=sources)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(sources))
    with pytest.raises(NativeUnavailable, match="no C.. compiler found: install g.. "):
        load(sources=sources)


def test_a_compiler_that_does_not_know_an_instruction_set_gets_the_next_one(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old-g++"
    refused = "|".join(f"-m{flag}" for flag in ("avx512bf16", "amx-tile", "avx2"))
    old.write_text(
        f'#!/bin/sh\nfor a; do case "$a" in {refused}) echo "error: unrecognized $a"; exit 1;; esac; done\nexec {COMPILER} "$@"\n'
    )
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    lines: list[str] = []
    library = load(progress=lines.append, sources=sources)
    assert library.isa == "generic" and library.everbatch_macros() == MACROS["generic"]
    assert lines[0] == f"compiling the native kernels for generic (once, {COMPILE_TIME})"
    assert load(progress=lines.append, sources=sources).isa == "generic" and len(lines) == 2
    if best_isa() != "generic":
        with pytest.raises(
            NativeUnavailable, match=f"cannot compile the native kernels for {best_isa()}: error: unrecognized"
        ):
            load(best_isa(), sources=sources)


def test_a_source_that_does_not_compile_gives_the_first_error_and_the_log(sources: Path) -> None:
    (sources / "broken.cpp").write_text("int ok;\nint broken = missing_name;\n")
    with pytest.raises(NativeUnavailable, match=r"broken\.cpp:2.*error.*missing_name") as caught:
        load(sources=sources)
    [log] = entries(sources, "*.log")
    assert str(log) in str(caught.value) and "\n" not in str(caught.value)
    assert "broken.cpp -o" in log.read_text() and "missing_name" in log.read_text()
    assert entries(sources, "*.so") == entries(sources, "*.part") == []


def spoiled_copy(sources: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[bytes], bytes]) -> tuple[Path, int]:
    """A second cache, used from now on, whose library is spoiled; its path and its right size.

    Under the old path, the dynamic loader would answer with what this process has already loaded from there.
    """
    path = Path(load(sources=sources)._name)
    cache = sources.parent / "second cache"
    cache.mkdir()
    monkeypatch.setenv("EVERBATCH_CACHE", str(cache))
    (cache / path.name).write_bytes(spoil(path.read_bytes()))
    return cache / path.name, path.stat().st_size


@pytest.mark.parametrize("fraction", [0, 0.5, 0.99])
def test_a_truncated_library_is_compiled_again(sources: Path, monkeypatch: pytest.MonkeyPatch, fraction: float) -> None:
    path, size = spoiled_copy(sources, monkeypatch, lambda content: content[: int(len(content) * fraction)])
    lines: list[str] = []
    assert load(progress=lines.append, sources=sources).everbatch_answer() == 41
    assert len(lines) == 2 and path.stat().st_size == size


def test_a_library_that_is_whole_and_cannot_be_loaded_is_compiled_again_once(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = spoiled_copy(sources, monkeypatch, lambda content: b"not ELF" + content[7:])
    lines: list[str] = []
    assert load(progress=lines.append, sources=sources).everbatch_answer() == 41
    assert len(lines) == 2 and path.read_bytes()[:4] == b"\x7fELF"


def test_a_library_that_can_never_be_loaded_says_why(sources: Path) -> None:
    (sources / "answer.cpp").write_text('int nowhere(); extern "C" int everbatch_answer() { return nowhere(); }')
    with pytest.raises(NativeUnavailable, match="cannot be loaded .*undefined symbol.*nowhere"):
        load(sources=sources)


def test_a_cache_that_cannot_be_written_is_named_with_its_remedy(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = sources / "answer.h" / "below a file"
    monkeypatch.setenv("EVERBATCH_CACHE", str(cache))
    with pytest.raises(NativeUnavailable, match="answer.h/below a file.* set EVERBATCH_CACHE to a directory that can"):
        load(sources=sources)


def test_the_home_directory_holds_the_cache_where_the_checkout_cannot_be_written(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EVERBATCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("kernels.cpu.build._CHECKOUT", sources / "answer.h")
    lines: list[str] = []
    for _ in range(2):
        library = load(progress=lines.append, sources=sources)
        assert Path(library._name).parent == tmp_path / "home" / "everbatch"
    assert len(lines) == 2


def test_the_library_shares_the_one_libgomp_of_torch(
    sources: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    script = """
import torch
torch.set_num_threads(3)
library = load(sources=sources)
print(library.everbatch_sum(100), library.everbatch_threads())
print(*{line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.split()[-1].rpartition("/")[2]})
"""
    process = start(script)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    first, mapped = output.splitlines()
    assert first == "5050 3"
    [runtime] = mapped.split()
    assert Path(runtime).is_relative_to(Path(torch.__file__).resolve().parent)  # a .venv may be a link


def test_the_environment_variable_forces_a_variant(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERBATCH_ISA", "generic")
    assert best_isa() == "generic"
    assert load(sources=sources).everbatch_macros() == MACROS["generic"]
    monkeypatch.setenv("EVERBATCH_ISA", "avx1024")
    with pytest.raises(
        ValueError, match="EVERBATCH_ISA is 'avx1024', this machine can run .*generic, amx_emulated; unset"
    ):
        load(sources=sources)
    assert load("generic", sources=sources).everbatch_answer() == 41


@pytest.mark.parametrize("isa", supported_isas())
def test_every_variant_of_this_machine_compiles_and_runs(sources: Path, isa: str) -> None:
    library = load(isa, sources=sources)
    assert library.everbatch_sum(1000) == 500500
    assert library.everbatch_macros() == MACROS[isa]


def test_emulated_amx_uses_the_best_variant_below_amx(sources: Path) -> None:
    base = next(isa for isa in supported_isas() if isa != "amx")
    assert load(AMX_EMULATED, sources=sources).everbatch_macros() == MACROS[base] | 16


def test_two_variants_in_one_process_share_no_variable(sources: Path) -> None:
    first, second = load(sources=sources), load(AMX_EMULATED, sources=sources)
    assert [first.everbatch_count(), first.everbatch_count(), second.everbatch_count()] == [1, 2, 1]


@pytest.mark.skipif(not cpu_features(), reason="the ladder is of x86-64")
@pytest.mark.parametrize("isa", LADDER)
def test_the_compiler_knows_the_flags_of_every_variant(sources: Path, isa: str) -> None:
    """This holds also for variants that this machine cannot run: their objects are compiled and not loaded."""
    flags = compiler_flags(isa, features=set(LADDER["amx"]))
    command = [COMPILER, *flags, "-c", str(sources / "macros.cpp"), "-o", str(sources / "macros.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_ladder_is_chosen_by_features() -> None:
    amx = set(LADDER["amx"])
    assert supported_isas(amx) == tuple(LADDER)
    assert supported_isas(amx - {"amx_int8"})[0] == "avx512bf16"
    assert supported_isas(amx - {"avx512_bf16"})[0] == "avx512"
    assert supported_isas(amx - {"avx512vl"})[0] == "avx2"
    assert supported_isas({"avx2", "fma"}) == supported_isas(set()) == ("generic",)
    with pytest.raises(ValueError, match="isa is 'amx', this machine can run generic, amx_emulated; name one of these"):
        compiler_flags("amx", features=set())


@pytest.mark.skipif(not cpu_features(), reason="the ladder is of x86-64")
def test_avx512_uses_vnni_where_there() -> None:
    avx512 = set(LADDER["avx512"])
    assert "-mavx512vnni" in compiler_flags("avx512", features=avx512 | {"avx512_vnni"})
    assert "-mavx512vnni" not in compiler_flags("avx512", features=avx512)


@pytest.mark.skipif(not cpu_features(), reason="the ladder is of x86-64")
@pytest.mark.parametrize("isa", ["avx512", "avx512bf16", "amx"])
def test_vbmi_is_used_where_there(isa: str) -> None:
    """The feature as /proc/cpuinfo names it, without an underscore."""
    features = set(LADDER["amx"])
    assert "-mavx512vbmi" in compiler_flags(isa, features=features | {"avx512vbmi"})
    assert "-mavx512vbmi" not in compiler_flags(isa, features=features)


def test_address_sanitizer_finds_a_read_behind_the_end(
    sources: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    script = """
import torch
try:
    torch.zeros(2) + torch.zeros(3)  # an exception of C++ passes
except RuntimeError:
    pass
library = load(sanitize=True, sources=sources)
print(library.everbatch_read(3), library.everbatch_sum(100), flush=True)
library.everbatch_read(int(sys.argv[1]))
"""
    process = start(script, 4, **asan_environment())
    output, errors = process.communicate()
    assert output == "0 5050\n", errors
    assert process.returncode != 0
    assert "heap-buffer-overflow" in errors and "everbatch_read" in errors


def test_a_sanitized_library_is_refused_where_the_sanitizer_is_missing(sources: Path) -> None:
    with pytest.raises(NativeUnavailable, match="asan_environment"):
        load(sanitize=True, sources=sources)
    assert load(sources=sources).everbatch_answer() == 41

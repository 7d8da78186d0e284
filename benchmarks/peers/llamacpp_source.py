"""The sources of llama-cpp-python and ik-llama-cpp-python, compiled for this CPU, with what has to be changed in them first.

llama.cpp: gcc 12's `_tile_loadconfig` declares only the first 8 bytes of its operand as read. The stores that fill the
configuration are then dropped, and `ldtilecfg` faults on CPUs with AMX. A statement that claims to read all of it keeps them; it
costs nothing and changes nothing on CPUs without AMX.

ik_llama.cpp: its wheels are compiled for AVX2, and its source makes programs that the binding does not use. The libraries
alone are made, without its products of types that are not measured and its attention for sizes of heads that are rare: these fall
back to plain operators, and they are most of what takes the compiler long.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import commands
from benchmarks.peers.errors import Skipped
from deploy.packages import describe
from deploy.progress import SteppedProgress

MMQ = Path("vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp")
CALL = "    _tile_loadconfig(&tc);\n"
MENDED = '    asm volatile("" : "+m"(tc) :: "memory");\n' + CALL

IQK = Path("vendor/ik_llama.cpp/ggml/src/iqk")
LIBRARIES = """cmake_minimum_required(VERSION 3.21)
project(ik_llama_cpp_python LANGUAGES C CXX)
set(CMAKE_INSTALL_RPATH "$ORIGIN")
add_subdirectory(vendor/ik_llama.cpp EXCLUDE_FROM_ALL)
add_custom_target(libraries ALL DEPENDS llama ggml)
install(TARGETS llama ggml LIBRARY DESTINATION ik_llama_cpp/lib)
"""
HEAD_SIZES = ("64_64", "128_128")  # of keys and values
_SET = "bool iqk_set_kernels_{}(int, int, int, std::array<mul_mat_t, IQK_MAX_NY>&, mul_mat_t&) {{ return false; }}\n"
_CONVERT = "bool iqk_convert_{}_q80_r8(int, int, const void*, size_t, void*, int) {{ return false; }}\n"
_UNPACK = "bool iqk_dequantize_{}(int, int, const void*, size_t, void*, size_t, int) {{ return false; }}\n"
# files of products of types that are not measured -> what they say instead
UNUSED_PRODUCTS = {
    "1bit": _SET + _CONVERT,
    "iquants": _SET + _CONVERT,
    "iqk_quants": _SET + _CONVERT,
    "ktquants": _SET + _UNPACK,
}


def mend(file: Path) -> None:
    """Put the statement in front of the call. Raises Skipped unless the call is there exactly once."""
    text = file.read_text()
    if text.count(CALL) != 1:
        raise Skipped(
            f"its source has no single call of _tile_loadconfig to mend in {file.name}; see llamacpp_source.py"
        )
    file.write_text(text.replace(CALL, MENDED))


def leave_out(directory: Path) -> None:
    """Make the libraries alone, without what is not measured. Raises Skipped where the source looks different."""
    iqk = directory / IQK
    attention = sorted((iqk / "fa").glob("iqk_fa_*_*.cpp"))
    products = [iqk / f"iqk_gemm_{name}.cpp" for name in UNUSED_PRODUCTS]
    kept = [file for file in attention if file.stem.removeprefix("iqk_fa_") in HEAD_SIZES]
    if len(kept) != len(HEAD_SIZES) or not all(file.exists() for file in products):
        raise Skipped("its source has other files than those that are left out of it; see llamacpp_source.py")
    for file in attention:
        if file not in kept:
            file.write_text(_stub("fa/iqk_fa_templates.h", f"IQK_FA_CASE({file.stem}) {{ return false; }}\n"))
    for file, (name, functions) in zip(products, UNUSED_PRODUCTS.items()):
        file.write_text(_stub(f"iqk_gemm_{name}.h", functions.format(name, name)))
    (directory / "CMakeLists.txt").write_text(LIBRARIES)


def _stub(header: str, functions: str) -> str:
    return f'#include "iqk/{header}"\n{functions}'


@dataclass(frozen=True)
class Source:
    """`package`: its name in the requirements. `change`: what is done to the unpacked source, which may raise Skipped."""

    package: str
    flags: tuple[str, ...]
    change: Callable[[Path], None]


_NATIVE = ("-DGGML_NATIVE=ON", "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_TESTS=OFF")
# by name of the engine. LLAVA is image input, tools are programs that the binding does not use; ik_llama.cpp has attention for
# caches of many types, of which those of 16 and 8 bits are kept.
SOURCES = {
    "llamacpp": Source(
        "llama-cpp-python",
        (*_NATIVE, "-DLLAVA_BUILD=OFF", "-DLLAMA_BUILD_TOOLS=OFF"),
        lambda directory: mend(directory / MMQ),
    ),
    "ik_llamacpp": Source("ik-llama-cpp-python", (*_NATIVE, "-DGGML_IQK_FA_ALL_QUANTS=OFF"), leave_out),
}


def unpack(pip: Sequence[str], source: Source, requirement: str, environment: Path, progress: SteppedProgress) -> Path:
    """Download, unpack and change the source; its directory, inside `environment`. Raises CommandFailed, Skipped."""
    place = environment / "source"
    shutil.rmtree(place, ignore_errors=True)
    download = ["download", "--no-deps", "--no-binary", source.package, "-d", str(place), requirement]
    commands.run([*pip, *download], progress, f"fetching the source of {requirement}", describe)
    archive = next(place.glob("*.tar.gz"))
    with tarfile.open(archive) as opened:
        opened.extractall(place, filter="data")
    directory = place / archive.name.removesuffix(".tar.gz")
    source.change(directory)
    return directory

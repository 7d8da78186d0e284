"""The source of llama-cpp-python, with one line mended that gcc 12 miscompiles on CPUs with AMX.

gcc 12's `_tile_loadconfig` declares only the first 8 bytes of its operand as read. The stores that fill the configuration are
then dropped, and `ldtilecfg` faults. A statement that claims to read all of it keeps them; it costs nothing and changes nothing
on CPUs without AMX.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import commands
from benchmarks.peers.errors import Skipped
from deploy.packages import describe
from deploy.progress import Progress

# LLAVA is image input; the rest are programs and servers that the binding does not use.
BUILD_FLAGS = (
    "-DGGML_NATIVE=ON",
    "-DLLAVA_BUILD=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
)
MMQ = Path("vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp")
CALL = "    _tile_loadconfig(&tc);\n"
MENDED = '    asm volatile("" : "+m"(tc) :: "memory");\n' + CALL


def unpack(pip: Sequence[str], requirement: str, environment: Path, progress: Progress) -> Path:
    """Download, unpack and mend the source; its directory, inside `environment`. Raises CommandFailed, Skipped."""
    place = environment / "source"
    shutil.rmtree(place, ignore_errors=True)
    package = requirement.partition("==")[0]
    download = ["download", "--no-deps", "--no-binary", package, "-d", str(place), requirement]
    commands.run([*pip, *download], progress, f"fetching the source of {requirement}", describe)
    archive = next(place.glob("*.tar.gz"))
    with tarfile.open(archive) as source:
        source.extractall(place, filter="data")
    directory = place / archive.name.removesuffix(".tar.gz")
    mend(directory / MMQ)
    return directory


def mend(file: Path) -> None:
    """Put the statement in front of the call. Raises Skipped unless the call is there exactly once."""
    text = file.read_text()
    if text.count(CALL) != 1:
        raise Skipped(
            f"its source has no single call of _tile_loadconfig to mend in {file.name}; see llamacpp_source.py"
        )
    file.write_text(text.replace(CALL, MENDED))

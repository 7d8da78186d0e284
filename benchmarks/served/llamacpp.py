"""llama.cpp's server: compiled from the sources that llama-cpp-python brings, as no registry has the program itself."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from benchmarks.peers import commands, models
from benchmarks.peers.environments import BENCH, REQUIREMENTS
from benchmarks.peers.llamacpp_source import SOURCES, unpack
from deploy.progress import SteppedProgress

HOME = BENCH / "llama-server"
PROGRAM = HOME / "llama-server"
_PYTHON = HOME / "env" / "bin" / "python"
_TOOLS = ("cmake==4.4.5", "ninja==1.13.2", "gguf==0.19.0")  # gguf writes the model's file
_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def program() -> Path | None:
    """The compiled server, or None."""
    return PROGRAM if PROGRAM.is_file() and _PYTHON.exists() else None


def form_of(model: models.Model, progress: SteppedProgress) -> Path:
    """The model as a GGUF file with its vocabulary, made once. Raises Skipped."""
    return models.gguf_with_vocabulary(_PYTHON, model, progress)


def install(progress: SteppedProgress) -> None:
    """Fetch and compile. Raises CommandFailed, Skipped."""
    HOME.mkdir(parents=True, exist_ok=True)
    if not _PYTHON.exists():
        commands.run([sys.executable, "-m", "venv", str(HOME / "env")], progress, "making an environment for cmake")
    pip = [str(_PYTHON), "-I", "-m", "pip"]
    commands.run([*pip, "install", "--no-input", "--progress-bar", "off", *_TOOLS], progress, "installing cmake")
    lines = (REQUIREMENTS / "llamacpp.txt").read_text().splitlines()
    pin = next(line for line in lines if line.startswith("llama-cpp-python=="))
    source = unpack(pip, SOURCES["llamacpp"], pin, HOME, progress) / "vendor" / "llama.cpp"
    tools = _PYTHON.parent
    build = source / "build"
    configure = [str(tools / "cmake"), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
    commands.run([*configure, "-S", str(source), "-B", str(build), *_FLAGS], progress, "configuring llama.cpp")
    commands.run(
        [str(tools / "cmake"), "--build", str(build), "--target", "llama-server"],
        progress,
        "compiling llama-server for this CPU (ten minutes on two cores, once)",
        lambda line: line[:100] if line.startswith("[") else None,
        log=BENCH / "install-llama-server.log",
    )
    shutil.copy2(next(build.rglob("llama-server")), PROGRAM)
    shutil.rmtree(HOME / "source")

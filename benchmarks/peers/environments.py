"""The peers' environments: one virtual environment each under .run/bench, made on first use and kept.

An environment is usable when its everbatch.json holds the hash of what it is made of. One that was interrupted is completed by
running pip again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

from benchmarks.peers import commands
from benchmarks.peers.engines import EngineSpec
from benchmarks.peers.errors import Skipped
from benchmarks.peers.llamacpp_source import SOURCES, unpack
from deploy import ROOT
from deploy.environment import runs
from deploy.packages import describe, explain
from deploy.progress import SteppedProgress

BENCH = ROOT / ".run" / "bench"
REQUIREMENTS = Path(__file__).parent / "requirements"


def python_of(engine: EngineSpec, progress: SteppedProgress) -> Path:
    """The interpreter that runs an engine's runner; its environment is made first if need be. Raises Skipped."""
    if not engine.requirements:
        return Path(sys.executable)
    environment = BENCH / f"env-{engine.name}"
    python = environment / "bin" / "python"
    if not is_complete(environment, _recipe(engine)):
        log = BENCH / f"install-{engine.name}.log"
        try:
            _make(engine, environment, progress, log)
        except commands.CommandFailed as failure:
            raise Skipped(f"it cannot be installed ({explain(failure.output)}); {_shown(log)} has it all") from None
        except OSError as error:
            raise Skipped(f"it cannot be installed ({error})") from None
    return python


def is_installed(engine: EngineSpec) -> bool:
    """Whether python_of would find an engine's environment as it should be, and so make nothing."""
    return not engine.requirements or is_complete(BENCH / f"env-{engine.name}", _recipe(engine))


def is_complete(environment: Path, recipe: str) -> bool:
    """Whether the environment carries the stamp of this recipe and its interpreter exists."""
    try:
        stamp = json.loads((environment / "everbatch.json").read_text())
    except (OSError, ValueError):
        return False
    return stamp == {"recipe": recipe} and (environment / "bin" / "python").exists()


def _recipe(engine: EngineSpec) -> str:
    """Changes with the pins and with how they are installed."""
    digest = hashlib.sha256((REQUIREMENTS / engine.requirements).read_bytes())
    source = SOURCES.get(engine.name)
    digest.update(json.dumps([engine.removed, source.flags if source else ()]).encode())
    return digest.hexdigest()


def _make(engine: EngineSpec, environment: Path, progress: SteppedProgress, log: Path) -> None:
    environment.parent.mkdir(parents=True, exist_ok=True)
    python = str(environment / "bin" / "python")
    if not runs(environment / "bin" / "python"):
        shutil.rmtree(environment, ignore_errors=True)
        commands.run([sys.executable, "-m", "venv", str(environment)], progress, f"making {_shown(environment)}")
    pip = [python, "-I", "-m", "pip"]
    install = [*pip, "install", "--progress-bar", "off", "--no-input"]
    requirements = ["-r", str(REQUIREMENTS / engine.requirements)]
    if source := SOURCES.get(engine.name):
        unpacked = unpack(pip, source, _pin(engine, source.package), environment, progress)
        title = f"compiling {engine.name} for this CPU (ten minutes on two cores, once)"
        flags = {"CMAKE_ARGS": " ".join(source.flags)}
        commands.run([*install, str(unpacked)], progress, title, environment=flags, log=log)
        shutil.rmtree(unpacked.parent)
    commands.run([*install, *requirements], progress, f"installing {engine.name} (once)", describe, log=log)
    if engine.removed:
        commands.run(
            [*pip, "uninstall", "-y", *engine.removed], progress, f"taking out {', '.join(engine.removed)}", describe
        )
    (environment / "everbatch.json").write_text(json.dumps({"recipe": _recipe(engine)}) + "\n")


def _pin(engine: EngineSpec, package: str) -> str:
    lines = (REQUIREMENTS / engine.requirements).read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{package}=="))


def _shown(path: Path) -> str:
    return os.path.relpath(path, ROOT)

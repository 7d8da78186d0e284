"""What a process really loads when it imports a layer: asked of a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT, python_files
from tests.architecture.test_imports import PURE

# Imports the modules given and prints all that are loaded then.
PROGRAM = """
import importlib, json, sys
names = json.loads(sys.argv[1])
if any(name.startswith("backend.serving") for name in names):  # Triton's own module exists in its stub only
    sys.modules["triton_python_backend_utils"] = importlib.import_module("tests.serving.fake_triton")
for name in names:
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


def loaded_packages(*rooms: str) -> set[str]:
    """Top-level packages in sys.modules after importing every module of these directories."""
    return {name.split(".")[0] for name in loaded_modules(*rooms)}


def loaded_modules(*rooms: str) -> set[str]:
    """All of sys.modules after importing every module of these directories."""
    paths = python_files(*rooms)
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    assert names, f"no modules in {rooms}"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(names)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_the_pure_side_loads_no_heavy_library() -> None:
    heavy = {"torch", "triton", "numpy", "ray", "transformers", "tokenizers", "safetensors"}
    assert not loaded_packages(*(f"backend/{room}" for room in PURE)) & heavy


@pytest.mark.parametrize(
    "room",
    [
        "backend/text",
        "backend/images",
        "backend/serving",
        "backend/executor",
        "compat/trtllm",
        "compat/llm",
        "compat/lmdeploy",
    ],
)
def test_what_runs_in_the_stub_or_is_imported_by_a_program_loads_no_torch(room: str) -> None:
    assert not loaded_packages(room) & {"torch", "transformers", "triton", "ray", "kernels"}


def test_a_stub_whose_engine_is_a_process_of_its_own_loads_no_engine() -> None:
    """Seven stubs start with a server."""
    engine = {"backend.engine.core", "backend.scheduler.scheduler", "backend.kvcache.manager"}
    assert not loaded_modules("backend/serving") & engine

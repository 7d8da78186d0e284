"""Imports point one way (backend/README.md). Read from the syntax trees, so that a lazy import counts as well."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.architecture.sources import ALL, ROOT, found_in, imported_modules, parsed, python_files

UTILITIES = "triton_python_backend_utils"
PURE = {"api", "architectures", "core", "storage", "kvcache", "scheduler", "engine", "wire"}
# layer of backend -> layers of backend that it may import, itself apart
ARROWS: dict[str, set[str]] = {
    "api": set(),
    "core": {"api"},
    "storage": {"api", "core"},
    "kvcache": {"api", "core", "storage"},
    "scheduler": {"api", "core", "kvcache"},
    "text": {"api"},
    "architectures": {"api"},
    "layers": {"api", "architectures"},
    "guided": {"api", "core", "text"},
    "sampling": {"api", "core"},
    "models": {"api", "core", "layers", "architectures"},
    "hosted": {"api", "architectures", "layers", "models"},
    "convert": {"api", "architectures", "models", "layers", "quant", "text"},  # offline: no other room imports it
    "quant": {"api", "architectures", "models", "layers", "text"},  # worker imports it to round to few bits
    "worker": {"api", "core", "architectures", "models", "layers", "guided", "hosted", "quant", "sampling", "wire"},
    "engine": {"api", "core", "kvcache", "scheduler", "storage"},
    "wire": {"api", "core"},
    "executor": {"api", "core", "engine", "wire", "worker"},
    "replicas": {"api", "core", "executor", "wire", "worker"},
    "images": {"api", "core", "text"},
    "serving": {"api", "core", "executor", "images", "text"},
}
# room of backend/serving -> rooms of it that it may import, itself and the files beside them apart
SERVING_ARROWS: dict[str, set[str]] = {
    "intake": {"lifecycle", "observe"},
    "delivery": set(),
    "lifecycle": set(),
    "observe": set(),
    "wires": {"intake", "delivery", "observe"},
}
MAY_USE_KERNELS = {"layers", "quant", "sampling", "guided", "hosted", "models", "worker"}
# room of compat -> what it may import, itself apart
COMPAT_ARROWS: dict[str, set[str]] = {
    "tensorrt_llm": {"backend.api"},  # shared by the others
    "config_object": set(),  # likewise
    "llm": {
        "backend.api",
        "backend.core",
        "backend.executor",
        "backend.images",
        "backend.replicas",
        "backend.text",
        "compat.config_object",
        "compat.tensorrt_llm",
    },
    "lmdeploy": {"backend.api", "compat.config_object", "compat.llm"},
    "trtllm": {"backend.api", "backend.core", "backend.engine", "backend.executor", "compat.tensorrt_llm"},
}
# root package -> what it may import of the others
ROOT_ARROWS = {
    "kernels": set(),
    "client": set(),
    "gateway": {"backend.api.sampling"},  # the table from which its messages are made
    "deploy": {
        "backend.api",
        "backend.architectures",
        "backend.text",
        "client",
        "gateway.browsers",
        "gateway.detected",
        "gateway.image_hosts",
        "gateway.keys",
    },
    "model_repository": {"backend.serving"},
}
ADAPTERS = ("backends", "profiles")  # directories of deploy/ with files for Triton's stubs


def breaches(path: Path) -> list[str]:
    """Modules that `path` imports against the arrows."""
    root = "model_repository" if path.is_relative_to("deploy") and path.parts[1] in ADAPTERS else path.parts[0]
    own = [name for name in imported_modules(parsed(path)) if name.split(".")[0] in ALL]
    if root == "backend":
        return [name for name in own if not _allowed_in_backend(path, name)]
    if root == "compat":
        return [name for name in own if not _below(name, _allowed_in_compat(path))]
    if root in ROOT_ARROWS:
        allowed = ROOT_ARROWS[root]
        return [name for name in own if name.split(".")[0] != root and not _below(name, allowed)]
    return []


def _allowed_in_backend(path: Path, name: str) -> bool:
    layer = path.parts[1].removesuffix(".py") if len(path.parts) > 2 else ""
    target = name.split(".")
    if target[0] == "kernels":
        return layer in MAY_USE_KERNELS
    if target[0] != "backend":
        return False
    return len(target) == 1 or target[1] == layer or target[1] in ARROWS.get(layer, set())


def _allowed_in_compat(path: Path) -> set[str]:
    room = path.parts[1].removesuffix(".py")
    return {f"compat.{room}", *COMPAT_ARROWS.get(room, set())}


def _below(name: str, allowed: set[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in allowed) or name in ("backend", "compat")


def test_imports_follow_the_arrows() -> None:
    against = {str(path): breaches(path) for path in python_files(*ROOT_ARROWS, "backend", "compat")}
    assert {path: names for path, names in against.items() if names} == {}, "see the arrows of backend/README.md"


def breaches_in_serving(path: Path, names: list[str]) -> list[str]:
    """What a file of a room of backend/serving imports of rooms that it must not know."""
    if len(path.parts) < 4:
        return []
    allowed = SERVING_ARROWS[path.parts[2]] | {path.parts[2]}
    rooms = [name.split(".")[2] for name in names if name.startswith("backend.serving.")]
    return [room for room in rooms if room in SERVING_ARROWS and room not in allowed]


def test_rooms_of_serving_follow_their_arrows() -> None:
    files = python_files("backend/serving")
    assert {path.parts[2] for path in files if len(path.parts) > 3} == set(SERVING_ARROWS)
    against = {str(path): breaches_in_serving(path, list(imported_modules(parsed(path)))) for path in files}
    assert {path: rooms for path, rooms in against.items() if rooms} == {}
    assert breaches_in_serving(Path("backend/serving/intake/x.py"), ["backend.serving.delivery.pump"]) == ["delivery"]


def test_an_import_against_the_arrows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARROWS, "engine", {"api"})
    assert "backend.core.step" in breaches(Path("backend/engine/core.py"))


def test_every_layer_of_backend_has_its_arrows() -> None:
    layers = {path.parts[1] for path in python_files("backend") if len(path.parts) > 2}
    assert layers == set(ARROWS), f"no arrows for {layers - set(ARROWS)}, none needed for {set(ARROWS) - layers}"
    assert {path.parts[1].removesuffix(".py") for path in python_files("compat")} == {"__init__", *COMPAT_ARROWS}


def test_the_arrows_have_no_cycle() -> None:
    resolved: set[str] = set()
    while len(resolved) < len(ARROWS):
        ready = {layer for layer, below in ARROWS.items() if layer not in resolved and below <= resolved}
        assert ready, f"cycle among {set(ARROWS) - resolved}"
        resolved |= ready


def importing(*names: str) -> Callable[[ast.Module], list[str]]:
    """Finds what a module imports of these packages."""
    return lambda tree: [name for name in imported_modules(tree) if name.split(".")[0] in names]


def test_the_pure_side_names_no_heavy_library() -> None:
    pure = [path for path in python_files("backend") if path.parts[1] in PURE]
    heavy = ("torch", "triton", "numpy", "ray", "transformers", "tokenizers", UTILITIES)
    assert found_in(pure, importing(*heavy)) == {}


def test_client_and_gateway_talk_to_triton_only() -> None:
    """Besides the table of sampling fields, which is pure."""
    foreign = importing("torch", "transformers", "backend", "kernels")
    found = found_in(python_files("client", "gateway"), foreign)
    assert {name for names in found.values() for name in names} <= {
        "backend.api.sampling",
        "backend.api.sampling.PLAIN",
    }
    assert not any(path.startswith("client") for path in found)


def test_no_module_is_named_triton() -> None:
    assert [path for path in python_files(*ALL) if path.stem == "triton" or "triton" in path.parts[:-1]] == []


def test_only_serving_uses_the_python_backend_utilities() -> None:
    found = found_in(python_files("backend"), importing(UTILITIES))
    assert found and {Path(path).parts[1] for path in found} == {"serving"}


@pytest.mark.parametrize("path", python_files("model_repository", *(f"deploy/{name}" for name in ADAPTERS)), ids=str)
def test_a_triton_model_is_a_thin_adapter(path: Path) -> None:
    assert len((ROOT / path).read_text().splitlines()) <= 120

"""No module imports itself through others: each can be imported first, read first and tested alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.architecture.sources import ALL, parsed, python_files


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_on_loading(body: list[ast.stmt]) -> Iterator[str]:
    """Names of the modules, and of what is taken from them, that loading a module imports: those in functions come later."""
    for node in body:
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str() as module, level=0):
                yield module
                yield from (f"{module}.{alias.name}" for alias in node.names)
            case ast.If() if "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from imported_on_loading([*node.body, *node.orelse])
            case ast.Try():
                yield from imported_on_loading([*node.body, *node.orelse, *node.finalbody])
            case ast.ClassDef():
                yield from imported_on_loading(node.body)


def imports_of(files: dict[str, list[ast.stmt]]) -> dict[str, set[str]]:
    """Module -> modules among `files` that loading it imports."""
    graph: dict[str, set[str]] = {}
    for name, body in files.items():
        found = {each for each in imported_on_loading(body) if each in files}
        packages = {package for package in found if any(each.startswith(package + ".") for each in found)}
        # `from package import module` takes the module, not what the package's __init__ collects, when there is such a module
        graph[name] = (found - packages) | {package for package in packages if _takes_names(body, package, files)}
        graph[name].discard(name)
    return graph


def _takes_names(body: list[ast.stmt], package: str, files: dict[str, list[ast.stmt]]) -> bool:
    """Whether something other than modules is taken from a package."""
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            if any(f"{package}.{alias.name}" not in files for alias in node.names):
                return True
    return False


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one cycle, in order; none when there is no cycle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("root", sorted(set(ALL) - {"tests", "model_repository"}))
def test_no_cycle_among_modules(root: str) -> None:
    files = {module_name(path): parsed(path).body for path in python_files(root)}
    assert files
    cycle = cycle_in(imports_of(files))
    assert not cycle, " -> ".join(cycle)


def test_a_cycle_is_found() -> None:
    sources = {
        "a": "from b import x",
        "b": "import c",
        "c": "from a import y\nif TYPE_CHECKING:\n    import b",
        "d": "import a",
    }
    graph = imports_of({name: ast.parse(source).body for name, source in sources.items()})
    assert set(cycle_in(graph)) == {"a", "b", "c"}
    sources["c"] = "def later():\n    from a import y"
    assert cycle_in(imports_of({name: ast.parse(source).body for name, source in sources.items()})) == []

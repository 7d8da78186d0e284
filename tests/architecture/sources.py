"""The project's own Python files, parsed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("backend", "client", "compat", "deploy", "gateway", "kernels", "model_repository")
ALL = (*PRODUCT, "benchmarks", "tests", "tools")


def python_files(*directories: str) -> list[Path]:
    """Paths relative to the root of the repository."""
    return sorted(path.relative_to(ROOT) for name in directories for path in (ROOT / name).rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), str(path))


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a tree."""
    return tuple(ast.walk(tree))


def found_in(paths: Iterable[Path], look: Callable[[ast.Module], list[str]]) -> dict[str, list[str]]:
    """What `look` finds in the syntax tree of each file, by path; files where it finds nothing are left out."""
    found = {str(path): look(parsed(path)) for path in paths}
    return {path: each for path, each in found.items() if each}


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Full names of everything imported anywhere in the tree, in functions and under TYPE_CHECKING too."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; name the module in full"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)

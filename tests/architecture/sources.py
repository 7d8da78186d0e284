"""The project's own Python files, parsed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Full names of everything imported anywhere in the tree, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; name the module in full"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)

"""Which rows of docs/features.md have tests: `python -m tests.feature_coverage` prints those missing, `--all` all.

Read from the marks in the syntax trees (`@pytest.mark.feature("004-15", ...)`, on functions, classes, parameters and in
`pytestmark`), so nothing is imported or run.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

TESTS = Path(__file__).parent

# The rows that are closed so far, document by document. 003-60 (graphs) is only seen on a GPU: tests/gpu/test_models.py.
REQUIRED = {
    "000": "01-18 21-40 42 48-57 59-61",
    "001": "01-33 35 49-60 64-68",
    "002": "01-12 15-34 40-44 47-48 50-53 55-57",
    "003": "01-05 07 10-28 34-38 40-46 49-50 52-59 61 63-65 67-68",
    "004": "01-20 22 24-27 29-32",
    "W": "01-12",
}


def required_ids() -> list[str]:
    """REQUIRED spelled out: `000-01`, `000-03`, ..."""
    return [f"{document}-{number:02d}" for document, rows in REQUIRED.items() for number in _numbers(rows)]


def tested_ids() -> dict[str, list[str]]:
    """Feature id -> names of the tests (file::function) that are marked with it."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text(), str(path))
        owners = _owners(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.feature"):
                name = f"{path.relative_to(TESTS.parent)}::{owners.get(node, 'module')}"
                for argument in node.args:
                    found.setdefault(_text(argument, name), []).append(name)
    return found


def missing_ids() -> list[str]:
    tested = tested_ids()
    return [feature for feature in required_ids() if feature not in tested]


def _numbers(rows: str) -> list[int]:
    numbers: list[int] = []
    for part in rows.split():
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _owners(tree: ast.Module) -> dict[ast.AST, str]:
    """Node -> name of the innermost function or class whose decorators hold it."""
    owners: dict[ast.AST, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            owners.update({inner: node.name for decorator in node.decorator_list for inner in ast.walk(decorator)})
    return owners


def _text(argument: ast.expr, where: str) -> str:
    if not (isinstance(argument, ast.Constant) and re.fullmatch(r"(00\d|W)-\d\d", str(argument.value))):
        raise ValueError(f'{where}: {ast.unparse(argument)} is no feature id; write it like "004-15"')
    return argument.value


def main() -> int:
    """Exit status 1 when a required row has no test."""
    tested, missing = tested_ids(), missing_ids()
    if "--all" in sys.argv:
        for feature in sorted({*required_ids(), *tested}):
            print(f"{feature}  {', '.join(tested.get(feature, ['MISSING']))}")
    print(
        f"{len(required_ids()) - len(missing)} of {len(required_ids())} required rows have tests, {len(tested)} in all"
    )
    if missing:
        print(f"missing: {' '.join(missing)}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())

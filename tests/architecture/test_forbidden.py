"""Calls that no product code makes, and the sizes of files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture.sources import ALL, PRODUCT, ROOT, imported_modules, parsed, python_files

FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "yaml.load", "os.system", "os.popen"}
FORBIDDEN_KEYWORDS = {"shell", "trust_remote_code", "allow_pickle"}
MAX_LINES = 400


def call_name(node: ast.Call) -> str:
    """`torch.load` for torch.load(...), `eval` for eval(...); of other calls what is written."""
    return ast.unparse(node.func)


@pytest.mark.parametrize("path", python_files(*PRODUCT, "benchmarks"), ids=str)
def test_nothing_forbidden_is_called(path: Path) -> None:
    calls = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
    found = [f"{call_name(call)} in line {call.lineno}" for call in calls if call_name(call) in FORBIDDEN_CALLS]
    found += [
        f"{keyword.arg}= in line {call.lineno}"
        for call in calls
        for keyword in call.keywords
        if keyword.arg in FORBIDDEN_KEYWORDS
        and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
    ]
    found += [name for name in imported_modules(parsed(path)) if name.split(".")[0] in FORBIDDEN_MODULES]
    assert not found, f"{path}: {found}"


@pytest.mark.parametrize("path", python_files(*PRODUCT), ids=str)
def test_no_exception_is_swallowed(path: Path) -> None:
    """No bare except, and no `except Exception` (or wider) whose body does nothing."""
    handlers = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.ExceptHandler)]
    wide = {"Exception", "BaseException"}
    for handler in handlers:
        assert handler.type is not None, f"{path} line {handler.lineno}: bare except"
        silent = all(isinstance(statement, ast.Pass) for statement in handler.body)
        assert not (silent and ast.unparse(handler.type) in wide), f"{path} line {handler.lineno}: swallowed exception"


def test_no_file_is_too_long() -> None:
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path in python_files(*ALL)}
    too_long = {str(path): count for path, count in lengths.items() if count > MAX_LINES}
    assert not too_long, f"more than {MAX_LINES} lines: {too_long}"


@pytest.mark.parametrize("path", python_files(*PRODUCT), ids=str)
def test_annotations_are_not_evaluated_when_a_module_is_imported(path: Path) -> None:
    tree = parsed(path)
    if any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree.body):
        assert "__future__.annotations" in set(imported_modules(tree)), (
            f"{path}: from __future__ import annotations is missing"
        )

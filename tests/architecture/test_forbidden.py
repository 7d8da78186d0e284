"""Calls that no product code makes, and the sizes of files."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest

from tests.architecture.sources import ALL, PRODUCT, ROOT, found_in, imported_modules, nodes, python_files

FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "yaml.load", "os.system", "os.popen"}
FORBIDDEN_KEYWORDS = {"shell", "trust_remote_code", "allow_pickle"}
MAX_LINES = 400


def dotted_name(node: ast.expr) -> str:
    """`torch.load` for the function of torch.load(...), `eval` for that of eval(...); of what has no such name, nothing."""
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def reads_tensors_only(call: ast.Call) -> bool:
    """torch.load(..., weights_only=True), which runs no code of the file."""
    return dotted_name(call.func) == "torch.load" and any(
        keyword.arg == "weights_only" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in call.keywords
    )


def forbidden(tree: ast.Module) -> list[str]:
    calls = [node for node in nodes(tree) if isinstance(node, ast.Call)]
    found = [
        f"{name} in line {call.lineno}"
        for call in calls
        if (name := dotted_name(call.func)) in FORBIDDEN_CALLS and not reads_tensors_only(call)
    ]
    found += [
        f"{keyword.arg}= in line {call.lineno}"
        for call in calls
        for keyword in call.keywords
        if keyword.arg in FORBIDDEN_KEYWORDS
        and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
    ]
    return found + [name for name in imported_modules(tree) if name.split(".")[0] in FORBIDDEN_MODULES]


def swallowed(tree: ast.Module) -> list[str]:
    """A bare except, and `except Exception` (or wider) whose body does nothing."""
    return [
        f"exception swallowed in line {handler.lineno}"
        for handler in nodes(tree)
        if isinstance(handler, ast.ExceptHandler) and (handler.type is None or _is_silent(handler, handler.type))
    ]


def _is_silent(handler: ast.ExceptHandler, caught: ast.expr) -> bool:
    silent = all(isinstance(statement, ast.Pass) for statement in handler.body)
    return silent and ast.unparse(caught) in {"Exception", "BaseException"}


def evaluated_annotations(tree: ast.Module) -> list[str]:
    has_annotations = any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree.body)
    is_lazy = "__future__.annotations" in set(imported_modules(tree))
    return ["from __future__ import annotations is missing"] if has_annotations and not is_lazy else []


def test_nothing_forbidden_is_called() -> None:
    assert found_in(python_files(*PRODUCT, "benchmarks"), forbidden) == {}


def test_no_exception_is_swallowed() -> None:
    assert found_in(python_files(*PRODUCT), swallowed) == {}


def test_annotations_are_not_evaluated_when_a_module_is_imported() -> None:
    assert found_in(python_files(*PRODUCT), evaluated_annotations) == {}


@pytest.mark.parametrize(
    ("look", "source"),
    [
        (forbidden, "torch.load('x')"),
        (forbidden, "torch.load('x', weights_only=False)"),
        (forbidden, "torch.load('x', weights_only=flag)"),
        (forbidden, "eval('x')"),
        (forbidden, "run('x', shell=True)"),
        (forbidden, "import pickle"),
        (swallowed, "try: x()\nexcept: y()"),
        (swallowed, "try: x()\nexcept Exception: pass"),
        (evaluated_annotations, "def x(): y()"),
    ],
)
def test_what_is_forbidden_is_found(look: Callable[[ast.Module], list[str]], source: str) -> None:
    assert len(look(ast.parse(source))) == 1
    allowed = "from __future__ import annotations\nclass X: pass\ntry: x(shell=False).load()\nexcept ValueError: pass"
    assert look(ast.parse(allowed)) == []


def test_no_file_is_too_long() -> None:
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path in python_files(*ALL)}
    too_long = {str(path): count for path, count in lengths.items() if count > MAX_LINES}
    assert not too_long, f"more than {MAX_LINES} lines: {too_long}"

"""Bugs are generated from the syntax tree: which ones, and that one of them is planted and noticed."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from tests.mutants.catalogue import TESTS_FAILED, run_tests
from tests.mutants.generated import names, split, suite_of
from tests.mutants.operators import changed, changes
from tests.mutants.prepared import ROOT

QUEUE = ROOT / "backend" / "scheduler" / "queue.py"


def texts(body: str) -> list[str]:
    source = f"def f():\n{dedent(body)}".replace("\n", "\n    ")
    return [change.text for change in changes(ast.parse(source))]


@pytest.mark.parametrize(
    "body, expected",
    [
        ("x = a < b", ["a < b -> a <= b", "a < b -> True", "a < b -> False"]),
        ("x = a and b", ["a and b -> a or b", "a and b -> b", "a and b -> a"]),
        ("x = a + b", ["a + b -> a - b", "a + b -> a", "a + b -> b"]),
        ("x = a / b", ["a / b -> a * b", "a / b -> a", "a / b -> b"]),
        ("x = not a", ["not a -> a"]),
        ("x = -a", ["-a -> a"]),
        ("x = min(a, b)", ["min(a, b) -> max(a, b)", "min(a, b) -> a", "min(a, b) -> b"]),
        ("x = any(a)", ["any(a) -> all(a)", "any(a) -> a"]),
        ("x = g(a, b)", ["g(a, b) -> g(b, a)", "g(a, b) -> a"]),
        ("x = g(a=b)", ["g(a=b) -> g()", "g(a=b) -> g(a=None)"]),
        ("x = a.g(b)", ["a.g(b) -> a", "a.g(b) -> b"]),
        ("x = a if b else c", ["a if b else c -> a", "a if b else c -> c"]),
        ("x = True", ["True -> False"]),
        ("x = 7", ["7 -> 8", "7 -> 6"]),
        ("x = (a, b)", ["(a, b) -> (b,)", "(a, b) -> (a,)"]),
        ("x = a[b:c]", ["a[b:c] -> a", "a[b:c] -> a[:c]", "a[b:c] -> a[b:]"]),
        ("return a", ["return a -> return None"]),
        ("a.b = c", ["a.b = c -> pass"]),
        ("a += b", ["a += b -> pass", "a += b -> a = b"]),
        ("a.close()", ["a.close() -> pass", "a.close() -> a"]),
        ("raise a", ["raise a -> pass"]),
        ("x = [a for a in b if c]", [" for a in b if c -> for a in b", " for a in b if c -> for a in () if c"]),
        ("for a in b: continue", ["for a in b: continue -> for a in (): continue", "continue -> break"]),
        ("x: int = y", []),
    ],
)
def test_each_plain_operator_is_changed(body: str, expected: list[str]) -> None:
    found = sorted(text.strip() for text in texts(body) if not text.endswith(" = None"))
    assert found == sorted(text.strip() for text in expected)


def test_what_is_assigned_becomes_none() -> None:
    assert texts("x = y") == ["x = y -> x = None"]


def test_one_change_at_a_time_and_every_one_can_be_compiled() -> None:
    source = QUEUE.read_text()
    trees = {ast.dump(ast.parse(source))}
    for number in range(0, len(changes(ast.parse(source))), 4):
        tree = changed(source, number)
        compile(tree, "queue.py", "exec")
        trees.add(ast.dump(tree))
    assert len(trees) > 60


def test_a_generated_bug_is_noticed_by_the_tests_of_its_file() -> None:
    name = next(name for name, text in names([QUEUE], 1).items() if "num_tokens" in text)
    status, output = run_tests(suite_of(split(name)[0]), name)
    assert status == TESTS_FAILED, output[-2000:]


def test_a_generated_bug_is_planted_before_a_conftest_imports_its_module() -> None:
    bodies = ROOT / "gateway" / "bodies.py"  # tests/gateway/conftest.py imports it
    name = next(name for name, text in names([bodies], 1).items() if "json.loads" in text or "replace" in text)
    status, output = run_tests(["tests/gateway/test_bodies.py"], name)
    assert status == TESTS_FAILED, output[-2000:]

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
        ("x = not a", ["not a -> a"]),
        ("x = min(a, b)", ["min(a, b) -> max(a, b)", "min(a, b) -> a", "min(a, b) -> b"]),
        ("x = g(a, b)", ["g(a, b) -> g(b, a)"]),
        ("x = a if b else c", ["a if b else c -> a", "a if b else c -> c"]),
        ("x = True", ["True -> False"]),
        ("return a", ["return a -> return None"]),
        ("a.b = c", ["a.b = c -> pass"]),
        ("a.close()", ["a.close() -> pass", "a.close() -> a"]),
        ("x = [a for a in b if c]", [" for a in b if c -> for a in b"]),
        ("x = y", []),
    ],
)
def test_each_plain_operator_is_changed(body: str, expected: list[str]) -> None:
    assert sorted(text.strip() for text in texts(body)) == sorted(text.strip() for text in expected)


def test_one_change_at_a_time_and_every_one_can_be_compiled() -> None:
    source = QUEUE.read_text()
    trees = {ast.dump(changed(source, number)) for number in range(len(changes(ast.parse(source))))}
    assert len(trees) > 90 and ast.dump(ast.parse(source)) not in trees
    for number in range(len(changes(ast.parse(source)))):
        compile(changed(source, number), "queue.py", "exec")


def test_a_generated_bug_is_noticed_by_the_tests_of_its_file() -> None:
    name = next(name for name, text in names([QUEUE], 1).items() if "num_tokens" in text)
    status, output = run_tests(suite_of(split(name)[0]), name)
    assert status == TESTS_FAILED, output[-2000:]

"""The examples of docs/executor.md and those beside it run with the default model."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, command_of, examples, run_as_a_user, run_python, users_checkout
from tests.trtllm.test_names import CLASSES

BLOCKS = examples("executor.md")
EXAMPLES = ROOT / "docs" / "examples"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return users_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.mark.feature("000-57")
def test_the_basic_example_prints_the_prompt_and_ten_tokens(checkout: Path) -> None:
    printed = run_as_a_user(checkout, *command_of(EXAMPLES / "executor_basic.py"))
    (tokens,) = eval(printed)
    assert tokens[:4] == [1, 2, 3, 4] and len(tokens) == 14


@pytest.mark.feature("000-57")
def test_the_advanced_example_writes_a_row_for_each_request(checkout: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "out.csv"
    more = ("--output_tokens_csv_file", str(tokens), "--streaming", "--max_tokens", "6")
    printed = run_as_a_user(checkout, *command_of(EXAMPLES / "executor_advanced.py"), *more)
    assert [len(row.split(",")) for row in tokens.read_text().splitlines()] == [6, 6, 6]
    assert re.fullmatch(r"3 requests in \d+ iterations, at most [123] at once\n", printed)


@pytest.mark.feature("000-57", "000-36")
def test_the_logits_processor_example_lets_even_tokens_through_only(checkout: Path) -> None:
    printed = run_as_a_user(checkout, *command_of(EXAMPLES / "executor_logits_processor.py"))
    allowed = printed.splitlines()[1].removeprefix("even ")
    assert all(token % 2 == 0 for token in map(int, allowed.strip("[]").split(",")))


@pytest.mark.feature("000-57")
@pytest.mark.parametrize("program", sorted(EXAMPLES.glob("executor_*.py")), ids=lambda path: path.stem)
def test_of_an_example_the_import_alone_is_this_projects(program: Path) -> None:
    """What else they call has TensorRT-LLM's names; test_leader.py runs such a program on several ranks."""
    tree = ast.parse(program.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    ours = [ast.unparse(each) for each in imports if "backend" in ast.unparse(each) or "compat" in ast.unparse(each)]
    assert ours == ["from compat import trtllm"]
    named = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "trtllm"
    }
    assert named and named <= {*CLASSES}


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_each_example_of_the_page_runs(number: int, tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text(f"if __name__ == '__main__':\n{'    '.join(['', *BLOCKS[number].splitlines(keepends=True)])}")
    printed = run_python(str(program))
    assert printed or "Executor(" not in BLOCKS[number]

"""The examples of docs/executor.md and those beside it run with the default model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, examples
from tests.docs.pages import run_python as run

BLOCKS = examples("executor.md")
EXAMPLES = ROOT / "docs" / "examples"
MODEL = str(ROOT / "models" / "default")


@pytest.mark.feature("000-57")
def test_the_basic_example_prints_the_prompt_and_ten_tokens() -> None:
    printed = run(str(EXAMPLES / "executor_basic.py"), "--model_path", MODEL)
    (tokens,) = eval(printed)  # noqa: S307 (a list of lists of numbers, which the example has printed)
    assert tokens[:4] == [1, 2, 3, 4] and len(tokens) == 14


@pytest.mark.feature("000-57")
def test_the_advanced_example_writes_a_row_for_each_request(tmp_path: Path) -> None:
    prompts, tokens = tmp_path / "in.csv", tmp_path / "out.csv"
    prompts.write_text("1,2,3\n4,5\n6\n")
    files = ("--input_tokens_csv_file", str(prompts), "--output_tokens_csv_file", str(tokens))
    printed = run(
        str(EXAMPLES / "executor_advanced.py"), "--model_path", MODEL, *files, "--streaming", "--max_tokens", "6"
    )
    assert [len(row.split(",")) for row in tokens.read_text().splitlines()] == [6, 6, 6]
    assert re.fullmatch(r"3 requests in \d+ iterations, at most [123] at once\n", printed)


@pytest.mark.feature("000-57", "000-36")
def test_the_logits_processor_example_lets_even_tokens_through_only() -> None:
    printed = run(str(EXAMPLES / "executor_logits_processor.py"), "--model_path", MODEL)
    allowed = printed.splitlines()[1].removeprefix("even ")
    assert all(token % 2 == 0 for token in map(int, allowed.strip("[]").split(",")))


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_each_example_of_the_page_runs(number: int, tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text(f"if __name__ == '__main__':\n{'    '.join(['', *BLOCKS[number].splitlines(keepends=True)])}")
    printed = run(str(program))
    assert printed or "Executor(" not in BLOCKS[number]

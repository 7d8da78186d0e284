"""Each block of code on the pages for users is run by a test, or says by its tag why not; its command lines are real."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer

from backend.api import ConfigError, load_config
from deploy.cli import app, benchmarks
from tests.docs.blocks import ALL, DATA, NEEDS, Block, blocks

ROOT = Path(__file__).resolve().parents[2]
USAGE_ERROR: Any = typer.BadParameter.__base__
SHELL = [block for block in ALL if block.tag in ("sh", "console")]
OWN = [(block, words) for block in SHELL for words in block.own_commands]
# Page with Python programs -> the test that runs each of them.
PROGRAMS = {
    "README.md": "tests/e2e/test_shell_examples.py",
    "docs/anthropic.md": "tests/e2e/test_shell_examples.py",
    "docs/batches.md": "tests/gateway/test_batches.py",
    "docs/client.md": "tests/e2e/test_python_client.py",
    "docs/embeddings.md": "tests/e2e/test_embeddings_page.py",
    "docs/everbatch-model.md": "tests/e2e/test_everbatch_page.py",
    "docs/executor.md": "tests/trtllm/test_examples.py",
    "docs/guided-decoding.md": "tests/docs/test_guided_page.py",
    "docs/llm.md": "tests/llm/test_docs.py",
    "docs/lmdeploy.md": "tests/lmdeploy/test_docs.py",
    "docs/lora.md": "tests/llm/test_docs.py",
    "docs/moving-from-tensorrt-llm.md": "tests/e2e/test_moving_page.py",
    "docs/openai.md": "tests/e2e/test_shell_examples.py",
    "docs/prompt-adapters.md": "tests/llm/test_docs.py",
    "docs/scale.md": "tests/llm/test_docs.py",
    "docs/speculation.md": "tests/docs/test_speculation_page.py",
    "docs/start.md": "tests/e2e/test_moving_page.py",
}
NUMBER_NOT_RUN = {
    "checkpoint": 18,
    "claude-code": 1,
    "docker": 2,
    "genai-perf": 1,
    "gpu": 1,
    "kubernetes": 2,
    "lm-eval": 1,
    "machines": 3,
    "minutes": 7,
    "network": 5,
    "nginx": 2,
    "perf-analyzer": 2,
    "terminal": 5,
}  # blocks by reason; a new one is a decision, not an accident


def test_every_block_has_a_tag_that_says_what_it_is() -> None:
    known = ("sh", "console", "python", *DATA)
    assert [str(block) for block in ALL if block.tag not in known or (block.needs and block.needs not in NEEDS)] == []
    assert [str(block) for block in ALL if block.needs and block not in SHELL] == []


def test_blocks_of_data_hold_no_commands() -> None:
    typed = re.compile(r"^(\$ |\./everbatch|curl |docker |kubectl |pip |export )", re.MULTILINE)
    assert [str(block) for block in ALL if block.tag in DATA and typed.search(block.text)] == []


def test_the_blocks_that_no_test_runs_are_counted_by_their_reason() -> None:
    assert dict(Counter(block.needs for block in ALL if block.needs)) == NUMBER_NOT_RUN
    assert len([block for block in SHELL if not block.needs]) >= 20


def test_each_page_with_programs_is_named_by_the_test_that_runs_them() -> None:
    assert {block.page for block in ALL if block.tag == "python"} == PROGRAMS.keys()
    unnamed = [page for page, test in PROGRAMS.items() if Path(page).name not in (ROOT / test).read_text()]
    assert unnamed == []


@pytest.mark.parametrize("block, words", OWN, ids=[f"{block}-{' '.join(words)[:40]}" for block, words in OWN])
def test_the_command_line_takes_each_command_of_the_pages(block: Block, words: list[str]) -> None:
    assert refusal(words) is None


def refusal(words: list[str]) -> str | None:
    """Why `./everbatch` with these words would be refused before it does anything, or None."""
    group: Any = typer.main.get_command(app)
    name, *rest = words
    try:
        context = group.commands[name].make_context(name, rest, parent=typer.Context(group))
        load_config(overrides=list(context.params.get("set_") or ()))
    except (KeyError, USAGE_ERROR, ConfigError) as error:
        return str(error)
    known = name != "bench" or context.params["name"] in benchmarks()
    return None if known else f"no benchmark {context.params['name']}"


def test_a_mistyped_option_command_setting_and_benchmark_are_noticed() -> None:
    assert refusal(["serve", "--modell", "DIR"]) and refusal(["sserve"]) and refusal(["bench", "peer"])
    assert refusal(["serve", "--set", "kv_cache.max_token=1"]) and refusal(["serve", "--set", "kv_cache.max_tokens=x"])
    assert refusal(["serve", "--set", "kv_cache.max_tokens=4096"]) is None


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_modules_and_files_of_this_repository_that_a_block_names_exist(block: Block) -> None:
    modules = re.findall(r"python -m ((?:tests|tools|benchmarks|gateway|client)[\w.]*)", block.commands)
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    files = re.findall(
        r"(?<![\w/.])(?:requirements|deploy|tests|tools|models|model_repository)/[\w./*-]+", block.commands
    )
    assert [name for name in files if not list(ROOT.glob(name.rstrip("./")))] == []


def test_the_parts_of_a_block_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "x\n\n```console needs=gpu\n$ ./everbatch serve \\\n    --model DIR   # a\nready\n$ A=1 ./everbatch top & curl x\n```\n"
    )
    (block,) = blocks(str(page))
    assert (block.line, block.tag, block.needs) == (4, "console", "gpu")
    assert block.own_commands == [["serve", "--model", "DIR"], ["top"]] and "ready" not in block.commands

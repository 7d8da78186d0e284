"""The examples of docs/llm.md and docs/lora.md, each in a program of its own, as a reader would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from backend.llm.arguments import KEYS, OWN

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "llm.md").read_text()
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
EXAMPLES = EXAMPLE.findall(PAGE)
OF_LORA = EXAMPLE.findall((ROOT / "docs" / "lora.md").read_text())


@pytest.mark.parametrize("number", range(len(EXAMPLES) + len(OF_LORA)))
def test_an_example_runs(number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", (EXAMPLES + OF_LORA)[number]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


def test_the_page_has_examples_and_names_every_argument() -> None:
    assert (len(EXAMPLES), len(OF_LORA)) == (4, 1)
    assert [name for name in (KEYS | OWN) if f"`{name}" not in PAGE] == []

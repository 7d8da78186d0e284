"""The example of docs/guided-decoding.md, as a reader would run it, and the names in its tables."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from backend.api.config import GuidedConfig
from backend.api.guide import GuideType

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guided-decoding.md").read_text()


def test_the_example_runs() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"\{'name': .*'age': \d+\}", done.stdout)


def test_the_page_names_all_types_and_only_keys_that_there_are() -> None:
    assert [each.value for each in GuideType if f"| `{each.value}` |" not in PAGE] == []
    assert set(re.findall(r"`guided\.([a-z_]+)`", PAGE)) <= set(GuidedConfig.__struct_fields__)

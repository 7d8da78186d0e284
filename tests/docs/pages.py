"""The examples on the pages of docs/, run as a reader would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


def examples(page: str) -> list[str]:
    """The Python programs on a page, in their order."""
    return re.findall(r"^```python\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE)


def printed_by(program: str) -> str:
    """What one of them prints. AssertionError with the end of its messages when it fails."""
    return run_python("-c", program)


def run_python(*command: str) -> str:
    """What a Python process prints that is started in the project's directory with nothing but that on its path."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout

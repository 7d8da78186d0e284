"""The example of docs/speculation.md runs with the default model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "speculation.md").read_text(), re.DOTALL)


def test_the_example_prints_that_half_of_the_drafts_were_right(tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text(EXAMPLE)
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "0.5\n"), done.stderr[-3000:]

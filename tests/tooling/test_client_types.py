"""The type checker refuses what the Python client would refuse, so that a mistyped option is seen in an editor."""

from __future__ import annotations

import subprocess
from pathlib import Path

from deploy import ROOT
from tests.tooling.test_checkers import checker

SOURCE = """
from client import AsyncEverbatchClient, Completion, EverbatchClient
client = EverbatchClient("127.0.0.1:8001")
answers: list[Completion] = client.map(["x"], max_tokens=5)
whole: Completion = client.generate("x", max_tokens=5, temperature=None, stop_words=["a"])
client.generate("x", max_token=5)
client.stream("x", max_tokens="5")
client.conversation(max_token=5)
AsyncEverbatchClient().stream("x", max_token=5)
EverbatchClient(protocol="ftp")
wrong: list[Completion] = client.map(["x"], on_error="return")
"""


def test_unknown_options_and_wrong_types_are_refused_and_right_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "uses.py"
    path.write_text(SOURCE)
    options = ["--strict", "--follow-imports", "silent", "--cache-dir", str(tmp_path / "cache"), "--hide-error-context"]
    done = subprocess.run(
        [*checker("mypy"), *options, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    lines = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error: " in line and "uses.py" in line}
    assert lines == set(range(6, 12)), done.stdout[-4000:]

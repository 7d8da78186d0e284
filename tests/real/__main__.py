"""The tests with published weights, for nights and by hand.

python -m tests.real             SmolLM2-135M-Instruct, as in the full run
python -m tests.real --all       Gemma 3 270M and Qwen2.5-Coder-0.5B-Instruct besides (750 MB to download, once)
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated

import typer

from deploy import ROOT
from tests.real.weights import DEFAULT, PUBLISHED, VARIABLE


def main(
    everything: Annotated[bool, typer.Option("--all", help="Test all models of tests/real/weights.py.")] = False,
) -> None:
    """Run tests/real on published weights."""
    variables = os.environ | {VARIABLE: ",".join(PUBLISHED if everything else [DEFAULT])}
    command = [sys.executable, "-m", "pytest", "tests/real", "-q", "-rs", "--timeout", "3600"]
    sys.exit(subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode)


if __name__ == "__main__":
    typer.run(main)

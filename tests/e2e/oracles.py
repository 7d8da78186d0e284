"""Programs of other projects that tests compare this one with, where they are installed: in this Python, or in the one that the
variable EVERBATCH_ORACLES names, which need not have anything of this project.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

VARIABLE = "EVERBATCH_ORACLES"


def result_of(program: str, package: str, argument: dict[str, Any]) -> Any:
    """The JSON in the last line that a program prints, given the argument as JSON. Skips the test without the package."""
    python = os.environ.get(VARIABLE, sys.executable)
    if subprocess.run([python, "-c", f"import {package}"], capture_output=True, check=False).returncode:
        pytest.skip(f"{package} is not installed; install it, or name a Python that has it in {VARIABLE}")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [python, "-c", program, json.dumps(argument)],
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])

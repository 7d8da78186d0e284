"""Runs `lives.py` and `planted.py` in processes of their own: the simulation puts stand-ins into the server's modules, which
threads that other tests have left running in this process must not meet.

    .venv/bin/python -m pytest tests/simulation/server/lives.py        # to see each test
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["lives.py", "planted.py"])
def test_the_server_is_simulated_in_a_process_of_its_own(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / name)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

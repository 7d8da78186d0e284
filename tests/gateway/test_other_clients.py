"""Clients of other projects, unmodified: LangChain, LlamaIndex, LiteLLM, instructor, Pydantic AI and Ollama.

They want other versions of libraries than this project does, so they have a Python of their own. The variable EVERBATCH_CLIENTS
names it: `python3 -m venv V && V/bin/pip install -r requirements/clients.txt`, then EVERBATCH_CLIENTS=V.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.gateway.conftest import Served
from tests.gateway.other_clients import CLIENTS

PYTHON = Path(os.environ.get("EVERBATCH_CLIENTS", "nowhere")) / "bin/python"
SCRIPT = Path(__file__).with_name("other_clients.py")
pytestmark = [
    pytest.mark.feature("W-11"),
    pytest.mark.slow("imports the libraries of eight projects"),
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason="none of these clients here: see the first lines of tests/gateway/test_other_clients.py",
    ),
]


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_that_knows_nothing_of_this_server_is_served(name: str, served: Served) -> None:
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False", "LANGSMITH_TRACING": "false"}
    command = [str(PYTHON), str(SCRIPT), name, served.url]
    done = subprocess.run(command, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]

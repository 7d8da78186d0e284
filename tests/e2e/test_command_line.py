"""What a person types: generate and chat against a running server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.triton_server import TritonServer

ROOT = Path(__file__).resolve().parents[2]


def everbatch(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.cli", *arguments]
    return subprocess.run(command, input=typed, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_generate_streams_text_to_standard_output_and_statistics_to_standard_error(server: TritonServer) -> None:
    done = everbatch("generate", "def main(", "--max-tokens", "12", "--url", server.grpc_url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "12 tokens" in done.stderr and "12 tokens" not in done.stdout


@pytest.mark.feature("004-05")
def test_the_second_turn_of_a_chat_reuses_the_kv_of_the_first(server: TritonServer) -> None:
    typed = "Write the function read_lines.\nAnd now one that writes.\n/quit\n"
    done = everbatch("chat", "--max-tokens", "24", "--url", server.grpc_url, typed=typed)
    assert done.returncode == 0, done.stderr
    first, second = re.findall(r"reused (\d+) of (\d+) prompt tokens", done.stdout + done.stderr)
    assert int(second[0]) > int(first[1]), "more than the first prompt: the first reply is in the cache too"


def test_without_a_server_the_error_names_the_address_and_the_remedy() -> None:
    done = everbatch("generate", "x", "--url", "127.0.0.1:9")
    assert done.returncode != 0
    assert "127.0.0.1:9" in done.stderr and "everbatch serve" in done.stderr
    assert "Traceback" not in done.stderr

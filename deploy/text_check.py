"""Reads a model's tokenizer and renders a chat by its template, in a process with limits, for `doctor --model`.

python -m deploy.text_check PATH     prints what is wrong, in one sentence, or nothing
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from backend.api.errors import EverbatchError
from backend.text.chat import ChatTemplate
from backend.text.tokenizer import Tokenizer
from deploy import ROOT

CPU_S, MEMORY_BYTES, PATIENCE_S = 30, 3 << 30, 120.0  # a tokenizer of 64 MB takes some seconds and half a GiB
SAMPLE = [{"role": "user", "content": "Hello"}]


def wrong_with(path: Path) -> str:
    """The fault that keeps the model's text from being read or its chats from being rendered; empty if there is none."""
    command = [sys.executable, "-m", "deploy.text_check", str(path)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"its tokenizer and chat template take longer than {PATIENCE_S:g} s"
    if done.returncode:
        limits = f"{CPU_S} s of processor time, or {MEMORY_BYTES >> 30} GiB of memory"
        return f"its tokenizer and chat template take more than {limits}"
    return done.stdout.strip()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        tokenizer = Tokenizer.from_directory(sys.argv[1])
        tokenizer.encode("Hello")
        template = ChatTemplate.from_directory(sys.argv[1], tokenizer)
        if template.exists:
            template.render(SAMPLE)
    except EverbatchError as error:
        print(error.message)


if __name__ == "__main__":
    main()

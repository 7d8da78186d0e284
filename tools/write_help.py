"""Writes deploy/help/*.txt, what `./everbatch [COMMAND] --help` prints before there is an environment.

.venv/bin/python -m tools.write_help          rewrite them
.venv/bin/python -m tools.write_help --check  fail when they are not up to date
"""

from __future__ import annotations

import os
import subprocess
import sys

from deploy import ROOT
from deploy.environment import HELP_DIRECTORY, ROOT_PAGE

COMMANDS = ("serve", "test", "doctor", "rank", "quantize", "convert", "bench", "generate", "chat", "top", "batch")
WIDTH = 80
_PROGRAM = """
import sys
from deploy import cli
for name in sys.argv[1:]:
    print("\\f" + name)
    try:
        cli.app(([] if name == "everbatch" else [name]) + ["--help"], prog_name="everbatch", standalone_mode=False)
    except SystemExit:
        pass
"""


def texts() -> dict[str, str]:
    """The help of each command, as it is now, by its name."""
    plain = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "COLUMNS": str(WIDTH),
        "NO_COLOR": "1",
        "TERM": "dumb",
    }
    plain |= {"TERMINAL_WIDTH": str(WIDTH), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-P", "-c", _PROGRAM, ROOT_PAGE, *COMMANDS]
    printed = subprocess.run(command, env=plain, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pages = [part.split("\n", 1) for part in printed.split("\f")[1:]]
    return {name: "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n" for name, text in pages}


def main(arguments: list[str]) -> int:
    """Returns 0, or with --check 1 when a file is stale."""
    stale = 0
    HELP_DIRECTORY.mkdir(exist_ok=True)
    for name, text in texts().items():
        path = HELP_DIRECTORY / f"{name}.txt"
        if not path.is_file() or path.read_text() != text:
            stale += 1
            if "--check" not in arguments:
                path.write_text(text)
    print(f"{stale} of {len(COMMANDS) + 1} pages were stale")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

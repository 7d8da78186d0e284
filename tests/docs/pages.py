"""The examples on the pages of docs/, run as a reader would run them."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from deploy import environment

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


def users_checkout(directory: Path) -> Path:
    """A checkout with an environment that was finished as the launcher does it, and nothing in PYTHONPATH. Its packages are those
    of this process.
    """
    for entry in ROOT.iterdir():
        if entry.name not in (".venv", ".run", ".git"):
            (directory / entry.name).symlink_to(entry)
    venv = directory / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    environment._finish(venv, {})
    (packages,) = venv.glob("lib/python3*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return directory


def command_of(program: Path) -> list[str]:
    """The command line that a program's docstring says to run it with."""
    text = (ast.get_docstring(ast.parse(program.read_text())) or "").replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.strip().startswith(".venv/bin/python ")]
    return shlex.split(line)


def run_as_a_user(checkout: Path, *command: str) -> str:
    """What a command prints in a user's checkout."""
    variables = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    done = subprocess.run(
        command, cwd=checkout, env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout

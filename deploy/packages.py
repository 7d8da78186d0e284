"""The pinned packages and pip. Standard library only, and any Python >= 3.9 runs it."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

from deploy.errors import SetupError
from deploy.progress import Progress

REQUIREMENTS = ("run.txt", "test.txt", "bench.txt")
SERVER_REQUIREMENTS = "server.txt"  # pip installs it with --no-deps
NEEDED_BYTES = 2_500_000_000  # disk space that the environment takes while pip works, with pip's temporary files
_SIZE = re.compile(r"\([\d.]+ ?[kMG]?B\)")


def pins(root: Path) -> list[tuple[str, str]]:
    """(name, version) of every direct requirement, extras dropped."""
    found = []
    for name in (*REQUIREMENTS, SERVER_REQUIREMENTS):
        for line in (root / "requirements" / name).read_text().splitlines():
            line = line.split("#", 1)[0].strip()
            if line:
                package, _, version = line.partition("==")
                found.append((package.split("[", 1)[0], version))
    return found


def missing_pins(root: Path, venv: Path) -> list[str]:
    """Requirements that the environment does not hold in exactly the pinned version (a local suffix like +cpu is
    fine).
    """
    code = (
        "import json,sys,importlib.metadata as m\n"
        "def version(name):\n"
        "    try: return m.version(name).split('+')[0]\n"
        "    except m.PackageNotFoundError: return None\n"
        "print(json.dumps([n+'=='+v for n,v in json.loads(sys.argv[1]) if version(n)!=v]))"
    )
    command = [str(venv / "bin" / "python"), "-I", "-c", code, json.dumps(pins(root))]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return list(json.loads(result.stdout))


def pip(venv: Path, arguments: list[str], progress: Progress, title: str, lock: int) -> None:
    """Run pip install and show what it does; it ends with us. Raises SetupError with the reason in one sentence."""
    progress.step(title)
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "--progress-bar", "off", "--no-input", *arguments]
    output: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(lock,)) as process:
        assert process.stdout is not None
        try:
            for line in lines_or_ticks(process.stdout.fileno()):
                if line is None:
                    progress.tick()
                    continue
                output.append(line)
                if action := describe(line):
                    progress.note(action)
        except BaseException:  # pip must not go on alone, whatever ends us: Ctrl-C or SIGTERM, for example.
            process.terminate()
            raise
    if process.returncode != 0:
        raise SetupError(explain(output))


def lines_or_ticks(descriptor: int) -> Iterator[str | None]:
    """Lines as they come, and None after each second without one."""
    rest = b""
    while True:
        if not select.select([descriptor], [], [], 1.0)[0]:
            yield None
            continue
        data = os.read(descriptor, 1 << 16)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines if data else [*lines, rest]:
            yield line.decode(errors="replace").rstrip()
        if not data:
            return


def describe(line: str) -> str | None:
    """What a line of pip's output says to a person, or None."""
    words = line.split()
    if len(words) >= 2 and words[0] == "Collecting":
        return f"looking up {words[1]}"
    if len(words) >= 2 and words[0] in ("Downloading", "Processing", "Using"):
        name = words[2] if words[0] == "Using" and len(words) > 2 else words[1]
        size = match.group(0) if (match := _SIZE.search(line)) else ""
        verb = {"Downloading": "downloading", "Processing": "using", "Using": "using"}[words[0]]
        return f"{verb} {os.path.basename(name)} {size}".rstrip()
    if line.startswith("Installing collected packages:"):
        return f"unpacking {line.count(',') + 1} packages"
    return None


def explain(output: list[str]) -> str:
    """One sentence about why pip failed."""
    text = "\n".join(output)
    if "No space left on device" in text:
        return f"the disk is full; {NEEDED_BYTES / 1e9:.1f} GB are needed for the environment"
    unreachable = (
        "NewConnectionError",
        "Temporary failure in name resolution",
        "Network is unreachable",
        "ConnectTimeoutError",
    )
    if any(sign in text for sign in unreachable):
        return "no package index can be reached; connect to a network, or name one in PIP_INDEX_URL, and start again"
    errors = [line for line in output if line.startswith("ERROR:")]
    return f"pip failed: {(errors or output or ['it said nothing'])[-1]}"

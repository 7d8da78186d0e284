"""The pinned packages and pip. Standard library only, and any Python >= 3.9 runs it."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import SetupError
from deploy.progress import SteppedProgress

RUN, TEST, BENCH, SERVER = "run.txt", "test.txt", "bench.txt", "server.txt"  # pip installs the last one with --no-deps


@dataclass(frozen=True)
class Kit:
    """The packages of an environment: `files` of requirements/, their size in words, and the disk space that installing them
    takes, with pip's temporary files.
    """

    files: tuple[str, ...]
    size: str
    needed_bytes: int

    @property
    def for_pip(self) -> tuple[str, ...]:
        """The files that pip installs with what they depend on."""
        return tuple(name for name in self.files if name != SERVER)


SERVING = Kit((RUN, SERVER), "1.4 GB", 2_000_000_000)
TESTING = Kit((RUN, TEST, BENCH, SERVER), "2.3 GB", 3_000_000_000)
_SIZE = re.compile(r"\([\d.]+ ?[kMG]?B\)")


def pins(root: Path, files: Sequence[str] = TESTING.files) -> list[tuple[str, str]]:
    """(name, version) of every direct requirement in these files of requirements/, extras dropped."""
    found = []
    for name in files:
        for line in (root / "requirements" / name).read_text().splitlines():
            line = line.split("#", 1)[0].strip()
            if line:
                package, _, version = line.partition("==")
                found.append((package.split("[", 1)[0], version))
    return found


def missing_pins(root: Path, venv: Path, files: Sequence[str]) -> list[str]:
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
    command = [str(venv / "bin" / "python"), "-I", "-c", code, json.dumps(pins(root, files))]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return list(json.loads(result.stdout))


def pip(venv: Path, arguments: list[str], progress: SteppedProgress, title: str, lock: int) -> None:
    """Run pip install and show what it does; it ends with us. Raises SetupError with the reason in one sentence."""
    progress.step(title)
    # --no-compile: Python compiles the modules that are imported, when they are. All of them would take half a minute.
    command = [
        str(venv / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--progress-bar",
        "off",
        "--no-input",
        "--no-compile",
    ]
    command += arguments
    output: list[str] = []
    counter = Counter(venv)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(lock,)) as process:
        assert process.stdout is not None
        try:
            for line in lines_or_ticks(process.stdout.fileno()):
                if line is not None:
                    output.append(line)
                if action := counter.action(line):
                    progress.note(action)
                elif line is None:
                    progress.tick()
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


class Counter:
    """Follows pip's output: what it does, and with which package of how many. pip names their number once it has fetched them
    all, and prints nothing while it unpacks them: then the packages that have arrived are counted.
    """

    def __init__(self, venv: Path) -> None:
        self._venv = venv
        self._before = self._installed()
        self._found = self._total = 0

    def action(self, line: str | None) -> str | None:
        """A sentence for a person from a line of pip's output, or from a second without one (`line` None). None: nothing new."""
        if line is None:
            return self._unpacked() if self._total else None
        if line.startswith("Installing collected packages:"):
            self._total = line.count(",") + 1
            return self._unpacked()
        self._found += line.startswith("Collecting ")
        text = describe(line)
        return text and f"package {max(1, self._found)}: {text}"

    def _unpacked(self) -> str:
        return f"unpacking: {min(len(self._installed() - self._before), self._total)} of {self._total} packages"

    def _installed(self) -> set[str]:
        return {path.name for path in self._venv.glob("lib/python3*/site-packages/*.dist-info")}


def describe(line: str) -> str | None:
    """A sentence for a person from a line of pip's output; None if the line holds nothing for them."""
    words = line.split()
    if len(words) >= 2 and words[0] == "Collecting":
        return f"looking up {words[1]}"
    if len(words) >= 2 and words[0] in ("Downloading", "Processing", "Using"):
        name = words[2] if words[0] == "Using" and len(words) > 2 else words[1]
        size = match.group(0) if (match := _SIZE.search(line)) else ""
        verb = {"Downloading": "downloading", "Processing": "using", "Using": "using"}[words[0]]
        return f"{verb} {os.path.basename(name)} {size}".rstrip()
    return None


def explain(output: list[str]) -> str:
    """One sentence about why pip failed."""
    text = "\n".join(output)
    if "No space left on device" in text:
        return f"the disk is full; {TESTING.needed_bytes / 1e9:.1f} GB are enough for every environment"
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

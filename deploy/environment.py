"""The project's own environment, made on first use. Standard library only, and any Python >= 3.9 runs it.

.venv is usable when .venv/everbatch.json names the hash of the present requirements. While pip works, .venv/incomplete
exists: an environment that was interrupted is completed by running pip again, one whose Python does not run is made anew.
Order of side effects: lock, look for a Python, install missing system packages (root on Debian only), venv, pip, stamp.

EVERBATCH_PYTHON=/path/to/python skips all of this and uses that interpreter as it is.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, List, Optional, Tuple

from deploy import libpython
from deploy.progress import Progress

VERSIONS = ("3.11", "3.12")  # those with a stub in the wheel and a numpy < 2
NEEDED_BYTES = 2_500_000_000  # of disk for the environment, pip's temporary files included
REQUIREMENTS = ("run.txt", "test.txt")
SERVER_REQUIREMENTS = "server.txt"  # installed with --no-deps

_PROBE = (
    "import json,sys,importlib.util as u;"
    "sys.path.insert(0,sys.argv[1]);from deploy import libpython;"
    "print(json.dumps([sys.implementation.name,'%d.%d'%sys.version_info[:2],sys.executable,"
    "u.find_spec('ensurepip') is not None,libpython.find() is not None]))"
)


class SetupError(Exception):
    """The environment cannot be made; the message is one sentence with the remedy."""


@dataclass(frozen=True)
class Interpreter:
    """A CPython that could carry the environment."""

    path: str
    version: str
    has_venv: bool
    has_libpython: bool

    @property
    def missing_packages(self) -> List[str]:
        """Debian packages without which the environment or the stub cannot work."""
        names = [] if self.has_venv else [f"python{self.version}-venv"]
        return names if self.has_libpython else [*names, f"libpython{self.version}"]


def main(root: str, arguments: List[str]) -> None:
    """Make the environment if need be and become `python -m deploy.cli`. Does not return."""
    try:
        python = os.environ.get("EVERBATCH_PYTHON") or str(ensure(Path(root)))
    except SetupError as error:
        sys.exit(f"everbatch: {error}")
    except KeyboardInterrupt:
        sys.exit("everbatch: interrupted; the next start continues where this one stopped")
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != root]
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *paths])
    try:
        os.execv(python, [python, "-P", "-m", "deploy.cli", *arguments])  # -P: a ./deploy of the user's is not imported
    except OSError as error:
        sys.exit(f"everbatch: {python} cannot be executed ({error.strerror}); unset EVERBATCH_PYTHON or name a Python 3.11")


def ensure(root: Path) -> Path:
    """The environment's Python, made or completed if need be. Raises SetupError."""
    venv = root / ".venv"
    wanted = requirements_hash(root)
    if is_complete(venv, wanted):
        return venv / "bin" / "python"
    (root / ".run").mkdir(exist_ok=True)
    with open(root / ".run" / "environment.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second ./everbatch waits here
        if not is_complete(venv, wanted):
            make(root, venv, wanted)
    return venv / "bin" / "python"


def requirements_hash(root: Path) -> str:
    """Changes when a pin does."""
    digest = hashlib.sha256()
    for name in (*REQUIREMENTS, SERVER_REQUIREMENTS):
        digest.update(name.encode() + b"\0" + (root / "requirements" / name).read_bytes() + b"\0")
    return digest.hexdigest()


def is_complete(venv: Path, wanted: str) -> bool:
    """True if the environment carries the stamp of these requirements and its Python exists. Reads two small files."""
    try:
        stamp = json.loads((venv / "everbatch.json").read_text())
    except (OSError, ValueError):
        return False
    return stamp.get("requirements") == wanted and not (venv / "incomplete").exists() and (venv / "bin" / "python").exists()


def make(root: Path, venv: Path, wanted: str) -> None:
    """Make or complete the environment, showing progress. Raises SetupError."""
    progress = Progress()
    if not runs(venv / "bin" / "python"):
        interpreter = find_interpreter(root, progress)
        check_disk(root)
        progress.step(f"making {venv.name} with Python {interpreter.version} ({interpreter.path})")
        _make_venv(interpreter, venv)
    elif not (venv / "incomplete").exists() and missing_pins(root, venv) == []:
        _stamp(venv, wanted)  # made by hand with the same pins: adopt it
        return
    (venv / "incomplete").touch()
    check_disk(root)
    pip(venv, _requirement_flags(root), progress, "installing packages (about 1.5 GB on disk, once)")
    pip(venv, ["--no-deps", "-r", str(root / "requirements" / SERVER_REQUIREMENTS)], progress, "installing tritonserver")
    if missing := missing_pins(root, venv):
        raise SetupError(f"{', '.join(missing)} is not there after pip had installed it; remove .venv and start again")
    (venv / "incomplete").unlink()
    _stamp(venv, wanted)
    progress.done("environment ready")


def _requirement_flags(root: Path) -> List[str]:
    return [flag for name in REQUIREMENTS for flag in ("-r", str(root / "requirements" / name))]


def _stamp(venv: Path, wanted: str) -> None:
    temporary = venv / "everbatch.json.new"
    temporary.write_text(json.dumps({"requirements": wanted}) + "\n")
    temporary.replace(venv / "everbatch.json")


def _make_venv(interpreter: Interpreter, venv: Path) -> None:
    shutil.rmtree(venv, ignore_errors=True)
    result = subprocess.run([interpreter.path, "-m", "venv", str(venv)], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = (result.stdout + result.stderr).strip().splitlines() or ["no reason given"]
        raise SetupError(f"{interpreter.path} -m venv failed: {lines[-1]}")


def runs(python: Path) -> bool:
    """True if the interpreter starts and has pip."""
    try:
        return subprocess.run([str(python), "-c", "import pip"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


# ---- the interpreter -----------------------------------------------------------------------------------------------------


def find_interpreter(root: Path, progress: Progress) -> Interpreter:
    """The best CPython of this machine for the environment, after installing what it lacks where that is allowed."""
    found = [interpreter for path in candidates() for interpreter in [inspect(root, path)] if interpreter is not None]
    if not found:
        raise SetupError(
            f"no CPython {' or '.join(VERSIONS)} found on PATH, in /usr/bin, /usr/local/bin or ~/.pyenv; "
            "install one, on Debian with: apt-get install -y python3.11-venv libpython3.11"
        )
    best = min(found, key=lambda interpreter: len(interpreter.missing_packages))  # the first of equals
    if best.missing_packages:
        install_system_packages(best.missing_packages, progress)
        best = inspect(root, best.path) or best
    if best.missing_packages:
        raise SetupError(f"Python {best.version} lacks a part; run: apt-get install -y {' '.join(best.missing_packages)}")
    return best


def candidates() -> Iterator[str]:
    """Paths that may be a suitable Python, best first: 3.11 before 3.12, PATH before the usual places."""
    seen = set()
    own = "{}.{}".format(*sys.version_info[:2])
    for version in VERSIONS:
        paths = [sys.executable] if own == version else []
        paths.append(shutil.which(f"python{version}") or "")
        paths += [f"/usr/bin/python{version}", f"/usr/local/bin/python{version}"]
        paths += sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python{version}")), reverse=True)
        for path in paths:
            if path and path not in seen and os.access(path, os.X_OK):
                seen.add(path)
                yield path


def inspect(root: Path, path: str) -> Optional[Interpreter]:
    """Run a candidate and ask it what it is. None if it does not run or is none of VERSIONS."""
    try:
        result = subprocess.run([path, "-S", "-c", _PROBE, str(root)], capture_output=True, text=True, timeout=20, check=False)
        name, version, executable, has_venv, has_libpython = json.loads(result.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    if name != "cpython" or version not in VERSIONS:
        return None
    return Interpreter(executable, version, has_venv, has_libpython)


def install_system_packages(names: List[str], progress: Progress) -> None:
    """apt-get install, when root on a Debian-like machine; otherwise SetupError naming the one command."""
    command = f"apt-get install -y {' '.join(names)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupError(f"{' and '.join(names)} is missing; run as root: {command}")
    progress.step(f"installing {' '.join(names)} with apt-get")
    variables = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    for arguments in (["update", "-qq"], ["install", "-y", "-qq", *names]):
        result = subprocess.run(["apt-get", *arguments], capture_output=True, text=True, env=variables, check=False)
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SetupError(f"apt-get could not install {' '.join(names)} ({reason}); run: apt-get update && {command}")


def check_disk(root: Path) -> None:
    """Raise SetupError when the environment would not fit."""
    free = shutil.disk_usage(root).free
    if free < NEEDED_BYTES:
        raise SetupError(
            f"{free / 1e9:.1f} GB are free under {root}, the environment needs {NEEDED_BYTES / 1e9:.1f} GB; free some space"
        )


# ---- packages ------------------------------------------------------------------------------------------------------------


def pins(root: Path) -> List[Tuple[str, str]]:
    """(name, version) of every direct requirement, extras dropped."""
    found = []
    for name in (*REQUIREMENTS, SERVER_REQUIREMENTS):
        for line in (root / "requirements" / name).read_text().splitlines():
            line = line.split("#", 1)[0].strip()
            if line:
                package, _, version = line.partition("==")
                found.append((package.split("[", 1)[0], version))
    return found


def missing_pins(root: Path, venv: Path) -> List[str]:
    """Requirements that the environment does not hold in exactly the pinned version (a local suffix like +cpu is fine)."""
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


def pip(venv: Path, arguments: List[str], progress: Progress, title: str) -> None:
    """Run pip install and show what it does. Raises SetupError with the reason in one sentence."""
    progress.step(title)
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "--progress-bar", "off", "--no-input", *arguments]
    output: List[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line.rstrip())
            if action := describe(line):
                progress.note(action)
    if process.returncode != 0:
        raise SetupError(explain(output))


def describe(line: str) -> Optional[str]:
    """What a line of pip's output says to a person, or None."""
    words = line.split()
    if len(words) >= 2 and words[0] == "Collecting":
        return f"looking up {words[1]}"
    if len(words) >= 2 and words[0] in ("Downloading", "Processing", "Using"):
        name = words[2] if words[0] == "Using" and len(words) > 2 else words[1]
        size = line[line.rindex("(") :].strip() if "(" in line else ""
        verb = {"Downloading": "downloading", "Processing": "using", "Using": "using"}[words[0]]
        return f"{verb} {os.path.basename(name)} {size}".rstrip()
    if line.startswith("Installing collected packages:"):
        return f"unpacking {line.count(',') + 1} packages"
    return None


def explain(output: List[str]) -> str:
    """One sentence about why pip failed."""
    text = "\n".join(output)
    if "No space left on device" in text:
        return f"the disk is full; {NEEDED_BYTES / 1e9:.1f} GB are needed for the environment"
    unreachable = ("NewConnectionError", "Temporary failure in name resolution", "Network is unreachable", "ConnectTimeoutError")
    if any(sign in text for sign in unreachable):
        return "no package index can be reached; connect to a network, or name a reachable one in PIP_INDEX_URL, and start again"
    errors = [line for line in output if line.startswith("ERROR:")]
    return f"pip failed: {(errors or output or ['it said nothing'])[-1]}"

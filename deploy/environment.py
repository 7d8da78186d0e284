"""The project's own environment, made on first use. Standard library only, and any Python >= 3.9 runs it.

.venv is usable when .venv/everbatch.json names the hashes of the requirements that the command needs: `test` and `bench` need
more than all others, and help needs none. While pip works, .venv/incomplete exists: an environment that was interrupted is
completed by running pip again, one whose Python does not run is made anew. Order of side effects: lock, look for a Python,
install missing system packages (root on Debian only), venv, pip, path, stamp. Where .venv is a link, checkouts share the
environment that it leads to, and so they share its lock.

EVERBATCH_PYTHON=/path/to/python skips all of this and uses that interpreter as it is.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

from deploy import __version__
from deploy.errors import SetupError
from deploy.interpreter import Interpreter, find_interpreter
from deploy.packages import SERVER, SERVING, TESTING, Kit, missing_pins, pip
from deploy.progress import SteppedProgress

HELP_DIRECTORY = Path(__file__).parent / "help"  # what `--help` prints, as tools/write_help.py has stored it
ROOT_PAGE = "everbatch"
OWN_HELP = "bench"  # `bench NAME --help` is the help of the benchmark itself
PATH_FILE = "everbatch.pth"  # Python adds the directory that it names to its search path.


def main(root: str, arguments: list[str]) -> None:
    """Make the environment if need be and become `python -m deploy.cli`. Does not return.

    Ctrl-C waits while a program is being loaded that cannot answer it yet: before this function and after it.
    """
    if os.pathsep in root:
        sys.exit(f"everbatch: the path {root} holds a colon, at which Python ends a path; move the checkout elsewhere")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM raises too, so that pip is ended with us
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        python = os.environ.get("EVERBATCH_PYTHON") or str(_own_python(Path(root), arguments))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    except SetupError as error:
        sys.exit(f"everbatch: {error}")
    except KeyboardInterrupt:
        sys.exit("everbatch: interrupted; the next start continues where this one stopped")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != root]
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *paths])
    try:
        os.execv(python, [python, "-P", "-m", "deploy.cli", *arguments])  # -P: a ./deploy of the user's is not imported
    except OSError as error:
        sys.exit(
            f"everbatch: {python} cannot be executed ({error.strerror}); unset EVERBATCH_PYTHON or name a Python 3.11"
        )


def _own_python(root: Path, arguments: list[str]) -> Path:
    """The Python of the environment that the command needs. Does not return where no environment is there, nor needed."""
    kit = kit_for(arguments)
    if not is_complete(root / ".venv", hashes(root, kit)) and (text := asked_help(arguments)) is not None:
        try:
            print(text, flush=True)
        except BrokenPipeError:  # The reader has left, as `head` does. The interpreter's last flush must not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0 if arguments else 2)
    return ensure(root, kit)


def kit_for(arguments: list[str]) -> Kit:
    """The packages that the command of these arguments needs."""
    return TESTING if arguments[:1] in (["test"], ["bench"]) else SERVING


def ensure(root: Path, kit: Kit) -> Path:
    """The environment's Python, made or completed if need be. Raises SetupError."""
    venv = root / ".venv"
    wanted = hashes(root, kit)
    if is_complete(venv, wanted):
        return venv / "bin" / "python"
    progress = SteppedProgress()
    with _open_lock(venv) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.step("waiting for another everbatch that makes the environment")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_complete(venv, wanted):
            make(root, venv.resolve(), kit, progress, lock.fileno())
    return venv / "bin" / "python"


def _open_lock(venv: Path) -> TextIO:
    """The file whose lock is held while the environment is made: beside what `venv` is or leads to. Raises SetupError."""
    path = venv.resolve().parent / ".run" / "environment.lock"
    try:
        path.parent.mkdir(exist_ok=True)
        return path.open("w")
    except OSError as error:
        raise SetupError(
            f"{path} cannot be written ({error.strerror}), so the environment cannot be brought up to date; let its owner "
            "run ./everbatch there, or remove .venv to get one of your own"
        ) from None


def hashes(root: Path, kit: Kit) -> dict[str, str]:
    """File of requirements -> SHA-256 of its content, which changes with every pin in it."""
    return {name: hashlib.sha256((root / "requirements" / name).read_bytes()).hexdigest() for name in kit.files}


def is_complete(venv: Path, wanted: dict[str, str]) -> bool:
    """True if the environment carries the stamp of these requirements and its Python exists. Reads two small files."""
    return (
        wanted.items() <= _stamped(venv).items()
        and not (venv / "incomplete").exists()
        and (venv / "bin" / "python").exists()
    )


def _stamped(venv: Path) -> dict[str, str]:
    """The hashes of the requirements that the environment was made of."""
    try:
        found = json.loads((venv / "everbatch.json").read_text())["requirements"]
    except (OSError, ValueError, KeyError, TypeError):  # There is no stamp, or one that was not written to its end.
        return {}
    return found if isinstance(found, dict) else {}  # Older stamps held one hash of all.


def make(root: Path, venv: Path, kit: Kit, progress: SteppedProgress, lock: int) -> None:
    """Make or complete the environment. `lock`: descriptor that pip holds too, should it outlive us. Raises
    SetupError.
    """
    wanted = hashes(root, kit)
    if not runs(venv / "bin" / "python"):
        interpreter = find_interpreter(root, progress)
        check_disk(venv.parent, kit)
        progress.step(f"making {venv.name} with Python {interpreter.version} ({interpreter.path})")
        _make_venv(interpreter, venv)
    elif not (venv / "incomplete").exists() and missing_pins(root, venv, kit.files) == []:
        _finish(venv, wanted)  # An environment that was made by hand with the same pins is adopted.
        return
    (venv / "incomplete").touch()
    check_disk(venv.parent, kit)
    kernels = _compile_kernels(root, venv) if kit is SERVING else None
    try:
        _install(root, venv, kit, progress, lock)
        if kernels is not None and kernels.poll() is None:
            progress.step("compiling the native kernels, which began beside pip")
            while kernels.poll() is None:
                progress.tick()
                time.sleep(0.2)
    finally:
        if kernels is not None and kernels.poll() is None:
            os.killpg(kernels.pid, signal.SIGTERM)  # the compilers that it has started, too
            kernels.wait()
    (venv / "incomplete").unlink(missing_ok=True)
    _finish(venv, wanted)
    progress.done("environment ready")


def _compile_kernels(root: Path, venv: Path) -> subprocess.Popen[bytes]:
    """Begin to compile them: pip leaves a core idle. Where that fails, the first start says why."""
    command = [str(venv / "bin" / "python"), "-P", "-m", "kernels.cpu.build"]
    variables = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.Popen(
        command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def _install(root: Path, venv: Path, kit: Kit, progress: SteppedProgress, lock: int) -> None:
    files = [flag for name in kit.for_pip for flag in ("-r", str(root / "requirements" / name))]
    pip(venv, files, progress, f"installing packages ({kit.size} on disk, once)", lock)
    server = ["--no-deps", "-r", str(root / "requirements" / SERVER)]
    pip(venv, server, progress, "installing tritonserver (30 MB)", lock)
    if missing := missing_pins(root, venv, kit.files):
        raise SetupError(f"{', '.join(missing)} is not there after pip had installed it; remove .venv and start again")


def _finish(venv: Path, wanted: dict[str, str]) -> None:
    """Let the environment's Python find the packages of the checkout, then write the stamp."""
    for packages in venv.glob("lib/python3*/site-packages"):
        # Seen from the link .venv, by which several checkouts may share the environment, each finds itself.
        (packages / PATH_FILE).write_text("../../../..\n")
    temporary = venv / "everbatch.json.new"
    temporary.write_text(json.dumps({"requirements": _stamped(venv) | wanted}) + "\n")
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
    except OSError:  # There is no such file, or one that cannot be executed.
        return False


def check_disk(place: Path, kit: Kit) -> None:
    """Raise SetupError when the environment would not fit on the file system of `place`."""
    free = shutil.disk_usage(place).free
    if free < kit.needed_bytes:
        raise SetupError(
            f"{free / 1e9:.1f} GB are free under {place}, the environment needs {kit.needed_bytes / 1e9:.1f} GB; "
            "free some space"
        )


def asked_help(arguments: list[str]) -> str | None:
    """The text that these arguments of the command line ask for; None where they ask for more than help or the version."""
    if arguments in ([], ["--help"]):
        return help_page(ROOT_PAGE)
    if arguments == ["--version"]:
        return f"everbatch {__version__}"
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    asks = own[1:2] == ["--help"] if own[0:1] == [OWN_HELP] else "--help" in own
    return help_page(own[0]) if asks else None


def help_page(name: str) -> str | None:
    """The stored help of a command; None where there is no such command."""
    known = {path.stem: path for path in HELP_DIRECTORY.glob("*.txt")}
    return known[name].read_text().rstrip() if name in known else None

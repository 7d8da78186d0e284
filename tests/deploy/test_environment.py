"""The launcher's environment: stamp, repair, refusals. pip and venv are never run here."""

from __future__ import annotations

import fcntl
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import ROOT, environment, interpreter, packages
from deploy.errors import SetupError
from deploy.interpreter import Interpreter
from deploy.packages import SERVING, TESTING
from deploy.progress import SteppedProgress


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "requirements").mkdir()
    for name in TESTING.files:
        (tmp_path / "requirements" / name).write_text(f"# {name}\npackage-{name[:-4]}[extra]==1.0\n")
    return tmp_path


def stamped(checkout: Path, kit: packages.Kit = SERVING) -> Path:
    venv = checkout / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / "everbatch.json").write_text(json.dumps({"requirements": environment.hashes(checkout, kit)}))
    return venv


def quiet() -> SteppedProgress:
    return SteppedProgress(io.StringIO())


def test_a_stamped_environment_is_used_without_running_anything(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = stamped(checkout)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("a process was started"))
    assert environment.ensure(checkout, SERVING) == venv / "bin" / "python"


def test_a_changed_pin_makes_the_environment_incomplete(checkout: Path) -> None:
    venv, wanted = stamped(checkout), environment.hashes(checkout, SERVING)
    assert environment.is_complete(venv, wanted)
    (checkout / "requirements" / "run.txt").write_text("package-run==1.1\n")
    assert not environment.is_complete(venv, environment.hashes(checkout, SERVING))


@pytest.mark.parametrize("damage", ["no python", "interrupted", "no stamp", "broken stamp"])
def test_a_half_made_environment_is_not_taken_for_a_whole_one(checkout: Path, damage: str) -> None:
    venv = stamped(checkout)
    if damage == "no python":
        (venv / "bin" / "python").unlink()
    elif damage == "interrupted":
        (venv / "incomplete").touch()
    elif damage == "no stamp":
        (venv / "everbatch.json").unlink()
    else:
        (venv / "everbatch.json").write_text('{"requ')
    assert not environment.is_complete(venv, environment.hashes(checkout, SERVING))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace everything that would touch the machine by a note of it."""
    notes: list[str] = []

    def make_venv(found: Interpreter, venv: Path) -> None:
        notes.append("venv")
        shutil.rmtree(venv, ignore_errors=True)
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin" / "python").touch()
        (venv / "lib" / "python3.11" / "site-packages").mkdir(parents=True)

    def pip(venv: Path, arguments: list[str], progress: SteppedProgress, title: str, lock: int) -> None:
        assert (venv / "incomplete").exists()
        notes.append(" ".join(["pip", *(Path(word).name for word in arguments if word != "-r")]))

    def compile_kernels(root: Path, venv: Path) -> subprocess.Popen[bytes]:
        notes.append("kernels")
        return subprocess.Popen(["sleep", "0.3"], start_new_session=True)

    monkeypatch.setattr(environment, "_make_venv", make_venv)
    monkeypatch.setattr(environment, "_compile_kernels", compile_kernels)
    monkeypatch.setattr(environment, "pip", pip)
    monkeypatch.setattr(environment, "check_disk", lambda place, kit: None)
    monkeypatch.setattr(environment, "missing_pins", lambda root, venv, files: [])
    monkeypatch.setattr(environment, "find_interpreter", lambda root, progress: Interpreter("/p", "3.11", True, True))
    monkeypatch.setattr(environment, "SteppedProgress", quiet)
    return notes


def test_a_fresh_clone_gets_a_venv_then_packages_then_the_stamp(checkout: Path, recorded: list[str]) -> None:
    environment.ensure(checkout, SERVING)
    assert recorded == ["venv", "kernels", "pip run.txt", "pip --no-deps server.txt"]
    assert environment.is_complete(checkout / ".venv", environment.hashes(checkout, SERVING))


@pytest.fixture
def shared(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that .venv of the checkout leads to, in another one; nothing is in it yet."""
    target = tmp_path_factory.mktemp("shared") / "environment"
    target.mkdir()
    (checkout / ".venv").symlink_to(target)
    return target


def test_checkouts_that_share_an_environment_share_its_lock(
    checkout: Path, shared: Path, recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = shared.parent / ".run" / "environment.lock"
    held: list[bool] = []

    def make(root: Path, venv: Path, kit: packages.Kit, progress: SteppedProgress, descriptor: int) -> None:
        with lock.open() as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(True)
        original(root, venv, kit, progress, descriptor)

    original = environment.make
    monkeypatch.setattr(environment, "make", make)
    assert environment.ensure(checkout, SERVING) == checkout / ".venv" / "bin" / "python"
    assert held == [True] and not (checkout / ".run").exists()
    assert (checkout / ".venv").is_symlink() and (shared / "everbatch.json").is_file(), "the link stays"
    assert environment.is_complete(checkout / ".venv", environment.hashes(checkout, SERVING))


def test_a_shared_environment_of_somebody_else_is_refused_with_the_remedy(checkout: Path) -> None:
    (checkout / ".venv").symlink_to(checkout / "gone" / "environment")
    with pytest.raises(SetupError, match=r"environment\.lock cannot be written .*remove \.venv"):
        environment.ensure(checkout, SERVING)


def test_an_interrupted_environment_is_completed_by_pip_alone(
    checkout: Path, recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = stamped(checkout)
    (venv / "incomplete").touch()
    monkeypatch.setattr(environment, "runs", lambda python: True)
    environment.ensure(checkout, SERVING)
    assert recorded == ["kernels", "pip run.txt", "pip --no-deps server.txt"]
    assert not (venv / "incomplete").exists()


def test_an_environment_whose_python_does_not_run_is_made_anew(checkout: Path, recorded: list[str]) -> None:
    venv = stamped(checkout)
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to("/nonexistent/python3.11")
    environment.ensure(checkout, SERVING)
    assert recorded[0] == "venv"


def test_an_environment_made_by_hand_with_the_same_pins_is_adopted(
    checkout: Path, recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = stamped(checkout)
    (venv / "everbatch.json").unlink()
    monkeypatch.setattr(environment, "runs", lambda python: True)
    environment.ensure(checkout, SERVING)
    assert recorded == []
    assert environment.is_complete(venv, environment.hashes(checkout, SERVING))


def test_a_failing_pip_leaves_no_stamp(checkout: Path, recorded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SetupError("no package index can be reached")

    monkeypatch.setattr(environment, "pip", fail)
    with pytest.raises(SetupError):
        environment.ensure(checkout, SERVING)
    assert (checkout / ".venv" / "incomplete").exists()
    assert not environment.is_complete(checkout / ".venv", environment.hashes(checkout, SERVING))


def test_pins_are_exact_and_known_without_their_extras(checkout: Path) -> None:
    assert packages.pins(checkout) == [
        ("package-run", "1.0"),
        ("package-test", "1.0"),
        ("package-bench", "1.0"),
        ("package-server", "1.0"),
    ]
    for name, version in packages.pins(ROOT):
        assert version, f"{name} has no exact version"


def test_the_pins_keep_numpy_1_for_the_stub_and_the_server_in_a_file_of_its_own() -> None:
    pins = dict(packages.pins(ROOT))
    assert pins["numpy"].startswith("1.")
    assert "nvidia-pytriton" in (ROOT / "requirements" / packages.SERVER).read_text()


def test_no_requirements_file_names_an_index() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        text = path.read_text()
        assert "://" not in text and "--index" not in text and "--extra" not in text and "--find" not in text


def test_a_machine_without_a_suitable_python_is_one_sentence(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "candidates", lambda: iter([]))
    with pytest.raises(SetupError, match="apt-get install -y python3.11-venv libpython3.11") as caught:
        interpreter.find_interpreter(checkout, quiet())
    assert "\n" not in str(caught.value)


def test_an_interpreter_that_lacks_nothing_is_preferred(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"/a": Interpreter("/a", "3.11", False, False), "/b": Interpreter("/b", "3.12", True, True)}
    monkeypatch.setattr(interpreter, "candidates", lambda: iter(known))
    monkeypatch.setattr(interpreter, "inspect", lambda root, path: known[path])
    assert interpreter.find_interpreter(checkout, quiet()).path == "/b"


def test_without_root_a_missing_package_names_the_one_command(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.os, "geteuid", lambda: 1000)
    with pytest.raises(SetupError, match="run as root: apt-get install -y python3.11-venv libpython3.11"):
        interpreter.install_system_packages(["python3.11-venv", "libpython3.11"], quiet())


def test_an_interpreter_is_asked_what_it_is() -> None:
    found = interpreter.inspect(ROOT, sys.executable)
    assert found is not None
    assert found.version == "{}.{}".format(*sys.version_info[:2])
    assert interpreter.inspect(ROOT, "/bin/true") is None


def test_too_little_disk_is_refused_before_anything_is_made(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = environment.shutil.disk_usage(checkout)._replace(free=10**9)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(SetupError, match="1.0 GB are free"):
        environment.check_disk(checkout, SERVING)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            ["WARNING: Retrying ... NewConnectionError(...)", "ERROR: Could not find a version"],
            "no package index can be reached",
        ),
        (["ERROR: Could not install packages: [Errno 28] No space left on device"], "the disk is full"),
        (["noise", "ERROR: No matching distribution found for x==1"], "No matching distribution found for x==1"),
        ([], "it said nothing"),
    ],
)
def test_why_pip_failed_is_one_sentence(output: list[str], expected: str) -> None:
    assert expected in packages.explain(output)
    assert "\n" not in packages.explain(output)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Collecting torch==2.13.0\n", "looking up torch==2.13.0"),
        ("  Downloading torch-2.13.0-cp311.whl (196.2 MB)\n", "downloading torch-2.13.0-cp311.whl (196.2 MB)"),
        ("Processing /somewhere/torch-2.13.0.whl (from -r run.txt (line 2))\n", "using torch-2.13.0.whl"),
        ("     --- noise\n", None),
    ],
)
def test_pips_output_becomes_progress(line: str, expected: str | None) -> None:
    assert packages.describe(line) == expected


def test_the_progress_counts_packages_while_pip_fetches_them_and_while_it_unpacks_them(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    (site / "pip-25.dist-info").mkdir(parents=True)
    counter = packages.Counter(tmp_path)
    assert counter.action("Collecting a==1 (from -r run.txt (line 2))") == "package 1: looking up a==1"
    assert counter.action("  Downloading a-1.whl (3 MB)") == "package 1: downloading a-1.whl (3 MB)"
    assert counter.action("Collecting b") == "package 2: looking up b"
    assert counter.action(None) is None, "nothing new happened in this second"
    assert counter.action("Installing collected packages: a, b") == "unpacking: 0 of 2 packages"
    (site / "a-1.dist-info").mkdir()
    assert counter.action(None) == "unpacking: 1 of 2 packages"


def test_only_the_commands_that_need_test_tools_install_them(
    checkout: Path, recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "runs", lambda python: True)
    monkeypatch.setattr(environment, "missing_pins", lambda *_: [] if recorded else ["package-test==1.0"])
    for command in (["serve"], ["chat"], ["doctor"], ["generate", "test"]):
        assert environment.kit_for(command) == SERVING
    stamped(checkout)
    for command in ("test", "bench"):
        assert environment.kit_for([command, "--quick"]) == TESTING
    assert environment.ensure(checkout, SERVING) and recorded == []
    environment.ensure(checkout, TESTING)
    assert recorded[-2:] == ["pip run.txt test.txt bench.txt", "pip --no-deps server.txt"]
    for kit in (SERVING, TESTING):
        assert environment.is_complete(checkout / ".venv", environment.hashes(checkout, kit))


def test_the_environments_python_finds_the_packages_of_its_own_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real interpreter, in the environment itself and through a second checkout's link to it."""
    first, second = tmp_path / "first", tmp_path / "second"
    for checkout in (first, second):
        checkout.mkdir()
        (checkout / "marker.py").write_text(f"NAME = {checkout.name!r}\n")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(first / ".venv")], check=True)
    (second / ".venv").symlink_to(first / ".venv")
    environment._finish(first / ".venv", {"run.txt": "a hash"})
    for checkout in (first, second):
        command = [str(checkout / ".venv" / "bin" / "python"), "-P", "-c", "import marker; print(marker.NAME)"]
        found = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
        assert found.stdout.strip() == checkout.name, found.stderr


def test_lines_come_as_they_are_written_with_ticks_in_between() -> None:
    """The second line is not even written before a tick has come."""
    code = "import sys; print('a', flush=True); sys.stdin.read(); sys.stdout.write('b'); sys.stdout.flush()"
    found = []
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        for line in packages.lines_or_ticks(process.stdout.fileno()):
            found.append(line)
            if line is None and "a" in found:
                process.stdin.close()
    assert [line for line in found if line is not None] == ["a", "b"]


def test_an_interrupted_set_up_ends_pip(tmp_path: Path) -> None:
    """A pip that never ends and a person who presses Ctrl-C while it is busy."""

    class Impatient(SteppedProgress):
        def tick(self) -> None:
            if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
                raise KeyboardInterrupt

    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "python"
    fake.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    fake.chmod(0o755)
    with open(tmp_path / "lock", "w") as lock, pytest.raises(KeyboardInterrupt):
        packages.pip(tmp_path, [], Impatient(io.StringIO()), "installing", lock.fileno())
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_progress_without_a_terminal_is_plain_lines() -> None:
    stream = io.StringIO()
    progress = SteppedProgress(stream)
    progress.step("one")
    for _ in range(100):
        progress.note("busy")
    progress.done("ready")
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()
    assert len(lines) <= 4 and lines[0].endswith("one") and lines[-1].endswith("ready")


def test_the_launcher_itself_needs_the_standard_library_only() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import deploy.environment; print(sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert "'rich'" not in result.stdout and "'msgspec'" not in result.stdout

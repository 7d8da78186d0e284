"""What `pip install .` makes: a wheel with everything that serving reads, which serves where there is no checkout."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest

import backend
from deploy import ROOT, __version__, doctor, invocation, rundir
from deploy.errors import UserError
from deploy.ports import Ports

PACKAGES = ("backend", "client", "compat", "deploy", "gateway", "kernels")
DATA = ("model_repository", "models")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, with the setuptools that is there: nothing is fetched, and nothing is left in the checkout."""
    source, target = tmp_path_factory.mktemp("source") / "everbatch", tmp_path_factory.mktemp("wheel")
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in (*PACKAGES, *DATA, "requirements", "tests", "tools", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(target)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_file_that_serving_reads(wheel: zipfile.ZipFile) -> None:
    held = set(wheel.namelist())
    wanted = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".h", ".cpp")]
    wanted += [path for name in DATA for path in (ROOT / name).rglob("*")]
    wanted += [*(ROOT / "gateway" / "page").iterdir()]
    wanted += [*(ROOT / "deploy" / "profiles").rglob("config.pbtxt"), ROOT / "deploy" / "nginx.conf"]
    wanted += [*(ROOT / name / "py.typed" for name in PACKAGES)]
    names = {str(path.relative_to(ROOT)) for path in wanted if path.is_file() and "__pycache__" not in path.parts}
    assert names - held == set()
    assert {name.split("/")[0] for name in held} == {*PACKAGES, *DATA, f"everbatch-{__version__}.dist-info"}


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `everbatch` command of an environment that holds the wheel, and sees the packages beside this Python by a .pth file."""
    environment = tmp_path_factory.mktemp("installed")
    venv.create(environment)
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-compile", str(wheel.filename)], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "pinned.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return environment / "bin" / "everbatch"


def outside_the_checkout(directory: Path) -> dict[str, str]:
    """The environment variables of a program that must not find the checkout, and that keeps its files in a directory."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {"EVERBATCH_CACHE": str(ROOT / ".run" / "native")} | kept | {"EVERBATCH_RUN_ROOT": str(directory)}


def test_the_installed_command_runs_its_own_copy_in_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    def printed(*command: str) -> str:
        variables = outside_the_checkout(tmp_path)
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=True).stdout

    assert printed(str(installed), "--version") == f"everbatch {__version__}\n"
    code = f"import importlib.util as i; print(*(i.find_spec(name).origin for name in {PACKAGES}), sep='\\n')"
    origins = printed(str(installed.parent / "python"), "-c", code).split()
    assert [Path(each).is_relative_to(installed.parent.parent) for each in origins] == [True] * len(PACKAGES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow("a server starts")
def test_the_installed_command_serves_the_default_model(installed: Path, tmp_path: Path) -> None:
    ports, openai = Ports.free(), Ports.free().http
    command = [str(installed), "serve", f"--http-port={ports.http}", f"--grpc-port={ports.grpc}"]
    command += [f"--metrics-port={ports.metrics}", f"--openai-port={openai}", "--exit-timeout=5"]
    variables = outside_the_checkout(tmp_path)
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path, env=variables, text=True) as process:
        assert process.stdout is not None
        try:
            assert any("Ctrl-C stops it" in line for line in process.stdout)
            body = json.dumps({"model": "everbatch", "prompt": "def main(", "max_tokens": 4}).encode()
            url, types = f"http://127.0.0.1:{openai}/v1/completions", {"Content-Type": "application/json"}
            with urllib.request.urlopen(urllib.request.Request(url, body, types), timeout=60) as reply:
                assert json.load(reply)["usage"]["completion_tokens"] == 4
        finally:
            process.terminate()
        assert "no process of it is left" in process.stdout.read()
    assert process.returncode == 0


def test_every_place_that_names_the_version_names_the_same() -> None:
    assert backend.__version__ == __version__
    chart = (ROOT / "deploy" / "kubernetes" / "everbatch" / "Chart.yaml").read_text()
    assert dict(re.findall(r'^(version|appVersion): "?([^"\n]+)', chart, re.MULTILINE)) == {
        "version": __version__,
        "appVersion": __version__,
    }
    assert f"everbatch:{__version__} " in (ROOT / "docs" / "kubernetes.md").read_text()
    assert f"everbatch-{__version__}-py3-none-any.whl" in (ROOT / "docs" / "start.md").read_text()
    released = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[:2] == ["Unreleased", __version__]


def test_the_wheel_brings_the_command_the_licence_and_the_pins_of_serving(wheel: zipfile.ZipFile) -> None:
    folder = f"everbatch-{__version__}.dist-info"
    assert "everbatch = deploy.entry:main" in wheel.read(f"{folder}/entry_points.txt").decode()
    assert b"Apache License" in wheel.read(f"{folder}/licenses/LICENSE")
    lines = wheel.read(f"{folder}/METADATA").decode().splitlines()
    asked = {
        line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist") and ";" not in line
    }
    pinned = (ROOT / "requirements" / "run.txt").read_text().splitlines()
    assert asked == {line for line in pinned if line and not line.startswith("#")}


def test_matplotlib_is_asked_for_by_benchmarks_only() -> None:
    for name in ("run.txt", "container.txt", "test.txt"):
        assert "matplotlib" not in (ROOT / "requirements" / name).read_text()
    assert "matplotlib==" in (ROOT / "requirements" / "bench.txt").read_text()


def test_a_picture_without_matplotlib_is_refused_in_one_sentence() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from benchmarks import pictures; pictures.pyplot()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "no picture: matplotlib is not installed; pip install -r requirements/bench.txt\n"


def test_an_installed_copy_writes_to_the_users_directory_of_states(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("EVERBATCH_RUN_ROOT", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert rundir.default_run_directory("serve-1") == ROOT / ".run" / "serve-1"
    monkeypatch.setattr(rundir, "IS_CHECKOUT", False)
    assert rundir.default_run_directory("serve-1") == tmp_path / "everbatch" / "serve-1"


def test_an_installed_copy_names_the_command_that_brings_tritonserver(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = (ROOT / "requirements" / "server.txt").read_text().splitlines()
    assert invocation.INSTALL_SERVER.split()[-1] in pins
    monkeypatch.setattr(invocation, "IS_CHECKOUT", False)
    monkeypatch.setattr(invocation.shutil, "which", lambda name: None)
    monkeypatch.setattr(invocation.os, "access", lambda path, mode: False)
    monkeypatch.setattr(invocation.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps nvidia-pytriton=="):
        invocation.find_installation()


@pytest.mark.parametrize(
    ("asked", "state"),
    [
        (["pytest==" + pytest.__version__, 'x==1; extra == "bench"'], "ok"),
        (["pytest==0.1"], "warn"),
        (["nope==1"], "warn"),
    ],
)
def test_doctor_compares_the_packages_beside_an_installed_copy(
    asked: list[str], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "IS_CHECKOUT", False)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: asked)
    finding = doctor.environment()
    assert finding.state == state and (state == "ok" or (asked[0] in finding.seen and finding.remedy))


def test_the_ruff_of_the_commit_hooks_is_the_pinned_one() -> None:
    """The hooks run what the environment holds, so that nothing has a second version."""
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    assert "repo: local" in text and "entry: .venv/bin/ruff" in text and "://" not in text

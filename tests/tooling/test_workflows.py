"""The workflows of .github and the hooks of pre-commit run what this checkout holds. Nothing of them is run here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from deploy import ROOT
from tests.tooling.test_checkers import STRICT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
_PATH = re.compile(r"^(?:\./)?(?:tests|requirements|deploy|\.ci)/[\w./*-]+$|^\./everbatch$")


def commands(workflow: Path) -> list[str]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_every_path_that_a_step_names_exists(workflow: Path) -> None:
    named = [word for command in commands(workflow) for word in shlex.split(command) if _PATH.match(word)]
    assert [word for word in named if not list(ROOT.glob(word.removeprefix("./")))] == []
    assert commands(workflow)


def test_the_rooms_without_triton_are_tested_on_the_other_python() -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["engine-without-triton"]
    text = str(job)
    assert "'python-version': '3.12'" in text and "server.txt" not in text
    assert all(f"tests/{room}" in text for room in ("core", "kvcache", "scheduler", "engine", "wire"))


def test_the_site_is_built_of_its_pins_alone_and_kept() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["docs"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [
        "python -m pip install -r requirements/docs.txt",
        "python -m mkdocs build --strict",
    ]
    assert steps[-1]["with"]["path"] == yaml.safe_load((ROOT / "mkdocs.yml").read_text())["site_dir"]


def test_pre_commit_checks_the_types_of_the_same_rooms_as_the_suite() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (mypy,) = (hook for hook in hooks if hook["id"] == "mypy")
    assert set(STRICT) <= set(mypy["entry"].split()) and mypy["pass_filenames"] is False


def test_dependabot_looks_where_pins_are() -> None:
    updates = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text())["updates"]
    assert {update["package-ecosystem"] for update in updates} == {"pip", "github-actions", "docker"}
    assert all((ROOT / update["directory"].lstrip("/")).is_dir() for update in updates)

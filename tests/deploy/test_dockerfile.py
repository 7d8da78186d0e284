"""deploy/Dockerfile against the checkout: what it copies, from which context, and what it installs.

There is no Docker engine where the tests run, so the instructions are read, not run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest

from deploy import ROOT
from deploy.packages import pins
from tests.architecture.sources import PRODUCT

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
CONTEXT = ROOT / "deploy" / "Dockerfile.dockerignore"
DATA = {"model_repository", "models"}  # read by path, never imported
CHECKOUT_ONLY = {"benchmarks", "tests", "tools"}
IMPORT = re.compile(r"^ *(?:from|import) (\w+)", re.MULTILINE)


def instructions(text: str) -> list[list[str]]:
    """Instruction and arguments of each line, with continued lines joined and comments left out."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    return [line.split(None, 1) for line in lines.splitlines() if line.strip()]


def arguments_of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions(DOCKERFILE.read_text()) if instruction == name]


def copied() -> dict[str, str]:
    """Destination of each source of a COPY."""
    words = [shlex.split(rest) for rest in arguments_of("COPY")]
    return {source: target for *sources, target in words for source in sources}


def rooms_loaded_from(start: str) -> set[str]:
    """Packages of the checkout that the modules of one package import, directly or through each other."""
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    seen: set[str] = set()
    waiting = {start}
    while waiting:
        room = waiting.pop()
        seen.add(room)
        texts = (path.read_text() for path in (ROOT / room).rglob("*.py"))
        found = {name for text in texts for name in IMPORT.findall(text)}
        waiting |= found & rooms - CHECKOUT_ONLY - seen
    return seen


def test_the_image_starts_the_supervisor_as_another_user_from_a_pinned_official_tag() -> None:
    (base,), (entry,) = arguments_of("FROM"), arguments_of("ENTRYPOINT")
    assert re.fullmatch(r"nvcr\.io/nvidia/tritonserver:\d\d\.\d\d-py3", base)
    assert "deploy.cli" in entry and "serve" in entry
    assert arguments_of("USER")[-1].split(":")[0] not in ("0", "root")


def test_the_image_copies_every_package_that_the_launcher_loads_and_the_data() -> None:
    folders = {source for source, target in copied().items() if source == target and (ROOT / source).is_dir()}
    assert folders == rooms_loaded_from("deploy") | set(PRODUCT) | DATA
    assert "LICENSE" in copied()


def test_everything_that_is_copied_exists_and_is_in_the_context_of_the_build() -> None:
    first, *rest = CONTEXT.read_text().split()
    allowed = {line.removeprefix("!") for line in rest if line.startswith("!")}
    assert first == "**"
    assert {source.split("/")[0] for source in copied()} == allowed
    assert [source for source in copied() if not (ROOT / source).exists()] == []


def commands() -> Iterator[list[str]]:
    for line in arguments_of("RUN"):
        yield from (shlex.split(command) for command in line.split("&&"))


def test_commands_read_only_what_was_copied_before() -> None:
    given = [word for command in commands() for flag, word in zip(command, command[1:]) if flag == "-r"]
    read = [word for word in given if word.endswith(".txt")]
    place = "/opt/everbatch/"
    assert read and {word.removeprefix(place) for word in read} == {
        s for s in copied() if s.startswith("requirements/")
    }
    (backends,) = [command[2] for command in commands() if command[:2] == ["cp", "-r"]]
    assert (ROOT / backends).is_dir() and backends.split("/")[0] in copied()


@pytest.mark.parametrize("name", ["PYTHONPATH", "WORKDIR"])
def test_modules_are_found_where_they_are_copied(name: str) -> None:
    values = dict(word.split("=", 1) for word in shlex.split(arguments_of("ENV")[0]))
    assert {"PYTHONPATH": values["PYTHONPATH"], "WORKDIR": arguments_of("WORKDIR")[0]}[name] == "/opt/everbatch"


def test_the_containers_pins_are_those_of_the_environment() -> None:
    container, run = set(pins(ROOT, ["container.txt"])), set(pins(ROOT, ["run.txt"]))
    assert container <= run
    assert {name for name, _ in run - container} == {"numpy"}  # the container's own fits its stub

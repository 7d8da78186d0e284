"""A model repository in which every front of backend/serving/wires is served at once, each under the name of its role."""

from __future__ import annotations

import re
from pathlib import Path

from deploy.repository import DEFAULT_PROFILE, profiles

_NAME = re.compile(r'^name: ".*"$', re.MULTILINE)


def write_other_fronts(directory: Path, roles: set[str]) -> Path:
    """Copies of the models that the default profile has not, of these roles, named by them. Returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for profile, source in profiles().items():
        for configuration in sorted(source.glob("*/config.pbtxt")) if profile != DEFAULT_PROFILE else ():
            role = role_of(configuration)
            if role in roles and not (directory / role).exists():
                _copy(configuration.parent, directory / role, role)
    return directory


def role_of(configuration: Path) -> str:
    """The role that a config.pbtxt states, or else the name that its backend prescribes."""
    text = configuration.read_text()
    found = re.search(r'key: "role" value: \{ string_value: "([^"]+)" \}', text)
    return found[1] if found else re.findall(r'^backend: "([^"]+)"', text, re.MULTILINE)[0]


def _copy(source: Path, copy: Path, role: str) -> None:
    copy.mkdir()
    for entry in source.iterdir():
        if entry.name != "config.pbtxt":
            (copy / entry.name).symlink_to(entry.resolve())
    text = (source / "config.pbtxt").read_text()
    (copy / "config.pbtxt").write_text(_NAME.sub(f'name: "{role}"', text, count=1))

"""The links between pages: what they name, and the anchors that a page has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_CODE_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_PAGE_IN_CODE = re.compile(r"(?<![\w/.-])docs/[\w/-]+\.(?:md|png)")
_FOLDERS_OF_CODE = (
    "backend",
    "benchmarks",
    "client",
    "compat",
    "deploy",
    "gateway",
    "kernels",
    "model_repository",
    "tests",
    "tools",
)
_KINDS_OF_CODE = (".py", ".txt", ".yml", ".conf", ".h", ".cpp", ".pbtxt", "")


def dead_links(page: Path) -> list[str]:
    """The links of `page` into this repository whose file, or whose heading in it, does not exist."""
    return [target for target in _LINK.findall(_without_code(page)) if not _leads_somewhere(page, target)]


def _leads_somewhere(page: Path, target: str) -> bool:
    if "://" in target or target.startswith("mailto:"):
        return True
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    return file.exists() and (not anchor or (file.suffix == ".md" and anchor in _anchors(file)))


def _without_code(page: Path) -> str:
    return _CODE_BLOCK.sub("", page.read_text())


@cache
def _anchors(page: Path) -> frozenset[str]:
    """The names that GitHub gives to the headings of a page: words in lower case, joined by hyphens; equal ones are numbered."""
    found: list[str] = []
    for heading in _HEADING.findall(_without_code(page)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.append(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return frozenset(found) | {f"{name}-{n}" for name in found for n in range(1, found.count(name))}


def pages_in_code() -> Iterator[tuple[str, str]]:
    """(file, page): each page of docs/ that a comment, a message or a help text names."""
    files = [path for folder in _FOLDERS_OF_CODE for path in (ROOT / folder).rglob("*")]
    for path in sorted([*files, *(path for path in ROOT.iterdir() if path.suffix in (".yml", ".toml"))]):
        if path.is_file() and path.suffix in (*_KINDS_OF_CODE, ".toml") and "__pycache__" not in path.parts:
            for name in _PAGE_IN_CODE.findall(path.read_text(errors="replace")):
                yield str(path.relative_to(ROOT)), name

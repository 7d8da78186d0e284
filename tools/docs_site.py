"""Hooks that mkdocs calls while it builds docs/ as a site (mkdocs.yml names this file under `hooks`).

The pages are written for GitHub: links lead to files of the whole repository, and headings have GitHub's anchors. The hooks
add the pages and files that lie outside docs/, turn each link to the place that its target has in the site, and make anchors
as GitHub makes them.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
# Path in the repository -> path in the site, of pages that are not in docs/ or that lie elsewhere there.
PLACES = {
    "README.md": "index.md",
    "docs/README.md": "all-pages.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "backend/README.md": "design/contract.md",
    "models/default/README.md": "default-model.md",
    "deploy/kubernetes/README.md": "helm-chart.md",
    "benchmarks/results/gpu.md": "lab/gpu-results.md",
}
SOURCES = "sources"  # the directory of the site with the files that pages link to and that are no pages
_BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_NEEDS = re.compile(r"^```(\w+) needs=([\w-]+)$", re.MULTILINE)
_COPIED = (".png", ".svg", ".json")
_LANGUAGES = {".py": "python", ".conf": "nginx", ".yml": "yaml"}


def on_config(config: Any) -> Any:
    """mkdocs calls it once: headings get the anchors of GitHub."""
    config["mdx_configs"].setdefault("toc", {})["slugify"] = lambda text, separator: anchor(text)
    return config


def on_files(files: Any, config: Any) -> Any:
    """mkdocs calls it with the files of docs/: adds those of PLACES, each file that a page links to, and the reference."""
    from mkdocs.structure.files import File

    sys.path.insert(0, str(ROOT))  # mkdocs loads this file by its path
    from tools import docs_reference

    files.remove(files.get_file_from_path("README.md"))
    for path, place in PLACES.items():
        files.append(File.generated(config, place, content=(ROOT / path).read_text()))
    pages = [(_path_of(file.src_uri), file.content_string) for file in files.documentation_pages()]
    for path in sorted({linked for page, text in pages for linked in _linked(page, text)}):
        place, target = place_of(path), ROOT / path
        if files.get_file_from_path(place) is None:
            content = target.read_bytes() if _is_copied(target) else source_page(target)
            files.append(File.generated(config, place, content=content))
    for place, text in docs_reference.pages().items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """mkdocs calls it for each page before it is rendered."""
    if page.file.src_uri.startswith((f"{SOURCES}/", "reference/")):
        return markdown
    return _NEEDS.sub(r'```\1 title="needs \2"', with_links_of_the_site(markdown, page.file.src_uri))


def anchor(heading: str) -> str:
    """The name that GitHub gives to a heading, whose text comes without markup: words in lower case, joined by hyphens."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def place_of(path: str) -> str:
    """Where a file of the repository lies in the site, before pages are rendered."""
    if path in PLACES:
        return PLACES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{SOURCES}/{path}" if _is_copied(ROOT / path) else f"{SOURCES}/{path}.md"


def with_links_of_the_site(markdown: str, place: str) -> str:
    """A page's text at `place` of the site with each link into the repository turned to where its target lies in the site."""
    path = _path_of(place)

    def turned(found: re.Match[str]) -> str:
        name, hash_sign, heading = found[1].partition("#")
        if (target := _target(path, name)) is None:
            return found[0]
        away = os.path.relpath(place_of(target), PurePosixPath(place).parent)
        return f"]({away}{hash_sign}{heading})"

    return _outside_blocks(markdown, lambda text: _LINK.sub(turned, text))


def source_page(path: Path) -> str:
    """The page of a source file, or of a directory: the names in it."""
    title = f"# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        return title + "".join(f"- `{each.name}`\n" for each in sorted(path.iterdir()) if each.name != "__pycache__")
    text = path.read_text()
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return f"{title}{fence}{_LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def _linked(page: str, text: str) -> set[str]:
    """The files and directories outside docs/ that a page of the repository links to."""
    names = [link.partition("#")[0] for link in _LINK.findall(_BLOCK.sub("", text))]
    found = {target for name in names if (target := _target(page, name)) is not None}
    return {path for path in found if not path.startswith("docs/") and path not in PLACES}


def _target(page: str, name: str) -> str | None:
    """The path in the repository that a link of a page leads to, or None where it leads to no file of it."""
    if not name or "://" in name or name.startswith("mailto:"):
        return None
    path = os.path.normpath(PurePosixPath(page).parent / name)
    return path if not path.startswith("..") and (ROOT / path).exists() else None


def _path_of(place: str) -> str:
    """The path in the repository of a page of the site."""
    return next((path for path, other in PLACES.items() if other == place), f"docs/{place}")


def _is_copied(path: Path) -> bool:
    return path.suffix in _COPIED


def _outside_blocks(markdown: str, change: Callable[[str], str]) -> str:
    """A text with `change` applied to what is not in a block of code."""
    parts, end = [], 0
    for block in _BLOCK.finditer(markdown):
        parts += [change(markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(markdown[end:])])

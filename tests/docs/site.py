"""The built site of docs/: its pages as a browser reads them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[2]
FETCHED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "link": "href",
}  # tag: what a browser loads by itself
COUNTED = ("h1", "h2", "h3", "h4", "li", "table", "tr", "pre", "img")


@dataclass
class Page:
    """One page: the anchors in it, its links, what a browser fetches for it, and how many tags its article has of each kind."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    tags: Counter[str] = field(default_factory=Counter)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page, self._in_article = Page(), False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self._in_article |= tag == "article"
        if self._in_article:
            self.page.tags[tag] += 1
        if "id" in named:
            self.page.anchors.add(named["id"])
        if tag == "a" and "href" in named:
            self.page.links.append(named["href"])
        if tag in FETCHED and FETCHED[tag] in named and named.get("rel") not in ("canonical", "prev", "next"):
            self.page.fetched.append(named[FETCHED[tag]])

    def handle_endtag(self, tag: str) -> None:
        self._in_article &= tag != "article"


def build(directory: Path) -> str:
    """Builds the site as CI does and gives what mkdocs says. AssertionError when it warns of anything."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    unreachable = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | unreachable, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@cache
def read(path: Path) -> Page:
    reader = _Reader()
    reader.feed(path.read_text())
    return reader.page


def dead_links(path: Path) -> list[str]:
    """The links and files of a built page that lead to no file of the site, or to no anchor there."""
    page = read(path)
    inside = [link for link in [*page.links, *page.fetched] if "://" not in link and not link.startswith("mailto:")]
    return [link for link in inside if not _leads_somewhere(path, link)]


def _leads_somewhere(path: Path, link: str) -> bool:
    name, _, anchor = unquote(link).partition("#")
    file = (path.parent / name).resolve() if name else path
    if file.is_dir():
        file /= "index.html"
    return file.is_file() and (not anchor or anchor in read(file).anchors)

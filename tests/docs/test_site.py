"""docs/ as a site (mkdocs.yml): it builds without a warning, leads nowhere dead, fetches nothing, and shows what GitHub shows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from tests.docs import site
from tools import docs_reference, docs_site

ROOT = Path(__file__).resolve().parents[2]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
PLACES = sorted(
    {docs_site.place_of(str(path.relative_to(ROOT))) for path in (ROOT / "docs").rglob("*.md")}
    | {*docs_site.PLACES.values()}
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    said = site.build(directory)
    assert "WARNING" not in said
    return directory


def places_in(entry: Any) -> Iterator[str]:
    """The pages below an entry of the navigation."""
    if isinstance(entry, str):
        yield entry
    for each in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from places_in(each)


def test_every_page_is_once_in_the_navigation() -> None:
    assert sorted(places_in(CONFIG["nav"])) == sorted([*PLACES, *docs_reference.pages()])


def test_the_navigation_goes_in_the_order_in_which_a_newcomer_asks() -> None:
    tabs = [name for entry in CONFIG["nav"] for name in entry]
    assert tabs == ["Start", "Your model", "Your client", "Requests", "Operation", "Reference", "Design", "Laboratory"]
    order = list(places_in(CONFIG["nav"]))
    asked = [
        "start.md",
        "models.md",
        "client.md",
        "openai.md",
        "anthropic.md",
        "tools.md",
        "several-models.md",
        "container.md",
    ]
    assert [place for place in order if place in asked] == asked


def test_every_link_and_anchor_of_the_site_leads_somewhere(built: Path) -> None:
    pages = [path for path in built.rglob("*.html") if path.name != "404.html"]
    assert len(pages) > len(PLACES)
    assert {str(page.relative_to(built)): dead for page in pages if (dead := site.dead_links(page))} == {}


def test_a_browser_fetches_nothing_from_elsewhere(built: Path) -> None:
    fetched = {link for page in built.rglob("*.html") for link in site.read(page).fetched}
    assert fetched and [link for link in fetched if re.match(r"(https?:)?//", link)] == []
    styles = "".join(path.read_text() for path in built.rglob("*.css"))
    assert re.findall(r"@import|url\(\s*[\"']?(?:https?:)?//", styles) == []


@pytest.mark.parametrize("place", PLACES)
def test_the_site_shows_the_same_lists_tables_and_blocks_as_github(built: Path, place: str) -> None:
    """GitHub's Markdown (CommonMark with tables) allows lists that mkdocs reads as one paragraph, among other things."""
    text = (ROOT / docs_site._path_of(place)).read_text()
    html = MarkdownIt("commonmark").enable("table").render(text)
    expected = Counter({tag: len(re.findall(rf"<{tag}\b", html)) for tag in site.COUNTED})
    tags = site.read(built / place.replace(".md", ".html")).tags
    assert {tag: tags[tag] for tag in site.COUNTED} == dict(expected)


def test_a_dead_link_a_dead_anchor_and_a_missing_picture_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text('<h2 id="there">x</h2>')
    page = tmp_path / "a.html"
    page.write_text('<a href="b.html#there"></a><a href="b.html#gone"></a><a href="c.html"></a><img src="d.png">')
    assert site.dead_links(page) == ["b.html#gone", "c.html", "d.png"]


def test_links_are_turned_to_where_the_site_has_their_target() -> None:
    text = "[a](../README.md#a-model-of-your-own) [b](design/ranks.md) [c](../deploy/nginx.conf) [d](https://h/x)\n\n```\n[e](../README.md)\n```\n"
    turned = docs_site.with_links_of_the_site(text, "start.md")
    assert turned.splitlines()[0] == (
        "[a](index.md#a-model-of-your-own) [b](design/ranks.md) [c](sources/deploy/nginx.conf.md) [d](https://h/x)"
    )
    assert "[e](../README.md)" in turned


def test_the_reference_has_every_name_that_can_be_imported_with_its_docstring(built: Path) -> None:
    import client

    page = docs_reference.pages()["reference/client.md"]
    assert [name for name in client.__all__ if f"## `{name}`\n" not in page] == []
    assert "### `EverbatchClient.stream`" in page and "EverbatchClient(\n    url: str | None=None,\n" in page
    assert str(client.EverbatchClient.__doc__).partition("\n")[0] in page
    assert {"everbatchclient", "everbatchclientstream"} <= site.read(built / "reference/client.html").anchors


def test_the_reference_of_the_command_line_has_each_help_text() -> None:
    page = docs_reference.pages()["reference/command-line.md"]
    texts = [path.read_text().strip("\n") for path in (ROOT / "deploy" / "help").glob("*.txt")]
    assert len(texts) > 5 and [text for text in texts if text not in page] == []


def test_the_pins_of_the_site_are_those_of_the_tests() -> None:
    pins = [line for line in (ROOT / "requirements" / "docs.txt").read_text().splitlines() if not line.startswith("#")]
    tests = (ROOT / "requirements" / "test.txt").read_text().splitlines()
    assert [pin for pin in pins if pin not in tests] == []
    for name in ("run.txt", "container.txt", "bench.txt", "server.txt"):
        assert "mkdocs" not in (ROOT / "requirements" / name).read_text()

"""The page at /: its files as they are served, and that none of them asks for anything from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from gateway.page_routes import DIRECTORY, page_files
from tests.gateway.conftest import Served
from tests.gateway.test_keys import ALICE, write

Serve = Callable[..., AbstractContextManager[Served]]
SOURCES = sorted(path for path in DIRECTORY.iterdir() if path.is_file())
MOST_LINES, LONGEST_LINE = 400, 160
IMPORT = re.compile(r'from "\./([\w.]+)"')
MARKUP = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser")
ELSEWHERE = re.compile(r"""https?://[\w-]+\.\w|['"(]//\w""")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html"),
        ("/page/main.js", "text/javascript"),
        ("/page/base.css", "text/css"),
        ("/page/icon.svg", "image/svg+xml"),
    ],
)
def test_each_file_has_its_type_and_what_keeps_a_browser_from_other_servers(
    served: Served, path: str, kind: str
) -> None:
    status, text, headers = served.request("GET", path)
    assert status == 200 and text
    assert headers["content-type"] == f"{kind}; charset=utf-8"
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'self';") and "unsafe" not in policy and "frame-ancestors 'none'" in policy


def test_a_browser_that_has_a_file_gets_no_second_copy(served: Served) -> None:
    headers = served.request("GET", "/")[2]
    assert headers["cache-control"] == "no-cache"
    for tag in (headers["etag"], f'"other", W/{headers["etag"]}'):
        status, text, again = served.request("GET", "/", headers={"If-None-Match": tag})
        assert (status, text, again["etag"]) == (304, "", headers["etag"])
    assert served.request("GET", "/", headers={"If-None-Match": '"other"'})[0] == 200
    tags = [file.headers["etag"] for file in page_files().values()]
    assert len(set(tags)) == len(tags)


def test_a_head_request_gets_the_headers_alone(served: Served) -> None:
    status, text, headers = served.request("HEAD", "/")
    assert (status, text) == (200, "")
    assert headers["etag"] == served.request("GET", "/")[2]["etag"]


@pytest.mark.parametrize(
    "name", ["../app.py", "..%2fapp.py", "%2e%2e/app.py", "/etc/passwd", "absent.js", "", "main.js%00", "x" * 5000]
)
def test_a_name_is_never_a_path(served: Served, name: str) -> None:
    status, body, _ = served.request("GET", f"/page/{name}")
    assert status == 404 and "error" in body


def test_the_page_needs_no_key_and_the_api_behind_it_does(serve: Serve, tmp_path: Path) -> None:
    with serve(api_keys=write(tmp_path / "keys", f"alice {ALICE}\n")) as served:
        served.wait_healthy()
        for path in ("/", "/page/main.js", "/page/icon.svg"):
            assert served.request("GET", path)[0] == 200
        assert served.request("GET", "/page/absent.js")[0] == 404
        for path in ("/v1/models", "/everbatch/live", "/page", "//", "/page/../v1/models"):
            assert served.request("GET", path)[0] in (401, 404), path
        assert served.request("POST", "/page/main.js", {"a": 1})[0] == 405


def test_every_module_that_is_imported_is_served() -> None:
    files = page_files()
    imported = {name for path in SOURCES for name in IMPORT.findall(path.read_text())}
    linked = set(re.findall(r'(?:src|href)="page/([\w.]+)"', files["index.html"].content.decode()))
    assert imported | linked <= set(files)
    assert {path.name for path in SOURCES} == set(files) == imported | linked | {"index.html"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_a_file_makes_no_markup_of_text_and_names_no_other_server(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not MARKUP.search(text) and not ELSEWHERE.search(text)
    lines = text.splitlines()
    assert len(lines) <= MOST_LINES
    if path.suffix == ".js":
        assert lines[0].startswith("// "), "the first line says what the module does"
        assert max(map(len, lines)) <= LONGEST_LINE


def test_the_page_has_no_inline_script_or_style() -> None:
    html = page_files()["index.html"].content.decode()
    assert not re.search(r"<style|\bstyle=|\son\w+=|<script(?![^>]*\bsrc=)", html)


def test_every_field_and_picture_has_a_name_for_a_screen_reader() -> None:
    html = page_files()["index.html"].content.decode()
    for tag in re.findall(r"<(?:canvas|textarea|input|nav|aside|main|dialog|img)\b[^>]*>", html, re.DOTALL):
        is_labelled = "name=" in tag or "hidden" in tag  # those with a name stand within a label
        assert is_labelled or re.search(r"aria-label(?:ledby)?=|alt=", tag), tag

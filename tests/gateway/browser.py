"""Chromium without a screen, through playwright. Tests are skipped where one of them is absent."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

TIMEOUT_MS = 60_000
ANSWER = "#messages > .assistant:last-child"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser. Its pages have to be closed by who opens them."""
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed (requirements/test.txt)")
    if CHROMIUM is None:
        pytest.skip("there is no chromium (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Any, url: str, **context: Any) -> Iterator[Any]:
    """A page of a new profile. At its end nothing may have been asked of another server, and no error be in the console."""
    profile = browser.new_context(viewport={"width": 1280, "height": 800}, **context)
    profile.set_default_timeout(TIMEOUT_MS)
    page = profile.new_page()
    asked: list[str] = []
    faults: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda line: faults.append(line.text) if "Security Policy" in line.text else None)
    page.goto(url)
    try:
        yield page
        assert not [address for address in asked if not address.startswith((url, "blob:", "data:"))]
        assert not faults
    finally:
        profile.close()


def ask(page: Any, text: str) -> None:
    page.fill("#question", text)
    page.press("#question", "Enter")


def answered(page: Any, text: str) -> Any:
    """The answer to a question, once it is complete."""
    before = page.locator("#messages > .user, #messages > .assistant").count()
    ask(page, text)
    page.wait_for_selector(f"#messages > .assistant:nth-child({before + 2}) .again")
    return page.locator(ANSWER)

"""The live panel of the page in Chromium: rows, the pool, evictions, the last minutes, and an engine that dies."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.gateway.browser import chromium, opened
from tests.gateway.conftest import Served
from tests.gateway.fake_triton import FakeTriton
from tests.gateway.views import view

pytestmark = pytest.mark.slow("a browser")
Serve = Callable[..., AbstractContextManager[Served]]
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser: Any, served: Served, triton: FakeTriton) -> Iterator[Any]:
    triton.live = view()
    with opened(browser, f"{served.url}/") as found:
        yield found


def test_the_batch_shows_rows_the_pool_and_evictions(page: Any, triton: FakeTriton) -> None:
    page.wait_for_selector("#rows .generation")
    rows = page.inner_text("#rows")
    assert "10 / 100 output" in rows and "reused 8" in rows and "computed again 3" in rows and "queued" in rows
    # Of 100 tokens 60 are cached and the latest never had KV; the latest step computed 50 prompt tokens in 10 ms.
    assert "39 evicted tokens to compute again, about 8 ms" in page.inner_text("#sessions")
    assert page.get_attribute("#map", "aria-label") == "Map of the KV pool: 4 blocks in use, 6 cached, 6 free"
    assert "25 %" in page.inner_text("#figures")  # 20 of 80 prompt tokens
    assert pixels(page, "evicted") == 0
    triton.live = view(cached=1, evicted=3, uptime_s=6.0)
    page.wait_for_selector("#count-free:text-is('9')")
    deadline = time.monotonic() + DEADLINE_S
    while not pixels(page, "evicted"):
        assert time.monotonic() < deadline, "the eviction is not marked in the strip"


# How many pixels of the strip have the colour of a swatch.
PIXELS = """name => {
  const colour = getComputedStyle(document.querySelector(`.swatch.${name}`)).backgroundColor;
  const [red, green, blue] = colour.match(/\\d+/g).map(Number);
  const canvas = document.querySelector('#line');
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let at = 0; at < data.length; at += 4) found += data[at] === red && data[at + 1] === green && data[at + 2] === blue;
  return found;
}"""


def pixels(page: Any, name: str) -> int:
    found: int = page.evaluate(PIXELS, name)
    return found


def test_the_last_minutes_can_be_looked_at_again(page: Any, triton: FakeTriton) -> None:
    page.wait_for_selector("#rows .generation")
    page.wait_for_selector("#count-cached:text-is('6')")
    triton.live = view(cached=1, uptime_s=9.0)
    page.wait_for_selector("#count-cached:text-is('3')")
    page.focus("#moment")
    page.keyboard.press("Home")
    page.wait_for_selector("#count-cached:text-is('6')")
    assert re.fullmatch(r"\d+ seconds ago", page.get_attribute("#moment", "aria-valuetext"))
    page.click("#now")
    page.wait_for_selector("#count-cached:text-is('3')")
    assert page.is_disabled("#now")


def test_an_engine_that_dies_is_said_and_its_successor_is_shown(browser: Any, serve: Serve, triton: FakeTriton) -> None:
    triton.live = view()
    with serve() as served:
        served.wait_healthy()
        with opened(browser, f"{served.url}/") as page:
            page.wait_for_selector("#state:has-text('engine e1')")
            triton.stop()
            try:
                page.wait_for_selector("#state:has-text('cannot be reached')")
                assert page.locator(".dot.away").count() == 1 and "cannot be reached" in page.inner_text("#heard")
            finally:
                triton.start()
            triton.live = view(engine="e2")
            page.wait_for_selector("#state:has-text('engine e2')")


def test_nothing_is_asked_while_the_batch_is_not_seen(page: Any, served: Served) -> None:
    page.wait_for_selector("#rows .generation")
    page.click("#toggle-live")
    deadline = time.monotonic() + DEADLINE_S
    while served.gateway.live._rates:
        assert time.monotonic() < deadline, "views are asked for though the batch is hidden"
        page.wait_for_timeout(50)
    assert page.is_hidden("#live")
    page.click("#toggle-live")
    page.wait_for_selector("#live .dot.here")

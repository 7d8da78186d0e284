"""Pictures on the page, in Chromium: chosen, dropped, pasted, removed, sent, and kept in the conversation."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.browser import answered, ask, chromium, opened
from tests.gateway.conftest import Served, serving
from tests.gateway.fake_triton import WORDS, FakeTriton
from tests.gateway.pictures import DATA_URL, PNG, png
from tests.gateway.views import view

pytestmark = pytest.mark.slow("a browser")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def seeing(shared_triton: FakeTriton) -> Iterator[Served]:
    shared_triton.takes_images = True
    with serving(shared_triton.url) as served:
        served.wait_healthy()
        yield served
    shared_triton.takes_images = None


@pytest.fixture
def page(browser: Any, seeing: Served, triton: FakeTriton) -> Iterator[Any]:
    triton.live = view()
    with opened(browser, f"{seeing.url}/") as found:
        found.wait_for_selector("#model:not([disabled])")
        yield found


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "red.png"
    path.write_bytes(PNG)
    return path


def chats(triton: FakeTriton) -> list[dict[str, Any]]:
    return [seen.body for seen in list(triton.requests) if "messages" in seen.body]


HAND_OVER = """([event, selector, base64, name, type]) => {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const files = new DataTransfer();
  files.items.add(new File([bytes], name, { type }));
  const about = { bubbles: true, cancelable: true, dataTransfer: files, clipboardData: files };
  const made = event === 'paste' ? new ClipboardEvent(event, about) : new DragEvent(event, about);
  document.querySelector(selector).dispatchEvent(made);
}"""


def hand_over(page: Any, event: str, selector: str, data: bytes, name: str, kind: str = "image/png") -> None:
    page.evaluate(HAND_OVER, [event, selector, base64.b64encode(data).decode(), name, kind])


def test_a_chosen_picture_is_sent_and_stays_in_the_conversation(page: Any, triton: FakeTriton, picture: Path) -> None:
    assert page.inner_text("#attach") == "Attach text or picture"
    page.set_input_files("#file", picture)
    page.wait_for_selector("#files .thumb img[alt='Picture red.png']")
    assert page.inner_text("#said") == "red.png is attached"
    answered(page, "What is it?")
    assert page.locator("#files > *").count() == 0
    first = chats(triton)[-1]
    assert first["images"] == [base64.b64encode(PNG).decode()]
    assert first["messages"] == [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    ]
    assert page.locator("#messages .user img.picture").get_attribute("src") == DATA_URL
    page.reload()
    page.wait_for_selector("#messages .user img.picture[alt='Picture red.png']")
    assert page.evaluate("document.querySelector('img.picture').naturalWidth") == 2, "the browser shows it"
    answered(page, "And now?")
    assert chats(triton)[-1]["images"] == first["images"] and len(chats(triton)[-1]["messages"]) == 3


def test_pictures_are_dropped_and_pasted_and_removed_by_key(page: Any, triton: FakeTriton) -> None:
    hand_over(page, "dragover", "#messages", PNG, "dropped.png")
    assert page.locator("#chat.dropping").count() == 1
    hand_over(page, "drop", "#messages", PNG, "dropped.png")
    hand_over(page, "paste", "#question", png(5, 5), "pasted.png")
    page.wait_for_selector("#files .thumb:nth-child(2)")
    assert page.locator("#chat.dropping").count() == 0
    page.focus("#files .thumb:first-child button")
    assert page.get_attribute("#files .thumb:first-child button", "aria-label") == "Remove dropped.png"
    page.keyboard.press("Enter")
    page.wait_for_selector("#files .thumb:only-child img[alt='Picture pasted.png']")
    assert page.inner_text("#said") == "dropped.png is removed"
    assert page.evaluate("document.activeElement.id") == "question"
    page.press("#question", "Enter")  # a picture without a word
    page.wait_for_selector("#messages .assistant .again")
    assert chats(triton)[-1]["messages"] == [{"role": "user", "content": [{"type": "image"}]}]
    assert page.inner_text("#conversations .title") == "pasted.png"


def test_a_large_picture_is_sent_smaller(page: Any, triton: FakeTriton) -> None:
    hand_over(page, "drop", "#question", png(3072, 10), "wide.png")
    hand_over(page, "drop", "#question", PNG, "copy.gif", "image/gif")  # of a type that is written anew
    page.wait_for_selector("#files .thumb:nth-child(2)")
    widths = page.evaluate("[...document.querySelectorAll('#files img')].map((image) => image.naturalWidth)")
    assert widths == [1536, 2]
    answered(page, "Look")
    assert all(base64.b64decode(text).startswith(b"\xff\xd8\xff") for text in chats(triton)[-1]["images"])


def test_what_is_no_picture_is_refused_with_its_name(page: Any) -> None:
    for data, name, kind, said in (
        (b"no picture", "broken.png", "image/png", "broken.png is no picture that this browser can read"),
        (b"\0\xff", "x.bin", "", "x.bin is not text in UTF-8"),
    ):
        hand_over(page, "drop", "#question", data, name, kind)
        page.wait_for_selector(f"#files .error:has-text('{said}')")
    for number in range(9):
        hand_over(page, "drop", "#question", PNG, f"{number}.png")
    page.wait_for_selector("#files .error:has-text('8 files are attached, the limit')")
    hand_over(page, "drop", "#question", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "a.svg", "image/svg+xml")
    assert page.locator("#files .thumb").count() == 8


def test_a_model_that_takes_no_images_gets_no_pictures(
    browser: Any, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "takes_images", False)
    with serving(triton.url) as served:
        served.wait_healthy()
        with opened(browser, f"{served.url}/") as page:
            page.wait_for_selector("#model:not([disabled])")
            assert page.inner_text("#attach") == "Attach text"
            for event, place in (("drop", "#messages"), ("paste", "#question")):
                hand_over(page, event, place, PNG, f"{event}.png")
                page.wait_for_selector(f"#files .error:has-text('{event}.png is a picture, and this model takes no')")
            assert page.locator("#files .thumb").count() == 0


def test_pictures_go_when_another_model_is_chosen(page: Any) -> None:
    hand_over(page, "drop", "#question", PNG, "a.png")
    page.wait_for_selector("#files .thumb")
    page.evaluate(
        "document.getElementById('model').append(new Option('text-only'));"
        "document.getElementById('model').value = 'text-only';"
        "document.getElementById('model').dispatchEvent(new Event('change'))"
    )
    page.wait_for_selector("#files .error:has-text('this model takes no pictures')")
    assert page.locator("#files .thumb").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_fit_the_page_in_both_colours_and_on_a_telephone(
    browser: Any, seeing: Served, scheme: Any, tmp_path: Path
) -> None:
    with opened(browser, f"{seeing.url}/", color_scheme=scheme) as page:
        page.wait_for_selector("#model:not([disabled])")
        hand_over(page, "drop", "#question", png(1200, 800), "wide.png")
        page.wait_for_selector("#files .thumb")
        assert "".join(WORDS) in answered(page, "What is it?").inner_text()
        hand_over(page, "drop", "#question", png(30, 900), "tall.png")
        page.wait_for_selector("#files .thumb")
        page.screenshot(path=tmp_path / f"{scheme}.png")
        page.set_viewport_size({"width": 390, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        box, screen = page.locator("img.picture").bounding_box(), page.locator("#messages").bounding_box()
        assert box["width"] <= screen["width"] and box["height"] <= 18 * 15 + 1
        ask(page, "")

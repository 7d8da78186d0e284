"""The page in Chromium: chats, failures, hostile answers, and a reader without a mouse or with a phone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.browser import ANSWER, answered, ask, chromium, opened
from tests.gateway.conftest import Served
from tests.gateway.fake_triton import WORDS, FakeTriton
from tests.gateway.test_keys import ALICE, BOB, write
from tests.gateway.views import view

pytestmark = pytest.mark.slow("a browser")
Serve = Callable[..., AbstractContextManager[Served]]
DEADLINE_S = 60.0
HOSTILE = (
    "<img src=x onerror=document.title='bad'> [a](javascript:document.title='bad') ![p](http://evil.test/p.png)"
    " <script>document.title='bad'</script> [ok](https://example.test/a)"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser: Any, served: Served, triton: FakeTriton) -> Iterator[Any]:
    triton.live = view()
    with opened(browser, f"{served.url}/") as found:
        found.wait_for_selector("#model:not([disabled])")
        yield found


def chats(triton: FakeTriton) -> list[dict[str, Any]]:
    return [seen.body for seen in list(triton.requests) if "messages" in seen.body]


def test_an_answer_streams_in_and_says_what_it_took(page: Any, triton: FakeTriton) -> None:
    answer = answered(page, "Hi")
    assert answer.locator(".text").inner_text() == "".join(WORDS)
    foot = answer.locator(".foot").inner_text()
    assert "4 tokens" in foot and "first after" in foot and "reused 3 of 7 prompt tokens" in foot
    assert page.inner_text("#said") == "The answer is complete"
    answered(page, "And then?")
    assert chats(triton)[-1]["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "".join(WORDS)},
        {"role": "user", "content": "And then?"},
    ]
    assert "3 of 7 cached" in page.inner_text("#conversations")


def test_an_answer_can_be_stopped_by_key_and_asked_for_again(page: Any, triton: FakeTriton) -> None:
    ask(page, "hold")
    page.wait_for_selector(f"{ANSWER} .text:has-text('tick')")
    assert page.is_disabled("#send")
    page.keyboard.press("Escape")
    page.wait_for_selector(f"{ANSWER} .foot:has-text('stopped')")
    held = next(seen for seen in triton.requests if "messages" in seen.body)
    assert held.ended.wait(60), "the request goes on at the server"
    page.click(f"{ANSWER} .again")
    page.wait_for_selector("#stop:visible")
    page.click("#stop")
    page.wait_for_selector(f"{ANSWER} .foot:has-text('stopped')")
    assert [body["messages"] for body in chats(triton)] == [[{"role": "user", "content": "hold"}]] * 2
    assert page.locator("#messages > li").count() == 2


def test_two_conversations_answer_at_once_and_survive_a_reload(page: Any) -> None:
    ask(page, "hold")
    page.wait_for_selector(f"{ANSWER} .text:has-text('tick')")
    page.click("#new")
    assert "".join(WORDS) in answered(page, "Second").inner_text()
    assert page.locator("#conversations .runs").count() == 1
    page.click("#conversations .open:has-text('hold')")
    page.wait_for_selector(f"{ANSWER} .text:has-text('tick')")
    page.click("#stop")
    page.wait_for_selector(f"{ANSWER} .again")
    page.reload()
    assert sorted(page.locator("#conversations .title").all_inner_texts()) == ["Second", "hold"]
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.click("#conversations li:has-text('Second') .remove")
    assert page.locator("#conversations .title").count() == 2
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#conversations li:has-text('Second') .remove")
    page.reload()
    assert page.locator("#conversations .title").all_inner_texts() == ["hold"]


def test_an_error_is_shown_and_can_be_tried_again(page: Any, triton: FakeTriton) -> None:
    answer = answered(page, "error [INVALID_ARGUMENT] the prompt is too long; shorten it")
    assert answer.locator(".error").inner_text() == "the prompt is too long; shorten it"
    assert answer.locator(".error").get_attribute("role") == "alert"
    assert answer.locator(".again").inner_text() == "Try again"
    late = answered(page, "late error [UNAVAILABLE] the engine has ended")
    assert "tick" in late.inner_text() and "the engine has ended" in late.locator(".error").inner_text()
    answered(page, "Hi")
    said = chats(triton)[-1]["messages"]
    assert [message["role"] for message in said] == [
        "user",
        "assistant",
        "user",
    ]  # the answer without a word is left out


def test_a_question_waits_in_its_field_until_the_server_says_what_it_serves(
    browser: Any, served: Served, triton: FakeTriton
) -> None:
    with opened(browser, f"{served.url}/") as page:
        page.wait_for_selector("#model:not([disabled])")
        page.route("**/v1/models", lambda route: route.abort())
        page.reload()
        page.wait_for_selector("#question[placeholder='the server cannot be reached']")
        ask(page, "Hi")
        assert page.input_value("#question") == "Hi" and not chats(triton)
        page.unroute("**/v1/models")
        page.wait_for_selector("#model:not([disabled])")
        page.press("#question", "Enter")
        page.wait_for_selector(f"{ANSWER} .again")


def test_a_stream_goes_on_after_the_death_of_its_server(page: Any, triton: FakeTriton) -> None:
    triton.losses = 1
    assert answered(page, "lose 2").locator(".text").inner_text() == "".join(WORDS)


def test_what_a_model_writes_never_becomes_markup(page: Any) -> None:
    text = answered(page, f"say {HOSTILE}").locator(".text")
    assert "<img src=x" in text.inner_text() and "<script>" in text.inner_text()
    assert text.locator("img, script").count() == 0 and page.title() == "Everbatch"
    links = text.locator("a")
    hrefs = [links.nth(index).get_attribute("href") for index in range(links.count())]
    assert hrefs == ["http://evil.test/p.png", "https://example.test/a"]
    assert links.first.get_attribute("rel") == "noopener noreferrer nofollow"


CASES = {
    "# A\n\ntext **b** `c*d*`": "<h3>A</h3><p>text <strong>b</strong> <code>c*d*</code></p>",
    "- a\n- b\n  - c": "<ul><li>a</li><li><p>b</p><ul><li>c</li></ul></li></ul>",
    "3. x\n4. y": '<ol start="3"><li>x</li><li>y</li></ol>',
    "> a\n> b": "<blockquote><p>a\nb</p></blockquote>",
    "a_b_c and __init__ 2 * 3 * 4": "<p>a_b_c and <strong>init</strong> 2 * 3 * 4</p>",
    "*a* \\*b\\*": "<p><em>a</em> *b*</p>",
    "x\n---": "<p>x\n---</p>",
    "&lt;b>": "<p>&amp;lt;b&gt;</p>",
}


def test_markdown_becomes_elements(page: Any) -> None:
    assert {text: rendered(page, text) for text in CASES} == CASES


def rendered(page: Any, text: str) -> str:
    code = "async text => { const { markdown } = await import('./page/markdown.js'); const found = document.createElement('div');"
    html: str = page.evaluate(code + " found.append(markdown(text)); return found.innerHTML; }", text)
    return html


def test_markdown_of_hostile_texts_ends_soon_and_loses_nothing(page: Any) -> None:
    for text in (
        "*" * 5000,
        "_a" * 5000,
        "[" * 5000,
        "`" * 5000 + "a",
        ">" * 3000,
        "- " * 3000,
        "|" * 4000 + "\n|-|",
        "~~~\n" * 2000,
    ):
        assert rendered(page, text) != ""
    assert page.evaluate("document.title") == "Everbatch"


def test_code_has_a_button_that_copies_it(browser: Any, served: Served) -> None:
    with opened(browser, f"{served.url}/", permissions=["clipboard-read", "clipboard-write"]) as page:
        page.wait_for_selector("#model:not([disabled])")
        answer = answered(page, "say ```python\nif a < b:\n    pass\n```")
        assert answer.locator("pre code").text_content() == "if a < b:\n    pass"
        answer.locator(".copy").click()
        page.wait_for_selector(".copy:has-text('Copied')")
        assert page.evaluate("navigator.clipboard.readText()") == "if a < b:\n    pass"


def test_answers_are_shown_as_markdown_or_as_they_were_generated(page: Any) -> None:
    text = "return self.__dict__ * 2\n    # *all* of it"
    answer = answered(page, f"say {text}")
    assert "__" not in answer.locator(".text").inner_text()
    page.click("#open-settings")
    page.select_option("#settings [name=answers]", "plain")
    page.click("#settings .main")
    page.wait_for_selector("#messages .assistant pre.plain")
    assert page.locator("#messages .assistant .text").text_content() == text


def test_settings_and_attached_text_reach_the_request(page: Any, triton: FakeTriton, tmp_path: Path) -> None:
    note, binary = tmp_path / "note.md", tmp_path / "picture.bin"
    note.write_text("some ``` fence")
    binary.write_bytes(b"\0\xff")
    page.click("#open-settings")
    for name, value in {
        "system": "Be brief",
        "temperature": "0.5",
        "top_p": "0.9",
        "max_tokens": "3",
        "seed": "11",
    }.items():
        page.fill(f"#settings [name={name}]", value)
    page.click("#settings .main")
    page.set_input_files("#file", [note, binary])
    page.wait_for_selector("#files .error:has-text('picture.bin is not text in UTF-8')")
    answer = answered(page, "Read this")
    assert "cut at the most tokens" in answer.inner_text()
    body = chats(triton)[-1]
    assert body["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Read this\n\nFile note.md:\n````\nsome ``` fence\n````"},
    ]
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (0.5, 0.9, 3, 11)
    assert "note.md (14 characters)" in page.inner_text("#messages .user")


def test_reasoning_is_folded(browser: Any, serve: Serve) -> None:
    with serve(reasoning_format="think") as served:
        served.wait_healthy()
        with opened(browser, f"{served.url}/") as page:
            page.wait_for_selector("#model:not([disabled])")
            answer = answered(page, "say <think>\nHm, 1 < 2.\n</think>\n\nYes.")
            assert answer.locator("> .text").inner_text() == "Yes."
            assert answer.locator("details.reasoning").get_attribute("open") is None
            answer.locator("summary").click()
            assert "Hm, 1 < 2." in answer.locator("details.reasoning").inner_text()


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(browser: Any, serve: Serve, tmp_path: Path) -> None:
    with serve(api_keys=write(tmp_path / "keys", f"alice {ALICE} metrics\nbob {BOB}\n")) as served:
        served.wait_healthy()
        for key in (ALICE, BOB):
            with opened(browser, f"{served.url}/") as page:
                page.wait_for_selector("#key[open]")
                page.fill("#key input", key)
                page.press("#key input", "Enter")
                page.wait_for_selector("#model:not([disabled])")  # a question waits for the list of models
                assert "".join(WORDS) in answered(page, "Hi").inner_text()
                kept = json.loads(
                    page.evaluate("JSON.stringify([Object.values(localStorage), Object.values(sessionStorage)])")
                )
                assert key not in "".join(kept[0]) and kept[1] == [key]
                if key == ALICE:
                    page.wait_for_selector("#rows .generation")
                else:
                    page.wait_for_selector("#refused:has-text('this key may not read metrics')")
                    assert page.is_hidden("#views")


def test_on_a_phone_one_panel_is_shown_and_nothing_sticks_out(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    answered(
        page, "say " + "word" * 200 + "\n```\n" + "x" * 400 + "\n```\n| a | b |\n|---|---|\n| " + "c" * 300 + " | d |"
    )
    for panel, shown in (("list", "#list"), ("chat", "#chat"), ("live", "#live")):
        page.click(f".tabs [data-panel={panel}]")
        assert page.is_visible(shown) and page.locator(".panels > *:visible").count() == 1
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), panel
        tall = page.locator("#composer").bounding_box() if panel == "chat" else None
        assert tall is None or tall["y"] + tall["height"] <= 700


def test_everything_is_reached_by_keyboard_and_has_a_name(page: Any) -> None:
    answered(page, "Hi")
    page.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {
        "model",
        "new",
        "open",
        "remove",
        "question",
        "attach",
        "send",
        "again",
        "moment",
        "open-settings",
    } <= reached
    assert page.evaluate(NAMELESS) == []


NAMELESS = """() => {
  const isNamed = (item) => item.getAttribute('aria-label') || item.labels?.length || item.textContent.trim();
  const all = [...document.querySelectorAll('button, input, select, textarea, canvas')];
  return all.filter((item) => !item.hidden && !isNamed(item)).map((item) => item.outerHTML);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_easy_to_read_in_both_colours(browser: Any, served: Served, scheme: Any) -> None:
    with opened(browser, f"{served.url}/", color_scheme=scheme) as page:
        page.wait_for_selector("#model:not([disabled])")
        answered(page, "Hi")
        page.wait_for_selector("#rows .generation")
        for selector in ("body", ".assistant .foot", ".kv", "#figures dt", ".hint", "#send", ".details", ".user"):
            text, ground = page.evaluate(COLOURS, selector)
            assert contrast(text, ground) >= 4.5, f"{selector}: {text} on {ground}"


COLOURS = """selector => {
  const element = document.querySelector(selector);
  let ground = element;
  while (getComputedStyle(ground).backgroundColor === 'rgba(0, 0, 0, 0)') ground = ground.parentElement;
  return [getComputedStyle(element).color, getComputedStyle(ground).backgroundColor];
}"""


def contrast(text: str, ground: str) -> float:
    """The ratio of WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(text), luminance(ground)), reverse=True)
    return (high + 0.05) / (low + 0.05)

"""Images in requests: where each API has them, what the model gets, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import anthropic
import openai
import pytest

from gateway.errors import GatewayError
from gateway.images import FORMATS, Picture, brought, content_of, lifted
from tests.gateway.conftest import Served, serving
from tests.gateway.fake_triton import WORDS, FakeTriton
from tests.gateway.pictures import DATA_URL, IN_BASE64, OTHER, OTHER_IN_BASE64, OTHER_URL, PNG

Serve = Callable[..., AbstractContextManager[Served]]
IMAGE = {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "high"}}
TURN = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE]}
SHOWN = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": "image"}]}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IN_BASE64}}


@pytest.fixture(scope="module")
def seeing(shared_triton: FakeTriton) -> Iterator[Served]:
    """A gateway whose model takes images."""
    shared_triton.takes_images = True
    with serving(shared_triton.url) as served:
        served.wait_healthy()
        yield served
    shared_triton.takes_images = None


@pytest.fixture
def ask(seeing: Served, triton: FakeTriton) -> Callable[..., tuple[int, Any]]:
    """POST to a route; the status and the answer."""

    def asked(path: str, **body: Any) -> tuple[int, Any]:
        status, answer, _ = seeing.request("POST", f"/{path}", {"model": "everbatch", **body})
        return status, answer

    return asked


def last(triton: FakeTriton) -> dict[str, Any]:
    """The last request that holds a conversation."""
    return [seen.body for seen in triton.requests if "messages" in seen.body][-1]


Ask = Callable[..., tuple[int, Any]]


def test_a_chat_s_images_reach_the_model_in_their_order(ask: Ask, triton: FakeTriton) -> None:
    plain = {"type": "image_url", "image_url": OTHER_URL}
    messages = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [plain, {"type": "text", "text": "this"}, {"type": "text", "text": " one"}]},
        {"role": "assistant", "content": "blue"},
        TURN,
    ]
    status, answer = ask("v1/chat/completions", messages=messages)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "".join(WORDS))
    assert answer["usage"]["prompt_tokens"] == 9, "the usage is the model's, which counts the images"
    assert last(triton)["images"] == [OTHER_IN_BASE64, IN_BASE64]
    assert last(triton)["messages"] == [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "this one"}]},
        {"role": "assistant", "content": "blue"},
        SHOWN,
    ]


def test_a_chat_without_images_is_as_it_was(ask: Ask, triton: FakeTriton) -> None:
    ask("v1/chat/completions", messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
    assert last(triton)["messages"] == [{"role": "user", "content": "Hi"}] and "images" not in last(triton)


def test_the_packages_of_openai_and_anthropic_send_images(seeing: Served, triton: FakeTriton) -> None:
    with seeing.client() as client:
        raw = client.chat.completions.with_raw_response.create(model="everbatch", messages=[TURN], stream=False)  # type: ignore[list-item]
        assert raw.headers["x-everbatch-ignored"] == "messages.content.image_url.detail"
        part: Any = {"type": "input_image", "image_url": DATA_URL, "detail": "low"}
        told = client.responses.create(model="everbatch", input=[{"role": "user", "content": [part]}])
        assert told.output_text == "".join(WORDS) and last(triton)["images"] == [IN_BASE64]
        stored = client.responses.input_items.list(told.id).data[0]
        assert stored.content[0].type == "input_image" and stored.content[0].image_url == DATA_URL  # type: ignore[union-attr]
        client.responses.create(model="everbatch", input="And now?", previous_response_id=told.id)
        assert last(triton)["images"] == [IN_BASE64], "an earlier turn keeps its image"
        assert [turn["role"] for turn in last(triton)["messages"]] == ["user", "assistant", "user"]
    with anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0) as claude:
        block: Any = {**BLOCK, "cache_control": {"type": "ephemeral"}}
        claude.messages.create(
            model="everbatch",
            max_tokens=9,
            messages=[{"role": "user", "content": [block, {"type": "text", "text": "?"}]}],
        )
        assert last(triton)["images"] == [IN_BASE64]
        assert last(triton)["messages"][0]["content"] == [{"type": "image"}, {"type": "text", "text": "?"}]


def test_results_of_tools_may_hold_images(ask: Ask, triton: FakeTriton) -> None:
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "is_error": True}
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, BLOCK]
    turns = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{**result, "content": content}]},
    ]
    assert ask("v1/messages", max_tokens=5, messages=turns)[0] == 200
    assert last(triton)["messages"][-1] == {
        "role": "tool",
        "tool_call_id": "c",
        "content": [{"type": "text", "text": "Error: a\n\nb"}, {"type": "image"}],
    }
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {
        "type": "function_call_output",
        "call_id": "c",
        "output": [{"type": "input_image", "image_url": DATA_URL}],
    }
    assert ask("v1/responses", input=[call, output])[0] == 200
    assert last(triton)["messages"][-1]["content"] == [{"type": "image"}] and last(triton)["images"] == [IN_BASE64]
    call_turn = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
    }
    answer = {"role": "tool", "tool_call_id": "c", "content": [IMAGE]}
    assert ask("v1/chat/completions", messages=[call_turn, answer])[0] == 200
    assert last(triton)["messages"][-1]["content"] == [{"type": "image"}]


def test_images_count_wherever_tokens_are_counted(ask: Ask, triton: FakeTriton) -> None:
    turns = [{"role": "user", "content": [BLOCK, BLOCK]}]
    assert ask("v1/messages/count_tokens", messages=turns)[1] == {"input_tokens": 9}
    part = {"type": "input_image", "image_url": DATA_URL}
    assert ask("v1/responses/input_tokens", input=[{"role": "user", "content": [part]}])[1]["input_tokens"] == 8
    assert ask("tokenize", messages=[TURN])[1]["count"] == 4
    assert last(triton)["images"] == [IN_BASE64] and last(triton)["tokenize"] is True


def test_conversations_and_sessions_keep_images(ask: Ask, seeing: Served, triton: FakeTriton) -> None:
    item = {"role": "user", "content": [{"type": "input_image", "image_url": DATA_URL, "detail": "auto"}]}
    kept = seeing.request("POST", "/v1/conversations", {"items": [item]})[1]
    assert ask("v1/responses", conversation=kept["id"], input="And?")[0] == 200
    assert last(triton)["images"] == [IN_BASE64]
    session: dict[str, Any] = {"session_id": 7, "interactive_mode": True}
    for prompt in ([TURN], "More"):
        assert seeing.request("POST", "/v1/chat/interactive", {"prompt": prompt, **session})[0] == 200
        assert last(triton)["images"] == [IN_BASE64] and last(triton)["messages"][0] == SHOWN


@pytest.mark.parametrize("says", [None, False])
def test_a_model_that_takes_no_images_is_not_sent_any(serve: Serve, triton: FakeTriton, says: bool | None) -> None:
    triton.takes_images, before = says, triton.takes_images
    try:
        with serve() as served:
            served.wait_healthy()
            status, answer, _ = served.request(
                "POST", "/v1/chat/completions", {"model": "everbatch", "messages": [TURN]}
            )
            assert served.request("GET", "/v1/models")[1]["data"][0]["input_modalities"] == ["text"]
    finally:
        triton.takes_images = before
    assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")
    assert answer["error"]["param"] == "messages[0].content[1].image_url"
    assert "the model 'everbatch' reads text only; leave the image out" in answer["error"]["message"]
    assert not [seen for seen in triton.requests if "messages" in seen.body]


def test_the_list_of_models_says_which_take_images(seeing: Served) -> None:
    assert seeing.request("GET", "/v1/models")[1]["data"][0]["input_modalities"] == ["text", "image"]


def test_a_model_that_cannot_be_asked_is_not_ready(
    serve: Serve, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve() as served:

        async def silent(model: Any) -> None:
            return None

        monkeypatch.setattr(served.gateway, "_ask_facts", silent)
        status, answer, headers = served.request(
            "POST", "/v1/chat/completions", {"model": "everbatch", "messages": [TURN]}
        )
        assert (status, answer["error"]["code"]) == (503, "service_unavailable") and "retry-after" in headers


def test_a_body_may_be_larger_where_a_model_takes_images(serve: Serve, triton: FakeTriton) -> None:
    limits = {"max_body_bytes": 1000, "max_image_body_bytes": 3000}
    body = {"model": "everbatch", "messages": [{"role": "user", "content": "x" * 1500}]}
    triton.takes_images, before = True, triton.takes_images
    try:
        with serve(**limits) as served:
            assert served.request("POST", "/v1/chat/completions", body)[0] == 200
            status, answer, _ = served.request("POST", "/v1/chat/completions", {**body, "user": "x" * 3000})
            assert status == 413 and "3000 bytes" in answer["error"]["message"]
            triton.takes_images = False
        with serve(**limits) as served:
            status, answer, _ = served.request("POST", "/v1/chat/completions", body)
            assert status == 413 and "1000 bytes" in answer["error"]["message"]
    finally:
        triton.takes_images = before


def image(url: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]


PLACE = "messages[0].content[0].image_url"
HUGE = "A" * (3 << 20)
WRONG_URLS = [
    ("", "is empty; send the bytes of a file"),
    (5, "is 5; it should be"),
    (None, "is null; it should be"),
    ([DATA_URL], "is a list; it should be"),
    ({"uri": DATA_URL}, f"unknown parameter {PLACE}.uri; did you mean url?"),
    ({}, f"{PLACE}.url is missing"),
    ("data:", "is a data: URL without base64"),
    ("data:image/png;base64", "is a data: URL without base64"),
    (f"data:image/png,{IN_BASE64}", "is a data: URL without base64"),
    ("data:image/png;base64,", "is empty"),
    ("data:text/html;base64,PGI+", "of type 'text/html'; an image has a type such as image/png"),
    ("data:image/png;base64,PGI+", f"is none of the formats {FORMATS}"),
    ("data:image/svg+xml;base64,PHN2Zz4=", f"is none of the formats {FORMATS}"),
    (f"data:image/png;base64,{IN_BASE64[:-1]}", "is not base64"),
    ("data:image/png;base64,iVBO*w0K", "is not base64"),
    ("data:image/png;base64,iVBOé", "is not base64"),
    ("data:image/png;base64,____", "is not base64"),
    ("file:///etc/passwd", "begins with 'file:///etc/passwd'; send a data: URL"),
    ("ftp://example.org/a.png", "send a data: URL with base64"),
    ("/etc/passwd", "send a data: URL with base64"),
    (IN_BASE64, "send a data: URL with base64"),
    (" data:image/png;base64,AAAA", "send a data: URL with base64"),
    ("https://example.org/a.png", "without --allow-image-hosts HOST[,HOST]; send a data: URL"),
    ("http://169.254.169.254/latest", "without --allow-image-hosts"),
    ("https://user:secret@example.org/", "holds a user or a password"),
]


@pytest.mark.parametrize(("url", "said"), WRONG_URLS, ids=lambda value: str(value)[:40])
def test_an_image_that_is_none_is_refused_with_the_remedy(ask: Ask, triton: FakeTriton, url: Any, said: str) -> None:
    status, answer = ask("v1/chat/completions", messages=image(url))
    assert status == 400 and said in answer["error"]["message"], answer
    assert str(answer["error"]["param"]).startswith("messages[0].content[0].image_url")
    assert len(answer["error"]["message"]) < 400
    assert not [seen for seen in triton.requests if "messages" in seen.body]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"type": "base64", "media_type": "image/png"}, "source.data is missing"),
        ({"type": "base64", "data": IN_BASE64}, "source.media_type is missing"),
        ({"type": "base64", "media_type": "image/png", "data": "!"}, "source.data is not base64"),
        ({"type": "base64", "media_type": "image/png", "data": ""}, "source.data is empty"),
        ({"type": "file", "file_id": "f"}, "source.type is 'file'; it is one of base64, url"),
        ({"type": "url", "url": "https://example.org/a.png"}, "without --allow-image-hosts"),
        ({"type": "url"}, "source.url is missing"),
        ({}, "source.type is missing"),
        (5, "source.type is missing"),
    ],
)
def test_a_source_of_anthropic_s_that_is_none_is_refused(ask: Ask, source: Any, said: str) -> None:
    turns = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    status, answer = ask("v1/messages", max_tokens=5, messages=turns)
    assert status == 400 and said in answer["error"]["message"], answer


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "input_image", "file_id": "file-1"}, "file_id is not served: this server keeps no files"),
        ({"type": "input_image", "file_id": "f", "image_url": DATA_URL}, "file_id is not served"),
        ({"type": "input_image"}, "input[0].content[0].image_url is missing"),
        ({"type": "input_image", "image_url": {"url": DATA_URL}}, "is an object; it should be a text"),
        ({"type": "input_file", "file_data": "x"}, "is 'input_file', which is not served: models read text"),
        ({"type": "input_image", "image_url": "https://example.org/a.png"}, "the image at input, 'https://example.org"),
    ],
)
def test_an_input_image_that_is_none_is_refused(ask: Ask, part: Any, said: str) -> None:
    status, answer = ask("v1/responses", input=[{"role": "user", "content": [part]}])
    assert status == 400 and said in answer["error"]["message"], answer


def test_only_users_and_tools_send_images(ask: Ask) -> None:
    for role in ("system", "developer", "assistant"):
        status, answer = ask("v1/chat/completions", messages=[{"role": role, "content": [IMAGE]}])
        assert status == 400 and f"is an image in a message of role {role}" in answer["error"]["message"]
    part = {"type": "input_image", "image_url": DATA_URL}
    status, answer = ask("v1/responses", input=[{"role": "assistant", "content": [part]}])
    assert status == 400 and "role assistant; send it in one of role user" in answer["error"]["message"]
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": [BLOCK]}]
    status, answer = ask("v1/messages", max_tokens=5, messages=turns)
    assert status == 400 and "send it in one of role user" in answer["error"]["message"]


def test_the_number_and_size_of_images_have_limits(serve: Serve, triton: FakeTriton) -> None:
    triton.takes_images, before = True, triton.takes_images
    try:
        with serve(max_images=2, max_image_bytes=100) as served:
            body = {"model": "everbatch", "messages": [{"role": "user", "content": [IMAGE] * 3}]}
            error = served.request("POST", "/v1/chat/completions", body)[1]["error"]
            assert error["message"] == "the request has 3 images, the limit is 2; send fewer"
            assert error["param"] == "messages[0].content[2].image_url"
            for count in (101, 20_000):
                data = base64.b64encode(PNG.ljust(count, b"\0")).decode()
                body["messages"] = image(f"data:image/png;base64,{data}")
                error = served.request("POST", "/v1/chat/completions", body)[1]["error"]
                assert "has more than 100 bytes, the limit; send it smaller" in error["message"]
    finally:
        triton.takes_images = before


def test_thousands_of_images_and_huge_texts_are_refused_soon(ask: Ask) -> None:
    status, answer = ask("v1/chat/completions", messages=[{"role": "user", "content": [IMAGE] * 5000}])
    assert status == 400 and "has 5000 images, the limit is 16" in answer["error"]["message"]
    status, answer = ask("v1/chat/completions", messages=image(f"data:image/png;base64,{HUGE}"))
    assert status == 400 and f"is none of the formats {FORMATS}" in answer["error"]["message"]
    status, answer = ask("v1/chat/completions", messages=image("data:image/png;base64," + "A" * (100 << 20)))
    assert status == 413


def test_lines_of_base64_are_joined() -> None:
    in_lines = base64.encodebytes(OTHER * 9).decode().replace("\n", "\r\n")
    assert brought([Picture("x", data=in_lines)], 1 << 20) == [OTHER * 9]
    with pytest.raises(GatewayError, match="is not base64"):
        brought([Picture("x", data=in_lines.replace("\r\n", " "))], 1 << 20)


def test_contents_are_one_text_or_parts_in_their_order() -> None:
    one = Picture("x", DATA_URL)
    assert content_of(["a", "b"], "\n") == "a\nb" and content_of([]) == ""
    assert content_of([one, "", "a", "b", one, ""], "\n") == [one, {"type": "text", "text": "\na\nb"}, one]
    turns = [{"role": "user", "content": content_of(["a", one])}, {"role": "assistant", "content": "b"}, {"role": "x"}]
    shown, found = lifted(turns)
    assert found == [one] and shown[0]["content"] == [{"type": "text", "text": "a"}, {"type": "image"}]
    assert shown[1:] == turns[1:] and turns[0]["content"][1] is one, "what is kept is not changed"


def test_a_refused_image_of_a_package_is_an_exception_of_it(seeing: Served) -> None:
    with seeing.client() as client, pytest.raises(openai.BadRequestError, match="is not base64"):
        client.chat.completions.create(model="everbatch", messages=image("data:image/png;base64,!"))

"""/v1/responses as the openai package uses it: a conversation that the gateway remembers."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.gateway.conftest import Served
from tests.gateway.fake_triton import WORDS, FakeTriton

TEXT = "".join(WORDS)
EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_a_response_has_text_status_and_usage(client: openai.OpenAI, triton: FakeTriton) -> None:
    response = client.responses.create(model="everbatch", input="hi", instructions="Be brief.", metadata={"a": "b"})
    assert (response.output_text, response.status, response.metadata) == (TEXT, "completed", {"a": "b"})
    assert response.usage is not None and response.usage.total_tokens == 11
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert triton.last().body["messages"] == [turn("system", "Be brief."), turn("user", "hi")]


def test_a_stream_tells_every_step_in_order(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="everbatch", input="hi", stream=True))
    assert [event.type for event in events] == EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    last = events[-1]
    assert last.type == "response.completed" and last.response.output_text == TEXT and last.response.usage is not None


def test_the_last_event_has_all_that_was_streamed(client: openai.OpenAI) -> None:
    events: Any = list(client.responses.create(model="everbatch", input="hi", stream=True, top_logprobs=2))
    streamed = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    part = events[-1].response.output[0].content[0]
    for logprobs in (streamed, done.logprobs, part.logprobs):
        assert [one.token for one in logprobs] == WORDS
    assert part.text == done.text == TEXT


def test_a_response_shows_what_was_asked_for_each_under_its_own_name(served: Served) -> None:
    """No two values are alike."""
    asked = {
        "temperature": 0.25,
        "top_p": 0.5,
        "max_output_tokens": 40,
        "top_logprobs": 3,
        "instructions": "Be brief.",
        "user": "carol",
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "store": False,
        "text": {"format": {"type": "json_object"}},
    }
    status, body, _ = served.request("POST", "/v1/responses", {"model": "everbatch", "input": "hi", **asked})
    assert status == 200 and {name: body[name] for name in asked} == asked
    usage = body["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (7, 4, 11)
    assert usage["input_tokens_details"]["cached_tokens"] == 3


def test_the_stream_helper_of_the_package_reads_it(client: openai.OpenAI) -> None:
    with client.responses.stream(model="everbatch", input="hi") as stream:
        assert stream.get_final_response().output_text == TEXT


def test_previous_response_id_brings_the_earlier_turns_but_not_their_instructions(
    client: openai.OpenAI, triton: FakeTriton
) -> None:
    first = client.responses.create(model="everbatch", input="one", instructions="Rule one.")
    second = client.responses.create(
        model="everbatch", input="two", instructions="Rule two.", previous_response_id=first.id
    )
    parts: Any = [{"role": "user", "content": [{"type": "input_text", "text": "three"}]}]
    client.responses.create(model="everbatch", input=parts, previous_response_id=second.id)
    assert triton.last().body["messages"] == [
        turn("user", "one"),
        turn("assistant", TEXT),
        turn("user", "two"),
        turn("assistant", TEXT),
        turn("user", "three"),
    ]
    assert triton.requests[1].body["messages"][0] == turn("system", "Rule two.")


def test_one_response_may_be_continued_twice(client: openai.OpenAI, triton: FakeTriton) -> None:
    first = client.responses.create(model="everbatch", input="one")
    for text in ("left", "right"):
        client.responses.create(model="everbatch", input=text, previous_response_id=first.id)
        assert [one["content"] for one in triton.last().body["messages"]] == ["one", TEXT, text]


def test_a_clients_own_list_may_hold_an_earlier_output(client: openai.OpenAI, triton: FakeTriton) -> None:
    first = client.responses.create(model="everbatch", input="one")
    items: Any = [turn("user", "one"), *(item.model_dump() for item in first.output), turn("user", "two")]
    client.responses.create(model="everbatch", input=items)
    assert [one["content"] for one in triton.last().body["messages"]] == ["one", TEXT, "two"]


def test_a_stored_response_is_given_back_and_deleted(client: openai.OpenAI) -> None:
    response = client.responses.create(model="everbatch", input="one")
    assert client.responses.retrieve(response.id) == response
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="everbatch", input="two", previous_response_id=response.id)


def test_store_false_keeps_nothing(client: openai.OpenAI, served: Served) -> None:
    before = served.gateway.store.held()
    response = client.responses.create(model="everbatch", input="one", store=False)
    assert served.gateway.store.held() == before
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_response_cut_at_its_limit_is_incomplete_and_can_be_continued(
    client: openai.OpenAI, triton: FakeTriton
) -> None:
    events = list(client.responses.create(model="everbatch", input="one", max_output_tokens=2, stream=True))
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"
    client.responses.create(model="everbatch", input="two", previous_response_id=last.response.id)
    assert triton.last().body["messages"][1] == turn("assistant", WORDS[0] + WORDS[1])


def test_logprobs_come_where_they_are_included(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="everbatch", input="hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    part: Any = response.output[0].content[0]  # type: ignore[union-attr, index]
    assert [token.token for token in part.logprobs] == WORDS and len(part.logprobs[0].top_logprobs) == 2


def test_a_stream_that_fails_ends_with_response_failed(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="everbatch", input="late error [UNAVAILABLE] engine died", stream=True))
    last = events[-1]
    assert last.type == "response.failed" and last.response.error is not None
    assert last.response.error.message == "engine died"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(last.response.id)

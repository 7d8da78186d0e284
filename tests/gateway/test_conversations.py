"""/v1/conversations as the openai package uses them."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.core import Gateway, Responding
from gateway.items import items_of
from gateway.response_events import ResponseWriter
from gateway.response_messages import ResponseRequest
from gateway.settings import Settings
from gateway.store import ITEM_BYTES, OVERHEAD_BYTES, Conversation, ResponseStore
from gateway.triton_client import Piece
from gateway.turns import Turns
from tests.gateway.conftest import Served
from tests.gateway.fake_triton import WORDS, FakeTriton
from tests.gateway.test_keys import ALICE, BOB, LINES, Serve, write

TEXT = "".join(WORDS)
ONE: Any = {"type": "message", "role": "user", "content": "one"}


def texts(triton: FakeTriton) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"]) for turn in triton.last().body["messages"]]


def test_a_conversation_is_made_shown_changed_and_deleted(client: openai.OpenAI) -> None:
    made = client.conversations.create(metadata={"a": "b"}, items=[ONE])
    assert made.object == "conversation" and made.metadata == {"a": "b"}
    assert client.conversations.retrieve(made.id) == made
    assert client.conversations.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert client.conversations.retrieve(made.id).metadata == {"c": "d"}
    assert [item.type for item in client.conversations.items.list(made.id)] == ["message"]
    assert client.conversations.delete(made.id).deleted
    for lost in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError, match="there is no such conversation"):
            lost(made.id)


def test_items_are_added_listed_shown_and_deleted(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    assert client.conversations.items.list(made.id).data == []
    added = client.conversations.items.create(made.id, items=[ONE, {**ONE, "content": "two"}])
    listed: list[Any] = list(client.conversations.items.list(made.id, order="asc", limit=1))
    assert listed == added.data and [item.content[0].text for item in listed] == ["one", "two"]
    assert client.conversations.items.retrieve(listed[0].id, conversation_id=made.id) == listed[0]
    assert client.conversations.items.delete(listed[0].id, conversation_id=made.id).id == made.id
    assert list(client.conversations.items.list(made.id)) == listed[1:]
    for lost in (client.conversations.items.retrieve, client.conversations.items.delete):
        with pytest.raises(openai.NotFoundError, match="no such item"):
            lost(listed[0].id, conversation_id=made.id)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [False, True])
def test_responses_go_on_from_a_conversation_and_add_to_it(
    stream: bool, store: bool, client: openai.OpenAI, triton: FakeTriton
) -> None:
    made = client.conversations.create(items=[ONE])
    for conversation in (made.id, {"id": made.id}):
        given: Any = {"model": "everbatch", "conversation": conversation, "store": store, "instructions": "Rule."}
        answer: Any = client.responses.create(**given, input="next", stream=stream)
        if stream:
            answer = list(answer)[-1].response
        assert answer.conversation is not None and answer.conversation.id == made.id
    assert texts(triton) == [
        ("system", "Rule."),
        ("user", "one"),
        *(("user", "next"), ("assistant", TEXT)),
        ("user", "next"),
    ]
    kinds = [(item.role, item.content[0].text) for item in client.conversations.items.list(made.id, order="asc")]  # type: ignore[union-attr]
    assert kinds == [("user", "one"), *[("user", "next"), ("assistant", TEXT)] * 2]
    if store:
        client.responses.create(model="everbatch", input="last", previous_response_id=answer.id)
        assert texts(triton)[0] == ("user", "one") and texts(triton)[-2:] == [("assistant", TEXT), ("user", "last")]
        assert len(list(client.responses.input_items.list(answer.id))) == 1


def test_a_response_that_fails_adds_nothing(client: openai.OpenAI) -> None:
    made = client.conversations.create(items=[ONE])
    with pytest.raises(openai.APIError):
        client.responses.create(model="everbatch", input="error [UNAVAILABLE] gone", conversation=made.id)
    assert len(client.conversations.items.list(made.id).data) == 1


def test_a_conversation_that_is_deleted_meanwhile_does_not_come_back() -> None:
    gateway, message = Gateway(Settings()), ResponseRequest(model="m", input="two", conversation="conv_1")
    gateway.store.put("ns", Conversation("conv_1", 0, {}))
    asked = Responding(message, items_of("two"), gateway.before(message, "ns"))
    writer = ResponseWriter(message, Turns())
    writer.take(Piece(text="answer", finish_reason="stop"))
    gateway.add_to_conversation(asked, writer, "ns")
    assert len(gateway.conversation("conv_1", "ns").items) == 2
    gateway.store.delete("ns", "conv_1")
    gateway.add_to_conversation(asked, writer, "ns")
    assert gateway.store.get("ns", "conv_1") is None


def test_a_conversation_is_another_ones_own(tmp_path: Path, serve: Serve) -> None:
    with serve(api_keys=write(tmp_path / "keys", LINES)) as served, served.client(ALICE) as alice:
        made = alice.conversations.create()
        with served.client(BOB) as bob, pytest.raises(openai.NotFoundError):
            bob.conversations.retrieve(made.id)
        assert alice.conversations.retrieve(made.id) == made


def test_tokens_of_a_conversation_are_counted_and_none_are_added(client: openai.OpenAI, triton: FakeTriton) -> None:
    made = client.conversations.create(items=[ONE])
    client.responses.input_tokens.count(model="everbatch", input="two", conversation=made.id)
    assert texts(triton) == [("user", "one"), ("user", "two")]
    assert len(client.conversations.items.list(made.id).data) == 1


@pytest.mark.parametrize(
    ("added", "status", "param"),
    [
        ({"conversation": "conv_0"}, 404, "conversation"),
        ({"conversation": "conv_0", "previous_response_id": "resp_0"}, 400, "conversation"),
        ({"conversation": {"id": 5}}, 400, "conversation.id"),
        ({"previous_response_id": "{conversation}"}, 400, "previous_response_id"),
        ({"conversation": "{response}"}, 404, "conversation"),
    ],
)
def test_what_cannot_be_gone_on_from_is_refused(
    added: dict[str, Any], status: int, param: str, served: Served, client: openai.OpenAI
) -> None:
    made = client.conversations.create()
    response = client.responses.create(model="everbatch", input="x")
    ids = {"{conversation}": made.id, "{response}": response.id}
    given = {name: ids.get(value, value) if isinstance(value, str) else value for name, value in added.items()}
    found, answer, _ = served.request("POST", "/v1/responses", {"model": "everbatch", "input": "x", **given})
    assert (found, answer["error"]["param"]) == (status, param)
    assert served.request("GET", f"/v1/responses/{made.id}")[0] == 404
    assert served.request("DELETE", f"/v1/responses/{made.id}")[0] == 404


def test_a_conversation_that_grows_counts_as_it_is_now() -> None:
    store = ResponseStore(9, 1 << 20, 60)
    item = {"content": "x" * 1000}
    conversation = Conversation("conv_1", 0, {})
    sizes = []
    for _ in range(3):
        store.put("ns", conversation)
        sizes.append(store.held())
        conversation = conversation.with_items([item])
    grown = [size - sizes[0][1] for _, size in sizes]
    each = 1000 + ITEM_BYTES + OVERHEAD_BYTES
    assert [count for count, _ in sizes] == [1, 1, 1] and grown == [0, each, 2 * each]


def test_a_conversation_that_grows_to_the_limit_displaces_nothing_but_what_there_is_no_room_for() -> None:
    """What was put in earlier counts once, also while a request still holds the conversation as it was before."""
    store = ResponseStore(9, 20_000, 60)
    store.put("ns", Conversation("other", 0, {}).with_items([{"content": "x"}]))
    conversation = Conversation("conv_1", 0, {})
    for _ in range(3):
        before, conversation = conversation, conversation.with_items([{"content": "x" * 3000}])
        store.put("ns", conversation)
        assert store.get("ns", before.id) is conversation and store.get("ns", "other") is not None
    assert [len(item["content"]) for item in conversation.items] == [3000] * 3


def test_what_a_response_goes_on_from_counts_after_its_conversation_was_deleted(served: Served) -> None:
    """Else deleted conversations would take memory beyond all limits, one for each response."""
    item = {**ONE, "content": "x" * 100_000}
    made = served.request("POST", "/v1/conversations", {"items": [item]})[1]["id"]
    before = served.gateway.store.held()[1]
    status, answer, _ = served.request(
        "POST", "/v1/responses", {"model": "everbatch", "input": "x", "conversation": made}
    )
    assert status == 200 and served.request("DELETE", f"/v1/conversations/{made}")[0] == 200
    gc.collect()
    assert served.gateway.store.held()[1] > before - 10_000
    assert served.request("DELETE", f"/v1/responses/{answer['id']}")[0] == 200
    gc.collect()
    assert served.gateway.store.held()[1] < before - 90_000

"""A conversation over a scripted client: history, sessions, cancellation, errors."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from client import conversation
from client.conversation import Conversation
from client.errors import ClientError
from client.messages import GenerateRequest, TextChunk


class ScriptedClient:
    """Answers each request with the next item of the script: chunks, or an error."""

    def __init__(self, *script: list[str] | ClientError) -> None:
        self.script = list(script)
        self.requests: list[GenerateRequest] = []

    def send(self, request: GenerateRequest, *, timeout_s: float = 1.0) -> Generator[TextChunk, None, None]:
        self.requests.append(request)
        step = self.script.pop(0)
        if isinstance(step, ClientError):
            raise step
        for text in step:
            yield TextChunk(text)
        yield TextChunk("", final=True, finish_reason="stop")


def say(talk: Conversation, text: str) -> str:
    return "".join(chunk.text for chunk in talk.say(text))


def roles(talk: Conversation) -> list[str]:
    return [message["role"] for message in talk.messages]


UNKNOWN = ClientError("session error 1 (invalid): not known")


def test_every_turn_sends_the_whole_conversation_in_one_session() -> None:
    client = ScriptedClient(["he", "llo"], ["again"])
    talk = Conversation(client, "be brief", max_tokens=5)  # type: ignore[arg-type]
    assert (say(talk, "one"), say(talk, "two")) == ("hello", "again")
    first, second = client.requests
    assert [message["content"] for message in second.messages] == ["be brief", "one", "hello", "two"]  # type: ignore[union-attr]
    assert first.session.start and not second.session.start  # type: ignore[union-attr]
    assert first.session.id == second.session.id > 0  # type: ignore[union-attr]
    assert second.session.full_history and not second.session.end and second.max_tokens == 5  # type: ignore[union-attr]


def test_two_conversations_have_different_sessions_and_a_reset_opens_another() -> None:
    client = ScriptedClient(["a"], ["b"], ["c"])
    talk = Conversation(client)  # type: ignore[arg-type]
    say(talk, "one")
    talk.reset()
    say(talk, "two")
    say(Conversation(client), "three")  # type: ignore[arg-type]
    assert len({request.session.id for request in client.requests}) == 3  # type: ignore[union-attr]
    assert client.requests[1].session.start and len(client.requests[1].messages) == 1


def test_a_session_the_server_has_forgotten_is_started_again_unseen() -> None:
    client = ScriptedClient(["a"], UNKNOWN, ["b"])
    talk = Conversation(client)  # type: ignore[arg-type]
    say(talk, "one")
    assert say(talk, "two") == "b"
    assert [request.session.start for request in client.requests] == [True, False, True]  # type: ignore[union-attr]
    assert roles(talk) == ["user", "assistant", "user", "assistant"]


def test_a_session_that_cannot_be_begun_is_an_error_and_not_tried_for_ever() -> None:
    client = ScriptedClient(["a"], UNKNOWN, UNKNOWN, ["never asked for"])
    talk = Conversation(client)  # type: ignore[arg-type]
    say(talk, "one")
    with pytest.raises(ClientError, match="session error 1"):
        say(talk, "two")
    assert len(client.requests) == 3 and roles(talk) == ["user", "assistant"]


def test_a_session_that_stays_busy_is_an_error_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "BUSY_PAUSE_S", 0.0)
    client = ScriptedClient(*[ClientError("session error 3 (busy): running")] * 100)
    with pytest.raises(ClientError, match="busy"):
        say(Conversation(client), "one")  # type: ignore[arg-type]
    assert len(client.requests) == 1 + conversation.BUSY_RETRIES


def test_a_session_that_is_busy_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "BUSY_PAUSE_S", 0.0)
    client = ScriptedClient(["a"], ClientError("session error 3 (busy): running"), ["b"])
    talk = Conversation(client)  # type: ignore[arg-type]
    say(talk, "one")
    assert say(talk, "two") == "b"


def test_a_failed_turn_leaves_the_conversation_as_it_was() -> None:
    client = ScriptedClient(["a"], ClientError("session error 6 (too_long): no room"), ["b"])
    talk = Conversation(client)  # type: ignore[arg-type]
    say(talk, "one")
    with pytest.raises(ClientError, match="too_long"):
        say(talk, "two")
    assert roles(talk) == ["user", "assistant"]
    assert say(talk, "three") == "b"


def test_a_cancelled_reply_keeps_what_was_shown() -> None:
    talk = Conversation(ScriptedClient(["a", "b", "c"]))  # type: ignore[arg-type]
    stream = talk.say("one")
    assert next(stream).text + next(stream).text == "ab"
    stream.close()
    assert talk.messages[-1] == {"role": "assistant", "content": "ab"}


def test_a_reply_cancelled_after_tokens_without_text_is_taken_back() -> None:
    talk = Conversation(ScriptedClient(["", "", "a"]))  # type: ignore[arg-type]
    stream = talk.say("one")
    assert next(stream).text + next(stream).text == ""
    stream.close()
    assert talk.messages == []


def test_ctrl_c_inside_the_wait_for_a_chunk_keeps_what_was_shown() -> None:
    talk = Conversation(ScriptedClient(["a", "b"]))  # type: ignore[arg-type]
    stream = talk.say("one")
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt)
    assert talk.messages[-1] == {"role": "assistant", "content": "a"}


def test_a_turn_cancelled_before_its_first_text_is_taken_back() -> None:
    class Waiting(ScriptedClient):
        def send(self, request: GenerateRequest, *, timeout_s: float = 1.0) -> Generator[TextChunk, None, None]:
            raise KeyboardInterrupt
            yield TextChunk("never")

    talk = Conversation(Waiting())  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        say(talk, "one")
    assert talk.messages == []


def test_a_namespace_among_the_options_holds_for_every_turn_and_for_the_end() -> None:
    client = ScriptedClient(["a"], ["b"], [""])
    talk = Conversation(client, namespace="alice")  # type: ignore[arg-type]
    say(talk, "one")
    say(talk, "two")
    talk.end()
    assert [request.namespace for request in client.requests] == ["alice"] * 3


def test_the_end_lets_the_server_forget_and_survives_a_server_that_is_gone() -> None:
    client = ScriptedClient(["a"], [""])
    talk = Conversation(client)  # type: ignore[arg-type]
    talk.end()
    assert client.requests == []  # there never was a session
    say(talk, "one")
    talk.end()
    session = client.requests[-1].session
    assert session is not None and session.stop and session.end and not session.start
    client.script = [["b"], ClientError("no server answers")]
    say(talk, "two")
    talk.end()

"""A conversation over a scripted client: history, sessions, cancellation, errors."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from client import history
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
    monkeypatch.setattr(history, "BUSY_PAUSE_S", 0.0)
    client = ScriptedClient(*[ClientError("session error 3 (busy): running")] * 100)
    with pytest.raises(ClientError, match="busy"):
        say(Conversation(client), "one")  # type: ignore[arg-type]
    assert len(client.requests) == 1 + history.BUSY_RETRIES


def test_a_session_that_is_busy_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "BUSY_PAUSE_S", 0.0)
    client = ScriptedClient(["a"], ClientError("session error 3 (busy): running"), ["b"])
    talk = Conversation(client)  # type: ignore[arg-type]
    say(talk, "one")
    assert say(talk, "two") == "b"


def test_each_turn_is_tried_again_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "BUSY_PAUSE_S", 0.0)
    busy = [ClientError("session error 3 (busy): running")] * history.BUSY_RETRIES
    talk = Conversation(ScriptedClient(*busy, ["a"], *busy, ["b"]))  # type: ignore[arg-type]
    assert (say(talk, "one"), say(talk, "two")) == ("a", "b")


def test_a_failed_turn_leaves_the_conversation_as_it_was() -> None:
    client = ScriptedClient(["a"], ClientError("[INVALID_ARGUMENT] temperature is 200"), ["b"])
    talk = Conversation(client)  # type: ignore[arg-type]
    say(talk, "one")
    with pytest.raises(ClientError, match="temperature"):
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
    talk.end()
    assert len(client.requests) == 2, "it has ended"
    client.script = [["b"], ClientError("no server answers")]
    say(talk, "two")
    talk.end()
    assert client.requests[2].session.start, "a turn behind the end begins a session"  # type: ignore[union-attr]


# ---- a full context --------------------------------------------------------------------------------------------------

FULL = [
    "[INVALID_ARGUMENT] session error 6 (too_long): history and prompt have 99 tokens, the limit is 64; start afresh",
    "[INVALID_ARGUMENT] the prompt has 99 tokens, the limit is 63: shorten it, or serve with a larger model.max_seq_len",
    "[INVALID_ARGUMENT] 9 prompt tokens and 9 output tokens need 9 KV blocks, the pool has 4 of 2 tokens; lower max_tokens",
    "[INVALID_ARGUMENT] messages has 900 bytes, the limit is 640 (64 for each token of model.max_seq_len); shorten it",
    "[INVALID_ARGUMENT] there are 1025 messages, allowed is 1 to 1024; drop older ones",
]


def contents(request: GenerateRequest) -> list[str]:
    return [message["content"] for message in request.messages or ()]


@pytest.mark.parametrize("reason", FULL)
def test_a_full_context_leaves_out_the_oldest_turns_and_never_the_system_message(reason: str) -> None:
    client = ScriptedClient(["a" * 8], ["b" * 8], ["c" * 8], ClientError(reason), ClientError(reason), ["d"])
    talk = Conversation(client, "be brief")  # type: ignore[arg-type]
    for text in ("one", "two", "three"):
        say(talk, text)
    assert say(talk, "four") == "d"
    assert contents(client.requests[-1]) == ["be brief", "three", "c" * 8, "four"]
    assert talk.left_out == 2 and contents(client.requests[-2])[:2] == ["be brief", "two"]
    assert {request.session.id for request in client.requests} == {client.requests[0].session.id}  # type: ignore[union-attr]


def test_a_quarter_of_the_text_is_left_out_at_once() -> None:
    client = ScriptedClient(*[["a"]] * 16, ClientError(FULL[0]), ["b"])
    talk = Conversation(client)  # type: ignore[arg-type]
    for _ in range(16):
        say(talk, "x")
    say(talk, "y")
    assert talk.left_out == 5, "8 of 33 characters would be less than a quarter"
    talk.reset()
    assert (talk.left_out, talk.messages) == (0, [])


def test_a_turn_that_fits_nowhere_is_refused_and_no_old_turn_is_lost() -> None:
    client = ScriptedClient(["a"], ClientError(FULL[0]), ClientError(FULL[0]), ["b"])
    talk = Conversation(client)  # type: ignore[arg-type]
    say(talk, "one")
    with pytest.raises(ClientError, match="too_long"):
        say(talk, "far too long")
    assert contents(client.requests[-1]) == ["far too long"]
    say(talk, "two")
    assert contents(client.requests[-1]) == ["one", "a", "two"] and talk.left_out == 0


def test_an_option_of_a_conversation_is_checked_when_it_begins() -> None:
    with pytest.raises(TypeError, match="'max_token' is no option; did you mean max_tokens"):
        Conversation(ScriptedClient(), max_token=5)  # type: ignore[arg-type, call-arg]
    with pytest.raises(TypeError, match="session is no option of a conversation"):
        Conversation(ScriptedClient(), session=None)  # type: ignore[arg-type]

"""The chat on a real terminal (a pty): editing, pastes, Ctrl-C, commands."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

from client.editor import merged
from client.grpc_messages import decode_values
from tests.client.pty_chat import chatting
from tests.client.servers import GrpcServer, HttpServer, grpc_answer, grpc_server, http_server

ANSWER = {"text_output": "fine", "finish_reason": "stop"}
CTRL_C, UP, LEFT, CTRL_D = "\x03", "\x1b[A", "\x1b[D", "\x04"
LONG = "".join(f"{number:05d} " for number in range(3300))  # 19.8 kB in one line


def turns(server: HttpServer) -> list[str]:
    """What the model was told, turn by turn."""
    talks = [json.loads(body["messages"]) for _, body in server.requests if "messages" in body]
    return [talk[-1]["content"] for talk in talks]


def test_a_long_line_a_paste_of_many_lines_editing_and_history_arrive_as_turns() -> None:
    paragraph = "def f():\n    return 1\n\n\tand so on\n"
    with http_server(ANSWER) as server, chatting(server.url) as chat:
        chat.prompt()
        chat.paste(LONG)
        chat.type("\r")
        chat.prompt()
        chat.paste(paragraph)
        chat.type("\r")
        chat.prompt()
        chat.type("hllo" + LEFT * 3 + "e\r")
        chat.prompt()
        chat.type(UP + "!\r")
        chat.prompt()
        chat.type("two\x1b\rlines\r")
        chat.prompt()
        chat.type(CTRL_D)
        assert chat.end() == 0
    assert turns(server) == [LONG.rstrip(), paragraph.rstrip(), "hello", "hello!", "two\nlines"]


def test_a_long_line_is_not_cut_by_a_terminal_that_marks_no_pastes() -> None:
    with http_server(ANSWER) as server, chatting(server.url) as chat:
        chat.prompt()
        chat.type(LONG + "\r")
        chat.wait_for("fine")
        chat.prompt()
        chat.type("/exit\r")
        assert chat.end() == 0
    assert turns(server) == [LONG.rstrip()]


def test_ctrl_c_ends_the_answer_or_the_line_and_not_the_chat() -> None:
    def answers(server: GrpcServer) -> Iterator[Any]:
        if len(server.requests) > 1:
            yield grpc_answer("second", final=True)
            return
        yield grpc_answer("first")
        server.left.wait(20)

    with grpc_server(answers) as server, chatting(server.url) as chat:
        chat.prompt()
        chat.type("one\r")
        chat.wait_for("first")
        chat.type(CTRL_C)
        chat.wait_for(" ...")
        assert server.left.wait(20), "the request was cancelled"
        chat.prompt()
        chat.type("half a line" + CTRL_C)
        chat.prompt()
        chat.type("two\r")
        chat.wait_for("second")
        chat.prompt()
        chat.type("/quit\r")
        assert chat.end() == 0
    messages = json.loads(_texts(server.requests[1])["messages"])
    assert [message["content"] for message in messages] == ["one", "first", "two"]


def _texts(request: Any) -> dict[str, str]:
    raw = zip(request.inputs, request.raw_input_contents)
    return {tensor.name: decode_values("BYTES", data)[0] for tensor, data in raw if tensor.datatype == "BYTES"}


def test_a_paste_during_an_answer_waits_whole_for_the_next_prompt() -> None:
    pasted = threading.Event()

    def answers(server: GrpcServer) -> Iterator[Any]:
        yield grpc_answer("first")
        if len(server.requests) == 1:
            pasted.wait(20)
        yield grpc_answer("end", final=True)

    text = "a" * 6000 + "\n" + "b" * 1500  # more than a terminal's line may have, and than its buffer holds
    with grpc_server(answers) as server, chatting(server.url) as chat:
        chat.prompt()
        chat.type("one\r")
        chat.wait_for("first")
        threading.Timer(0.3, pasted.set).start()  # the rest of the paste waits for the prompt after the answer
        chat.paste(text)
        chat.prompt()
        chat.wait_for("b" * 40)
        chat.type("\r")
        chat.wait_for("first")
        chat.prompt()
        chat.type(CTRL_D)
        assert chat.end() == 0
    messages = json.loads(_texts(server.requests[1])["messages"])
    assert messages[-1]["content"] == text


def test_commands_are_answered_and_a_pasted_path_in_many_lines_is_none() -> None:
    with http_server(ANSWER) as server, chatting(server.url) as chat:
        for typed, shown in (
            ("/help", "forgotten"),
            ("/nope", "there are /image, /reset, /help and /exit"),
            ("one", "fine"),
        ):
            chat.prompt()
            chat.type(typed + "\r")
            chat.wait_for(shown)
        chat.prompt()
        chat.type("/reset\r")
        chat.wait_for("new conversation")
        chat.prompt()
        chat.paste("/usr\n/bin")
        chat.type("\r")
        chat.wait_for("fine")
        chat.prompt()
        chat.type("/exit\r")
        assert chat.end() == 0
    assert turns(server) == ["one", "/usr\n/bin"]


def test_characters_that_come_together_are_one_paste_and_keys_stay_keys() -> None:
    def pressed(*keys: str) -> list[tuple[str, str]]:
        return [(str(press.key), press.data) for press in merged(KeyPress(key) for key in keys)]

    assert pressed("a", "b", Keys.ControlM, "c") == [
        (str(Keys.BracketedPaste), "ab"),
        (str(Keys.ControlM), Keys.ControlM),
        ("c", "c"),
    ]
    assert pressed(Keys.Escape, "f", "a", "b")[1:] == [("f", "f"), (str(Keys.BracketedPaste), "ab")]


def test_on_a_terminal_an_error_is_seen_and_leaving_is_no_failure() -> None:
    with http_server({"error": "[INVALID_ARGUMENT] not that"}, status=400) as server, chatting(server.url) as chat:
        chat.prompt()
        chat.type("one\r")
        chat.wait_for("[INVALID_ARGUMENT] not that")
        chat.prompt()
        chat.type("/exit\r")
        assert chat.end() == 0

"""Images that the client sends: files, the request of model `everbatch` over both protocols, conversations and the command."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client.chat import Chat
from client.client import EverbatchClient
from client.conversation import Conversation
from client.errors import ClientError
from client.grpc_messages import decode_values
from client.images import MOST_BYTES, read_image
from client.messages import GenerateRequest
from tests.client.servers import GrpcServer, grpc_answer, grpc_server, http_server
from tests.client.test_cli import run
from tests.client.test_conversation import ScriptedClient, say

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20
IN_BASE64 = base64.b64encode(PNG).decode()
USAGE = {"prompt_tokens": 9, "completion_tokens": 1, "cached_tokens": 4}
LAST = {"text": "red", "token_ids": [1], "finish_reason": "stop", "stop_reason": None, "usage": USAGE}
SHOWN = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a picture.png"
    path.write_bytes(PNG)
    return path


def json_answers(server: GrpcServer) -> Iterator[Any]:
    answer = grpc_answer(json.dumps(LAST))
    answer.infer_response.outputs[0].name = "response"
    yield answer
    end = grpc_answer(final=True)
    del end.infer_response.outputs[:]
    del end.infer_response.raw_output_contents[:]
    yield end


def test_a_turn_with_an_image_is_a_request_of_the_json_model_over_grpc() -> None:
    with grpc_server(json_answers) as server, EverbatchClient(server.url, "grpc", "code.ensemble") as client:
        chunks = list(Conversation(client, max_tokens=7).say("What is it?", [IN_BASE64]))
    (asked,) = server.requests
    assert asked.model_name == "code.everbatch" and list(asked.inputs[0].shape) == [1]
    assert [tensor.name for tensor in asked.inputs] == ["request"]
    body = json.loads(decode_values("BYTES", asked.raw_input_contents[0])[0])
    assert body == {"messages": [SHOWN], "images": [IN_BASE64], "max_tokens": 7, "stream": True}
    assert asked.parameters["cache_salt"].string_param.startswith("chat-"), (
        "or no turn would find the KV of the one before"
    )
    assert "".join(chunk.text for chunk in chunks) == "red" and chunks[-1].final
    assert (chunks[0].num_input_tokens, chunks[0].num_cached_tokens, chunks[0].num_context_tokens) == (9, 4, 5)


def test_the_command_sends_images_over_http_with_the_first_turn(picture: Path) -> None:
    with http_server({"response": json.dumps(LAST)}) as server:
        done = run("chat", "--url", server.url, "--image", str(picture), "--image", str(picture), typed="one\ntwo\n")
    assert (done.exit_code, done.stdout) == (0, "red\nred\n"), done.stderr
    assert {path for path, _ in server.requests} == {"/v2/models/everbatch/generate_stream"}
    first, second = (json.loads(body["request"]) for _, body in server.requests)
    assert first["images"] == second["images"] == [IN_BASE64] * 2
    assert second["messages"][1:] == [{"role": "assistant", "content": "red"}, {"role": "user", "content": "two"}]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "cannot be read: No such file or directory"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        (lambda path: path.write_bytes(b""), "is none of the formats PNG, JPEG"),
        (lambda path: path.write_text("<svg/>"), "is none of the formats PNG, JPEG"),
        (lambda path: path.write_bytes(PNG.ljust(MOST_BYTES + 1, b"\0")), "has more than 20 MiB, the limit"),
    ],
)
def test_a_file_that_cannot_be_sent_is_a_sentence(make: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    make(path)
    with pytest.raises(ValueError, match=said) as caught:
        read_image(path)
    assert str(caught.value).startswith(repr(str(path)))
    done = run("chat", "--image", str(path), typed="one\n")
    assert done.exit_code == 2 and f"--image '{path}' {said}"[:60] in done.stderr.replace("\n", "")


def test_a_name_that_is_none_is_refused() -> None:
    for name in ("a\0b", "~nobody-of-this-name/a.png"):
        with pytest.raises(ValueError, match="cannot be read"):
            read_image(name)


def test_options_that_the_json_model_has_not_are_refused_by_name() -> None:
    for option in ({"n": 2}, {"beam_width": 2}, {"end_id": 5}, {"exclude_input": False}, {"return_log_probs": True}):
        with pytest.raises(ValueError, match="does not go with images; leave it out"):
            GenerateRequest(messages=[SHOWN], images=[IN_BASE64], **option).check()  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="images"):
        GenerateRequest(messages=[SHOWN], images=[5]).check()  # type: ignore[list-item]


def test_images_go_with_their_turn_when_a_full_context_leaves_it_out() -> None:
    full = ClientError("the prompt has 9 tokens, max_seq_len is 8")
    client = ScriptedClient(["a"], full, ["b"])
    talk = Conversation(client)  # type: ignore[arg-type]
    list(talk.say("one" * 50, [IN_BASE64]))
    assert client.requests[0].images == [IN_BASE64] and client.requests[0].session is None
    if full.is_too_long:
        assert say(talk, "two") == "b" and client.requests[-1].images == ()
        assert client.requests[-1].session is not None


def test_the_chat_attaches_files_and_keeps_them_when_a_turn_fails(
    picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    client = ScriptedClient(["a"], ClientError("busy"), ["b"], ["c"])
    chat = Chat(Console(), Conversation(client), 5)  # type: ignore[arg-type]
    for typed in ("/image", "/image absent.png", "hi", f"/image {picture}", "look", "again", "more"):
        chat.take(typed)
    out = capsys.readouterr().out
    assert "/image has no file" in out and "'absent.png' cannot be read" in out and "goes with the next turn" in out
    assert [len(request.images) for request in client.requests] == [0, 1, 1, 1]
    assert client.requests[2].messages[-1]["content"][-1] == {"type": "text", "text": "again"}  # type: ignore[index]

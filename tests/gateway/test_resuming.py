"""Replies whose Triton ends in their midst: their clients get the same events as without, once it is back."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from gateway.errors import ConnectionLost, from_triton
from gateway.resuming import MOST_LOSSES, Progress
from gateway.triton_client import Job, Piece
from tests.gateway.conftest import Served, serving
from tests.gateway.fake_triton import WORDS, FakeTriton
from tests.gateway.test_limits import connect, post

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("completions", {"prompt": "lose N"}),
    "completions n = 3": ("completions", {"prompt": "lose N", "n": 3, "logprobs": 1}),
    "completions of several prompts": ("completions", {"prompt": ["lose N", "lose N"]}),
    "completions with echo": ("completions", {"prompt": "lose N", "echo": True, "logprobs": 0}),
    "completions with usage": ("completions", {"prompt": "lose N", "stream_options": {"include_usage": True}}),
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": "lose N"}], "n": 2, "logprobs": True}),
    "completions with token ids": ("completions", {"prompt": "lose N", "n": 2, "return_token_ids": True}),
    "responses": ("responses", {"input": "lose N"}),
    "messages": ("messages", {"messages": [{"role": "user", "content": "lose N"}], "max_tokens": 64}),
}


def events(text: str) -> list[Any]:
    """The events of a stream, without what is another one in each request."""
    found = []
    for line in text.splitlines():
        if line.startswith("data: {"):
            value = json.loads(line.removeprefix("data: "))
            for name in ("id", "created", "item_id", "response", "item", "obfuscation"):
                value.pop(name, None)
            value.get("message", {}).pop("id", None)
            found.append(value)
    return sorted(found, key=_choice)


def _choice(event: Any) -> int:
    """Each choice has its own order; that of different ones is chance where there are several prompts."""
    return event["choices"][0]["index"] if event.get("choices") else 99


def ask(served: Served, kind: str, count: int, **fields: Any) -> tuple[int, Any]:
    path, body = BODIES[kind]
    text = json.dumps({"model": "everbatch", **body, **fields}).replace("lose N", f"lose {count}")
    status, answer, _ = served.request("POST", f"/v1/{path}", text.encode(), {"Content-Type": "application/json"})
    return status, answer


def lost(triton: FakeTriton, losses: int) -> FakeTriton:
    triton.requests.clear()
    triton.losses = losses
    return triton


@pytest.mark.feature("002-34")
@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_stream_goes_on_with_the_same_events(kind: str, count: int, served: Served, triton: FakeTriton) -> None:
    lost(triton, 0)
    right = ask(served, kind, count, stream=True)
    sent = len(triton.requests)
    lost(triton, 1)
    status, text = ask(served, kind, count, stream=True)
    assert (status, events(text)) == (right[0], events(right[1]))
    assert events(text) and ("[DONE]" in text) == ("[DONE]" in right[1])
    assert triton.losses == 0 and len(triton.requests) == sent + 1


def test_what_has_come_goes_back_with_the_seed_that_the_server_has_chosen(served: Served, triton: FakeTriton) -> None:
    ask(served, "completions n = 3", 4, stream=True, **lost_once(triton))
    first, again = (seen.body for seen in triton.requests)
    had = [
        {"token_ids": [0, 1], "ended": False},
        {"token_ids": [0], "ended": False},
        {"token_ids": [0], "ended": False},
    ]
    assert again == first | {"resume": had, "seed": 7} and "seed" not in first
    assert triton.requests[0].id == triton.requests[1].id, "a stop of the request finds it"


def lost_once(triton: FakeTriton) -> dict[str, Any]:
    lost(triton, 1)
    return {}


def test_a_seed_of_the_client_stays(served: Served, triton: FakeTriton) -> None:
    lost(triton, 1)
    ask(served, "completions", 2, stream=True, seed=5)
    assert [seen.body["seed"] for seen in triton.requests] == [5, 5]


@pytest.mark.parametrize("kind", sorted(BODIES.keys() - {"completions with usage"}))
def test_a_reply_that_does_not_stream_is_asked_for_again(kind: str, served: Served, triton: FakeTriton) -> None:
    lost(triton, 0)
    right = ask(served, kind, 0)
    lost(triton, 1)
    status, body = ask(served, kind, 0)
    ids = dict.fromkeys(("id", "created", "created_at", "completed_at", "output"))
    assert (status, body | ids) == (200, right[1] | ids)
    assert all("resume" not in seen.body for seen in triton.requests)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_server_ends_twice_is_not_sent_again(stream: bool, served: Served, triton: FakeTriton) -> None:
    lost(triton, 9)
    status, body = ask(served, "completions", 1, stream=stream)
    error = events(body)[-1]["error"] if stream else body["error"]
    assert status == (200 if stream else 503)
    assert "has ended 2 times while this request ran" in error["message"] and error["code"] == "service_unavailable"
    assert len(triton.requests) == MOST_LOSSES
    triton.losses = 0


def test_a_stream_waits_for_a_server_that_is_away_and_says_so() -> None:
    with FakeTriton() as triton, serving(triton.url) as served, connect(served) as connection:
        served.wait_healthy()
        triton.losses = 1
        body = {"model": "everbatch", "prompt": "lose 2", "stream": True}
        triton.ready = False
        connection.sendall(post(json.dumps(body).encode(), "/v1/completions"))
        data = b""
        while b": waiting" not in data:
            data += connection.recv(4096)
        assert b"[DONE]" not in data and len(triton.requests) == 1
        triton.stop()
        triton.start()
        assert len(triton.requests) == 1, "it is sent again once the server says that it is ready"
        triton.ready = True
        while not data.endswith(b"0\r\n\r\n"):
            more = connection.recv(4096)
            assert more, "the connection was cut"
            data += more
    texts = [event["choices"][0]["text"] for event in events(data.decode())]
    assert "".join(texts) == "".join(WORDS) and b"[DONE]" in data


@pytest.mark.parametrize(
    ("path", "fields", "sign"),
    [
        ("/v1/messages", {"max_tokens": 64, "messages": [{"role": "user", "content": "lose 2"}]}, b": waiting for the"),
        ("/v1/chat/interactive", {"prompt": "lose 2"}, b'"text":"","tokens":2'),
    ],
)
def test_other_streams_that_wait_say_so_too(path: str, fields: dict[str, Any], sign: bytes) -> None:
    """Else a proxy ends a connection on which nothing comes for a minute."""
    with FakeTriton() as triton, serving(triton.url) as served, connect(served) as connection:
        served.wait_healthy()
        triton.losses, triton.ready = 1, False
        model = {} if "prompt" in fields else {"model": "everbatch"}
        connection.sendall(post(json.dumps({"stream": True, **model, **fields}).encode(), path))
        connection.settimeout(30)
        data = b""
        while sign not in data:
            data += connection.recv(4096)
        triton.ready = True
        while not data.endswith(b"0\r\n\r\n"):
            more = connection.recv(4096)
            assert more, "the connection was cut"
            data += more
    assert data.count(b"HTTP/1.1 200") == 1 and b'"error"' not in data


def test_a_server_that_does_not_come_back_is_an_error_in_time(serve: Any, triton: FakeTriton) -> None:
    with serve(resume_timeout_s=0.6) as served:
        served.wait_healthy()
        lost(triton, 1)
        triton.ready = False
        try:
            status, text = ask(served, "completions", 1, stream=True)
        finally:
            triton.ready = True
    assert status == 200 and events(text)[-1]["error"]["code"] == "service_unavailable"
    assert len(triton.requests) == 1


def test_a_client_that_leaves_while_it_waits_is_not_waited_for(served: Served, triton: FakeTriton) -> None:
    lost(triton, 1)
    triton.ready = False
    try:
        with connect(served) as connection:
            body = {"model": "everbatch", "prompt": "lose 1", "stream": True}
            connection.sendall(post(json.dumps(body).encode(), "/v1/completions"))
            data = b""
            while b": waiting" not in data:
                data += connection.recv(4096)
        deadline = time.monotonic() + 60
        while served.gateway.running.choices:
            assert time.monotonic() < deadline, "its place is not given back"
            time.sleep(0.01)
    finally:
        triton.ready = True
    assert len(triton.requests) == 1


def test_an_error_of_the_model_is_no_loss(served: Served, triton: FakeTriton) -> None:
    body = {"model": "everbatch", "prompt": "late error [UNAVAILABLE] the server is shutting down", "stream": True}
    text = served.request("POST", "/v1/completions", body)[1]
    assert "shutting down" in events(text)[-1]["error"]["message"] and len(triton.requests) == 1


def test_tritons_words_about_a_dead_stub_are_a_loss() -> None:
    text = "Failed to process the request(s) for model 'everbatch_0_0', message: Stub process 'everbatch_0_0' is not healthy."
    assert isinstance(from_triton(text), ConnectionLost)
    assert not isinstance(from_triton("[INTERNAL] x"), ConnectionLost)


def job(choices: int = 1, **fields: Any) -> Job:
    return Job({"prompt": "a", "stream": True, **fields}, "id", "", choices)


def noted(progress: Progress, *pieces: Piece) -> Progress:
    for piece in pieces:
        progress.note(piece)
    return progress


def test_a_stream_of_which_nothing_has_come_is_sent_as_it_was() -> None:
    assert Progress(job()).rest() == job()


def test_the_prompts_log_probabilities_are_not_asked_for_twice() -> None:
    whole = job(2, prompt_logprobs=1)
    first = [Piece(index, "x", [1], prompt_logprobs=[]) for index in range(2)]
    rest = noted(Progress(whole), *first).rest()
    assert rest is not None and "prompt_logprobs" not in rest.request and rest.request["resume"][1]["token_ids"] == [1]
    assert noted(Progress(whole), first[0]).rest() is None, "of the other reply they have not come"


def test_replies_that_have_ended_are_not_waited_for_again() -> None:
    rest = noted(Progress(job(2)), Piece(0, "x", [1], finish_reason="stop"), Piece(1, "y", [2])).rest()
    assert rest is not None and rest.resumed == 1
    assert [one["ended"] for one in rest.request["resume"]] == [True, False]


def test_a_choice_that_had_ended_is_not_asked_for_again(served: Served, triton: FakeTriton) -> None:
    lost(triton, 0)
    right = ask(served, "completions n = 3", 10, stream=True)
    lost(triton, 1)
    assert events(ask(served, "completions n = 3", 10, stream=True)[1]) == events(right[1])
    assert [one["ended"] for one in triton.last().body["resume"]] == [True, False, False]

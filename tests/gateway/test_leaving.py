"""Clients that leave, and the server that is told to stop."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest

from gateway.settings import Settings
from tests.gateway.conftest import Served, serving
from tests.gateway.fake_triton import FakeTriton
from tests.gateway.test_limits import connect, post

ROOT = Path(__file__).resolve().parents[2]


def hold(path: str, stream: bool, prompts: int) -> bytes:
    if path == "/v1/responses":
        return post(json.dumps({"model": "everbatch", "input": "hold", "stream": stream}).encode(), path)
    body = {"model": "everbatch", "prompt": ["hold"] * prompts, "stream": stream, "n": 2}
    return post(json.dumps(body).encode(), path)


@pytest.mark.parametrize(
    ("path", "stream", "prompts"),
    [("/v1/completions", True, 1), ("/v1/completions", False, 1), ("/v1/completions", True, 3)]
    + [("/v1/completions", False, 3), ("/v1/responses", True, 1), ("/v1/responses", False, 1)],
)
def test_a_client_that_leaves_ends_its_replies_within_100_ms(
    path: str, stream: bool, prompts: int, served: Served, triton: FakeTriton
) -> None:
    """The quickest of five: what a loaded machine adds is not the gateway's."""
    times = []
    for _ in range(5):
        triton.requests.clear()
        with connect(served) as connection:
            connection.sendall(hold(path, stream, prompts))
            seen = list(triton.wait_for(prompts))
            if stream:
                assert b" 200 " in connection.recv(1000)
            left = time.monotonic()
        assert all(one.ended.wait(10) and one.was_stopped for one in seen)
        times.append(max(one.ended_at for one in seen) - left)
    assert min(times) < 0.1, times
    assert served.gateway.running.choices == 0 or eventually_idle(served)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "responses"])
def test_a_client_that_leaves_before_the_first_token_ends_its_reply(
    path: str, stream: bool, served: Served, triton: FakeTriton
) -> None:
    text = "input" if path == "responses" else "prompt"
    with connect(served) as connection:
        body = {"model": "everbatch", text: "silent", "stream": stream}
        connection.sendall(post(json.dumps(body).encode(), f"/v1/{path}"))
        (seen,) = triton.wait_for(1)
    assert seen.ended.wait(10) and seen.said == 0
    assert eventually_idle(served)


def test_a_stop_that_comes_too_early_is_sent_again_and_the_stream_is_not_cancelled(
    served: Served, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.triton_client.STOP_AGAIN_S", 0.1)
    triton.early_stops = 2
    with connect(served) as connection:
        connection.sendall(hold("/v1/completions", True, 1))
        assert b" 200 " in connection.recv(1000)
        (seen,) = triton.wait_for(1)
    assert seen.ended.wait(10) and seen.was_stopped and triton.early_stops == 0
    deadline = time.monotonic() + 10
    while seen.client_stayed is None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert seen.client_stayed is True


STEP = "step 0.3"  # sixty times END_S as the tests set it, as a step of five minutes is to what it is


def cancelled(triton: FakeTriton) -> bool:
    """Whether the client has cancelled the stream of the last request, once the server has ended that."""
    deadline = time.monotonic() + 10
    while triton.last().client_stayed is None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert triton.last().was_stopped
    return bool(triton.last().was_cancelled)


@pytest.mark.parametrize("stream", [False, True])
def test_the_stream_of_a_client_that_left_is_read_on_however_long_the_step_of_the_model_takes(
    stream: bool, served: Served, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.triton_client.END_S", 0.005)
    with connect(served) as connection:
        body = {"model": "everbatch", "prompt": STEP, "stream": stream}
        connection.sendall(post(json.dumps(body).encode(), "/v1/completions"))
        triton.wait_for(1)
        if stream:
            assert b" 200 " in connection.recv(1000)
    assert not cancelled(triton)


def test_the_stream_of_a_reply_that_comes_too_late_is_read_on(
    triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.triton_client.END_S", 0.005)
    monkeypatch.setattr("gateway.triton_client.MARGIN_S", 0.0)
    with serving(triton.url, request_timeout_s=1.0) as served:
        status, answer, _ = served.request("POST", "/v1/completions", {"model": "everbatch", "prompt": STEP})
        assert (status, answer["error"]["code"]) == (408, "timeout")
        assert not cancelled(triton)


@pytest.mark.parametrize("error", ["[UNAVAILABLE] the engine is not ready yet", "[INVALID_ARGUMENT] no"])
def test_a_request_that_the_model_has_refused_is_not_stopped(error: str, served: Served, triton: FakeTriton) -> None:
    """The server may be full, and the same id may be sent again."""
    before = triton.stops
    status, _, _ = served.request("POST", "/v1/completions", {"model": "everbatch", "prompt": f"error {error}"})
    deadline = time.monotonic() + 10
    while triton.last().client_stayed is None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert status in (400, 503) and triton.last().client_stayed is True and triton.stops == before


def eventually_idle(served: Served) -> bool:
    deadline = time.monotonic() + 10
    while served.gateway.running.choices and time.monotonic() < deadline:
        time.sleep(0.005)
    return served.gateway.running.choices == 0


def test_leaving_the_iterator_of_the_async_client_ends_the_reply(served: Served, triton: FakeTriton) -> None:
    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(model="everbatch", prompt="hold", stream=True)
            async with stream:
                async for _ in stream:
                    break

    asyncio.run(leave())
    assert triton.last().ended.wait(10)


def test_a_client_that_left_is_counted(served: Served, triton: FakeTriton) -> None:
    before = served.gateway.counters.disconnects
    with connect(served) as connection:
        connection.sendall(hold("/v1/completions", False, 1))
        triton.wait_for(1)
    deadline = time.monotonic() + 10
    while served.gateway.counters.disconnects == before and time.monotonic() < deadline:
        time.sleep(0.005)
    assert served.gateway.counters.disconnects == before + 1


@pytest.mark.parametrize("margin", ["gateway.triton_client.MARGIN_S", "gateway.core.MARGIN_S"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_longer_than_the_time_limit_is_408(
    margin: str, stream: bool, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gives up first: the link on its deadline, or the answer on its own."""
    monkeypatch.setattr(margin, 0.0)
    with serving(triton.url, request_timeout_s=1.0) as served:
        body = {"model": "everbatch", "prompt": "hold", "stream": stream}
        status, answer, _ = served.request("POST", "/v1/completions", body)
    error = json.loads(answer.split("data: ")[2])["error"] if stream else answer["error"]
    assert (status, error["code"], error["type"]) == (200 if stream else 408, "timeout", "timeout_error")
    assert triton.last().ended.wait(10)


def test_a_server_that_stops_lets_replies_end_and_then_ends_them_with_an_error(triton: FakeTriton) -> None:
    served = Served(Settings(triton=triton.url, port=0, shutdown_grace_s=0.2))
    served.start()
    with connect(served) as streaming, connect(served) as waiting:
        streaming.sendall(hold("/v1/completions", True, 1))
        assert b" 200 " in streaming.recv(1000)
        waiting.sendall(hold("/v1/completions", False, 1))
        seen = list(triton.wait_for(2))
        served.stop()
        last = b"".join(iter(lambda: streaming.recv(1000), b""))
        whole = b"".join(iter(lambda: waiting.recv(1000), b""))
    assert b'"error"' in last and b"is being stopped" in last and last.endswith(b"0\r\n\r\n")
    assert b" 503 " in whole.split(b"\r\n")[0] and b"retry-after" in whole
    assert all(one.ended.wait(10) for one in seen)


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_stream_whose_server_dies_and_is_not_waited_for_ends_with_an_error_event(path: str, prompts: int) -> None:
    """The last event says that it may be tried again; without it a client would take the text for the whole reply."""
    if prompts > 1 and path != "completions":
        return
    bodies = {
        "chat/completions": {"messages": [{"role": "user", "content": "hold"}], "logprobs": True},
        "completions": {"prompt": ["hold"] * prompts},
        "responses": {"input": "hold"},
    }
    with FakeTriton() as triton, serving(triton.url, resume_timeout_s=0) as served, connect(served) as connection:
        served.wait_healthy()
        body = {"model": "everbatch", "stream": True, **bodies[path]}
        connection.sendall(post(json.dumps(body).encode(), f"/v1/{path}"))
        data = b""
        while b"tick" not in data:
            data += connection.recv(1000)
        triton.stop()
        while not data.endswith(b"0\r\n\r\n"):
            more = connection.recv(1000)
            assert more, "the connection was cut"
            data += more
    events = re.findall(rb"data: (\{.*\})\n\n", data)
    last = json.loads(events[-1])
    error = last["response"]["error"] if path == "responses" else last["error"]
    assert error["code"] == ("server_error" if path == "responses" else "service_unavailable"), last
    assert "[DONE]" not in data.decode() and "try again" in error["message"]


def start(triton: FakeTriton, *flags: str) -> tuple[subprocess.Popen[str], str]:
    """`python -m gateway` and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "--triton", triton.url, "--port", "0", *flags],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    return process, line.strip().rpartition("//")[2].removesuffix("/v1")


def test_the_command_serves_until_sigterm_and_ends_with_0(triton: FakeTriton) -> None:
    process, address = start(triton, "--model-name", "a", "--model-name", "b")
    try:
        with openai.OpenAI(base_url=f"http://{address}/v1", api_key="x", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["a", "b"]
            assert client.completions.create(model="b", prompt="x").choices[0].text
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)
    assert process.returncode == 0 and "Traceback" not in log
    began = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} gateway INFO everbatch\.gateway: "  # as the lines of the models do
    assert re.search(rf"^{began}POST /v1/completions 200 ", log, re.MULTILINE), log


def test_the_command_refuses_a_file_of_keys_that_others_may_read(triton: FakeTriton, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice alice-key-0123456789\n")
    os.chmod(file, 0o644)
    process, line = start(triton, "--api-keys", str(file))
    assert process.wait(30) == 2 and "chmod 600 mends that" in line
    process.communicate()


def test_the_command_says_when_its_port_is_taken(triton: FakeTriton) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process, line = start(triton, "--port", str(taken.getsockname()[1]))
        _, rest = process.communicate(timeout=30)
    assert process.returncode != 0 and "address already in use" in line + rest

"""The stub of a model, or tritonserver, is killed: `everbatch serve` starts the server again, and streams go on."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import openai
import pytest

from client import EverbatchClient, Retry
from tests.e2e.launched import Launched, launched
from tests.e2e.resuming import PATIENCE_S, tokens_over_ends
from tests.e2e.wire import eventually

TEXT = "def main():\n    for line in open("
NUM_TOKENS = 1000  # seconds, so that most streams have not ended when all have begun
VICTIMS = {"tritonserver": b"bin/tritonserver", "stub": b"/everbatch/1/model.py"}


@pytest.fixture(scope="module")
def supervised() -> Iterator[Launched]:
    with launched() as server:
        yield server


FIRST = "OpenAI, chat with a schema"  # it takes its time to begin
OnToken = Callable[[], None]


def asks(server: Launched) -> dict[str, Callable[[OnToken], Any]]:
    """Functions that send a request by another way each, call back as its answer comes, and return all of it."""

    def completion(on_token: OnToken, **fields: Any) -> Any:
        with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=600) as client:
            given: dict[str, Any] = {"model": "everbatch", "prompt": TEXT, "max_tokens": NUM_TOKENS, **fields}
            found = []
            for part in client.completions.create(**given, extra_body={"ignore_eos": True}, stream=True):
                found += [each.model_dump() for each in part.choices]
                on_token()
            return sorted(found, key=lambda choice: choice["index"])

    def whole(on_token: OnToken) -> Any:
        address = server.url.removeprefix("http://").removesuffix("/v1")
        connection = http.client.HTTPConnection(address, timeout=600)
        given = {"model": "everbatch", "prompt": TEXT, "max_tokens": NUM_TOKENS, "seed": 9, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(given), {"Content-Type": "application/json"})
        on_token()
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer["choices"]

    def chat(on_token: OnToken) -> Any:
        with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=600) as client:
            said: Any = [{"role": "user", "content": "who?"}]
            form: Any = {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "array", "minItems": 30}},
            }
            given: Any = {"model": "everbatch", "messages": said, "max_tokens": 300, "seed": 4, "response_format": form}
            found = []
            for part in client.chat.completions.create(**given, stream=True):
                found.append(part.choices[0].delta.content)
                on_token()
            return found

    def python_client(on_token: OnToken) -> Any:
        with EverbatchClient(server.grpc_url, retry=Retry(resume_s=PATIENCE_S)) as client:
            found = {0: "", 1: ""}
            for chunk in client.stream(TEXT, max_tokens=NUM_TOKENS, temperature=1.0, seed=7, end_id=-1, n=2):
                found[chunk.sequence] += chunk.text
                on_token()
            return found

    tokens = partial(tokens_over_ends, server.grpc_url, [40, 300, 17, 923, 40], NUM_TOKENS)
    return {
        FIRST: chat,
        "OpenAI, not streaming": whole,
        "OpenAI, sampled": partial(completion, temperature=2.0, seed=5),  # with parts of characters
        "OpenAI, n = 2, logprobs": partial(completion, n=2, logprobs=2, temperature=1.0, seed=9),
        "OpenAI, stop": partial(completion, temperature=0.9, seed=3, stop=["return", "self.", "\n\n\n"]),
        "gRPC": partial(tokens, return_log_probs=True, temperature=1.2, runtime_top_k=40, seed=7),
        "gRPC, penalties": partial(tokens, repetition_penalty=1.3),
        "Python client": python_client,
    }


def answers(
    server: Launched, when_all_have_begun: Callable[[Iterable[str]], None] = lambda ended: None
) -> dict[str, Any]:
    """All at once. `when_all_have_begun` is called once, with the names of those that have ended by then."""
    found: dict[str, Any] = {}
    all_asks, begun, counter, is_done = asks(server), set(), iter(range(1 << 30)), threading.Event()

    def on_token(name: str) -> None:
        begun.add(name)
        if next(counter) >= 60 and len(begun) == len(all_asks) and not is_done.is_set():
            is_done.set()
            when_all_have_begun(found)

    def run(name: str, ask: Callable[[OnToken], Any]) -> None:
        try:
            found[name] = ask(partial(on_token, name))
        except Exception as error:  # The answer of its client: it differs from the right one.
            found[name] = error

    threads = [threading.Thread(target=run, args=each) for each in all_asks.items()]
    for index, thread in enumerate(threads):
        thread.start()
        assert index or eventually(lambda: FIRST in begun or FIRST in found, 120)
    for thread in threads:
        thread.join(600)
    assert is_done.is_set(), found
    return found


@pytest.fixture(scope="module")
def right(supervised: Launched) -> dict[str, Any]:
    found = answers(supervised)
    assert not [each for each in found.values() if isinstance(each, Exception)], found
    return found


@pytest.mark.feature("002-34")
@pytest.mark.parametrize("victim", VICTIMS)
def test_all_clients_get_the_bytes_that_they_would_have_had(
    victim: str, supervised: Launched, right: dict[str, Any]
) -> None:
    dead = supervised.pid_of(VICTIMS[victim])
    assert dead is not None
    had_ended: list[str] = []

    def kill(ended: Iterable[str]) -> None:
        os.kill(dead, signal.SIGKILL)
        had_ended.extend(ended)

    found = answers(supervised, kill)
    assert len(found) - len(had_ended) >= 4, f"before the kill {had_ended} had ended"
    for name, answer in found.items():
        assert answer == right[name], name
    assert eventually(lambda: supervised.pid_of(VICTIMS[victim]) not in (None, dead), 120)

"""The same on a whole server: the engine process behind a tritonserver, a stub, or tritonserver itself is killed under
tritonclient's and OpenAI's clients.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import openai

from backend.executor.engine_supervisor import MAX_RESTARTS
from deploy.triton_server import TritonServer
from tests.crashes.killing import Outcome
from tests.e2e.conftest import health, serve
from tests.e2e.launched import WORDS, Launched, launched
from tests.e2e.resuming import PATIENCE_S, tokens_over_ends
from tests.e2e.starts import wait_ready
from tests.e2e.test_engine_death import engine_pid
from tests.e2e.wire import TokenClient, eventually, ids_of
from tests.gateway.conftest import serving

PROMPT = [40, 300, 17, 923, 40]
TEXT = "def main():\n    for line in open("
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
Ask = Callable[[], object]


def asks(grpc_url: str, client: openai.OpenAI, over_ends: bool = False) -> dict[str, Ask]:
    """By their names functions that send a request, and return all that its client was given. `over_ends`: clients of gRPC
    come back with what they have had.
    """

    def tokens(num_tokens: int = 150, **inputs: Any) -> Ask:
        def ask() -> object:
            if over_ends:
                return tokens_over_ends(grpc_url, PROMPT, num_tokens, **inputs)
            with TokenClient(grpc_url) as own:
                results = list(own.start(PROMPT, num_tokens, streaming=True, **inputs))
                sums = [result.as_numpy("cum_log_probs") for result in results]
                return [ids_of(result) for result in results], [
                    None if each is None else each.tolist() for each in sums
                ]

        return ask

    def text(**fields: Any) -> Ask:
        def ask() -> object:
            given: dict[str, Any] = {"model": "everbatch", "prompt": TEXT, "max_tokens": 100, "stream": True} | fields
            parts = client.completions.create(**given, extra_body={"ignore_eos": True})
            return _joined(parts if given["stream"] else [parts])

        return ask

    def schema() -> object:
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        said: list[dict[str, str]] = [{"role": "user", "content": "who?"}]
        given: dict[str, Any] = {
            "model": "everbatch",
            "messages": said,
            "max_tokens": 60,
            "response_format": form,
            "seed": 4,
        }
        return "".join(
            part.choices[0].delta.content or "" for part in client.chat.completions.create(**given, stream=True)
        )

    return {
        "gRPC greedy": tokens(),
        "gRPC seeded": tokens(temperature=1.2, runtime_top_k=40, seed=7),
        "gRPC penalties": tokens(repetition_penalty=1.3),
        "gRPC log-probs": tokens(return_log_probs=True, temperature=0.8, seed=1),
        "OpenAI greedy": text(temperature=0),
        "OpenAI seeded": text(temperature=1.1, seed=3),
        "OpenAI stop strings": text(temperature=0.9, seed=3, stop=["return", "\n\n\n", "self."]),
        "OpenAI parts of characters": text(temperature=2.0, seed=5),
        "OpenAI n = 3": text(n=3, temperature=1.0, seed=9, max_tokens=60),
        "OpenAI not streaming": text(stream=False, temperature=1.0, seed=9),
        "OpenAI schema": schema,
    }


def _joined(parts: Any) -> object:
    """The text and the end of each choice."""
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for part in parts:
        for choice in part.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    return sorted(texts.items()), sorted(ends.items())


def run_served(num_kills: int, seed: int = 0, of: str = "engine") -> Outcome:
    """A server is left after as many kills as its supervisor takes; then the next one begins. `of`: engine, stub or server;
    the latter two end all of `everbatch serve` but its launcher and its endpoint.
    """
    rng, outcome = random.Random(seed), Outcome()
    if of != "engine":
        _run_launched(num_kills, rng, of, outcome)
        return outcome
    while outcome.num_kills < num_kills:
        with tempfile.TemporaryDirectory(prefix="everbatch-crashes-") as directory, serve(Path(directory)) as server:
            wait_ready(server)
            with serving(server.grpc_url, metrics_url=server.metrics_url) as served, served.client() as client:
                served.wait_healthy()
                _rounds(
                    server,
                    asks(server.grpc_url, client),
                    min(MAX_RESTARTS, num_kills - outcome.num_kills),
                    rng,
                    outcome,
                )
    return outcome


def _run_launched(num_kills: int, rng: random.Random, of: str, outcome: Outcome) -> None:
    with (
        launched() as server,
        openai.OpenAI(base_url=server.url, api_key="none", timeout=600, max_retries=60) as client,
    ):
        all_asks = asks(server.grpc_url, client, over_ends=True)
        started = time.monotonic()
        right = answers_of(all_asks)
        length_s = time.monotonic() - started
        while outcome.num_kills < num_kills:
            moment_s, word = rng.uniform(0.1, 0.7) * length_s, rng.choice(WORDS[of])
            answers = answers_of(all_asks, partial(_kill_launched, server, word, moment_s, outcome))
            _compare(answers, right, outcome)


def _kill_launched(server: Launched, word: bytes, moment_s: float, outcome: Outcome) -> None:
    time.sleep(moment_s)
    dead = server.pid_of(word)
    assert dead is not None
    os.kill(dead, signal.SIGKILL)
    outcome.num_kills += 1
    assert eventually(lambda: server.pid_of(word) not in (None, dead), PATIENCE_S)


def _compare(answers: dict[str, object], right: dict[str, object], outcome: Outcome) -> None:
    for name, answer in answers.items():
        outcome.num_requests += 1
        if answer != right[name]:
            outcome.differences.append(f"{name}: {_first_difference(answer, right[name])}")
            print(f"after {outcome.num_kills} kills, {outcome.differences[-1]}", flush=True)
    print(f"{outcome.num_kills} kills, {len(outcome.differences)} differences", end="\r", flush=True)


def _first_difference(answer: object, right: object) -> str:
    if isinstance(answer, Exception):
        return f"{type(answer).__name__}: {answer}"
    had, expected = repr(answer), repr(right)
    at = next((n for n, (a, b) in enumerate(zip(had, expected, strict=False)) if a != b), min(len(had), len(expected)))
    begin = max(0, at - 60)
    return f"other bytes from character {at} on: ...{had[begin : at + 60]}... for ...{expected[begin : at + 60]}..."


def _rounds(server: TritonServer, all_asks: dict[str, Ask], number: int, rng: random.Random, outcome: Outcome) -> None:
    started = time.monotonic()
    right = answers_of(all_asks)
    length_s = time.monotonic() - started
    for _ in range(number):
        moment = rng.uniform(0.1, 0.7) * length_s
        answers = answers_of(all_asks, partial(_kill, server, moment, outcome))
        _compare(answers, right, outcome)
        assert eventually(lambda: health(server)["tensorrt_llm"].state == "ready", 60)


def _kill(server: TritonServer, moment_s: float, outcome: Outcome) -> None:
    time.sleep(moment_s)
    dead = engine_pid(server)
    assert dead is not None
    os.kill(dead, signal.SIGKILL)
    killed = time.monotonic()
    assert eventually(lambda: engine_pid(server) not in (None, dead), 60)
    assert eventually(lambda: health(server)["tensorrt_llm"].state == "ready", 60)
    outcome.pauses_s.append(time.monotonic() - killed)
    outcome.num_kills += 1


def answers_of(all_asks: dict[str, Ask], meanwhile: Callable[[], None] = lambda: None) -> dict[str, object]:
    """Send all at once. An exception of a client counts as its answer."""
    answers: dict[str, object] = {}

    def run(name: str, ask: Ask) -> None:
        try:
            answers[name] = ask()
        except Exception as error:
            answers[name] = error

    threads = [threading.Thread(target=run, args=each) for each in all_asks.items()]
    for thread in threads:
        thread.start()
    meanwhile()
    for thread in threads:
        thread.join()
    return answers

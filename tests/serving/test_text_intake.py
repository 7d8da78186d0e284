"""What comes in as text, before it reaches the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from backend.api import EngineConfig
from backend.api.config.schema import TritonConfig
from backend.core.step import ModelInfo
from backend.serving.server import ModelServer
from backend.serving.wires.front import TextTools
from backend.serving.wires.trtllm_tensors import ENSEMBLE
from backend.serving.wires.trtllm_text import check_text_requests, parse_text_requests
from backend.serving.work import Work
from tests.serving.conftest import QUICK
from tests.serving.fake_triton import InferenceRequest
from tests.serving.helpers import MODEL_DIRECTORY, bools, ints, strings, uint64
from tests.serving.scripted import ScriptedExecutor, acquire


class SlowFront:
    """Reading text takes as long as the test says."""

    def __init__(self) -> None:
        self.tools = TextTools.from_directory(str(MODEL_DIRECTORY))
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Event()
        self.threads: set[str] = set()

    def parse(self, *arguments: Any) -> list[Work]:
        self.threads.add(threading.current_thread().name)
        self.begun.release()
        assert self.may_end.wait(20)
        return parse_text_requests(*arguments, self.tools)


@pytest.fixture
def front() -> SlowFront:
    return SlowFront()


@pytest.fixture
def make_text_server(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor, front: SlowFront
) -> Iterator[Callable[..., ModelServer]]:
    executor.hello = type(executor.hello)(1, ModelInfo("m", 4096, 256), str(MODEL_DIRECTORY), executor.hello.config)

    def make(config: EngineConfig = QUICK, **options: Any) -> ModelServer:
        return make_server(ENSEMBLE, front.parse, config, check_text=check_text_requests, **options)

    yield make
    front.may_end.set()


def ask(text: str = "a", request_id: str = "", namespace: str = "", **extra: np.ndarray) -> InferenceRequest:
    inputs = {"text_input": strings(text), "max_tokens": ints(4), **extra}
    return InferenceRequest(inputs, request_id, parameters={"cache_salt": namespace} if namespace else None)


def test_text_is_read_on_its_own_threads_and_its_inputs_are_kept(
    make_text_server: Callable[..., ModelServer], executor: ScriptedExecutor, front: SlowFront
) -> None:
    server = make_text_server()
    request = ask("abc", seed=uint64(7))
    server.execute([request])  # returns while the text is being read
    acquire(front.begun)
    for tensor in request.inputs():
        tensor.as_numpy()[:] = 0  # Triton may take its memory back like this
    front.may_end.set()
    acquire(executor.submitted)
    sent = executor.requests[1]
    assert sent.input_token_ids == front.tools.tokenizer.encode("abc") and sent.sampling_config.seed == 7
    assert front.threads == {"everbatch-text"}
    executor.end(1, 50)
    request.sender.wait()


def test_no_text_is_read_for_an_engine_that_is_not_ready(
    make_text_server: Callable[..., ModelServer],
    executor: ScriptedExecutor,
    front: SlowFront,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = make_text_server()
    monkeypatch.setattr(executor, "is_ready", lambda: False)
    request = ask()
    server.execute([request])
    assert request.sender.error() == "[UNAVAILABLE] the engine is not ready yet; try again in a few seconds"
    assert front.threads == set()


def test_turns_of_one_session_reach_the_engine_in_the_order_they_came(
    make_text_server: Callable[..., ModelServer], executor: ScriptedExecutor, front: SlowFront
) -> None:
    server = make_text_server()
    turns = [ask(f"turn {n}", CORRID=uint64(5), START=ints(int(n == 0)), END=ints(0)) for n in range(6)]
    server.execute(turns)
    acquire(front.begun)
    assert not front.begun.acquire(timeout=0.05), "one at a time"
    front.may_end.set()
    for _ in turns:
        acquire(executor.submitted)
    encode = front.tools.tokenizer.encode
    expected = [encode(f"turn {n}", add_special_tokens=n == 0) for n in range(6)]
    assert [executor.requests[n + 1].input_token_ids for n in range(6)] == expected
    for n, turn in enumerate(turns):
        executor.end(n + 1)
        turn.sender.wait()


def test_a_client_waits_neither_for_others_texts_nor_for_others_sessions_of_the_same_number(
    make_text_server: Callable[..., ModelServer], executor: ScriptedExecutor, front: SlowFront
) -> None:
    """One client alone has half of the threads."""
    server = make_text_server(EngineConfig(triton=TritonConfig(text_threads=2)))
    turns = [ask(CORRID=uint64(5), START=ints(1), END=ints(0), namespace=name) for name in ("alice", "alice", "bob")]
    server.execute(turns)
    for _ in ("alice", "bob"):
        acquire(front.begun)
    assert not front.begun.acquire(timeout=0.05)
    front.may_end.set()
    for _ in turns:
        acquire(executor.submitted)
    assert [executor.requests[n].cache_salt for n in (1, 2, 3)].count("bob") == 1
    for n in (1, 2, 3):
        executor.end(n)
    for turn in turns:
        turn.sender.wait()


def test_a_stop_request_ends_one_whose_text_is_still_being_read(
    make_text_server: Callable[..., ModelServer], executor: ScriptedExecutor, front: SlowFront
) -> None:
    server = make_text_server()
    request = ask(request_id="job")
    server.execute([request])
    acquire(front.begun)
    answer = InferenceRequest({"max_tokens": ints(0), "stop": bools(True)}, request_id="job")
    server.execute([answer])
    assert answer.sender.wait()[0].outputs() == {}
    assert request.sender.error() == "[CANCELLED] the request was cancelled before its text had been read"
    front.may_end.set()
    server._intake.text.close()
    assert executor.requests == {}, "it never reaches the engine"


def test_a_client_that_leaves_while_its_text_is_read_reaches_no_engine(
    make_text_server: Callable[..., ModelServer], executor: ScriptedExecutor, front: SlowFront
) -> None:
    server = make_text_server()
    request = ask()
    server.execute([request])
    acquire(front.begun)
    request.sender.client_gone = True
    assert request.sender.error().startswith("[CANCELLED]")
    front.may_end.set()
    server._intake.text.close()
    assert executor.requests == {}


def test_the_end_of_a_drain_ends_requests_whose_text_is_being_read(
    make_text_server: Callable[..., ModelServer], executor: ScriptedExecutor, front: SlowFront
) -> None:
    server = make_text_server(drain_grace_s=0.0)
    request = ask()
    server.execute([request])
    acquire(front.begun)
    server._begin_drain()
    assert request.sender.error().startswith("[UNAVAILABLE] the server is shutting down")
    front.may_end.set()
    server._intake.text.close()
    assert executor.requests == {}


def test_a_request_whose_text_takes_too_long_is_refused_by_the_housekeeper(
    make_text_server: Callable[..., ModelServer],
    executor: ScriptedExecutor,
    front: SlowFront,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = make_text_server(EngineConfig(triton=TritonConfig(text_threads=1, text_timeout_s=60)))
    stuck = ask()
    server.execute([stuck])
    acquire(front.begun)
    with monkeypatch.context() as later:
        later.setattr(server._intake.text, "_clock", lambda: time.monotonic() + 100)
        assert "took longer than 60 s (triton.text_timeout_s)" in stuck.sender.error()
    front.may_end.set()
    served = ask()
    server.execute([served])
    acquire(executor.submitted)
    executor.end(1, 50)
    assert len(served.sender.wait()) == 1 and len(executor.requests) == 1


def test_text_beyond_its_limit_is_refused_without_a_text_thread(
    make_text_server: Callable[..., ModelServer], front: SlowFront
) -> None:
    server = make_text_server()
    requests = {
        "embedding_bias_words has 65537 bytes, the limit is 65536 (limits.max_bias_bytes)": ask(
            embedding_bias_words=strings("w" * 65_537)
        ),
        "stop_words has 4097 bytes, the limit is 4096 (limits.max_word_bytes)": ask(stop_words=strings("w" * 4097)),
        "bad_words has 4098 bytes, the limit is 4096 (limits.max_word_bytes)": ask(bad_words=strings(["é" * 2049])),
        "text_input has 16385 bytes, the limit is 16384": ask("x" * 16_385),
    }
    server.execute(list(requests.values()))
    for message, request in requests.items():
        assert message in request.sender.error()
    assert front.threads == set()

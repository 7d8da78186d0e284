"""The signs of life that a stub leaves for the launcher."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import pytest

from backend.api import EngineConfig
from backend.api.config.schema import TritonConfig
from backend.serving.served_model import ServedModel
from backend.serving.server import ModelServer
from backend.serving.wires.trtllm_tensors import ENSEMBLE, TOKEN_MODEL
from backend.serving.wires.trtllm_text import check_text_requests
from backend.serving.wires.trtllm_tokens import parse_token_requests
from tests.serving.helpers import streamed
from tests.serving.scripted import ScriptedExecutor, acquire


def test_the_state_is_told_at_once_and_again_and_again(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int]] = []  # by this thread: what the housekeeper says meanwhile may be a moment old
    pulses = threading.Semaphore(0)

    def report(state: str, num_live: int, why: str) -> None:
        if threading.current_thread() is threading.main_thread():
            told.append((state, num_live))
        else:
            pulses.release()

    server = make_server(report_health=report)
    assert told == [("ready", 0)]
    acquire(pulses)
    acquire(pulses)
    server.execute([streamed([[1]])])
    monkeypatch.setattr(executor, "is_ready", lambda: False)
    server._pulse()
    executor.has_given_up = True
    server._pulse()
    server._begin_drain()
    assert told == [("ready", 0), ("unavailable", 1), ("given_up", 1), ("draining", 1)]
    executor.end(1, 10)
    deadline = time.monotonic() + 20
    while server.num_live_streams and time.monotonic() < deadline:
        time.sleep(0.001)
    server._pulse()
    assert told[-1] == ("draining", 0)


def test_the_last_that_a_model_says_is_that_it_was_unloaded(executor: ScriptedExecutor) -> None:
    told: list[tuple[str, int]] = []
    switch_interval = sys.getswitchinterval()
    model = ServedModel(TOKEN_MODEL, parse_token_requests, report_health=lambda *sign: told.append(sign[:2]))
    ModelServer(model, executor, EngineConfig()).finalize()
    sys.setswitchinterval(switch_interval)
    assert told[0] == ("ready", 0) and told[-1] == ("unloaded", 0)


def test_a_model_whose_tokenizer_is_not_there_yet_is_not_ready(make_server: Callable[..., ModelServer]) -> None:
    loaded = threading.Event()
    server = make_server(ENSEMBLE, parse=None, check_text=check_text_requests, prepare=loaded.is_set)
    assert not server.is_ready()
    loaded.set()
    server._pulse()
    assert server.is_ready()


def test_the_sign_of_life_does_not_depend_on_the_period_of_the_metrics(make_server: Callable[..., ModelServer]) -> None:
    config = EngineConfig(triton=TritonConfig(stats_period_ms=60_000))
    pulses = threading.Semaphore(0)
    make_server(config=config, report_health=lambda state, num_live, why: pulses.release())
    for _ in range(3):
        acquire(pulses)


def test_a_sign_of_life_that_cannot_be_left_does_not_end_the_housekeeper(
    make_server: Callable[..., ModelServer],
) -> None:
    pulses = threading.Semaphore(0)

    def report(state: str, num_live: int, why: str) -> None:
        pulses.release()
        if threading.current_thread() is not threading.main_thread():
            raise OSError("no space")

    make_server(report_health=report)
    for _ in range(3):
        acquire(pulses)


def test_a_model_that_is_unavailable_says_why(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str]] = []

    def report(state: str, num_live: int, why: str) -> None:
        if threading.current_thread() is threading.main_thread():
            told.append((state, why))

    server = make_server(
        ENSEMBLE, parse=None, check_text=check_text_requests, prepare=lambda: False, report_health=report
    )
    assert told[-1] == ("unavailable", "the tokenizer is not loaded yet")
    monkeypatch.setattr(type(server._intake.text), "is_stuck", True)
    server._pulse()
    assert told[-1] == ("unavailable", "all text threads are stuck")
    monkeypatch.setattr(executor, "is_ready", lambda: False)
    server._pulse()
    assert told[-1] == ("unavailable", "no sign of life")
    executor.has_given_up = True
    server._pulse()
    assert told[-1] == ("given_up", "")

"""Small things of the stub, each of which a slip of the pen would break: limits, lines, flags, and who is told what."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from backend.api import EngineConfig, EngineCounters, EngineStats, InvalidRequest, IterationStats, Result
from backend.api.config.schema import LimitsConfig, SchedulerConfig, TritonConfig
from backend.serving import pb
from backend.serving.delivery.cancellation import CancellationPoller
from backend.serving.dialect import Dialect
from backend.serving.intake import text_pool
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import MAX_NAMESPACE, Parameters, ServingContext, parse_parameters
from backend.serving.lifecycle.environment import RunDirectory, local_path
from backend.serving.lifecycle.housekeeper import Housekeeper
from backend.serving.observe.metrics import MetricsPublisher
from backend.serving.server import ModelServer
from backend.serving.stream import Stream
from backend.serving.wires.trtllm_outputs import RowSettings, text_output
from backend.serving.wires.trtllm_tensors import ENSEMBLE, TOKEN_MODEL
from backend.serving.work import Work
from backend.text.stream import TextStream
from backend.text.tokenizer import Tokenizer
from deploy import ROOT
from tests.serving.conftest import QUICK
from tests.serving.fake_triton import InferenceRequest, MetricFamily, ResponseSender, Tensor
from tests.serving.helpers import bools, ints, streamed, strings, token_request, uint64
from tests.serving.scripted import ScriptedExecutor

# a batch of one and a queue of one: the third request is refused
NARROW = EngineConfig(
    scheduler=SchedulerConfig(max_batch_size=1), limits=LimitsConfig(max_queue_size=1), triton=QUICK.triton
)


# ---- requests --------------------------------------------------------------------------------------------------------


def test_a_namespace_may_have_as_many_characters_as_the_limit_says() -> None:
    name = "é" * MAX_NAMESPACE
    assert parse_parameters(0, json.dumps({"namespace": name})).namespace == name


def test_an_input_of_no_rows_beside_others_is_refused_as_what_it_is() -> None:
    tensors = [Tensor("input_lengths", np.zeros((0, 1), np.int32)), Tensor("input_ids", np.ones((2, 3), np.int32))]
    for order in (tensors, tensors[::-1]):
        with pytest.raises(InvalidRequest, match="rows where other inputs have"):
            Batch.read(TOKEN_MODEL, order, 64)


def test_the_same_session_number_of_another_namespace_waits_for_nobody(make_server: Callable[..., ModelServer]) -> None:
    begun, may_end = threading.Event(), threading.Event()
    read: list[str] = []

    def parse(batch: Batch, context: ServingContext, parameters: Parameters) -> list[Work]:
        read.append(parameters.namespace)
        if parameters.namespace == "us":
            begun.set()
            assert may_end.wait(20)
        raise InvalidRequest("read")

    def ask(namespace: str) -> InferenceRequest:
        inputs = {"text_input": strings("a"), "max_tokens": ints(1), "CORRID": uint64(5)}
        return InferenceRequest(inputs, parameters={"namespace": namespace} if namespace else {})

    config = EngineConfig(triton=TritonConfig(text_threads=2))
    server = make_server(ENSEMBLE, parse, config, check_text=lambda batch, context: None)
    ours, theirs, anonymous = ask("us"), ask("them"), ask("")
    server.execute([ours])
    assert begun.wait(20)
    server.execute([theirs, InferenceRequest({"text_input": strings("a"), "max_tokens": ints(1)}), anonymous])
    last = InferenceRequest({"text_input": strings("a"), "max_tokens": ints(1)})
    server.execute([last])  # it has no session: the second thread reads it after all that need not wait
    last.sender.wait()
    may_end.set()
    for request in (ours, theirs, anonymous):
        request.sender.wait()
    assert read == ["us", "them", "", "", ""]


# ---- room in the engine ----------------------------------------------------------------------------------------------


def stop_of_a_session() -> InferenceRequest:
    return token_request([[1]], 0, CORRID=uint64(9), STOP=ints(1))


def test_a_stop_of_a_session_makes_no_room_in_the_engine(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor
) -> None:
    server = make_server(config=NARROW)
    stop = stop_of_a_session()
    server.execute([stop])
    stop.sender.wait()
    requests = [streamed([[n]]) for n in range(3)]
    server.execute(requests)
    assert len(executor.requests) == 2 and "Maximum queue size of 1" in requests[2].sender.error()
    for n in (1, 2):
        executor.end(n)


def test_a_stop_of_a_session_is_taken_while_the_engine_is_full(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor
) -> None:
    """It is what makes room."""
    server = make_server(config=NARROW)
    server.execute([streamed([[1]]), streamed([[2]])])
    stop, both = stop_of_a_session(), token_request([[1], [1]], 0, CORRID=uint64(9, 9), STOP=ints(1, 0))
    server.execute([stop, both])
    assert not stop.sender.wait()[0].has_error() and executor.stopped_sessions == [(9, False, "")]
    assert "Maximum queue size of 1" in both.sender.error(), "a row that is no STOP needs a place"
    for n in (1, 2):
        executor.end(n)


def test_a_stop_request_that_is_sent_twice_is_answered_twice(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor
) -> None:
    """The second one comes before the first has been answered, and must not take that for the request of its id."""
    server = make_server(config=EngineConfig(triton=TritonConfig(sender_threads=1)))
    running = streamed([[1]], 50, request_id="job")
    running.sender.gate = threading.Event()
    server.execute([running])
    executor.tokens(1, 10)
    assert running.sender.entered.acquire(timeout=10)  # the only sender is busy
    stops = [InferenceRequest({"stop": bools(True)}, "job") for _ in range(2)]
    server.execute(stops)
    running.sender.gate.set()
    for stop in stops:
        (answer,) = stop.sender.wait()
        assert not answer.has_error() and stop.sender.finals == [0]
    assert running.sender.column("output_ids") == [10] and [n for n, _ in executor.cancelled] == [1]


# ---- state -----------------------------------------------------------------------------------------------------------


def test_a_model_whose_text_threads_are_all_stuck_is_not_ready(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.is_ready()
    monkeypatch.setattr(text_pool, "GIVEN_UP", -1)  # no thread may be started any more
    assert not server.is_ready()


def test_a_metric_that_fails_does_not_put_off_the_end_of_a_drain(
    make_server: Callable[..., ModelServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(drain_grace_s=0.0, owner=True)
    running = streamed([[1]])
    server.execute([running])

    def fail(*arguments: object) -> None:
        raise RuntimeError("no shared memory")

    monkeypatch.setattr(server._books, "publish_rows", fail)
    monkeypatch.setattr(server._books, "publish_engine", fail)
    server._begin_drain()
    assert running.sender.error().startswith("[UNAVAILABLE] the server is shutting down")
    monkeypatch.undo()


def test_a_process_of_another_user_is_not_the_owner_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of an owner that has died may have been given out anew."""

    def refuse(pid: int, number: int) -> None:
        raise PermissionError("not yours")

    directory = RunDirectory(tmp_path)
    directory.claim("tensorrt_llm")
    assert directory.has_owner()
    monkeypatch.setattr(os, "kill", refuse)
    assert not directory.has_owner()


def test_a_housekeeper_that_has_stopped_leaves_no_pipe_for_signals_behind() -> None:
    keeper = Housekeeper(lambda: None, 60, lambda: None, lambda: None)
    keeper.listen_for_drain()
    keeper.start()
    keeper.stop()
    assert signal.set_wakeup_fd(-1) == -1


def test_a_client_that_left_is_reported_once() -> None:
    sender = ResponseSender()
    sender.client_gone = True
    stream = Stream(sender, "r", [], None)
    abandoned: list[Stream] = []

    def abandon(stream: Stream) -> None:
        stream.abandoned = True
        abandoned.append(stream)

    poller = CancellationPoller(lambda: [stream], abandon, period_s=60)
    for _ in range(3):
        poller.sweep()
    assert abandoned == [stream]


# ---- what is told ----------------------------------------------------------------------------------------------------


def test_growth_that_could_not_be_sent_is_sent_with_the_next() -> None:
    MetricFamily.created.clear()
    publisher = MetricsPublisher(pb.new_metric_family, {}, engine=True)
    (steps,) = next(family.metrics for family in MetricFamily.created if family.name == "everbatch_steps_total")
    increment = steps.increment

    def fail(value: float) -> None:
        raise RuntimeError("no shared memory")

    steps.increment = fail
    with pytest.raises(RuntimeError):
        publisher.publish_engine(EngineStats(IterationStats(), EngineCounters(steps_total=7)), ready=True)
    steps.increment = increment
    publisher.publish_engine(EngineStats(IterationStats(), EngineCounters(steps_total=9)), ready=True)
    assert steps.current == 9


def test_text_that_is_held_back_makes_no_empty_response() -> None:
    """`b` may be the beginning of the stop string, so there is nothing to say yet."""
    tokenizer = Tokenizer(Backend(models.WordLevel({"a": 0, "b": 1, "x": 2}, unk_token="a")))
    output = text_output(RowSettings(streaming=True), lambda: TextStream(tokenizer, stops=[" b x"]))
    output.feed(Result([[0]]))
    assert dict(*output.render())["text_output"].item() == b"a"
    output.feed(Result([[1]]))
    assert not output.render()
    output.feed(Result([[0]]))
    assert dict(*output.render())["text_output"].item() == b" b a"


@pytest.mark.parametrize(
    "interval_ms, one_response_per_token, every_step, share",
    [
        (0, True, False, False),
        (0, False, False, True),
        (50, True, False, True),  # whoever asks for an interval does not ask for a response per token
        (50, False, True, False),  # vLLM's wire: as many responses as the engine gives, which has the interval
    ],
)
def test_tokens_that_wait_for_a_sender_share_a_response_where_that_is_asked_for(
    interval_ms: float, one_response_per_token: bool, every_step: bool, share: bool
) -> None:
    triton = TritonConfig(stream_interval_ms=interval_ms, one_response_per_token=one_response_per_token)
    assert Dialect(every_step=every_step).coalesces(EngineConfig(triton=triton)) is share


def test_a_path_with_letters_that_are_not_ascii_is_opened_by_an_interpreter_that_knows_ascii_only(
    tmp_path: Path,
) -> None:
    """As a stub's is: Triton starts it in isolated mode, without a locale."""
    (tmp_path / "grüße").mkdir()
    program = (
        "import os, sys; from backend.serving.lifecycle.environment import local_path;"
        "path = bytes.fromhex(sys.argv[1]).decode(); print(sys.getfilesystemencoding(), os.path.isdir(local_path(path)))"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", program, str(tmp_path / "grüße").encode().hex()]
    said = subprocess.run(words, env=ascii_only, capture_output=True, text=True, check=True).stdout
    assert said in ("ascii True\n", "utf-8 True\n")
    assert local_path("/tmp/grüße") == "/tmp/grüße"

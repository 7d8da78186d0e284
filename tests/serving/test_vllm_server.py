"""ModelServer of model `vllm` over a scripted executor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from backend.api import ErrorCode
from backend.core.step import ModelInfo
from backend.serving.assembly import ToolsLoader, text_arguments
from backend.serving.server import ModelServer
from backend.serving.wires.vllm import VLLM
from tests.serving.fake_triton import InferenceRequest, TritonError
from tests.serving.helpers import MODEL_DIRECTORY
from tests.serving.scripted import ScriptedExecutor
from tests.serving.test_vllm_front import tensors

pytestmark = pytest.mark.feature("W-07")


@pytest.fixture
def server(make_server: Callable[..., ModelServer], executor: ScriptedExecutor) -> ModelServer:
    executor.hello = type(executor.hello)(1, ModelInfo("m", 4096, 256), str(MODEL_DIRECTORY), executor.hello.config)
    tools = ToolsLoader(executor)
    tools.prepare()
    return make_server(VLLM.tensors, dialect=VLLM.dialect, **text_arguments(VLLM, tools))


def test_errors_are_worded_as_vllms_backend_words_them(server: ModelServer, executor: ScriptedExecutor) -> None:
    def error_of(**inputs: Any) -> str:
        request = InferenceRequest(tensors(**inputs))
        server.execute([request])
        return request.sender.error()

    assert error_of(stream=True, exclude_input_in_output=False).startswith("Error generating stream: When streaming, ")
    assert error_of(sampling={"n": 0}).startswith("Error generating stream: n is 0, allowed is 1 to 128")
    assert error_of(sampling={"lora_name": "doll"}) == "LoRA feature is not enabled."
    request = InferenceRequest(tensors())
    server.execute([request])
    assert executor.submitted.acquire(timeout=10)
    executor.error(1, "the engine process ended", ErrorCode.UNAVAILABLE)
    assert request.sender.error() == "Error generating stream: the engine process ended"
    assert request.sender.wait()[-1].error().code() == TritonError.UNAVAILABLE


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_client_is_gone_is_logged_as_upstreams_tests_look_for(
    server: ModelServer, executor: ScriptedExecutor, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level("INFO")
    request = InferenceRequest(tensors(stream=stream))
    server.execute([request])
    assert executor.submitted.acquire(timeout=10)
    assert "Cancelling" not in caplog.text
    request.sender.client_gone = True
    last = request.sender.wait()[-1]
    assert last.has_error() == stream
    if stream:
        assert (last.error().message(), last.error().code()) == ("Request was cancelled", TritonError.CANCELLED)
    said = [message for message in caplog.messages if message.startswith("[vllm]")]
    assert said == ["[vllm] Cancelling the request", "[vllm] Successfully cancelled the request"]


@pytest.mark.parametrize(
    ("sampling", "count"), [({}, 1), ({"n": 2}, 2), ({"n": 2, "best_of": 4}, 4), ({"n": 2, "use_beam_search": True}, 2)]
)
def test_the_books_know_how_many_sequences_there_were(
    server: ModelServer, executor: ScriptedExecutor, sampling: dict[str, Any], count: int
) -> None:
    request = InferenceRequest(tensors(sampling=sampling))
    server.execute([request])
    assert executor.submitted.acquire(timeout=10)
    (stream,) = server._pump.live_streams()
    assert [row.num_sequences for row in stream.rows] == [count]
    executor.error(1, "the end")
    request.sender.wait()


def test_steps_that_wait_for_a_busy_sender_are_not_joined(server: ModelServer, executor: ScriptedExecutor) -> None:
    request = InferenceRequest(tensors(stream=True, return_num_output_tokens=True))
    request.sender.gate = gate = threading.Event()
    server.execute([request])
    assert executor.submitted.acquire(timeout=10)
    for token_id in range(5, 10):
        executor.tokens(1, token_id)
    executor.end(1, 10)
    executor.settle()
    gate.set()
    assert len(request.sender.wait()) == 6
    assert request.sender.column("num_output_tokens") == [1] * 6
    assert request.sender.finals == [5]

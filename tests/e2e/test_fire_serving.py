"""What the landed server did not survive, or answered badly, when it was attacked from outside; each over a real tritonserver."""

from __future__ import annotations

import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from backend.serving.wires.roles import PROFILES
from backend.text.tokenizer import Tokenizer
from deploy.triton_server import TritonServer
from tests.e2e.conftest import health, serve
from tests.e2e.starts import wait_ready
from tests.e2e.wire import TYPES, TokenClient, eventually, ids_of, post
from tests.hostile.deaths import is_of_the_front_alone

DEFAULT_MODEL = Path(__file__).resolve().parents[2] / "models" / "default"
# A template that loops for ever, or refuses, as its first message says.
TEMPLATE = """{% set first = messages[0] %}{% if first.role == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}
{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}{% endif %}
{% if first.role != 'user' %}{{ raise_exception('the role ' + first.role + ' is not known') }}{% endif %}{{ first.content }}"""
TEXT_TIMEOUT_S = 1.5
GRPC_ERROR = (("triton_grpc_error", "true"),)
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@pytest.fixture(scope="module")
def fire_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The default model with a hostile chat template, and little patience with text."""
    model = tmp_path_factory.mktemp("model") / "default"
    shutil.copytree(DEFAULT_MODEL, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    overrides = (f"model.path={model}", f"triton.text_timeout_s={TEXT_TIMEOUT_S}", "triton.text_threads=2")
    with serve(tmp_path_factory.mktemp("fire"), *overrides) as server:
        wait_ready(server)
        yield server


@pytest.fixture
def stub(fire_server: TritonServer) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(fire_server.grpc_url, options=OPTIONS) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def request(
    model: str, inputs: dict[str, np.ndarray | list[bytes]], request_id: str = "", **parameters: str
) -> service_pb2.ModelInferRequest:
    """Arrays as they are; a list of strings is one row."""
    message = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in parameters.items():
        message.parameters[name].string_param = value
    datatypes = {"int32": "INT32", "float32": "FP32", "bool": "BOOL", "uint64": "UINT64"}
    for name, value in inputs.items():
        tensor = message.inputs.add(name=name)
        if isinstance(value, list):
            tensor.datatype, shape = "BYTES", [1, len(value)]
            raw = b"".join(struct.pack("<I", len(text)) + text for text in value)
        else:
            tensor.datatype, shape, raw = datatypes[str(value.dtype)], value.shape, value.tobytes()
        tensor.shape.extend(shape)
        message.raw_input_contents.append(raw)
    return message


def text_request(
    text: bytes = b"a",
    request_id: str = "",
    parameters: dict[str, str] | None = None,
    **inputs: np.ndarray | list[bytes],
) -> service_pb2.ModelInferRequest:
    return request(
        "ensemble", {"text_input": [text], "max_tokens": np.int32([[2]]), **inputs}, request_id, **(parameters or {})
    )


def chat_request(messages: bytes) -> service_pb2.ModelInferRequest:
    return request("ensemble", {"text_input": [b""], "messages": [messages], "max_tokens": np.int32([[2]])})


def answer(
    stub: service_pb2_grpc.GRPCInferenceServiceStub,
    message: service_pb2.ModelInferRequest,
    metadata: tuple[tuple[str, str], ...] = (),
    timeout_s: float = 60,
) -> tuple[int, str]:
    """The number of data responses, and the error that ended the stream ("" when there was none)."""
    num_data = 0
    try:
        for item in stub.ModelStreamInfer(iter([message]), timeout=timeout_s, metadata=metadata):
            final = "triton_final_response" in item.infer_response.parameters
            if item.error_message:
                return num_data, item.error_message
            num_data += bool(item.infer_response.outputs)
            if final and item.infer_response.parameters["triton_final_response"].bool_param:
                break
    except grpc.RpcError as error:
        return num_data, f"{error.code().name}: {error.details()}"
    return num_data, ""


def test_a_lone_surrogate_in_an_error_text_leaves_no_stream_without_an_end(
    stub: service_pb2_grpc.GRPCInferenceServiceStub,
) -> None:
    _, error = answer(stub, chat_request(rb'[{"role": "\ud800", "content": "x"}]'), timeout_s=20)
    assert error == "[INVALID_ARGUMENT] the chat template refuses these messages: the role ? is not known"
    assert answer(stub, text_request())[1] == ""


def test_bytes_that_are_no_text_are_refused_without_a_path(
    fire_server: TritonServer, stub: service_pb2_grpc.GRPCInferenceServiceStub
) -> None:
    url = f"{fire_server.http_url}/v2/models/ensemble/generate"
    bodies = {
        b'{"id": "\xff\xfe", "text_input": "a", "max_tokens": 2}': "the request id is not valid UTF-8",
        b'{"text_input": "a", "max_tokens": 2, "parameters": {"cache_salt": "\xff"}}': "parameters are not valid UTF-8",
    }
    for body, said in bodies.items():
        status, text = post(url, body, timeout=20)
        assert status == 400 and "[INVALID_ARGUMENT]" in text and said in text
        assert ".py" not in text and "At:" not in text
    _, error = answer(stub, chat_request(b'[{"role": "user", "content": ' + b"9" * 4400 + b"}]"))
    assert error.startswith("[INVALID_ARGUMENT] messages holds an integer of more than 4300 digits")
    assert answer(stub, text_request())[1] == ""


def test_a_long_request_id_is_refused_and_not_logged(
    fire_server: TritonServer, stub: service_pb2_grpc.GRPCInferenceServiceStub
) -> None:
    _, error = answer(stub, text_request(request_id="y" * 1_000_000))
    assert error.startswith("[INVALID_ARGUMENT] the request id has 1000000 characters, the limit is 256")
    assert answer(stub, text_request(request_id="y" * 256))[1] == ""
    assert "y" * 1000 not in fire_server.log_path.read_text(errors="replace")


def longest_wait(server: TritonServer, attack: Callable[[], object]) -> tuple[float, list[str]]:
    """Seconds that a newcomer waited at most while `attack()` ran, and what newcomers were told."""
    over, waits, errors = threading.Event(), [], []

    def newcomers() -> None:
        with grpc.insecure_channel(server.grpc_url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            while not over.is_set():
                began = time.monotonic()
                errors.append(answer(stub, text_request(), timeout_s=300)[1])
                waits.append(time.monotonic() - began)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(newcomers)
        attack()
        over.set()
        done.result()
    return max(waits), errors


WORDS = b"lorem ipsum dolor " * 600_000


@pytest.fixture(scope="module")
def tokenising_s() -> float:
    """What the words alone take to be tokenised, on a machine as busy as now."""
    tokenizer = Tokenizer.from_directory(DEFAULT_MODEL)
    began = time.monotonic()
    tokenizer.encode(WORDS.decode())
    return time.monotonic() - began


def empty_words(number: int) -> service_pb2.ModelInferRequest:
    message = text_request()
    message.inputs.add(name="embedding_bias_words", datatype="BYTES", shape=[1, number])
    message.raw_input_contents.append(bytes(4 * number))
    return message


@pytest.mark.parametrize("what", ["one word of 10 MB", "ten million empty words", "messages of 10 MB"])
def test_a_request_of_many_megabytes_of_text_does_not_hold_up_others(
    fire_server: TritonServer, stub: service_pb2_grpc.GRPCInferenceServiceStub, tokenising_s: float, what: str
) -> None:
    weights = {"embedding_bias_weights": np.ones((1, 1), np.float32)}
    message, limit = {
        "one word of 10 MB": lambda: (text_request(embedding_bias_words=[WORDS], **weights), "limits.max_bias_bytes"),
        "ten million empty words": lambda: (empty_words(10_000_000), "the limit is 131072"),
        "messages of 10 MB": lambda: (chat_request(b'[{"role": "user", "content": "' + WORDS + b'"}]'), "max_seq_len"),
    }[what]()
    told: list[str] = []
    wait_s, errors = longest_wait(fire_server, lambda: told.append(answer(stub, message, timeout_s=300)[1]))
    assert told[0].startswith("[INVALID_ARGUMENT]") and limit in told[0]
    assert set(errors) == {""} and wait_s < tokenising_s


def test_a_template_that_never_ends_costs_its_own_requests_alone(
    stub: service_pb2_grpc.GRPCInferenceServiceStub,
) -> None:
    loops = [chat_request(b'[{"role": "loop", "content": "x"}]') for _ in range(6)]  # three times the threads
    with ThreadPoolExecutor(len(loops)) as pool:
        errors = [error for _, error in pool.map(lambda message: answer(stub, message), loops)]
    late = f"took longer than {TEXT_TIMEOUT_S} s (triton.text_timeout_s)"
    waited = f"waited {TEXT_TIMEOUT_S} s for a text thread (triton.text_timeout_s)"
    assert all(late in error or waited in error for error in errors)
    assert any(late in error for error in errors), "a namespace has one of the two threads"
    assert answer(stub, chat_request(b'[{"role": "user", "content": "def main("}]')) == (1, "")


def test_a_stop_request_reaches_one_whose_text_is_being_read(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    loop = request(
        "ensemble",
        {"text_input": [b""], "messages": [b'[{"role": "loop", "content": "x"}]'], "max_tokens": np.int32([[2]])},
        "victim",
    )
    stop = request(
        "ensemble", {"stop": np.ones((1, 1), bool), "text_input": [b""], "max_tokens": np.int32([[0]])}, "victim"
    )
    with ThreadPoolExecutor(1) as pool:
        victim = pool.submit(answer, stub, loop)
        while not victim.done():  # the first may overtake the victim
            assert answer(stub, stop) == (0, "")
        _, error = victim.result()
    assert error == "[CANCELLED] the request was cancelled before its text had been read"


def test_a_salt_larger_than_a_frame_is_its_own_requests_error(
    fire_server: TritonServer, stub: service_pb2_grpc.GRPCInferenceServiceStub
) -> None:
    with TokenClient(fire_server.grpc_url) as client:
        bystanders = [client.start([n + 1, 2], 800, streaming=True) for n in range(8)]
        first = [ids_of(next(iter(stream))) for stream in bystanders]
        inputs = {"input_ids": [1], "input_lengths": [1], "request_output_len": [2]}
        arrays = {name: np.array([value], TYPES[name]) for name, value in inputs.items()}
        _, error = answer(stub, request("tensorrt_llm", arrays, cache_salt="x" * (257 << 20)), timeout_s=300)
        assert error.startswith("[INVALID_ARGUMENT] the request's parameters hold 269484")
        rest = [stream.token_ids() for stream in bystanders]
        assert [len(head) + len(tail) for head, tail in zip(first, rest)] == [800] * 8
        assert len(client.generate([1, 2, 3], 4)) == 4, "the engine was not lost meanwhile"


def test_a_stop_request_stays_in_its_namespace(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    inputs = {"input_ids": [4, 5, 6], "input_lengths": [3], "request_output_len": [1500], "streaming": [True]}
    arrays = {name: np.array([value], TYPES[name]) for name, value in inputs.items()}
    stop = {**arrays, "stop": np.ones((1, 1), bool)}
    running = stub.ModelStreamInfer(iter([request("tensorrt_llm", arrays, "job", namespace="us")]), timeout=120)
    count = len(next(running).infer_response.outputs)
    assert count > 0
    for other in ({}, {"namespace": "them"}):
        assert answer(stub, request("tensorrt_llm", stop, "job", **other)) == (0, "")
    alive = [next(running).error_message for _ in range(5)]
    assert alive == [""] * 5
    assert answer(stub, request("tensorrt_llm", stop, "job", cache_salt="us")) == (0, "")
    assert 6 < 6 + sum(1 for _ in running) < 1500


def test_each_model_has_a_stub_that_says_again_and_again_how_it_is(fire_server: TritonServer) -> None:
    # The engine may have been short of the processor for a second, after what other tests have sent.
    assert eventually(lambda: {report.state for report in health(fire_server).values()} == {"ready"}, 30)
    first = health(fire_server)
    assert set(first) == set(PROFILES["trtllm"])
    stubs = {report.pid for report in first.values()}
    assert len(stubs) == len(first) and stubs <= set(fire_server.processes())
    for name, report in first.items():  # An object is made anew for each sign.
        assert eventually(partial(lambda n, r: health(fire_server)[n] is not r, name, report), 30)


MOST_DEATHS = 2


def test_an_error_with_triton_grpc_error_does_not_end_the_server(fire_server: TritonServer) -> None:
    """Two rows, one refused while the other streams: without the mend tritonserver 24.10 dies within five requests, while the
    other row's answer is written to a stream that is gone. With it, about one request of 200 still ends the server, in a thread
    of its front alone (docs/reliability.md). Such a death is known by its frames, and the server is started again.
    """
    rows = {
        "input_ids": np.int32([[1, 2, 3], [4, 5, 6]]),
        "input_lengths": np.int32([[3], [3]]),
        "request_output_len": np.int32([[40], [40]]),
        "streaming": np.ones((2, 1), bool),
        "temperature": np.float32([[200.0], [1.0]]),
    }
    message = request("tensorrt_llm", rows)
    left, deaths = 25, 0
    while left := left - refusals(fire_server, message, left):
        deaths, left = deaths + 1, left - 1
        assert deaths <= MOST_DEATHS
        fire_server.abandon()
        fire_server.start()
        wait_ready(fire_server)
    with grpc.insecure_channel(fire_server.grpc_url, options=OPTIONS) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert fire_server.running() and answer(stub, text_request()) == (1, "")
        num_data, error = answer(stub, message)
    assert num_data >= 1 and "row 0: temperature is 200.0" in error, "the other row was answered first"


def refusals(server: TritonServer, message: service_pb2.ModelInferRequest, count: int) -> int:
    """How many of `count` requests with GRPC_ERROR are refused in words; fewer than `count` where tritonserver then dies, by a
    fault of its front.
    """
    refused = "INVALID_ARGUMENT: [INVALID_ARGUMENT] row 0: temperature is 200.0, allowed is 0.0 to 100.0"
    with grpc.insecure_channel(server.grpc_url, options=OPTIONS) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for number in range(count):
            _, error = answer(stub, message, GRPC_ERROR, timeout_s=20)
            if error != refused:
                assert eventually(lambda: not server.running(), 20), error
                log = server.log_path.read_text(errors="replace")
                assert is_of_the_front_alone(server.exit_status, log), (server.exit_status, log[-10_000:])
                return number
    return count

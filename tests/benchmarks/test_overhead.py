"""The pieces of `bench overhead`: its client against grpc's own server, its counters, and its engine without a model."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent import futures

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from backend.api import EngineConfig, Request, Response
from backend.api.config.schema import KvCacheConfig
from backend.executor import Executor
from benchmarks.overhead import bare_client, probe
from benchmarks.overhead.__main__ import request_of
from benchmarks.overhead.null_engine import FIRST_TOKEN, NullWorkerGroup

TOKENS = 40


class Echo(grpc.GenericRpcHandler):
    """Answers a request with as many responses as its request_output_len says; the third one tells two tokens."""

    def __init__(self) -> None:
        self.asked: list[service_pb2.ModelInferRequest] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        assert details.method == bare_client.METHOD
        return grpc.stream_stream_rpc_method_handler(
            self.answer, service_pb2.ModelInferRequest.FromString, lambda response: response.SerializeToString()
        )

    def answer(self, requests: Iterator[service_pb2.ModelInferRequest], context: object) -> Iterator[object]:
        for request in requests:
            self.asked.append(request)
            names = [one.name for one in request.inputs]
            wanted = np.frombuffer(request.raw_input_contents[names.index("request_output_len")], np.int32)[0]
            for n in range(wanted):
                response = service_pb2.ModelStreamInferResponse()
                response.infer_response.outputs.add(name="output_ids", datatype="INT32", shape=[1, 1, 1])
                response.infer_response.outputs.add(name="sequence_length", datatype="INT32", shape=[1, 1])
                told = 2 if n == 2 else 1
                response.infer_response.raw_output_contents.extend([bytes(4 * told), np.int32(told).tobytes()])
                yield response


@pytest.fixture
def echo() -> Iterator[tuple[str, Echo]]:
    handler = Echo()
    server = grpc.server(futures.ThreadPoolExecutor(8), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", handler
    server.stop(None)


@pytest.mark.parametrize("streams, connections", [(1, 1), (6, 6), (5, 2)])
def test_the_bare_client_counts_every_response_and_token(
    echo: tuple[str, Echo], streams: int, connections: int
) -> None:
    url, handler = echo
    figures = bare_client.measure(url, streams, connections, request_of("tensorrt_llm", TOKENS, 1000))
    assert figures.num_responses == streams * TOKENS
    assert figures.num_tokens == streams * (TOKENS + 1)  # the third response of each stream has two
    assert len(handler.asked) == streams and handler.asked[0].model_name == "tensorrt_llm"
    assert 0 <= figures.gap_p50_ms <= figures.gap_p99_ms


def test_messages_are_put_together_from_frames_that_cut_them_anywhere() -> None:
    stream = bare_client.Stream()
    data = b"".join(b"\0" + len(body).to_bytes(4, "big") + body for body in (b"", b"one", b"three" * 50))
    stream.chunks = [(float(n), data[n : n + 1]) for n in range(len(data))]
    times, messages = bare_client.responses_of(stream)
    assert messages == [b"", b"one", b"three" * 50]
    assert times == [4.0, 12.0, float(len(data) - 1)]  # 5 bytes; 5 and 3 more; all


def test_a_part_is_not_charged_for_parts_within_it() -> None:
    """20 ms of work inside 10 ms of work: both are told apart, whatever the machine makes of them."""

    def work(seconds: float) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    inner, outer = probe.Part(), probe.Part()
    within = probe.counted(lambda: work(0.02), inner)

    def both() -> None:
        work(0.01)
        within()

    thread = threading.Thread(target=probe.counted(both, outer))
    thread.start()
    thread.join()
    assert (inner.calls, outer.calls) == (1, 1)
    assert 0.02e9 <= inner.cpu_ns < 0.025e9
    assert 0.01e9 <= outer.cpu_ns < 0.015e9


def test_the_null_engine_answers_every_request_in_full_and_no_faster_than_it_is_told() -> None:
    """10 tokens in steps of 5 ms: at least nine of them lie between the first token and the last."""
    config = EngineConfig(kv_cache=KvCacheConfig(max_tokens=1024))
    told: list[tuple[float, Response]] = []
    done = threading.Event()

    def on_response(response: Response) -> None:
        told.append((time.perf_counter(), response))
        if response.is_final:
            done.set()

    with Executor.in_process(config, NullWorkerGroup(step_s=0.005)) as executor:
        executor.submit(Request([1, 2, 3], 10, streaming=True), on_response)
        assert done.wait(10)
    tokens = [token for _, response in told for token in response.result.output_token_ids[0]]
    assert tokens == [FIRST_TOKEN + n for n in range(1, 11)]
    assert told[-1][0] - told[0][0] >= 9 * 0.005 - 0.004

"""Cancelling over the wire, in every phase and by every route. The fixture checks that nothing stays in use."""

from __future__ import annotations

import http.client
import json

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from deploy.triton_server import TritonServer
from tests.e2e.wire import CANCELLED, TYPES, TokenClient, eventually, ids_of, num_cancelled, reaches, scrape, to_input

LONG = 1800


@pytest.mark.feature("000-07", "001-09")
@pytest.mark.parametrize("num_received", [0, 1, 2, 3, 5, 8, 16, 31, 32, 33])
def test_a_stream_cancelled_in_any_phase_frees_everything(
    server: TritonServer, tokens: TokenClient, num_received: int
) -> None:
    before = num_cancelled(server.metrics_url)
    stream = tokens.start(list(range(4, 40)), LONG, streaming=True)
    received, results = 0, iter(stream)
    while received < num_received:
        received += len(ids_of(next(results)))
    stream.cancel()
    assert num_received == 0 or reaches(server.metrics_url, CANCELLED, before + 1), "else it need not have arrived"
    assert len(tokens.generate([1, 2, 3], 4)) == 4


def test_queued_requests_can_be_cancelled(small_pool_server: TritonServer) -> None:
    with TokenClient(small_pool_server.grpc_url) as client:
        running = [client.start([i + 1] * 8, 370, streaming=True) for i in range(2)]
        queued = [client.start([i + 50] * 8, 370) for i in range(16)]
        url = small_pool_server.metrics_url
        before = num_cancelled(url)
        assert eventually(lambda: scrape(url)["everbatch_requests{state=queued}"] >= 4, 30)
        for stream in queued + running:
            stream.cancel()
        assert reaches(url, CANCELLED, before + 1)
        assert eventually(lambda: scrape(url)["everbatch_requests{state=queued}"] == 0, 30)


def test_stop_of_an_unknown_request_is_answered_and_stop_without_id_is_an_error(tokens: TokenClient) -> None:
    assert tokens.start([0], 0, request_id="nobody", stop=True).token_ids() == []
    assert "request id" in tokens.error_of(tokens.start([0], 0, stop=True)).lower()


def test_an_http_client_that_leaves_its_stream_cancels_it(server: TritonServer) -> None:
    before = num_cancelled(server.metrics_url)
    connection = http.client.HTTPConnection(server.http_url.removeprefix("http://"))
    body = {"text_input": "import os", "max_tokens": LONG, "stream": True, "end_id": 1}
    connection.request("POST", "/v2/models/ensemble/generate_stream", json.dumps(body))
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    response.close()
    connection.close()
    assert reaches(server.metrics_url, CANCELLED, before + 1)


def test_a_client_deadline_reaches_the_engine(server: TritonServer) -> None:
    """The reserved request parameter `timeout` (microseconds) ends the request on the server."""
    with TokenClient(server.grpc_url) as client:
        values = {"input_ids": [1, 2, 3], "input_lengths": 3, "request_output_len": LONG}
        stream = client.start([9], 1)
        stream.token_ids()
        tensors = [to_input(k, np.array(v, dtype=TYPES[k]).reshape(1, -1)) for k, v in values.items()]
        stream.client.async_stream_infer("tensorrt_llm", tensors, timeout=200_000)
        try:
            assert len(stream.token_ids()) < LONG
        except InferenceServerException as error:
            assert "time" in str(error).lower()

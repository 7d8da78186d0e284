"""`triton.decoupled=false` serves unary clients: ModelInfer over gRPC, /infer over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from deploy.report import examples
from deploy.triton_server import TritonServer
from tests.e2e.conftest import serve
from tests.e2e.starts import wait_ready
from tests.e2e.test_command_line import everbatch
from tests.e2e.wire import TYPES, events, ids_of, post, to_input


@pytest.fixture(scope="module")
def unary_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with serve(tmp_path_factory.mktemp("unary"), "triton.decoupled=false") as server:
        wait_ready(server)
        yield server


def tensors(**values: object) -> list[grpcclient.InferInput]:
    return [to_input(name, np.array(value, dtype=TYPES[name]).reshape(1, -1)) for name, value in values.items()]


def test_model_infer_returns_the_whole_answer(unary_server: TritonServer) -> None:
    with grpcclient.InferenceServerClient(unary_server.grpc_url) as client:
        ask = tensors(input_ids=[1, 2, 3], input_lengths=3, request_output_len=6)
        first, second = (ids_of(client.infer("tensorrt_llm", ask)) for _ in range(2))
        assert len(first) == 9 and first == second


def test_many_unary_requests_share_the_batch(unary_server: TritonServer) -> None:
    with grpcclient.InferenceServerClient(unary_server.grpc_url) as client:
        asks = [tensors(input_ids=[i + 1, 2], input_lengths=2, request_output_len=8) for i in range(12)]
        infer = lambda ask: ids_of(client.infer("tensorrt_llm", ask))
        with ThreadPoolExecutor(12) as pool:
            together = list(pool.map(infer, asks))
        assert together == [infer(ask) for ask in asks]


def test_streaming_is_refused(unary_server: TritonServer) -> None:
    with grpcclient.InferenceServerClient(unary_server.grpc_url) as client:
        ask = tensors(input_ids=[1, 2, 3], input_lengths=3, request_output_len=6, streaming=True)
        with pytest.raises(InferenceServerException, match="decoupled mode"):
            client.infer("tensorrt_llm", ask)


def test_http_infer_serves_text(unary_server: TritonServer) -> None:
    body = {
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["import os"]},
            {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [8]},
        ]
    }
    status, text = post(f"{unary_server.http_url}/v2/models/ensemble/infer", body)
    outputs = {output["name"]: output["data"] for output in json.loads(text)["outputs"]}
    assert status == 200 and outputs["text_output"][0].startswith("import os")
    assert outputs["finish_reason"] == ["length"]


def test_the_command_line_shows_whole_replies_over_both_protocols(unary_server: TritonServer) -> None:
    said = set()
    for url in (unary_server.grpc_url, unary_server.http_url):
        done = everbatch("generate", "def main(", "--max-tokens", "12", "--url", url)
        assert done.returncode == 0 and "12 tokens" in done.stderr, done.stderr
        said.add(done.stdout)
        talk = everbatch("chat", "--max-tokens", "4", "--url", url, typed="Write the function read_lines.\nAnd more.\n")
        assert talk.returncode == 0 and talk.stdout.count("\n") >= 2, talk.stderr
    assert len(said) == 1


def test_what_the_launcher_shows_of_the_server_works(unary_server: TritonServer) -> None:
    request, *_ = examples(unary_server, None)
    found = re.fullmatch(r"curl (http\S+) -d '(.*)'", request)
    assert found is not None, request
    status, text = post(found[1], json.loads(found[2]))
    assert status == 200 and json.loads(text)["text_output"].startswith("def main(")


def test_the_model_of_the_openai_endpoint_streams_all_the_same(unary_server: TritonServer) -> None:
    """Its protocol prescribes the policy, which the setting therefore does not change."""
    body = {"request": json.dumps({"prompt": "def main(", "max_tokens": 4, "stream": True})}
    status, text = post(f"{unary_server.http_url}/v2/models/everbatch/generate_stream", body)
    assert status == 200 and len(events(text)) > 1 and "error" not in text

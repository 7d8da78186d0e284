"""Profile `lmdeploy`, with a client that works as LMDeploy's client.py does, and over HTTP."""

from __future__ import annotations

import json
import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from deploy.triton_server import TritonServer
from tests.e2e.wire import CANCELLED, events, num_cancelled, post, reaches, to_input

PROMPT = "def read_lines("
TYPES = {"max_tokens": np.int32, "ignore_eos": bool, "stream": bool, "top_k": np.int32, "skip_special_tokens": bool}
pytestmark = pytest.mark.feature("W-08")


@pytest.fixture(scope="module")
def server(lmdeploy_server: TritonServer) -> TritonServer:
    return lmdeploy_server


def tensors_of(prompt: str, **fields: Any) -> list[grpcclient.InferInput]:
    """One dimension each; numbers are FP64 unless they are named above."""
    values = {"max_tokens": 16, "ignore_eos": False, "stream": True, **fields}
    arrays = {"prompt": np.array([prompt.encode()], dtype=np.object_)}
    for name, value in values.items():
        texts = isinstance(value, list)
        arrays[name] = (
            np.array([text.encode() for text in value], np.object_)
            if texts
            else np.array([value], TYPES.get(name, np.float64))
        )
    return [to_input(name, array) for name, array in arrays.items()]


def texts(server: TritonServer, prompt: str = PROMPT, **fields: Any) -> list[str]:
    """The texts of all responses. Raises InferenceServerException."""
    answers: queue.SimpleQueue = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(
            "lmdeploy_model", tensors_of(prompt, **fields), sequence_id=7, sequence_start=True, sequence_end=True
        )
        found = []
        while True:
            result, error = answers.get(timeout=60)
            if error is not None:
                raise error
            assert result.as_numpy("response").shape == ()
            found.append(result.as_numpy("response").item().decode())
            if result.get_response().parameters["triton_final_response"].bool_param:
                return found


def test_a_stream_tells_the_new_text_and_one_response_all_of_it(server: TritonServer) -> None:
    pieces = texts(server)
    (whole,) = texts(server, stream=False)
    assert len(pieces) > 1 and "".join(pieces) == whole and not whole.startswith(PROMPT)


def test_its_text_is_that_of_the_other_models(server: TritonServer) -> None:
    ids = json.loads(post(f"{server.http_url}/v2/models/preprocessing/generate", {"QUERY": PROMPT})[1])["INPUT_ID"]
    body = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": 16, "exclude_input_in_output": True}
    out = json.loads(post(f"{server.http_url}/v2/models/tensorrt_llm/generate", body)[1])["output_ids"]
    body = {"TOKENS_BATCH": out, "sequence_length": 0}
    decoded = json.loads(post(f"{server.http_url}/v2/models/postprocessing/generate", body)[1])["OUTPUT"]
    assert "".join(texts(server)) == decoded


def test_stop_words_end_the_text_and_are_not_shown(server: TritonServer) -> None:
    (whole,) = texts(server, stream=False)
    stop = whole[4:6]
    expected = whole[: whole.index(stop)]
    assert texts(server, stream=False, stop_words=[stop, "never there"]) == [expected]
    assert "".join(texts(server, stop_words=[stop])) == expected


def test_sampling_parameters_are_doubles(server: TritonServer) -> None:
    sampled = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1, "skip_special_tokens": True}
    assert "".join(texts(server, **sampled, bad_words=["self"], ignore_eos=True))
    greedy = {"temperature": 0.8, "top_k": 1}
    assert texts(server, stream=False, **greedy) == texts(server, stream=False)


def test_generate_and_generate_stream_serve_it_too(server: TritonServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 16, "ignore_eos": False, "stream": False}
    url = f"{server.http_url}/v2/models/lmdeploy_model"
    status, text = post(f"{url}/generate", body)
    assert status == 200
    whole = json.loads(text)["response"]
    status, text = post(f"{url}/generate_stream", {**body, "stream": True})
    assert status == 200 and "".join(event["response"] for event in events(text)) == whole


def test_errors_begin_with_lmdeploys_words(server: TritonServer) -> None:
    with pytest.raises(InferenceServerException, match="Error when processing request: max_tokens is 0"):
        texts(server, max_tokens=0)
    with pytest.raises(InferenceServerException, match="Error when processing request: temperature is -1"):
        texts(server, temperature=-1.0)
    status, text = post(f"{server.http_url}/v2/models/lmdeploy_model/generate", {"prompt": PROMPT, "max_tokens": 4})
    assert status == 400 and "ignore_eos" in text


def test_a_client_that_leaves_cancels_its_request(server: TritonServer) -> None:
    answers: queue.SimpleQueue = queue.SimpleQueue()
    client = grpcclient.InferenceServerClient(server.grpc_url)
    client.start_stream(lambda result, error: answers.put(error or result))
    client.async_stream_infer("lmdeploy_model", tensors_of(PROMPT, max_tokens=900, ignore_eos=True))
    assert isinstance(answers.get(timeout=60), grpcclient.InferResult)
    before = num_cancelled(server.metrics_url)
    client.stop_stream(cancel_requests=True)
    client.close()
    assert reaches(server.metrics_url, CANCELLED, before + 1)

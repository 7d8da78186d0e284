"""Whatever a client sends, it gets a clear answer, and the next request is served."""

from __future__ import annotations

import numpy as np
import pytest

from deploy.triton_server import TritonServer
from tests.e2e.wire import TokenClient, post

I32 = np.int32


def column(*values: int, dtype: type = I32) -> np.ndarray:
    return np.array([values], dtype=dtype)


GOOD = {"input_ids": column(1, 2, 3), "input_lengths": column(3), "request_output_len": column(4)}
# One of each kind: what Triton refuses, the stub, and the engine. tests/serving/test_token_requests.py has all of the stub's.
BAD = {
    "a prompt longer than the limit": ({"input_ids": column(*([7] * 3000)), "input_lengths": column(3000)}, "3000"),
    "a wrong dtype": ({"input_ids": column(1, 2, 3, dtype=np.float32)}, "FP32"),
    "an id beyond the vocabulary": ({"input_ids": column(1, 4096, 3)}, "4096"),
    "NaN as temperature": ({"temperature": column(float("nan"), dtype=np.float32)}, "not a finite"),
    "10,000 stop words": ({"stop_words_list": np.array([[[5] * 10_000, list(range(1, 10_001))]], I32)}, "10000"),
    "an embedding bias of the wrong length": (
        {"embedding_bias": np.zeros((1, 7), np.float32)},
        "embedding bias shape is not as expected",
    ),
    "more beams than there may be": ({"beam_width": column(9)}, "beam_width is 9, allowed is 1 to 8"),
    "a negative output length": ({"request_output_len": column(-3)}, "-3"),
    "an end id out of range": ({"end_id": column(99_999)}, "99999"),
}


@pytest.mark.feature("000-23", "001-64", "003-40")
@pytest.mark.parametrize("name", BAD)
def test_bad_tensors_are_refused_and_the_next_request_is_served(tokens: TokenClient, name: str) -> None:
    inputs, said = BAD[name]
    message = tokens.error_of(tokens.send({**GOOD, **inputs}))
    assert said.lower() in message.lower()
    assert "Traceback" not in message and "/" not in message
    assert len(tokens.generate([1, 2, 3], 4)) == 4


@pytest.mark.parametrize("missing", GOOD)
def test_a_missing_required_tensor_is_named(tokens: TokenClient, missing: str) -> None:
    message = tokens.error_of(tokens.send({name: array for name, array in GOOD.items() if name != missing}))
    assert missing in message or "expected number of inputs" in message
    assert len(tokens.generate([1, 2, 3], 4)) == 4


TEXT_BAD = {
    "no max_tokens": {"text_input": "a"},
    "a wrong type": {"text_input": "a", "max_tokens": "many"},
    "text and messages": {"text_input": "a", "messages": '[{"role": "user", "content": "b"}]', "max_tokens": 4},
    "a long text": {"text_input": "x = 1\n" * 20_000, "max_tokens": 4},
    "top_p above 1": {"text_input": "a", "max_tokens": 4, "top_p": 1.5},
}


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("name", TEXT_BAD)
def test_bad_json_is_refused_over_http_and_the_next_request_is_served(
    server: TritonServer, model: str, name: str
) -> None:
    url = f"{server.http_url}/v2/models/{model}/generate"
    status, text = post(url, TEXT_BAD[name])
    assert status in (400, 500) and "error" in text
    assert "Traceback" not in text and ".py" not in text
    assert post(url, {"text_input": "a", "max_tokens": 4})[0] == 200


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff\xfe", b'{"text_input": {"a": 1}, "max_tokens": 3}'])
def test_bodies_that_are_no_request_are_refused(server: TritonServer, body: bytes) -> None:
    status, _ = post(f"{server.http_url}/v2/models/ensemble/generate", body)
    assert status in (400, 500)
    assert post(f"{server.http_url}/v2/models/ensemble/generate", {"text_input": "a", "max_tokens": 2})[0] == 200

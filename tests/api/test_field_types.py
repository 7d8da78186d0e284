"""Requests that a program of the same process has made: a field of a wrong type is refused by name, and the engine lives on."""

from __future__ import annotations

import re

import pytest

from backend.api import InvalidRequest, Request, SamplingConfig
from backend.api.field_types import with_checked_types
from backend.api.request import RetentionConfig
from backend.api.tensor import TensorData


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling_config": SamplingConfig(temperature="x")}, "sampling_config.temperature: expected float | None, got str"),
        ({"sampling_config": SamplingConfig(seed=1.5)}, "sampling_config.seed: expected int | None, got float"),
        ({"sampling_config": SamplingConfig(top_k=True)}, "sampling_config.top_k: expected int | None, got bool"),
        ({"input_token_ids": [1, "a"]}, "input_token_ids[1]: expected int, got str"),
        ({"stop_words": [["a"]]}, "stop_words[0][0]: expected int, got str"),
        ({"timeout_s": object()}, "timeout_s: expected plain numbers of at most 64 bits, texts and lists"),
        ({"max_tokens": 10**400}, "max_tokens: expected plain numbers of at most 64 bits, texts and lists: can't serialize ints"),
        ({"extra_inputs": [1]}, "extra_inputs: expected an object whose keys are texts"),
        ({"extra_inputs": {1: b""}}, "extra_inputs: expected an object whose keys are texts"),
        ({"prompt_embeddings": TensorData(1, (1, 1), bytes(4))}, "prompt_embeddings.dtype: expected str, got int"),
        ({"prompt_embeddings": TensorData("float32", (1, 1), [0])}, "prompt_embeddings.data: expected bytes, got array"),
        ({"guide": {"type": "x" * 5000, "text": ""}}, f"guide.type: invalid enum value '{'x' * 64}...'"),
        ({"sampling_config": None}, "sampling_config: expected object, got None"),
    ],
)  # fmt: skip
def test_a_field_of_a_wrong_type_is_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        with_checked_types(Request(**{"input_token_ids": [1], "max_tokens": 1, **fields}))


def test_what_a_program_may_say_passes() -> None:
    whole_numbers = SamplingConfig(temperature=1, top_p=1, logit_bias={3: 1})
    request = Request(
        [1, 2],
        3,
        sampling_config=whole_numbers,
        extra_inputs={"pixels": object()},
        prompt_embeddings=TensorData("float32", (1, 1), b"1234"),
    )
    assert with_checked_types(request) == request


def test_an_object_in_the_place_of_a_struct_becomes_one() -> None:
    request = with_checked_types(Request([1, 2], 3, sampling_config={"top_k": 2}, retention={}))
    assert request == Request([1, 2], 3, sampling_config=SamplingConfig(top_k=2), retention=RetentionConfig())


@pytest.mark.parametrize(
    "table",
    [
        TensorData("float32", (1, 1), bytearray(b"1234")),
        TensorData("float32", (1, 1), memoryview(b"1234")),
        {"dtype": "float32", "shape": [1, 1], "data": b"1234"},
    ],
)
def test_embeddings_keep_their_numbers_whatever_holds_them(table: object) -> None:
    request = with_checked_types(Request([1, 2], 3, prompt_embeddings=table))
    assert request.prompt_embeddings == TensorData("float32", (1, 1), b"1234")


def test_what_is_no_request_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="the request is a str, a Request is expected"):
        with_checked_types("hello")

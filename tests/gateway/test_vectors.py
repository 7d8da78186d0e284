"""/v1/embeddings as the openai package uses it, and /v1/rerank; both with what hostile clients send."""

from __future__ import annotations

import base64
import struct
import time
from typing import Any

import openai
import pytest

from tests.gateway.conftest import Served, serving
from tests.gateway.fake_triton import FakeTriton

MODEL = "everbatch"


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("abc", ["abc"]),
        (["abc", "de"], ["abc", "de"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_each_text_is_a_request_of_its_own_and_the_answers_keep_the_order(
    given: Any, sent: list[Any], client: openai.OpenAI, triton: FakeTriton
) -> None:
    reply = client.embeddings.create(model=MODEL, input=given, dimensions=3, user="somebody")
    assert [(entry.index, entry.embedding) for entry in reply.data] == [
        (index, [len(one), 0.5, -1.0]) for index, one in enumerate(sent)
    ]
    assert (reply.object, reply.model, reply.usage.prompt_tokens, reply.usage.total_tokens) == (
        "list",
        MODEL,
        7 * len(sent),
        7 * len(sent),
    )
    assert sorted((seen.body["embed"] for seen in triton.requests), key=str) == sorted(sent, key=str)
    assert {seen.body["dimensions"] for seen in triton.requests} == {3}


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_numbers_are_a_list_or_base64(form: str | None, served: Served) -> None:
    body = {"model": MODEL, "input": "abcd"} | ({} if form is None else {"encoding_format": form})
    status, answer, _ = served.request("POST", "/v1/embeddings", body)
    found = answer["data"][0]["embedding"]
    if form == "base64":
        found = list(struct.unpack("<3f", base64.b64decode(found)))
    assert (status, found) == (200, [4.0, 0.5, -1.0])


def test_a_long_list_runs_a_part_at_a_time_and_leaves_places_to_others(triton: FakeTriton) -> None:
    with serving(triton.url, max_choices=10) as served:
        status, answer, _ = served.request("POST", "/v1/embeddings", {"model": MODEL, "input": ["a"] * 300})
        assert status == 200 and len(answer["data"]) == 300
        assert len(triton.requests) == 300
        with served.client() as client:  # which needs a place
            assert client.completions.create(model=MODEL, prompt="a", n=5).choices[4].text


def test_the_error_of_one_text_names_it_and_ends_the_others(served: Served, triton: FakeTriton) -> None:
    texts = ["hold", "hold", "error [INVALID_ARGUMENT] embed has 600 tokens, the limit is 512; shorten it"]
    status, answer, _ = served.request("POST", "/v1/embeddings", {"model": MODEL, "input": texts})
    assert (status, answer["error"]["param"]) == (400, "input[2]")
    assert answer["error"]["message"] == "input[2] has 600 tokens, the limit is 512; shorten it"
    assert all(seen.ended.wait(10) for seen in triton.requests)
    status, answer, _ = served.request("POST", "/v1/embeddings", {"model": MODEL, "input": texts[2]})
    assert (status, answer["error"]["param"], answer["error"]["type"]) == (400, "input", "invalid_request_error")


def test_a_client_that_leaves_ends_its_texts(client: openai.OpenAI, triton: FakeTriton) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.embeddings.create(model=MODEL, input=["hold"] * 5, timeout=0.5)
    seen = triton.wait_for(5)
    assert all(one.ended.wait(10) for one in seen) and time.monotonic() - max(one.ended_at for one in seen) < 10


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({}, "input", "input is missing"),
        ({"input": []}, "input", "input is empty; give at least one entry"),
        ({"input": [[]]}, "input[0]", "input[0] is empty; give at least one entry"),
        ({"input": None}, "input", "input is null"),
        ({"input": 5}, "input", "input is 5"),
        ({"input": {"text": "a"}}, "input", "input is an object"),
        ({"input": [["a"]]}, "input[0][0]", "input[0][0] is 'a'"),
        ({"input": [[[1]]]}, "input[0][0]", "input[0][0] is a list"),
        ({"input": [-1]}, "input[0]", "input[0] is -1"),
        ({"input": [1e308]}, "input[0]", "input[0] is 1e+308"),
        ({"input": [1 << 31]}, "input[0]", "input[0] is 2147483648"),
        (
            {"input": ["a"] * 10_000},
            "input",
            "input has 10000 entries, the limit is 2048; send them in several requests",
        ),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions is 0; it should be at least 1"),
        ({"input": "a", "dimensions": -1}, "dimensions", "dimensions is -1"),
        ({"input": "a", "dimensions": 1e308}, "dimensions", "dimensions is 1e+308"),
        ({"input": "a", "dimensions": 2.5}, "dimensions", "dimensions is 2.5"),
        ({"input": "a", "dimensions": "7"}, "dimensions", "dimensions is '7'"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format is 'int8'"),
        ({"input": "a", "dimension": 7}, "dimension", "unknown parameter dimension; did you mean dimensions?"),
    ],
)
def test_what_cannot_be_embedded_is_one_sentence_with_its_parameter(
    fields: dict[str, Any], param: str, sentence: str, served: Served, triton: FakeTriton
) -> None:
    status, answer, _ = served.request("POST", "/v1/embeddings", {"model": MODEL, **fields})
    error = answer["error"]
    assert status == 400 and error["type"] == "invalid_request_error"
    assert error["message"].startswith(sentence) and len(error["message"]) < 400 and error["param"] == param
    assert triton.requests == []


@pytest.mark.parametrize(
    ("rest", "param", "sentence"),
    [
        (b'"a", "dimensions": NaN', "dimensions", "dimensions is nan; it should be an integer"),
        (b'"a", "dimensions": 1e999', "dimensions", "dimensions is inf; it should be an integer"),
        (b'["a", "b\\ud800"]', None, "the body is not valid JSON: "),
    ],
)
def test_what_json_does_not_know_is_one_sentence(
    rest: bytes, param: str | None, sentence: str, served: Served, triton: FakeTriton
) -> None:
    status, answer, _ = served.request("POST", "/v1/embeddings", b'{"model": "everbatch", "input": ' + rest + b"}")
    assert (status, answer["error"]["param"], triton.requests) == (400, param, []), answer
    assert answer["error"]["message"].startswith(sentence) and "\n" not in answer["error"]["message"]


def test_the_most_relevant_documents_come_first(served: Served, triton: FakeTriton) -> None:
    """The stand-in's score is the length of a document, in hundredths."""
    documents = ["bb", {"text": "cccc"}, "a", "dd"]
    asked = {"model": MODEL, "query": "q", "documents": documents, "instruction": "Find letters."}
    for path in ("/v1/rerank", "/rerank"):
        status, answer, _ = served.request("POST", path, asked)
        found = [(one["index"], one["relevance_score"]) for one in answer["results"]]
        assert (status, found) == (200, [(1, 0.04), (0, 0.02), (3, 0.02), (2, 0.01)])
        assert answer["usage"] == {"prompt_tokens": 28, "total_tokens": 28} and "document" not in answer["results"][0]
    assert (
        triton.requests[0].body["rank"]["task"] == "Find letters." and triton.requests[0].body["rank"]["query"] == "q"
    )
    _, answer, _ = served.request("POST", "/rerank", {**asked, "top_n": 1, "return_documents": True})
    assert answer["results"] == [{"index": 1, "relevance_score": 0.04, "document": {"text": "cccc"}}]


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"documents": ["a"]}, "query", "query is missing"),
        ({"query": "", "documents": ["a"]}, "query", "query is ''"),
        ({"query": "q"}, "documents", "documents is missing"),
        ({"query": "q", "documents": []}, "documents", "documents is empty; give at least one entry"),
        ({"query": "q", "documents": "a"}, "documents", "documents is 'a'"),
        ({"query": "q", "documents": [5]}, "documents[0]", "documents[0] is 5"),
        ({"query": "q", "documents": [{"txt": "a"}]}, "documents[0].txt", "unknown parameter documents[0].txt"),
        ({"query": "q", "documents": ["a"], "top_n": 0}, "top_n", "top_n is 0; it should be at least 1"),
        ({"query": "q", "documents": ["a"] * 2049}, "documents", "documents has 2049 entries, the limit is 2048"),
    ],
)
def test_what_cannot_be_ranked_is_one_sentence_with_its_parameter(
    fields: dict[str, Any], param: str, sentence: str, served: Served
) -> None:
    status, answer, _ = served.request("POST", "/v1/rerank", {"model": MODEL, **fields})
    assert (status, answer["error"]["param"]) == (400, param)
    assert answer["error"]["message"].startswith(sentence)

"""The gateway against its own page /openapi.json, by schemathesis.

A few examples of each kind in the suite; many with EVERBATCH_SCHEMATHESIS_EXAMPLES=1000 before the command of pytest.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.gateway.conftest import Served

EXAMPLES = int(os.environ.get("EVERBATCH_SCHEMATHESIS_EXAMPLES", "8"))
# Rules between two parameters, which JSON Schema cannot say: such a request fits the page and gets 400.
BETWEEN_PARAMETERS = (
    *("needs logprobs", "needs stream", "send one of them", "has no content", "prompts times n"),
    *("leave one out", "names no response", "belongs to chat completions"),
    *("give one of json, json_object", "one of prompt and messages", "add_special_tokens is"),
    *("send it in one of role", "nothing answers it", "has no budget_tokens", "of type tool has no name"),
    *("has no tool_call_id", "there are no tools", "have the same name", "which is none of the tools"),
    "so it cannot have a budget",  # the model of these tests marks no reasoning
    *("the image at", "images, the limit is"),  # and takes no images
)


OPERATIONS = [
    ("GET", "/health"),
    ("GET", "/ping"),
    ("POST", "/ping"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/conversations"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/rerank"),
    ("POST", "/infill"),
    ("GET", "/props"),
    ("GET", "/slots"),
    ("POST", "/api/chat"),
    ("POST", "/api/generate"),
    ("POST", "/api/embed"),
    ("POST", "/api/embeddings"),
    ("POST", "/api/show"),
    ("GET", "/api/tags"),
    ("GET", "/api/ps"),
    ("GET", "/api/version"),
    ("POST", "/rerank"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("POST", "/v1/chat/interactive"),
    ("POST", "/v1/encode"),
    ("GET", "/version"),
    ("GET", "/server_info"),
    ("GET", "/load"),
    ("GET", "/v1/load"),
    ("GET", "/v1/loads"),
    ("GET", "/v1/admin/models"),
    *(("POST", f"/v1/admin/models/{{name}}/{operation}") for operation in ("load", "unload", "replace")),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    *((method, "/v1/conversations/{conversation_id}") for method in ("GET", "POST", "DELETE")),
    *((method, "/v1/conversations/{conversation_id}/items") for method in ("GET", "POST")),
    *((method, "/v1/conversations/{conversation_id}/items/{item_id}") for method in ("GET", "DELETE")),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
]
# Their own tests have a directory; here they say that there is none.
BATCHES = [
    *((method, f"/v1/{what}") for method in ("GET", "POST") for what in ("files", "batches")),
    *((method, "/v1/files/{file_id}") for method in ("GET", "DELETE")),
    ("GET", "/v1/files/{file_id}/content"),
    ("GET", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
]
# Random ids are a 404, and the fake Triton has no page of metrics to tell a load.
TRIED = [(method, path) for method, path in OPERATIONS if "{conversation_id}" not in path and path != "/v1/loads"]
RUNS = [(method, path, "positive") for method, path in TRIED]
RUNS += [
    (method, path, "negative")
    for method, path in TRIED
    if method == "POST" and path != "/ping" and "/admin/" not in path
]  # others have no body


@pytest.fixture(scope="module")
def document(shared_served: Served) -> Any:
    return schemathesis.openapi.from_url(f"{shared_served.url}/openapi.json")


def likely(value: Any) -> Any:
    """With the name of the model, else hardly any request gets past it; 5 for 5.0, which JSON Schema calls an integer."""
    if isinstance(value, list):
        return [likely(item) for item in value]
    if isinstance(value, dict):
        named = isinstance(value.get("model"), str) and len(value["model"]) <= 256
        values = {key: likely(item) for key, item in value.items()}
        return {**values, "model": "everbatch"} if named else values
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.mark.parametrize(("method", "path", "mode"), RUNS)
def test_every_answer_is_one_that_the_page_describes(method: str, path: str, mode: str, document: Any) -> None:
    """`positive` requests fit the page and are served, `negative` ones do not and are refused."""
    operation = document[path][method]

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES < 100, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def check(case: Any) -> None:
        case.body = likely(case.body)
        answer = case.call()
        assert answer.status_code < 500
        by_rule = answer.status_code == 400 and any(sentence in answer.text for sentence in BETWEEN_PARAMETERS)
        case.validate_response(answer, excluded_checks=[positive_data_acceptance] if by_rule else [])

    check()


def test_the_page_names_no_file_of_the_program(served: Served) -> None:
    assert ".py" not in json.dumps(served.request("GET", "/openapi.json")[1])


def test_the_page_names_nothing_on_the_net_and_every_route(served: Served) -> None:
    status, page, _ = served.request("GET", "/openapi.json")
    assert status == 200 and "http" not in json.dumps(page).replace("httpx", "")
    found = {(method.upper(), path) for path, methods in page["paths"].items() for method in methods}
    assert found == {*OPERATIONS, *BATCHES}
    assert page["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False

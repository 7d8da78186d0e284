"""The gateway passes the headers of W3C Trace Context on to the model."""

from __future__ import annotations

import pytest

from tests.gateway.conftest import Served
from tests.gateway.fake_triton import FakeTriton

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
BODY = {"model": "everbatch", "prompt": "a", "max_tokens": 2}


def passed_on(served: Served, triton: FakeTriton, headers: dict[str, str]) -> dict[str, str]:
    status, _, _ = served.request("POST", "/v1/completions", BODY, headers=headers)
    assert status == 200
    given = triton.last().parameters
    return {name: given[name] for name in ("traceparent", "tracestate") if name in given}


def test_a_request_bears_the_headers_of_its_caller(served: Served, triton: FakeTriton) -> None:
    headers = {"TraceParent": PARENT, "tracestate": "vendor=a, other=b"}
    assert passed_on(served, triton, headers) == {"traceparent": PARENT, "tracestate": "vendor=a, other=b"}


def test_each_prompt_of_a_request_belongs_to_the_same_trace(served: Served, triton: FakeTriton) -> None:
    served.request("POST", "/v1/completions", {**BODY, "prompt": ["a", "b"]}, headers={"traceparent": PARENT})
    assert [seen.parameters["traceparent"] for seen in triton.requests] == [PARENT] * 2


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"tracestate": "vendor=a"},
        {"traceparent": ""},
        {"traceparent": "garbage"},
        {"traceparent": PARENT.upper()},
        {"traceparent": PARENT + "0"},
        {"traceparent": PARENT + "-" + "x" * 5000},
    ],
)
def test_headers_of_another_form_count_as_absent(served: Served, triton: FakeTriton, headers: dict[str, str]) -> None:
    assert passed_on(served, triton, headers) == {}


def test_a_state_that_is_too_long_is_left_out(served: Served, triton: FakeTriton) -> None:
    assert passed_on(served, triton, {"traceparent": PARENT, "tracestate": "x" * 513}) == {"traceparent": PARENT}

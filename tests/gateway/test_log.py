"""The gateway's log: what a line says of a request, never in a client's own words, and its two formats."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from backend.api.processes import setup as of_the_models
from gateway import log_lines
from tests.gateway.conftest import Served
from tests.gateway.fake_triton import FakeTriton

ROOT = Path(__file__).resolve().parents[2]
Serve = Callable[..., AbstractContextManager[Served]]
CHAT: dict[str, Any] = {"model": "everbatch", "messages": [{"role": "user", "content": "MARKED"}]}
COMPLETION: dict[str, Any] = {"model": "everbatch", "prompt": "MARKED"}
KEYED = {"Authorization": "Bearer alice-key-0123456789"}
PART = [{"role": "user", "content": [{"type": "MARKED"}]}]
MISSPELLED = [{"role": "user", "MARKEDcontent": "MARKED"}]

# method, path, body, headers, the beginning of the line, its end behind the request id
LINES: list[tuple[str, str, Any, dict[str, str], str, str]] = [
    ("POST", "/v1/chat/completions", CHAT, {}, "POST /v1/chat/completions 401 ", ", invalid_api_key"),
    ("GET", "/v1/models/MARKED", None, {}, "GET /v1/models/{name:path} 401 ", ", invalid_api_key"),
    ("GET", "/MARKED", None, {}, "GET /* 401 ", ", invalid_api_key"),
    ("GET", "/openapi.json", None, {}, "GET /openapi.json 200 ", ""),
    ("GET", "/v1/completions", None, KEYED, "GET /v1/completions 405 ", ", invalid_request_error"),
    ("MARKED", "/v1/models", None, KEYED, "OTHER /v1/models 405 ", ", invalid_request_error"),
    ("POST", "/chat/completions", CHAT, KEYED, "POST /chat/completions 404 ", ", not_found_error"),
    ("POST", "/v1/MARKED/chat?MARKED", CHAT, KEYED, "POST /v1/*/chat 404 ", ", not_found_error"),
    ("POST", "/a" * 99, CHAT, KEYED, "POST " + "/*" * 7 + " 404 ", ", not_found_error"),
    ("POST", "/v1/completions", COMPLETION, KEYED, "POST /v1/completions 200 ", ""),
    ("POST", "/v1/completions", b"MARKED", KEYED, "POST /v1/completions 400 ", ", invalid_json"),
]
# what is added to a chat, how its line ends
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "MARKED"}, ", invalid_value (temperature)"),
    ({"tempersture": 1}, ", unknown_parameter (like temperature)"),
    ({"temperature MARKED": 1}, ", unknown_parameter (like temperature)"),
    ({"MARKED alice-key-0123456789": 1}, ", unknown_parameter"),
    ({"logit_bias": {"marked text": 1}}, ", invalid_value (logit_bias)"),
    ({"chat_template": "MARKED"}, ", unsupported_parameter (chat_template)"),
    ({"messages": PART}, ", invalid_value (messages[0].content[0].type)"),
    ({"messages": MISSPELLED}, ", unknown_parameter (like content)"),
    ({"functions": [{"MARKED": 1}]}, ", unsupported_parameter (functions)"),
    ({"model": "MARKED"}, ", model_not_found (model)"),
    ({"n": 129}, ", invalid_value (n)"),
    ({"stream_options": {}}, ", invalid_value (stream_options)"),
]
LINES += [
    ("POST", "/v1/chat/completions", {**CHAT, **added}, KEYED, "POST /v1/chat/completions 40", end)
    for added, end in REFUSED
]
FAILED = {**COMPLETION, "prompt": "late error [UNAVAILABLE] MARKED", "stream": True}
LINES.append(("POST", "/v1/completions", FAILED, KEYED, "POST /v1/completions 200 ", ", service_unavailable"))


def test_a_line_names_route_status_error_and_parameter_in_none_of_the_clients_words(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "keys").write_text("alice alice-key-0123456789\n")
    (tmp_path / "keys").chmod(0o600)
    caplog.set_level(logging.INFO, "everbatch.gateway")
    ids = []
    with serve(api_keys=tmp_path / "keys") as served:
        for method, path, body, headers, _, _ in LINES:
            ids.append(served.request(method, path, body, headers)[2]["x-request-id"])
    records = {record.fields["request_id"]: record for record in caplog.records if hasattr(record, "fields")}
    for request_id, (*_, begin, end) in zip(ids, LINES, strict=True):
        record = records[request_id]
        told = f"{record.getMessage()} {record.fields}"
        assert record.getMessage().startswith(begin) and record.getMessage().endswith(request_id + end), told
        assert "marked" not in told.lower() and "alice" not in told


def test_a_line_has_its_values_as_fields(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """Two choices of four tokens each are told, and one more was discarded after 100 tokens."""
    caplog.set_level(logging.INFO, "everbatch.gateway")
    with serve() as served:
        first = served.request("POST", "/v1/completions", {**COMPLETION, "n": 2, "best_of": 3})[2]["x-request-id"]
        second = served.request("POST", "/v1/completions", {**COMPLETION, "n": 0})[2]["x-request-id"]
    fields = {record.fields["request_id"]: record.fields for record in caplog.records if hasattr(record, "fields")}
    common = {"event": "http_request", "method": "POST", "route": "/v1/completions"}
    assert fields[first].pop("total_ms") > 0 and fields[second].pop("total_ms") > 0
    assert fields[first] == {
        **common,
        "status": 200,
        "prompt_tokens": 7,
        "completion_tokens": 108,
        "request_id": first,
    }
    failure = {"error": "invalid_value", "param": "n"}
    tokens = {"prompt_tokens": 0, "completion_tokens": 0}
    assert fields[second] == {**common, "status": 400, **tokens, "request_id": second, **failure}


def test_unknown_paths_are_one_route_of_the_metrics_page_and_refused_requests_count_for_theirs(serve: Serve) -> None:
    with serve() as served:
        for path in ("/a", "/v1/b", "/chat/completions"):
            served.request("POST", path, COMPLETION)
        served.request("GET", "/v1/completions")
        text = eventually_counted(served, 4)
    assert 'requests_total{route="other",status="404"} 3\n' in text
    assert 'requests_total{route="/v1/completions",status="405"} 1\n' in text


def eventually_counted(served: Served, count: int) -> str:
    """The metrics page once so many requests are on it: a request is counted after its answer is out."""
    deadline = time.monotonic() + 10
    while True:
        text = str(served.request("GET", "/metrics")[1])
        numbers = re.findall(r'requests_total\{route="(?!/metrics)\S+ (\d+)', text)
        if sum(map(int, numbers)) >= count or time.monotonic() > deadline:
            return text


def record_of(error: bool) -> logging.LogRecord:
    try:
        raise ValueError("wrong")
    except ValueError:
        given = sys.exc_info() if error else None
    record = logging.LogRecord("everbatch.gateway", logging.INFO, "", 0, "%s\nlines", ("two",), given)
    record.fields = {"route": "/health"}
    return record


@pytest.mark.parametrize("error", [False, True])
def test_a_json_line_is_the_one_that_a_model_would_write(error: bool) -> None:
    record = record_of(error)
    assert log_lines.JsonLines().format(record) == of_the_models.JsonLines("gateway").format(record)
    assert log_lines.VARIABLE == of_the_models.VARIABLE


def test_with_the_format_json_every_line_of_the_command_is_one_object(triton: FakeTriton) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "--triton", triton.url, "--port", "0"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {log_lines.VARIABLE: "json"},
    )
    assert process.stderr is not None
    try:
        said = [process.stderr.readline()]
        address = re.search(r"http://(\S+)/v1", said[0])
        assert address is not None, said
        http.client.HTTPConnection(address[1], timeout=30).request("GET", "/v1/models")
        said.append(process.stderr.readline())
    finally:
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=30)[1]
    lines = [json.loads(line) for line in (*said, *rest.splitlines())]
    assert [line["message"].split()[0] for line in lines] == ["OpenAI-compatible", "GET"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"]) for line in lines)
    assert {(line["process"], line["level"], line["logger"]) for line in lines} == {
        ("gateway", "INFO", "everbatch.gateway")
    }
    assert (lines[1]["route"], lines[1]["status"]) == ("/v1/models", 200)

"""What /metrics, the request log and the statistics line tell after a run that clients have counted themselves."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from tritonclient.utils import InferenceServerException

from backend.api import load_config
from deploy.invocation import ADMIN_HEADER
from deploy.triton_server import ROOT, TritonServer
from tests.e2e.conftest import EXACT
from tests.e2e.starts import wait_ready
from tests.e2e.wire import TokenClient, events, eventually, ids_of, post

PERIOD_S = 0.2
LONG = 1800
VLLM = 'parameters { key: "REPORT_CUSTOM_METRICS" value: { string_value: "true" } }\n'
SECRET, TEXT = "a secret namespace", "def read_a_file_that_nobody_may_see("


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Quick statistics, a log of JSON, and vLLM's metrics of the ensemble."""
    repository = tmp_path_factory.mktemp("metrics") / "models"
    shutil.copytree(ROOT / "model_repository", repository)
    with (repository / "ensemble" / "config.pbtxt").open("a") as config:
        config.write(VLLM)
    settings = load_config(overrides=[*EXACT, f"triton.stats_period_ms={int(PERIOD_S * 1000)}"])
    run_dir = tmp_path_factory.mktemp("run")
    environment = {"EVERBATCH_LOG_FORMAT": "json", "EVERBATCH_BACKEND_PATH": str(ROOT)}
    with TritonServer(
        settings, run_dir=run_dir, model_repository=repository, exit_timeout_s=5, extra_environment=environment
    ) as server:
        wait_ready(server)
        yield server


class Values(NamedTuple):
    """One reading of /metrics: each value by its name and labels."""

    text: str

    def get(self, name: str, **labels: str) -> float:
        """The only value with these labels. Raises AssertionError for none or several."""
        found = [value for other, kept, value in self.all() if other == name and labels.items() <= kept.items()]
        assert len(found) == 1, f"{name} {labels}: {found}"
        return found[0]

    def sum(self, name: str, **labels: str) -> float:
        return sum(value for other, kept, value in self.all() if other == name and labels.items() <= kept.items())

    def all(self) -> Iterator[tuple[str, dict[str, str], float]]:
        for name, labels, value in re.findall(r"^([\w:]+)(?:\{(.*?)\})? (\S+)$", self.text, re.MULTILINE):
            yield name, dict(re.findall(r'(\w+)="(.*?)"', labels)), float(value)


def read(server: TritonServer) -> Values:
    with urllib.request.urlopen(server.metrics_url, timeout=10) as response:
        return Values(response.read().decode())


def settled(server: TritonServer, num_accepted: float = 0) -> Values:
    """Once `num_accepted` requests in all have been counted, nothing is in flight, and two readings agree that lie
    several periods apart.
    """
    deadline = time.monotonic() + 120
    before = read(server)
    while True:
        time.sleep(5 * PERIOD_S)
        after = read(server)
        is_all = after.sum("everbatch_requests_accepted_total") >= num_accepted
        if is_all and ours(before) == ours(after) and after.get("everbatch_requests", state="active") == 0:
            return after
        assert time.monotonic() < deadline, "something still runs, or the metrics change by themselves"
        before = after


def ours(values: Values) -> list[Any]:
    return [item for item in values.all() if item[0].startswith(("everbatch_", "nv_llm_", "nv_trt_llm_", "vllm:"))]


def log_lines(server: TritonServer) -> list[dict[str, Any]]:
    """The request log, all of it."""
    lines = server.log_path.read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and '"event": "request"' in line]


class Seen(NamedTuple):
    """What a client counted of one row."""

    model: str
    reason: str
    output: int
    prompt: int | None = None  # where the client knows it


def generate(server: TritonServer, stream: bool, **fields: Any) -> tuple[int, list[dict[str, Any]]]:
    body = {"text_input": TEXT, "return_num_output_tokens": True, "return_num_input_tokens": True, **fields}
    suffix = "_stream" if stream else ""
    status, text = post(f"{server.http_url}/v2/models/ensemble/generate{suffix}", {**body, "stream": stream})
    return status, events(text) if stream else [json.loads(text)]


def text_row(server: TritonServer, reason: str, stream: bool = False, **fields: Any) -> Seen:
    status, replies = generate(server, stream, **fields)
    assert status == 200, replies
    told = {"end_id": "stop", "stop_words": "stop", "timed_out": "timeout"}.get(reason, reason)
    assert replies[-1]["finish_reason"] == told, replies[-1]
    return Seen("ensemble", reason, sum(r["num_output_tokens"] for r in replies), replies[0]["num_input_tokens"])


def run_everything(server: TritonServer) -> list[Seen]:
    """Every way in which a request can end, one after another; each is counted by its client."""
    (reply,) = generate(server, stream=False, max_tokens=30, end_id=-1, exclude_input_in_output=True)[1]
    in_the_middle = reply["text_output"][20:22]
    seen = [
        Seen("ensemble", "length", reply["num_output_tokens"], reply["num_input_tokens"]),
        text_row(server, "length", max_tokens=12, end_id=-1, id="plain", namespace=SECRET),
        text_row(server, "length", stream=True, max_tokens=20, end_id=-1, id='forged"\nline'),
        text_row(server, "stop_words", stream=True, max_tokens=400, stop_words=[in_the_middle]),
        text_row(server, "stop_words", max_tokens=400, stop_words=["never said", in_the_middle]),
        text_row(server, "timed_out", stream=True, max_tokens=1500, end_id=-1, timeout=300_000),
    ]
    with TokenClient(server.grpc_url) as client:
        ids = client.start([5, 6, 7], 9, streaming=True).token_ids()
        seen.append(Seen("tensorrt_llm", "length", len(ids), 3))
        end = ids[4]
        ended = client.start([5, 6, 7], 9, streaming=True, end_id=end).token_ids()
        seen.append(Seen("tensorrt_llm", "end_id", len(ended), 3))
        seen.append(stopped_row(client))
        error = client.error_of(client.start([5, 6, 7], 9, CORRID=77, START=0))  # the engine refuses an unknown session
        assert "session 77" in error
        with pytest.raises(InferenceServerException, match="vocabulary"):
            client.start([10**6], 9).token_ids()
    return seen


def stopped_row(client: TokenClient) -> Seen:
    """A request that another one stops."""
    stream = client.start([4, 5, 6], LONG, request_id="victim", streaming=True)
    results = iter(stream)
    count = len(ids_of(next(results)))
    assert client.start([0], 0, request_id="victim", stop=True).token_ids() == []
    return Seen("tensorrt_llm", "cancelled", count + sum(len(ids_of(result)) for result in results), 3)


@pytest.mark.feature("W-06")
def test_what_the_server_counts_is_what_its_clients_saw(server: TritonServer) -> None:
    before = settled(server)
    seen = run_everything(server)
    after = settled(server, before.get("everbatch_requests_accepted_total") + len(seen))

    def growth(name: str, **labels: str) -> int:
        return round(after.sum(name, **labels) - before.sum(name, **labels))

    reasons = Counter(row.reason for row in seen)
    assert {
        reason: growth("everbatch_requests_finished_total", reason=reason)
        for reason in ("end_id", "stop_words", "length", "timed_out", "cancelled", "error")
    } == {**dict.fromkeys(("end_id", "stop_words", "length", "timed_out", "cancelled", "error"), 0), **reasons}
    assert growth("everbatch_requests_accepted_total") == growth("everbatch_requests_finished_total") == len(seen)
    assert growth("everbatch_requests_rejected_total") == 1
    for model in ("ensemble", "tensorrt_llm"):
        output = sum(row.output for row in seen if row.model == model)
        prompt = sum(row.prompt or 0 for row in seen if row.model == model)
        assert growth("everbatch_client_tokens_total", model=model, kind="output") == output
        assert growth("nv_llm_output_token_len_sum", model=model) == output
        assert growth("nv_llm_input_token_len_sum", model=model) == prompt
        count = sum(row.model == model for row in seen)
        for name in ("time_to_first_token_seconds", "request_seconds", "queue_seconds"):
            assert growth(f"everbatch_{name}_count", model=model) == count, name
    told = sum(row.output for row in seen)
    assert (
        growth("everbatch_tokens_total", kind="generated") - growth("everbatch_tokens_total", kind="discarded") == told
    )
    assert growth("everbatch_tokens_total", kind="prompt") == sum(row.prompt or 0 for row in seen)

    texts = [row for row in seen if row.model == "ensemble"]
    assert growth("vllm:prompt_tokens_total") == sum(row.prompt or 0 for row in texts)
    assert growth("vllm:generation_tokens_total") == sum(row.output for row in texts)
    assert growth("vllm:time_per_output_token_seconds_count") == sum(row.output - 1 for row in texts)
    assert growth("vllm:e2e_request_latency_seconds_count") == growth("vllm:request_params_n_sum") == len(texts)


def test_the_request_log_has_a_line_for_each_and_nothing_secret(server: TritonServer) -> None:
    settled(server)
    num_before = len(log_lines(server))
    seen = run_everything(server)
    assert eventually(lambda: len(log_lines(server)) >= num_before + len(seen) + 2, 30)
    lines = log_lines(server)[num_before:]
    ended = [line for line in lines if line["reason"] not in ("error", "refused")]
    assert Counter((line["model"], line["reason"], line["output_tokens"], line["prompt_tokens"]) for line in ended) == (
        Counter((row.model, row.reason, row.output, row.prompt) for row in seen)
    )
    failed = [(line["reason"], line["code"]) for line in lines if line["reason"] in ("error", "refused")]
    assert sorted(failed) == [("error", "INVALID_ARGUMENT"), ("refused", "INVALID_ARGUMENT")]
    (plain,) = [line for line in lines if line["request_id"] == "plain"]
    assert plain["namespace"] == hashlib.sha256(SECRET.encode()).hexdigest()[:12]
    assert 0 <= plain["queue_ms"] <= plain["first_token_ms"] <= plain["total_ms"]
    log = server.log_path.read_text(errors="replace")
    assert SECRET not in log and "nobody_may_see" not in log
    assert r"forged\"\nline" in log


def test_a_client_that_leaves_and_requests_in_flight_are_accounted_for(server: TritonServer) -> None:
    with TokenClient(server.grpc_url) as client:
        before = settled(server)
        streams = [client.start([4 + n, 5, 6], LONG, streaming=True) for n in range(2)]
        firsts = [len(ids_of(next(iter(stream)))) for stream in streams]
        assert eventually(lambda: balanced(read(server), num_active=2), 30)
        for stream in streams:
            stream.cancel()
        after = settled(server, before.get("everbatch_requests_accepted_total") + 2)
        assert balanced(after)
        told = after.sum("everbatch_client_tokens_total", kind="output") - before.sum(
            "everbatch_client_tokens_total", kind="output"
        )
        assert sum(firsts) <= told < 2 * LONG


def balanced(values: Values, num_active: int = 0) -> bool:
    """Whether so many run, and accepted ones are the ended and those."""
    ended = values.sum("everbatch_requests_finished_total")
    is_so = values.get("everbatch_requests", state="active") == num_active
    return is_so and values.get("everbatch_requests_accepted_total") == ended + num_active


def test_unknown_parameters_are_refused_or_warned_about(server: TritonServer) -> None:
    url = f"{server.http_url}/v2/models/ensemble/generate"
    status, text = post(url, {"text_input": "a", "max_tokens": 1, "max_new_tokens": 9})
    assert status == 400 and "here the input is called max_tokens (INT32)" in text
    status, _ = post(url, {"text_input": "a", "max_tokens": 1, "temprature": 9, "parameters": {"user": "x"}})
    assert status == 200
    warning = "request parameter 'temprature' is not known and has no effect, did you mean temperature"
    assert eventually(lambda: warning in server.log_path.read_text(errors="replace"), 30)


@pytest.mark.parametrize(
    ("fields", "riddle"),
    [
        ({"stop": ["x"]}, "attempt to access JSON non-boolean as boolean"),
        ({"stream": 1}, "attempt to access JSON non-boolean as boolean"),
        ({"messages": [{"role": "user", "content": "x"}]}, "attempt to access JSON non-string as string"),
        ({"max_tokens": "64"}, "attempt to access JSON non-signed-integer as signed-integer"),
        ({"stop_sequences": ["x"]}, "parameter 'stop_sequences' has invalid type"),
    ],
)
def test_the_page_on_http_quotes_what_triton_answers(server: TritonServer, fields: dict[str, Any], riddle: str) -> None:
    body = {"text_input": "a", "max_tokens": 1, **fields}
    _, text = post(f"{server.http_url}/v2/models/ensemble/generate", body)
    page = " ".join((ROOT / "docs" / "http.md").read_text().split())
    assert riddle in text and riddle.replace("stop_sequences", "X") in page


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_words": ["\n", "###"]},
        {"stop_words": "###"},
        {"text_input": "", "messages": json.dumps([{"role": "user", "content": "Hi"}])},
        {"temperature": 1},
        {"id": "r7", "timeout": 2_000_000, "cache_salt": "alice"},
        {"parameters": {"n": 1}},
    ],
)
def test_the_forms_that_the_page_on_http_calls_right_are_right(server: TritonServer, fields: dict[str, Any]) -> None:
    status, text = post(
        f"{server.http_url}/v2/models/ensemble/generate", {"text_input": "a", "max_tokens": 1, **fields}
    )
    assert status == 200, text


def test_the_statistics_line_agrees_with_the_metrics(server: TritonServer) -> None:
    """As tensorrtllm_backend's custom_metrics_verification_tests.py reads both: verbose logging is switched on by a client."""
    settled(server)
    set_log_verbosity(server, 1)
    read_together: list[tuple[dict[str, Any], Values]] = []
    try:
        assert eventually(lambda: read_together.extend(line_and_metrics(server)) or bool(read_together), 30)
    finally:
        set_log_verbosity(server, 0)
    line, values = read_together[0]
    shown = {labels["model"]: 0 for name, labels, _ in values.all() if name.startswith("nv_trt_llm_")}
    assert list(shown) == ["tensorrt_llm"]
    upstream = [value for name, _, value in values.all() if name.startswith("nv_trt_llm_")]
    assert len(line) == len(upstream) == 22
    assert line["Used KV cache blocks"] == values.get("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used")
    cpu_bytes = values.get("nv_trt_llm_runtime_memory_metrics", memory_type="cpu")
    assert line["Runtime CPU Memory Usage"] == pytest.approx(cpu_bytes, rel=0.02), "read at another moment"
    assert cpu_bytes > 1e7
    assert line["Iteration Counter"] > 0


def set_log_verbosity(server: TritonServer, level: int) -> None:
    body = json.dumps({"log_verbose_level": level}).encode()
    request = urllib.request.Request(
        f"{server.http_url}/v2/logging", data=body, headers={ADMIN_HEADER: server.admin_key}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        assert response.status == 200


def line_and_metrics(server: TritonServer) -> list[tuple[dict[str, Any], Values]]:
    """The latest statistics line and the metrics, where both were taken in the same second behind the same iteration."""
    lines, values = statistics_lines(server), read(server)
    if not lines:
        return []
    taken = time.mktime(time.strptime(lines[-1]["Timestamp"].split(".")[0], "%m-%d-%Y %H:%M:%S"))
    shown_us = values.get("nv_trt_llm_general_metrics", general_type="timestamp")
    iteration = values.get("nv_trt_llm_general_metrics", general_type="iteration_counter")
    is_same = taken == shown_us // 1_000_000 and lines[-1]["Iteration Counter"] == iteration
    return [(lines[-1], values)] if is_same else []


def statistics_lines(server: TritonServer) -> list[dict[str, Any]]:
    r"""Triton 24.10 writes every message of a model as a quoted string, `I1122 ... "{\"Active Request Count\":0, ...}"`."""
    lines = server.log_path.read_text(errors="replace").splitlines()
    found = [line for line in lines if "Active Request Count" in line and line.endswith('}"')]
    return [json.loads(json.loads(line[line.index('"{') :])) for line in found]

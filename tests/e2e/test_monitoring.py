"""A real Prometheus scrapes a real run; every expression of dashboards and alerts gives data. A real collector gets the spans."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import yaml

from deploy import ROOT
from deploy.triton_server import TritonServer
from tests.e2e.conftest import serve
from tests.e2e.monitoring_expressions import ALL
from tests.e2e.starts import wait_ready
from tests.gateway.conftest import Served, serving
from tests.otlp_collector import Collector, attributes, collecting
from tools.write_dashboards import DASHBOARDS, document

DEADLINE_S = 60.0
OUTPUT = 150  # tokens
MONITORING = ROOT / "deploy" / "monitoring"
MODEL = "served"
VARIABLES = {"$__rate_interval": "1m", "$model_name": MODEL, "$instance": ".+", "$job": ".*", "$engine": ".*"}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
# Four of them need more KV than there is, so that some are paused and computed again; the model guesses at tokens.
SETTINGS = (
    *("kv_cache.block_size=16", "kv_cache.max_tokens=384", "kv_cache.watermark=0", "scheduler.max_batch_size=4"),
    *("scheduler.policy=max_utilization", "triton.stats_period_ms=200", "lora.enabled=true", "speculation.mode=lookup"),
)


def program(name: str) -> str:
    """Prometheus' programs, on PATH or in the directory that EVERBATCH_PROMETHEUS names."""
    path = os.pathsep.join([os.environ.get("EVERBATCH_PROMETHEUS", ""), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    if found is None:
        pytest.skip(f"{name} is not installed; apt-get install prometheus")
    return found


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    telemetry = (f"telemetry.otlp_endpoint={collector.url}", "telemetry.sample_ratio=0")
    with serve(tmp_path_factory.mktemp("monitored"), *SETTINGS, *telemetry) as server:
        wait_ready(server)
        yield server


@pytest.fixture(scope="module")
def served(server: TritonServer) -> Iterator[Served]:
    with serving(server.grpc_url, metrics_url=server.metrics_url, model_names=(MODEL,)) as served:
        yield served


def ask(served: Served, number: int, **headers: str) -> None:
    """A text of repetitions, so that there is something to guess, another one for each number."""
    prompt = f"{number} def add(a, b):\n    return a + b\n" * 3
    body = {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, "temperature": 0}
    status, answer, _ = served.request("POST", "/v1/completions", body, headers=headers)
    assert status == 200, answer


def load(served: Served) -> None:
    """Eight requests at once, and one that is refused."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: ask(served, number), range(8)))
    assert served.request("POST", "/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": -2})[0] == 400


@pytest.fixture(scope="module")
def query(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[Any]]]:
    """Asks a Prometheus that has scraped the endpoint before, between and after some requests."""
    directory = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [served.address]}]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(MONITORING / "rules.yml", directory)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [program("prometheus"), f"--config.file={directory}/prometheus.yml", f"--web.listen-address={address}"]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, f"--storage.tsdb.path={directory}/data", "--log.level=warn"], stdout=log, stderr=log
        )
    try:
        ask_prometheus = asking(address, process, directory / "log")
        load(served)
        wait_for_scrapes(ask_prometheus, 2)
        load(served)
        wait_for_scrapes(ask_prometheus, 3)
        yield ask_prometheus
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def asking(address: str, process: subprocess.Popen[bytes], log: Path) -> Callable[[str], list[Any]]:
    def ask_prometheus(expression: str) -> list[Any]:
        url = f"http://{address}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        deadline = time.monotonic() + DEADLINE_S
        while True:
            assert process.poll() is None, log.read_text()
            try:
                with urllib.request.urlopen(url, timeout=DEADLINE_S) as response:
                    return list(json.load(response)["data"]["result"])
            except urllib.error.HTTPError as error:
                raise AssertionError(f"{expression}: {error.read().decode()}") from None
            except OSError:
                assert time.monotonic() < deadline, "Prometheus does not listen"
                time.sleep(0.05)

    return ask_prometheus


def wait_for_scrapes(ask_prometheus: Callable[[str], list[Any]], number: int) -> None:
    """Until so many more scrapes have succeeded."""
    expression, deadline = 'sum_over_time(up{job="everbatch"}[1h])', time.monotonic() + DEADLINE_S
    before = sum(float(each["value"][1]) for each in ask_prometheus(expression))
    while sum(float(each["value"][1]) for each in ask_prometheus(expression)) < before + number:
        assert time.monotonic() < deadline, "Prometheus does not scrape"
        time.sleep(0.1)


def filled(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def of_dashboards() -> list[str]:
    panels = [panel for board in DASHBOARDS.values() for panel in document(board)["panels"]]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def alerts() -> dict[str, str]:
    (group,) = yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def without_threshold(expression: str) -> str:
    """What an alert compares: it gives data also while nothing is wrong."""
    left, _, right = max((expression.rpartition(sign) for sign in (" < ", " > ")), key=lambda parts: len(parts[0]))
    assert left and float(right) >= 0, expression
    return left


def problems(query: Callable[[str], list[Any]], expressions: list[str]) -> list[str]:
    """The expressions without data, and those whose values are all no numbers."""
    found = []
    for expression in expressions:
        values = [float(each["value"][1]) for each in query(filled(expression))]
        if all(map(math.isnan, values)):
            found.append(f"{expression}: {values}")
    return found


def test_every_panel_of_the_dashboards_has_data(query: Callable[[str], list[Any]]) -> None:
    assert not problems(query, of_dashboards())


def test_every_expression_that_is_used_around_a_vllm_server_has_data(query: Callable[[str], list[Any]]) -> None:
    assert not problems(query, ALL)


def test_every_alert_compares_something_that_is_there(query: Callable[[str], list[Any]]) -> None:
    assert not problems(query, [without_threshold(expression) for expression in alerts().values()])
    assert [each["metric"]["alertname"] for each in query('ALERTS{alertstate="firing"}')] == []


def test_the_engine_and_its_clients_have_counted_the_same(query: Callable[[str], list[Any]]) -> None:
    def value(expression: str) -> float:
        (only,) = query(expression)
        return float(only["value"][1])

    requests = value('vllm:request_success_total{finished_reason="length"}')
    probes = requests - 16  # of the launcher, one token each
    assert 0 < probes < 5 and value("vllm:e2e_request_latency_seconds_count") == requests
    told = value("everbatch_gateway_completion_tokens_total")
    assert told == 16 * OUTPUT
    assert value("vllm:generation_tokens_total") == value("vllm:request_generation_tokens_sum") == told + probes
    assert value("vllm:num_preemptions_total") == value("everbatch_pauses_total") > 0
    assert value("vllm:request_prompt_tokens_sum") == value("vllm:prompt_tokens_total")


def test_promtool_takes_configuration_and_rules() -> None:
    promtool = program("promtool")
    for command in (["config", "prometheus.yml"], ["rules", "rules.yml"]):
        done = subprocess.run(
            [promtool, "check", *command],
            cwd=MONITORING,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_the_spans_of_requests_arrive_with_the_callers_trace(served: Served, collector: Collector) -> None:
    """Over the endpoint and Triton: only what the caller has sampled, with what happened to it."""
    names = {"llm_request", "queue", "context", "generation", "pause", "evict", "recompute"}
    parents = [f"00-{TRACE}-{PARENT}-01"] * 7 + [f"00-{'1' * 32}-{PARENT}-00"]
    rounds, deadline = 0, time.monotonic() + DEADLINE_S
    while rounds == 0 or not names <= {span.name for span in collector.spans}:
        assert time.monotonic() < deadline, "four requests share the room of two, so that some are paused"
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda at: ask(served, at, traceparent=parents[at], tracestate="vendor=a"), range(8)))
        rounds += 1
        collector.wait(lambda told: sum(span.name == "llm_request" for span in told.spans) == 7 * rounds)  # noqa: B023
    assert {span.name for span in collector.spans} == names
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    requests = [span for span in collector.spans if span.name == "llm_request"]
    assert all((span.parent_span_id.hex(), span.trace_state) == (PARENT, "vendor=a") for span in requests)
    assert {attributes(span)["gen_ai.usage.output_tokens"] for span in requests} == {OUTPUT}


def test_triton_clients_name_their_trace_by_metadata(server: TritonServer, collector: Collector) -> None:
    other = "a" * 32
    with triton.InferenceServerClient(server.grpc_url) as client:
        prompt = triton.InferInput("request", [1], "BYTES")
        prompt.set_data_from_numpy(np.array([b'{"prompt": "a", "max_tokens": 2}'], dtype=object))
        client.start_stream(lambda result, error: None, headers={"traceparent": f"00-{other}-{PARENT}-01"})
        client.async_stream_infer("everbatch", [prompt])
        collector.wait(lambda told: any(span.trace_id.hex() == other for span in told.spans))

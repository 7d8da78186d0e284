"""What routers ask a server: its version, what it serves, and how much it has to do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.e2e.wire import eventually
from tests.gateway.conftest import Served, serving
from tests.gateway.fake_triton import FakeTriton

LABELS = 'model="tensorrt_llm",version="1"'
PAGE = f"""# HELP nv_trt_llm_request_metrics TRT LLM request metrics
nv_trt_llm_request_metrics{{{LABELS.replace(",", ',request_type="waiting",')}}} 3
nv_trt_llm_request_metrics{{model="tensorrt_llm",request_type="active",version="1"}} 11
nv_trt_llm_request_metrics{{model="tensorrt_llm",request_type="max",version="1"}} 16
nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"}} 32
nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="used",model="tensorrt_llm",version="1"}} 25
nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="max",model="tensorrt_llm",version="1"}} 100
"""


@contextmanager
def metrics_page(text: str) -> Iterator[str]:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            thread.join()


def test_the_load_is_that_of_the_engine(triton: FakeTriton) -> None:
    with metrics_page(PAGE) as url, serving(triton.url, metrics_url=url, server_version="1.2.3") as served:
        status, answer, _ = served.request("GET", "/v1/loads?include=core,disagg,queues,memory")
    (load,) = answer["loads"]
    assert status == 200 and load.pop("timestamp") > 0
    assert load == {
        "dp_rank": 0,
        "num_running_reqs": 8,
        "num_waiting_reqs": 3,
        "num_used_tokens": 800,
        "max_total_num_tokens": 3200,
        "token_usage": 0.25,
        "max_running_requests": 16,
        "utilization": 0.5,
    }
    assert (answer["version"], answer["dp_rank_count"]) == ("1.2.3", 1)
    assert (answer["aggregate"]["total_reqs"], answer["aggregate"]["avg_token_usage"]) == (11, 0.25)


def test_a_load_that_is_not_known_is_not_made_up(triton: FakeTriton, served: Served) -> None:
    status, answer, _ = served.request("GET", "/v1/loads")
    assert status == 503 and "the load is not known" in answer["error"]["message"]
    with metrics_page("something else\n") as url, serving(triton.url, metrics_url=url) as other:
        assert other.request("GET", "/v1/loads")[0] == 503


def test_a_key_without_the_right_may_not_read_the_load(triton: FakeTriton, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice key-of-alice-0123456789\nroot key-of-root-0123456789 metrics\n")
    keys.chmod(0o600)
    with metrics_page(PAGE) as url, serving(triton.url, metrics_url=url, api_keys=keys) as served:
        for key, expected in (("key-of-alice-0123456789", 403), ("key-of-root-0123456789", 200)):
            assert served.request("GET", "/v1/loads", headers={"Authorization": f"Bearer {key}"})[0] == expected


def test_version_and_models_are_told(served: Served) -> None:
    served.wait_healthy()
    assert served.request("GET", "/version")[1] == {"version": "unknown"}
    status, answer, _ = served.request("GET", "/server_info")
    assert (status, answer["served_model_name"], answer["max_model_len"]) == (200, "everbatch", 2048)


def test_the_load_of_vllm_is_the_number_of_requests_that_are_being_answered(triton: FakeTriton) -> None:
    """With an endpoint of its own: requests whose clients have just left count until that is noticed."""

    def loads() -> list[object]:
        return [served.request("GET", path)[:2] for path in ("/load", "/v1/load")]

    with serving(triton.url) as served, served.client() as client:
        assert loads() == [(200, {"server_load": 0})] * 2
        stream = client.completions.create(model="everbatch", prompt="hold", stream=True)
        next(stream)
        assert loads() == [(200, {"server_load": 1})] * 2
        stream.close()
        client.completions.create(model="everbatch", prompt="a", max_tokens=2)
        assert eventually(lambda: loads() == [(200, {"server_load": 0})] * 2, 60), "it is noticed that the client left"


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")])
def test_health_is_asked_for_in_several_ways(method: str, path: str, served: Served, triton: FakeTriton) -> None:
    assert served.request(method, path)[:2] == (200, {"status": "ready"})
    triton.model_ready = False
    try:
        assert served.request(method, path)[0] == 503
    finally:
        triton.model_ready = True

"""One scrape of /metrics has Triton's families, vLLM's and the gateway's own."""

from __future__ import annotations

from tests.gateway.conftest import serving
from tests.gateway.fake_triton import FakeTriton
from tests.gateway.test_loads import PAGE, metrics_page

ENGINES = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name="NAME",engine="0"} 3\n'
OF_A_MODEL = (
    "# HELP vllm:prompt_tokens_total Number of prefill tokens processed.\n# TYPE vllm:prompt_tokens_total counter\n"
    'vllm:prompt_tokens_total{model="ensemble",version="1"} 7\n'
)


def scraped(triton: FakeTriton, page: str, **settings: object) -> str:
    with metrics_page(page) as url, serving(triton.url, metrics_url=url, **settings) as served:
        status, text, _ = served.request("GET", "/metrics")
    assert status == 200
    return str(text)


def test_vllms_families_bear_the_name_that_clients_know_the_model_by(triton: FakeTriton) -> None:
    triton.vllm_page = ENGINES
    text = scraped(triton, PAGE, model_names=("served", "second"))
    assert text == PAGE + ENGINES.replace("NAME", "served") + text[text.index("# HELP everbatch_gateway") :]


def test_what_a_model_publishes_under_vllms_names_is_not_told_twice(triton: FakeTriton) -> None:
    triton.vllm_page = ENGINES
    assert "vllm:prompt_tokens_total" not in scraped(triton, OF_A_MODEL + PAGE)
    triton.vllm_page = None
    assert OF_A_MODEL in scraped(triton, OF_A_MODEL + PAGE), "it is all there is while the engine does not answer"


def test_a_server_that_does_not_answer_leaves_the_gateways_own_counters(triton: FakeTriton) -> None:
    with serving("127.0.0.1:9", metrics_url="http://127.0.0.1:9/metrics") as served:
        status, text, _ = served.request("GET", "/metrics")
    assert status == 200 and "everbatch_gateway_requests_in_flight 0\n" in text and "vllm:" not in text

"""Two models in one real tritonserver: each by its name over every wire, one replaced under load, one that sleeps and wakes."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import openai
import pytest

from deploy import probe
from deploy.invocation import ADMIN_HEADER
from deploy.models_file import Entry
from tests.e2e.several import WAIT_S, Load, Running, two_models
from tests.e2e.wire import TokenClient, eventually, ids_of


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with two_models(tmp_path_factory.mktemp("several")) as running:
        yield running


def kinds(running: Running) -> Counter[str]:
    """How many processes of each kind the server has: stubs by their model, without the number of a replacement."""
    found = Counter[str]()
    for pid in running.server.processes():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            is_stub = arguments[0].endswith("stub")
            found[re.sub(r"-\d+$", "", Path(arguments[1]).parts[-3]) if is_stub else " ".join(arguments[:3])] += 1
    return found


def test_openais_client_reaches_both_models_by_their_names(running: Running) -> None:
    with running.client() as client:
        assert [card.id for card in client.models.list()] == ["everbatch", "one", "two", "org/two"]
        texts = {
            name: client.completions.create(model=name, prompt="def main(", max_tokens=8, temperature=0).choices[0].text
            for name in ("everbatch", "one", "two", "org/two")
        }
        assert len(set(texts.values())) == 1, "both have the same weights here"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="three", prompt="a")


@pytest.mark.parametrize("name", ["ensemble", "tensorrt_llm_bls", "two.ensemble", "two.tensorrt_llm_bls"])
def test_two_of_tensorrt_llms_model_sets_are_there_under_two_names(name: str, running: Running) -> None:
    body = {"text_input": "def main(", "max_tokens": 4, "stream": False}
    status, text = probe.request(running.server.http_url, "POST", f"/v2/models/{name}/generate", body, WAIT_S)
    assert status == 200 and "text_output" in text


@pytest.mark.feature("002-49")
def test_the_prompt_runs_on_one_engine_and_its_output_on_the_other(running: Running) -> None:
    """Both servers of disaggregated serving, over Triton's tensors: `two` has another pool of the same model."""
    prompt, exact = [(7 * n) % 90 + 1 for n in range(75)], {"exclude_input_in_output": True}
    url = running.server.grpc_url
    with TokenClient(url) as first, TokenClient(url, "two.tensorrt_llm") as second:
        alone = second.generate(prompt, 12)
        (context,) = first.start(prompt, 12, request_type="context_only", **exact)
        assert ids_of(context) == alone[:1]
        state = context.as_numpy("context_phase_params")
        given = {"context_phase_params": state[0], "return_perf_metrics": True, **exact}
        (rest,) = second.start(prompt, 12, request_type="generation_only", **given)
        assert ids_of(rest) == alone and rest.as_numpy("num_context_tokens").item() == 1
        damaged = second.start(
            prompt, 12, request_type="generation_only", context_phase_params=state[0, :-1].tolist(), **exact
        )
        assert "is damaged: its checksum is another one" in second.error_of(damaged)
        assert second.generate(prompt, 12) == alone


def test_each_engine_has_its_own_label_and_its_own_pool(running: Running) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        page = probe.request(running.served.url, "GET", "/metrics")[1]
        found = {
            line.partition('model="')[2].partition('"')[0]: float(line.rpartition(" ")[2])
            for line in page.splitlines()
            if line.startswith("nv_trt_llm_kv_cache_block_metrics{") and '_type="max"' in line
        }
        if found == {"one": 4096 / 32, "two": 2048 / 32}:
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def test_a_model_is_replaced_under_load_without_a_failed_request(running: Running) -> None:
    """`python -m tests.soak.replacements` does it with 10,000 requests."""
    before = kinds(running)
    with Load(running) as load:
        assert running.operate("replace", "two") == 200
        served = load.answers.copy()
        deadline = time.monotonic() + WAIT_S
        while any(load.answers[name] <= served[name] for name in served) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert load.failures == [] and set(load.answers) == {"one", "two", "two.ensemble"}
    assert all(load.answers[name] > served[name] for name in served), "all are served on"
    is_clean = eventually(lambda: kinds(running) == before, WAIT_S)  # what was replaced ends a moment later
    assert is_clean, (
        f"left of the former engine and its stubs: {kinds(running) - before}; missing: {before - kinds(running)}"
    )
    assert running.server.failure() is None


def test_an_unloaded_model_is_refused_while_the_other_serves(running: Running) -> None:
    assert running.operate("unload", "two") == 200
    with running.client() as client:
        with pytest.raises(openai.InternalServerError, match="the model is unloaded"):
            client.completions.create(model="two", prompt="a", max_tokens=1)
        assert client.completions.create(model="one", prompt="a", max_tokens=1).choices
    assert probe.is_ready(running.server.http_url), "the server as a whole is well"
    assert running.operate("load", "two") == 200
    with running.client() as client:
        assert client.completions.create(model="two", prompt="a", max_tokens=1).choices


def test_tritons_model_control_unloads_and_loads_an_engine(running: Running) -> None:
    owner = running.server.sets[1].engine.owner
    key = {ADMIN_HEADER: running.server.admin_key}
    for action, state in (("unload", "unloaded"), ("load", "loaded")):
        path = f"/v2/repository/models/{owner}/{action}"
        assert probe.request(running.server.http_url, "POST", path, {"parameters": {}}, WAIT_S, key)[0] == 200
        running.wait_for("two", state)


def test_an_idle_model_sleeps_and_the_next_request_waits_for_it(running: Running) -> None:
    entries = running.server.sets[1]
    awake, entries.entry = entries.entry, Entry(entries.entry.path, idle_unload_s=1.0, load_timeout_s=WAIT_S)
    try:
        running.wait_for("two", "asleep")
        assert probe.is_ready(running.server.http_url)
        body = {"text_input": "a b", "max_tokens": 3, "stream": False}
        url = running.server.http_url
        status, text = probe.request(url, "POST", "/v2/models/two.ensemble/generate", body, WAIT_S)
        assert status == 200 and "text_output" in text
        running.wait_for("two", "asleep")
        with running.client() as client:
            assert client.completions.create(model="two", prompt="a", max_tokens=1).choices
    finally:
        entries.entry = awake


def test_a_replacement_that_cannot_be_loaded_leaves_the_former_one_serving(running: Running, tmp_path: Path) -> None:
    running.operate("load", "two")
    path = Path(running.server.sets[1].engine.share.config.model.path)
    weights = next(path.glob("*.safetensors"))
    hidden = weights.rename(tmp_path / weights.name) if weights.stat().st_dev == tmp_path.stat().st_dev else None
    assert hidden is not None
    try:
        assert running.operate("replace", "two") == 400
    finally:
        hidden.rename(weights)
    with running.client() as client:
        assert client.completions.create(model="two", prompt="a", max_tokens=1).choices
    assert probe.is_ready(running.server.http_url)


def test_a_replacement_that_takes_too_long_is_given_up(running: Running) -> None:
    """Triton goes on with a load whose caller has left; what comes of it must not stay."""
    entries = running.server._several.models.entries
    usual, before = entries["two"], len(running.server.processes())
    entries["two"] = Entry(usual.path, set=usual.set, names=usual.names, load_timeout_s=1.0)
    try:
        assert running.operate("replace", "two") == 503
    finally:
        entries["two"] = usual
    with running.client() as client:
        assert client.completions.create(model="two", prompt="a", max_tokens=1).choices
    deadline = time.monotonic() + WAIT_S
    while len(running.server.processes()) > before or not probe.is_ready(running.server.http_url):
        assert time.monotonic() < deadline, running.server.processes()
        time.sleep(0.1)
    assert running.server.failure() is None

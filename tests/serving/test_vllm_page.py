"""The engine's statistics under vLLM's names, and the command that asks for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import numpy as np
import pytest

from backend.api import EngineConfig, EngineStats, EngineUnavailable
from backend.api.config.schema import LoraSection, SchedulerConfig
from backend.api.distributions import Distributions
from backend.api.stats import EngineCounters, ImageStats, IterationStats, KvCacheStats
from backend.serving.intake.load import EngineLoad
from backend.serving.observe.vllm_page import HISTOGRAMS, vllm_page
from backend.serving.server import ModelServer
from backend.serving.wires.everbatch import EVERBATCH
from tests.serving.fake_triton import InferenceRequest
from tests.serving.scripted import ScriptedExecutor

_SAMPLE = re.compile(r'^(vllm:\w+)\{((?:\w+="(?:[^"\\\n]|\\["\\n])*",?)*)\} (\S+)$')
LATEST = IterationStats(
    num_running_sequences=5,
    num_queued_requests=3,
    num_paused_requests=2,
    num_preparing_requests=4,
    kv_cache=KvCacheStats(max_num_blocks=100, used_num_blocks=25, tokens_per_block=32),
    images=ImageStats(images_encoded_total=7, images_reused_total=4, images_failed_total=1),
)
COUNTERS = EngineCounters(
    requests_finished_total={"END_ID": 2, "STOP_WORDS": 3, "LENGTH": 5, "TIMED_OUT": 7, "CANCELLED": 11, "ERROR": 13},
    answered_prompt_tokens_total=70,
    answered_cached_tokens_total=30,
    generated_tokens_total=90,
    queried_tokens_total=80,
    cached_tokens_total=40,
    pauses_total=6,
)


def samples(page: str) -> dict[str, float]:
    """Each sample by its name and the labels besides model_name and engine. Raises AssertionError for another form."""
    found: dict[str, float] = {}
    typed: set[str] = set()
    for line in page.splitlines():
        if line.startswith("# "):
            typed.add(line.split(" ")[2])
            continue
        match = _SAMPLE.match(line)
        assert match, line
        name, labels, value = match.groups()
        own = re.sub(r'^model_name="(?:[^"\\\n]|\\["\\n])*",engine="0",?', "", labels)
        assert own != labels, line
        assert name in typed or re.sub("_(bucket|sum|count)$", "", name) in typed, line
        key = f"{name}{{{own}}}" if own else name
        assert key not in found, f"{key} twice"
        found[key] = float(value)
    return found


def page_of(config: EngineConfig = EngineConfig(), name: str = "m", **fields: object) -> dict[str, float]:  # noqa: B008
    stats = EngineStats(LATEST, COUNTERS, **fields)
    return samples(vllm_page(stats, config, 64, name))


def test_gauges_and_counters_have_vllms_names_and_the_engines_values() -> None:
    told = page_of()
    expected = {
        "vllm:num_requests_running": 5,
        "vllm:num_requests_waiting": 9,
        'vllm:num_requests_waiting_by_reason{reason="capacity"}': 5,
        'vllm:num_requests_waiting_by_reason{reason="deferred"}': 4,
        "vllm:num_requests_swapped": 0,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:gpu_cache_usage_perc": 0.25,
        "vllm:prompt_tokens_total": 70,
        "vllm:prompt_tokens_cached_total": 30,
        "vllm:generation_tokens_total": 90,
        "vllm:prefix_cache_queries_total": 80,
        "vllm:prefix_cache_hits_total": 40,
        "vllm:mm_cache_queries_total": 12,
        "vllm:mm_cache_hits_total": 4,
        "vllm:num_preemptions_total": 6,
        'vllm:request_success_total{finished_reason="stop"}': 5,
        'vllm:request_success_total{finished_reason="length"}': 5,
        'vllm:request_success_total{finished_reason="abort"}': 18,
        'vllm:request_success_total{finished_reason="error"}': 13,
    }
    assert {name: told[name] for name in expected} == expected


def test_what_is_swapped_does_not_wait_besides() -> None:
    told = page_of(EngineConfig(scheduler=SchedulerConfig(preemption="swap")))
    assert (told["vllm:num_requests_swapped"], told["vllm:num_requests_waiting"]) == (2, 7)


def test_histograms_add_their_buckets_up_and_end_with_all_values() -> None:
    counted = Distributions()
    for value in (0.0005, 0.3, 0.3, 9999.0):
        counted.add("first_token_s", value)
    for value in (1, 3, 64):
        counted.add("prompt_tokens", value)
    told = page_of(distributions=counted)
    name = "vllm:time_to_first_token_seconds"
    assert [told[f'{name}_bucket{{le="{bound}"}}'] for bound in ("0.001", "0.25", "0.5", "2560.0", "+Inf")] == [
        *(1, 1, 3, 3, 4)
    ]
    assert told[f"{name}_count"] == 4 and told[f"{name}_sum"] == pytest.approx(9999.6005)
    lengths = [key for key in told if key.startswith("vllm:request_prompt_tokens_bucket")]
    assert lengths[-2:] == [f'vllm:request_prompt_tokens_bucket{{le="{bound}"}}' for bound in ("50.0", "+Inf")], (
        "no bound is above the longest sequence"
    )
    assert told[lengths[-2]] == 2 and told[lengths[-1]] == 3
    for name in HISTOGRAMS:
        assert f"vllm:{name}_sum" in told and f'vllm:{name}_bucket{{le="+Inf"}}' in told


def test_adapters_are_named_where_there_are_any() -> None:
    assert not any("lora" in name for name in page_of())
    config = EngineConfig(lora=LoraSection(enabled=True), scheduler=SchedulerConfig(max_batch_size=8))
    told = page_of(config, running_adapters={"b": 2, "a": 1}, waiting_adapters={"c": 1})
    labels = 'max_lora="8",running_lora_adapters="a,b",waiting_lora_adapters="c"'
    assert told[f"vllm:lora_requests_info{{{labels}}}"] > 1.7e9, "the time, by which routers tell new from old"


def test_a_name_may_hold_any_text() -> None:
    page = vllm_page(EngineStats(LATEST, COUNTERS), EngineConfig(), 64, 'a"b\\c\nd}')
    assert 'vllm:num_requests_running{model_name="a\\"b\\\\c\\nd}",engine="0"} 5\n' in page
    assert page_of(name='a"b\\c\nd}') == page_of()


def refuse(load: EngineLoad) -> None:
    raise EngineUnavailable("the server is full")


def asked(make_server: Callable[..., ModelServer], request: str) -> InferenceRequest:
    server = make_server(EVERBATCH.tensors, EVERBATCH.parse, check_text=EVERBATCH.check, at_once=EVERBATCH.at_once)
    sent = InferenceRequest({"request": np.array([request.encode()], dtype=object)})
    server.execute([sent])
    return sent


def test_the_command_is_answered_with_the_page_also_when_the_server_is_full(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor.stats = EngineStats(LATEST, COUNTERS)
    monkeypatch.setattr(EngineLoad, "check", refuse)
    assert "full" in asked(make_server, '{"prompt":"a"}').sender.error()
    sent = asked(make_server, '{"metrics":"m","timeout_s":5}')
    (answer,) = sent.sender.column("response")
    reply = json.loads(answer)
    assert samples(reply["text"])["vllm:num_requests_running"] == 5
    assert reply["finish_reason"] == "stop" and reply["usage"]["completion_tokens"] == 0


def test_the_page_is_empty_while_nothing_is_known(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor
) -> None:
    (answer,) = asked(make_server, '{"metrics":"m"}').sender.column("response")
    assert json.loads(answer)["text"] == ""


@pytest.mark.parametrize(
    ("request_text", "named"),
    [
        ('{"metrics":5}', "metrics"),
        ('{"metrics":"' + "x" * 257 + '"}', "257"),
        ('{"metrics":"' + "x" * 5000 + '"}', "bytes"),
        ('{"metrics":"m","prompt":"a"}', "prompt"),
        ('{"metrics":"m"', "JSON"),
    ],
)
def test_a_command_of_another_form_is_refused(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor, request_text: str, named: str
) -> None:
    executor.stats = EngineStats(LATEST, COUNTERS)
    assert named in asked(make_server, request_text).sender.error()

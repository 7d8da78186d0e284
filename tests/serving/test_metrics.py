from __future__ import annotations

import pytest

from backend.api import EngineCounters, EngineStats, IterationStats, KvCacheStats
from backend.serving import pb
from backend.serving.metrics import MetricsPublisher
from tests.serving.fake_triton import Metric, MetricFamily

LABELS = {"model": "tensorrt_llm", "version": "1"}


@pytest.fixture(autouse=True)
def forget() -> None:
    MetricFamily.created.clear()


def metrics() -> dict[tuple[str, str], Metric]:
    """The metrics by family and the value of its own label."""
    found = {}
    for family in MetricFamily.created:
        for metric in family.metrics:
            own = [value for key, value in metric.labels.items() if key not in LABELS]
            found[family.name, own[0] if own else ""] = metric
    return found


def stats(steps: int = 7, **latest: object) -> EngineStats:
    cache = KvCacheStats(
        max_num_blocks=10, free_num_blocks=5, cached_num_blocks=3, used_num_blocks=2, tokens_per_block=32
    )
    counters = EngineCounters(steps_total=steps, recomputed_tokens_total=4, requests_finished_total={"LENGTH": 3})
    return EngineStats(IterationStats(kv_cache=cache, **latest), counters)


def test_families_carry_tensorrt_llms_names_labels_and_values() -> None:
    publisher = MetricsPublisher(pb.new_metric_family, LABELS, engine=True)
    publisher.publish_engine(stats(num_active_requests=9, num_scheduled_requests=6), ready=True)
    found = metrics()
    assert found["nv_trt_llm_request_metrics", "active"].current == 9
    assert found["nv_trt_llm_request_metrics", "waiting"].current == 3
    blocks = {
        kind: found["nv_trt_llm_kv_cache_block_metrics", kind].current for kind in ("max", "free", "used", "fraction")
    }
    assert blocks == {"max": 10, "free": 8, "used": 2, "fraction": 0.2}
    assert found["everbatch_tokens_total", "recomputed"].current == 4
    assert found["everbatch_requests_finished_total", "length"].current == 3
    assert all(metric.labels.items() >= LABELS.items() for metric in found.values())


def test_an_idle_engine_has_nothing_waiting() -> None:
    publisher = MetricsPublisher(pb.new_metric_family, LABELS, engine=True)
    publisher.publish_engine(stats(num_active_requests=0, num_scheduled_requests=6), ready=True)
    assert metrics()["nv_trt_llm_request_metrics", "waiting"].current == 0


def test_only_changed_values_are_sent() -> None:
    publisher = MetricsPublisher(pb.new_metric_family, LABELS, engine=True)
    publisher.publish_engine(stats(), ready=True)
    before = {key: metric.num_updates for key, metric in metrics().items()}
    publisher.publish_engine(stats(), ready=True)
    assert {key: metric.num_updates for key, metric in metrics().items()} == before
    publisher.publish_engine(stats(steps=8), ready=False)
    changed = {key for key, metric in metrics().items() if metric.num_updates > before[key]}
    assert changed == {("everbatch_steps_total", ""), ("everbatch_engine_ready", "")}


def test_a_counter_goes_on_growing_when_the_engine_starts_again() -> None:
    publisher = MetricsPublisher(pb.new_metric_family, LABELS, engine=True)
    for steps in (7, 9, 2, 3):
        publisher.publish_engine(stats(steps=steps), ready=True)
    assert metrics()["everbatch_steps_total", ""].current == 9 + 3


def test_a_model_that_does_not_own_the_engine_publishes_request_lengths_alone() -> None:
    publisher = MetricsPublisher(pb.new_metric_family, LABELS, engine=False)
    publisher.publish_lengths([(3, 5)])
    assert {family.name for family in MetricFamily.created} == {"nv_llm_input_token_len", "nv_llm_output_token_len"}
    assert metrics()["nv_llm_output_token_len", "total_output_tokens"].buckets == [10, 50, 100, 500, 1000]


def test_the_time_of_a_step_is_told_in_microseconds() -> None:
    publisher = MetricsPublisher(pb.new_metric_family, LABELS, engine=True)
    publisher.publish_engine(stats(timestamp_ns=1_700_000_000_123_456_789), ready=True)
    assert metrics()["nv_trt_llm_general_metrics", "timestamp"].current == 1_700_000_000_123_456

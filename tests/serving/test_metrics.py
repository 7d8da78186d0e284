from __future__ import annotations

import json
from datetime import datetime

import msgspec
import pytest

from backend.api import EngineConfig, EngineCounters, EngineStats, IterationStats, KvCacheStats, PerfMetrics
from backend.api.stats import MISSES, ImageStats, PauseCounts, SecondLevelStats, SnapshotStats
from backend.core.messages import Hello
from backend.serving import pb
from backend.serving.assembly import is_true
from backend.serving.observe.books import Books
from backend.serving.observe.ended import EndedRow
from backend.serving.observe.families import engine_families, statistics_line
from backend.serving.observe.metrics import MetricsPublisher, up_to
from tests.serving.fake_triton import Logger, Metric, MetricFamily
from tests.serving.scripted import MODEL

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
    for started_ns, steps in ((1, 7), (1, 9), (2, 10), (2, 11)):
        publisher.publish_engine(msgspec.structs.replace(stats(steps=steps), started_ns=started_ns), ready=True)
    assert metrics()["everbatch_steps_total", ""].current == 9 + 11


def test_what_was_in_flight_in_a_dead_engine_has_ended_with_it() -> None:
    publisher = MetricsPublisher(pb.new_metric_family, LABELS, engine=True)
    before = EngineCounters(requests_accepted_total=5, requests_finished_total={"LENGTH": 3})
    after = EngineCounters(requests_accepted_total=1)
    publisher.publish_engine(EngineStats(IterationStats(num_active_requests=2), before, started_ns=1), ready=True)
    publisher.publish_engine(EngineStats(IterationStats(num_active_requests=1), after, started_ns=2), ready=True)
    found = metrics()
    finished = sum(metric.current for (name, _), metric in found.items() if name == "everbatch_requests_finished_total")
    assert (found["everbatch_requests_accepted_total", ""].current, finished) == (6, 5)
    assert found["everbatch_requests_finished_total", "engine_died"].current == 2


def ended(prompt: int = 3, output: int = 5, reason: str = "length", **account: int) -> EndedRow:
    """Received at 1 s, ended at 2 s of the clock."""
    books = PerfMetrics(num_output_tokens=output, **account)
    return EndedRow("id", "", None, reason, "", prompt, output, 10**9, 2 * 10**9, 0.0, books)


TIMES = {"arrival_ns": 1_100_000_000, "first_scheduled_ns": 1_150_000_000, "first_token_ns": 1_200_000_000}


def test_a_model_that_does_not_own_the_engine_publishes_its_own_requests_alone() -> None:
    publisher = MetricsPublisher(pb.new_metric_family, LABELS, engine=False)
    publisher.publish_rows([ended(**TIMES, last_token_ns=1_600_000_000)])
    found = metrics()
    observed = {name: metric.observed for (name, _), metric in found.items() if metric.observed}
    assert observed == {
        "nv_llm_input_token_len": [3],
        "nv_llm_output_token_len": [5],
        "everbatch_time_to_first_token_seconds": [0.2],
        "everbatch_inter_token_latency_seconds": [0.1],
        "everbatch_request_seconds": [1.0],
        "everbatch_queue_seconds": [pytest.approx(0.05)],
    }
    assert found["nv_llm_output_token_len", "total_output_tokens"].buckets == [10, 50, 100, 500, 1000]
    assert found["everbatch_client_tokens_total", "output"].current == 5
    assert not any(name.startswith(("nv_trt_llm", "vllm:")) for name, _ in found)


def test_a_request_that_never_ran_has_no_times_and_one_that_failed_has_tokens_only() -> None:
    publisher = MetricsPublisher(pb.new_metric_family, LABELS, engine=False)
    publisher.publish_rows([ended(output=0, reason="timed_out", arrival_ns=5), ended(reason="error", **TIMES)])
    found = metrics()
    assert found["everbatch_request_seconds", ""].observed == [1.0]
    assert found["everbatch_queue_seconds", ""].observed == []
    assert found["everbatch_time_to_first_token_seconds", ""].observed == []
    assert found["everbatch_client_tokens_total", "prompt"].current == 6
    assert found["everbatch_client_tokens_total", "output"].current == 5


def test_vllms_families_carry_its_names_buckets_and_counts() -> None:
    publisher = MetricsPublisher(pb.new_metric_family, LABELS, engine=False)
    publisher.add_vllm(max_seq_len=120)
    publisher.add_vllm(max_seq_len=120)
    publisher.publish_rows([ended(prompt=6, output=16, **TIMES, last_token_ns=1_950_000_000)] * 3)
    found = {name: metric for (name, _), metric in metrics().items() if name.startswith("vllm:")}
    assert {name: len(metric.observed) for name, metric in found.items() if metric.buckets} == {
        "vllm:time_to_first_token_seconds": 3,
        "vllm:time_per_output_token_seconds": 45,
        "vllm:e2e_request_latency_seconds": 3,
        "vllm:request_prompt_tokens": 3,
        "vllm:request_generation_tokens": 3,
        "vllm:request_params_n": 3,
    }
    assert (found["vllm:prompt_tokens_total"].current, found["vllm:generation_tokens_total"].current) == (18, 48)
    assert found["vllm:request_prompt_tokens"].buckets == [1, 2, 5, 10, 20, 50, 100]
    assert sum(found["vllm:time_per_output_token_seconds"].observed) == pytest.approx(3 * 0.75)
    assert all(metric.labels == LABELS for metric in found.values())


def test_each_sequence_of_a_request_has_a_first_token_and_n_is_their_number() -> None:
    """Of three sequences with 5 tokens each 12 tokens follow another one."""
    publisher = MetricsPublisher(pb.new_metric_family, LABELS, engine=False)
    publisher.add_vllm(max_seq_len=120)
    row = ended(output=5, **TIMES, last_token_ns=1_950_000_000)
    publisher.publish_rows([row._replace(num_output_tokens=15, num_sequences=3)])
    found = {name: metric.observed for (name, _), metric in metrics().items()}
    assert found["vllm:request_params_n"] == [3] and len(found["vllm:time_per_output_token_seconds"]) == 12


def test_the_buckets_of_lengths_end_at_the_limit() -> None:
    assert (up_to(1), up_to(20), up_to(49)) == ([1], [1, 2, 5, 10, 20], [1, 2, 5, 10, 20])


def test_memory_is_that_of_the_engine() -> None:
    publisher = MetricsPublisher(pb.new_metric_family, LABELS, engine=True)
    publisher.publish_engine(stats(cpu_memory_bytes=7, gpu_memory_bytes=9), ready=True)
    found = metrics()
    memory = {kind: found["nv_trt_llm_runtime_memory_metrics", kind].current for kind in ("cpu", "gpu", "pinned")}
    assert memory == {"cpu": 7, "gpu": 9, "pinned": 0}


def test_the_statistics_line_has_a_key_for_each_of_tensorrt_llms_values() -> None:
    publisher = MetricsPublisher(pb.new_metric_family, LABELS, engine=True)
    now = stats(num_active_requests=9, num_scheduled_requests=6, timestamp_ns=1_700_000_000_123_456_789, iter=12)
    publisher.publish_engine(now, ready=True)
    line = json.loads(statistics_line(now))
    shown = {key: metric.current for key, metric in metrics().items() if key[0].startswith("nv_trt_llm_")}
    assert len(line) == len(shown) == 22
    assert line["Active Request Count"] == 9 and line["Waiting Requests"] == 3 and line["Iteration Counter"] == 12
    moment = datetime.strptime(line.pop("Timestamp"), "%m-%d-%Y %H:%M:%S.%f")
    assert moment.timestamp() * 1e6 == shown.pop(("nv_trt_llm_general_metrics", "timestamp"))
    assert sorted(line.values()) == sorted(shown.values())
    assert all(len(family.stats) == len(family.values) for family in engine_families(False) if family.stats)


@pytest.mark.feature("W-06")
def test_static_batches_have_a_family_in_place_of_that_of_inflight_batching() -> None:
    publisher = MetricsPublisher(pb.new_metric_family, LABELS, engine=True, is_static=True)
    now = stats(num_ctx_tokens=7, num_gen_requests=3, num_empty_gen_slots=2)
    publisher.publish_engine(now, ready=True)
    shown = {label: metric.current for (name, label), metric in metrics().items() if name == "nv_trt_llm_v1_metrics"}
    assert shown == {"total_context_tokens": 7, "total_generation_tokens": 3, "empty_generation_slots": 2}
    assert "nv_trt_llm_inflight_batcher_metrics" not in {name for name, _ in metrics()}
    line = json.loads(statistics_line(now, is_static=True))
    assert line["Empty Generation Slots"] == 2 and "Paused Requests" not in line


def test_the_time_of_a_step_is_told_in_microseconds() -> None:
    publisher = MetricsPublisher(pb.new_metric_family, LABELS, engine=True)
    publisher.publish_engine(stats(timestamp_ns=1_700_000_000_123_456_789), ready=True)
    assert metrics()["nv_trt_llm_general_metrics", "timestamp"].current == 1_700_000_000_123_456


def test_the_owner_writes_the_line_to_tritons_verbose_log() -> None:
    Logger.verbose.clear()
    books = Books(LABELS, log_requests=False, owner=True, vllm_hello=lambda: None)
    books.publish_engine(None, ready=False)
    books.publish_engine(stats(num_active_requests=9), ready=True)
    (line,) = Logger.verbose
    assert json.loads(line)["Active Request Count"] == 9


def test_vllms_families_appear_once_the_engine_is_known() -> None:
    said: list[Hello] = []
    books = Books(LABELS, log_requests=False, owner=False, vllm_hello=lambda: said[0] if said else None)
    books.publish_rows()
    assert not any(family.name.startswith("vllm:") for family in MetricFamily.created)
    said.append(Hello(1, MODEL, "", EngineConfig()))
    books.publish_rows()
    assert metrics()["vllm:request_prompt_tokens", ""].buckets == [1, 2, 5, 10, 20, 50]  # of 64 tokens at most


@pytest.mark.parametrize(
    ("text", "meant"), [("true", True), ("TRUE", True), ("1", True), ("false", False), ("", False)]
)
def test_a_parameter_of_the_model_config_switches_vllms_families_on(text: str, meant: bool) -> None:
    assert is_true({"parameters": {"REPORT_CUSTOM_METRICS": {"string_value": text}}}, "REPORT_CUSTOM_METRICS") is meant
    assert is_true({}, "REPORT_CUSTOM_METRICS") is False


CACHE = {
    "max": "max_num_blocks",
    "free": "free_num_blocks",
    "cached": "cached_num_blocks",
    "used": "used_num_blocks",
    "allocated": "allocated_num_blocks",
}
SOURCES: dict[str, dict[str, str]] = {  # family -> label -> the field of the statistics, or a term of fields
    "nv_trt_llm_request_metrics": {
        "active": "num_active_requests",
        "max": "max_num_active_requests",
        "scheduled": "num_scheduled_requests",
        "context": "num_context_requests",
        "waiting": "num_active_requests - num_scheduled_requests",
    },
    "nv_trt_llm_runtime_memory_metrics": {"cpu": "cpu_memory_bytes", "gpu": "gpu_memory_bytes", "pinned": "0"},
    "nv_trt_llm_kv_cache_block_metrics": {
        "max": "max_num_blocks",
        "free": "free_num_blocks + cached_num_blocks",
        "used": "used_num_blocks",
        "tokens_per": "tokens_per_block",
        "reused": "reused_blocks_total",
        "fraction": "used_num_blocks / max_num_blocks",
    },
    "nv_trt_llm_general_metrics": {"timestamp": "timestamp_ns // 1000", "iteration_counter": "iter"},
    "nv_trt_llm_disaggregated_serving_metrics": {
        "kv_cache_transfer_ms": "kv_transfer_ns_total / 1e6",
        "request_count": "kv_transfers_total",
    },
    "nv_trt_llm_inflight_batcher_metrics": {
        "total_context_tokens": "num_ctx_tokens",
        "generation_requests": "num_gen_requests",
        "micro_batch_id": "micro_batch_id",
        "paused_requests": "num_paused_requests",
    },
    "nv_trt_llm_v1_metrics": {
        "total_context_tokens": "num_ctx_tokens",
        "total_generation_tokens": "num_gen_requests",
        "empty_generation_slots": "num_empty_gen_slots",
    },
    "everbatch_kv_blocks": CACHE,
    "everbatch_kv_blocks_total": {
        "new": "alloc_new_blocks_total",
        "reused": "reused_blocks_total",
        "missed": "missed_blocks_total",
        "evicted": "evicted_blocks_total",
        "adopted": "adopted_blocks_total",
        "dropped": "dropped_blocks_total",
    },
    "everbatch_snapshots": {"max": "max_num_snapshots", "used": "used_num_snapshots"},
    "everbatch_snapshots_total": {kind: f"{kind}_snapshots_total" for kind in ("saved", "restored", "evicted")},
    "everbatch_second_level_blocks": {"max": "secondary_max_num_blocks", "used": "secondary_used_num_blocks"},
    "everbatch_second_level_blocks_total": {
        kind: f"{kind}_blocks_total" for kind in ("onboarded", "offloaded", "skipped", "recomputed")
    },
    "everbatch_second_level_misses_total": {reason: f"misses_total['{reason}']" for reason in MISSES},
    "everbatch_second_level_pace": {"load_bytes": "load_bytes_per_s", "prefill_tokens": "prefill_tokens_per_s"},
    "everbatch_tokens_total": {
        kind: f"{kind}_tokens_total" for kind in ("prompt", "context", "cached", "recomputed", "generated", "discarded")
    },
    "everbatch_evictions_total": {"": "sequences_evicted_total"},
    "everbatch_requests": {kind: f"num_{kind}_requests" for kind in ("active", "queued", "scheduled", "paused")},
    "everbatch_requests_accepted_total": {"": "requests_accepted_total"},
    "everbatch_requests_finished_total": {
        reason: f"requests_finished_total['{reason.upper()}']"
        for reason in ("end_id", "stop_words", "length", "timed_out", "cancelled", "error")
    }
    | {"engine_died": "0"},
    "everbatch_requests_rejected_total": {"": "requests_rejected_total"},
    "everbatch_pauses_total": {"": "pauses_total"},
    "everbatch_draft_tokens_total": {
        "accepted": "accepted_draft_tokens_total",
        "rejected": "draft_tokens_total - accepted_draft_tokens_total",
    },
    "everbatch_image_bytes": {"max": "image_max_bytes", "used": "image_used_bytes"},
    "everbatch_images_total": {kind: f"images_{kind}_total" for kind in ("encoded", "reused", "failed")},
    "everbatch_image_encoding_seconds_total": {"": "image_encoding_s_total"},
    "everbatch_steps_total": {"": "steps_total"},
    "everbatch_sessions": {"": "num_sessions"},
}


def numbered(kind: type[msgspec.Struct], first: int) -> dict[str, int]:
    """A number of its own for each field that is one."""
    fields = (field for field in msgspec.structs.fields(kind) if field.type in (int, float))
    return {field.name: first + 1000 * number for number, field in enumerate(fields)}


@pytest.mark.parametrize("is_static", [False, True])
def test_each_metric_has_the_number_that_its_name_says(is_static: bool) -> None:
    cache = numbered(KvCacheStats, 100_000)
    latest = numbered(IterationStats, 200_000) | {"num_active_requests": 10**9}  # the others are parts of it
    level = numbered(SecondLevelStats, 500_000)
    snapshots, images = numbered(SnapshotStats, 700_000), numbered(ImageStats, 800_000)
    misses = {reason: 600_000 + number for number, reason in enumerate(MISSES)}
    counters = numbered(EngineCounters, 300_000) | {"draft_tokens_total": 10**9}
    finished = {
        name: 400_000 + number
        for number, name in enumerate(("END_ID", "STOP_WORDS", "LENGTH", "TIMED_OUT", "CANCELLED", "ERROR"))
    }
    found = EngineStats(
        IterationStats(
            kv_cache=KvCacheStats(**cache),
            second_level=SecondLevelStats(misses_total=misses, **level),
            snapshots=SnapshotStats(**snapshots),
            images=ImageStats(**images),
            **latest,
        ),
        EngineCounters(requests_finished_total=finished, **counters),
    )
    parts = [
        snapshots,
        images,
        cache,
        level,
        latest,
        counters,
        {"requests_finished_total": finished, "misses_total": misses},
    ]
    values = {name: value for part in parts for name, value in part.items()}
    assert len(values) == sum(map(len, parts)), "no two fields have one name"
    families = engine_families(is_static)
    other = "nv_trt_llm_inflight_batcher_metrics" if is_static else "nv_trt_llm_v1_metrics"
    assert {family.name for family in families} == set(SOURCES) - {other}
    for family in families:
        told = {label: read(found) for label, read in family.values.items()}
        assert told == {label: eval(term, dict(values)) for label, term in SOURCES[family.name].items()}, family.name


def test_spans_are_counters_that_grow_by_what_is_new() -> None:
    publisher = MetricsPublisher(pb.new_metric_family, LABELS, engine=False)
    publisher.add_spans()
    for sent in (0, 3, 3, 5):
        publisher.publish_spans({"sent": sent, "rejected": 2, "dropped_requests": 0})
    found = metrics()
    values = [found["everbatch_spans_total", outcome] for outcome in ("sent", "rejected", "dropped_requests")]
    assert [(metric.current, metric.num_updates) for metric in values] == [(5, 2), (2, 1), (0, 0)]


@pytest.mark.parametrize("ends_engine", [False, True])
def test_the_gauges_of_an_engine_end_with_the_model_that_ends_it(ends_engine: bool) -> None:
    """Triton keeps the values of a model that is unloaded: a server with several models would show blocks of an engine that has
    gone.
    """
    books = Books(LABELS, log_requests=False, owner=True, vllm_hello=lambda: None)
    books.publish_engine(stats(num_active_requests=9), ready=True)
    books.close(ends_engine)
    found = metrics()
    gauges = ("nv_trt_llm_request_metrics", "active"), ("nv_trt_llm_kv_cache_block_metrics", "used")
    assert [found[gauge].current for gauge in gauges] == ([0, 0] if ends_engine else [9, 2])
    assert found["everbatch_tokens_total", "recomputed"].current == 4, "what was counted stays"


def test_pauses_of_the_engine_are_counters_that_grow_by_what_is_new() -> None:
    publisher = MetricsPublisher(pb.new_metric_family, LABELS, engine=False)
    for counts in (PauseCounts(), PauseCounts(3, 1, 1.5), PauseCounts(3, 1, 1.5), PauseCounts(5, 2, 4.0)):
        publisher.publish_pauses(counts)
    names = (
        "everbatch_resumed_requests_total",
        "everbatch_engine_pauses_total",
        "everbatch_engine_pause_seconds_total",
    )
    assert [metrics()[name, ""].current for name in names] == [5, 2, 4.0]

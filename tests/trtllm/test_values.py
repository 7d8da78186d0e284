"""Every value in its own place: each field of configurations, statistics and events has a number of its own, all compared."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import torch

from backend.api import EngineConfig
from backend.api import stats as core
from backend.api.lora import LoraConfig
from backend.api.request import KvOrigin
from backend.api.tensor import TensorData
from backend.core.messages import Hello
from backend.core.step import ModelInfo
from compat import trtllm
from compat.trtllm import from_core, kv_cache
from compat.trtllm.configs import PeftCacheConfig
from compat.trtllm.engine_config import engine_config
from compat.trtllm.gpt_configs import KvCacheConfig as GptKvCacheConfig
from compat.trtllm.gpt_configs import PeftCacheManagerConfig, TrtGptModelOptionalParams, TrtGptModelType
from compat.trtllm.gpt_manager import _engine_config, stats_json
from compat.trtllm.to_core import to_core

PEFT = {
    "num_host_module_layer": 11,
    "num_device_module_layer": 12,
    "optimal_adapter_size": 21,
    "max_adapter_size": 13,
    "num_put_workers": 14,
    "num_ensure_workers": 22,
    "num_copy_streams": 23,
    "max_pages_per_block_host": 25,
    "max_pages_per_block_device": 26,
    "device_cache_percent": 0.15,
    "host_cache_size": 16,
    "lora_prefetch_dir": "/seventeen",
}
LORA = {
    "enabled": True,
    "max_rank": 13,
    "host_bytes": 16,
    "device_fraction": 0.15,
    "host_module_layers": 11,
    "device_module_layers": 12,
    "page_rank": 21,
    "host_pages_per_block": 25,
    "device_pages_per_block": 26,
    "put_workers": 14,
    "ensure_workers": 22,
    "copy_streams": 23,
    "prefetch_dir": "/seventeen",
    "adapters": [],
    "allowed_dir": "",
}


def as_json(section: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(msgspec.json.encode(section))
    return found


def changed(config: EngineConfig, section: str) -> dict[str, Any]:
    """The keys of a section that differ from the defaults."""
    default, found = as_json(getattr(EngineConfig(), section)), as_json(getattr(config, section))
    return {key: value for key, value in found.items() if value != default[key]}


def test_sizes_of_lora_caches_reach_the_engine_each_in_its_place() -> None:
    config = trtllm.ExecutorConfig(peft_cache_config=PeftCacheConfig(**PEFT))
    assert as_json(engine_config(config).lora) == LORA


def test_what_gpt_manager_is_given_reaches_the_engine_each_in_its_place() -> None:
    tuning = trtllm.DynamicBatchConfig(True, False, 21)
    params = TrtGptModelOptionalParams(
        GptKvCacheConfig(
            max_tokens=640,
            max_attention_window=[64, 96],
            sink_token_length=5,
            free_gpu_memory_fraction=0.35,
            enable_block_reuse=False,
        ),
        enable_chunked_context=False,
        peft_cache_manager_config=PeftCacheManagerConfig(**PEFT),
        max_beam_width=3,
        scheduler_config=trtllm.SchedulerConfig(trtllm.CapacitySchedulerPolicy.MAX_UTILIZATION, None, tuning),
        max_batch_size=6,
        max_num_tokens=77,
    )
    config = _engine_config(TrtGptModelType.InflightBatching, params)
    assert as_json(config.lora) == LORA
    assert changed(config, "kv_cache") == {
        "max_tokens": 640,
        "max_attention_window": [64, 96],
        "sink_tokens": 5,
        "free_memory_fraction": 0.35,
        "enable_block_reuse": False,
        "sharing": "all",
    }
    assert changed(config, "scheduler") == {
        "max_batch_size": 6,
        "max_num_tokens": 77,
        "max_beam_width": 3,
        "policy": "max_utilization",
        "batching": "separate",
        "enable_chunked_context": False,
        "enable_batch_size_tuning": True,
        "tuning_requests": 21,
    }
    other = TrtGptModelOptionalParams(GptKvCacheConfig(enable_block_reuse=True), enable_chunked_context=True)
    config = _engine_config(TrtGptModelType.V1, other)
    assert (config.kv_cache.enable_block_reuse, config.scheduler.enable_chunked_context) == (True, True)
    assert config.scheduler.batching == "static"
    assert _engine_config(TrtGptModelType.InflightFusedBatching, other).scheduler.batching == "fused"


def test_several_devices_of_gpt_manager_are_refused() -> None:
    with pytest.raises(RuntimeError, match="device_ids"):
        _engine_config(TrtGptModelType.V1, TrtGptModelOptionalParams(device_ids=[0, 1]))


def test_an_adapter_of_a_request_reaches_the_engine_whole() -> None:
    rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    config = [[7, 8, 9], [10, 11, 12], [13, 14, 15]]
    for with_front in (False, True):
        weights = torch.tensor([rows] if with_front else rows)
        places = torch.tensor([config] if with_front else config, dtype=torch.int32)
        request = trtllm.Request([1], 1, lora_config=trtllm.LoraConfig(6, weights, places))
        data = torch.tensor(rows).numpy().tobytes()
        expected = LoraConfig(6, TensorData("float32", (3, 2), data), ((7, 8, 9), (10, 11, 12), (13, 14, 15)))
        assert to_core(request, 100, 1).lora == expected
    assert to_core(trtllm.Request([1], 1, lora_config=trtllm.LoraConfig(6)), 100, 1).lora == LoraConfig(6)
    assert to_core(trtllm.Request([1], 1), 100, 1).lora is None


KV = core.KvCacheStats(
    max_num_blocks=100,
    free_num_blocks=10,
    cached_num_blocks=20,
    used_num_blocks=70,
    tokens_per_block=32,
    allocated_num_blocks=90,
    alloc_new_blocks_total=51,
    reused_blocks_total=30,
    missed_blocks_total=70,
    evicted_blocks_total=54,
)
ITERATION = core.IterationStats(
    iter=101,
    iter_latency_ms=2.5,
    num_active_requests=103,
    num_queued_requests=104,
    num_paused_requests=105,
    num_completed_requests=106,
    num_new_active_requests=107,
    new_active_requests_queue_latency_ms=8.5,
    max_num_active_requests=109,
    num_scheduled_requests=110,
    num_context_requests=111,
    num_gen_requests=112,
    num_ctx_tokens=113,
    num_empty_gen_slots=114,
    num_gen_tokens=224,
    micro_batch_id=116,
    cpu_memory_bytes=117,
    gpu_memory_bytes=118,
    kv_cache=KV,
)
NEWEST = core.IterationStats(cpu_memory_bytes=217, gpu_memory_bytes=218)


def hello(batching: str = "fused", device: str = "cpu") -> Hello:
    config = msgspec.convert({"scheduler": {"batching": batching}}, EngineConfig)
    return Hello(1, ModelInfo("m", 10, 64, device=device), "", config)


def plain(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record._fields}


def test_statistics_of_an_iteration_are_told_each_in_its_place() -> None:
    found = plain(from_core.iteration_stats(ITERATION, hello(), NEWEST))
    kv, inflight = plain(found.pop("kv_cache_stats")), plain(found.pop("inflight_batching_stats"))
    assert kv == {
        "max_num_blocks": 100,
        "free_num_blocks": 30,  # those that hold KV nobody uses are free as well
        "used_num_blocks": 70,
        "tokens_per_block": 32,
        "alloc_total_blocks": 51,
        "alloc_new_blocks": 51,
        "reused_blocks": 30,
        "missed_blocks": 70,
        "cache_hit_rate": 0.3,
    }
    assert inflight == {
        "num_scheduled_requests": 110,
        "num_context_requests": 111,
        "num_gen_requests": 112,
        "num_paused_requests": 105,
        "num_ctx_tokens": 113,
        "micro_batch_id": 116,
        "avg_num_decoded_tokens_per_iter": 2.0,
    }
    found.pop("timestamp")
    assert found == {
        "iter": 101,
        "iter_latency_ms": 2.5,
        "new_active_requests_queue_latency_ms": 8.5,
        "num_new_active_requests": 107,
        "num_active_requests": 103,
        "num_queued_requests": 104,
        "num_completed_requests": 106,
        "max_num_active_requests": 109,
        "gpu_mem_usage": 217,  # the model runs on the CPU, whose memory is that of the engine process
        "cpu_mem_usage": 217,
        "pinned_mem_usage": 0,
        "cross_kv_cache_stats": None,
        "static_batching_stats": None,
        "specdec_stats": None,
    }
    on_gpu = from_core.iteration_stats(ITERATION, hello(device="cuda"), NEWEST)
    assert (on_gpu.gpu_mem_usage, on_gpu.cpu_mem_usage) == (218, 217)


def test_statistics_of_a_static_batch_are_told_each_in_its_place() -> None:
    found = from_core.iteration_stats(ITERATION, hello("static"), NEWEST)
    assert found.inflight_batching_stats is None
    assert plain(found.static_batching_stats) == {
        "num_scheduled_requests": 110,
        "num_context_requests": 111,
        "num_ctx_tokens": 113,
        "num_gen_tokens": 224,
        "empty_gen_slots": 114,
    }


def test_statistics_of_a_request_are_told_each_in_its_place() -> None:
    given = core.RequestStats(7, core.RequestStage.GENERATION, 21, 22, True, False, 30, 10, 11)
    (found,) = from_core.request_stats(core.IterationRequests(5, [given])).request_stats
    assert plain(found) == {
        "id": 7,
        "stage": trtllm.RequestStage.GENERATION_IN_PROGRESS,
        "context_prefill_position": 21,
        "num_generated_tokens": 22,
        "avg_num_decoded_tokens_per_iter": 2.0,
        "scheduled": True,
        "paused": False,
        "dis_serving_stats": None,
        "alloc_total_blocks_per_request": 30,
        "alloc_new_blocks_per_request": 30,
        "reused_blocks_per_request": 10,
        "missed_blocks_per_request": 30,
        "kv_cache_hit_rate_per_request": 0.25,
    }
    paused = msgspec.structs.replace(given, is_scheduled=False, is_paused=True)
    (found,) = from_core.request_stats(core.IterationRequests(5, [paused])).request_stats
    assert (found.scheduled, found.paused) == (False, True)


@pytest.mark.parametrize(
    ("model_type", "own"),
    [
        (TrtGptModelType.InflightFusedBatching, {"Generation Requests": 112, "MicroBatch ID": 116}),
        (TrtGptModelType.V1, {"Total Generation Tokens": 112, "Empty Generation Slots": 114}),
    ],
)
def test_statistics_of_gpt_manager_are_told_each_in_its_place(model_type: Any, own: dict[str, int]) -> None:
    told = json.loads(stats_json(ITERATION, core.EngineStats(NEWEST, core.EngineCounters()), model_type))
    told.pop("Timestamp")
    assert told == {
        "Iteration Counter": 101,
        "Active Request Count": 103,
        "Max Request Count": 109,
        "Max KV cache blocks": 100,
        "Free KV cache blocks": 30,
        "Used KV cache blocks": 70,
        "Tokens per KV cache block": 32,
        "Reused KV cache blocks": 30,
        "Scheduled Requests": 110,
        "Context Requests": 111,
        "Paused Requests": 105,
        "Waiting Requests": 104,
        "Total Context Tokens": 113,
        "Runtime CPU Memory Usage": 217,
        "Runtime GPU Memory Usage": 218,
        "Runtime Pinned Memory Usage": 0,
        **own,
    }


def test_events_of_the_cache_are_told_each_as_what_it_is() -> None:
    model = ModelInfo("m", 10, 64)

    def told(event_id: int, data: Any) -> Any:
        event = from_core.kv_event(core.KvEvent(event_id, data), model)
        assert (event.event_id, event.window_size) == (event_id, 64)
        return event.data

    assert told(1, core.BlocksCreated(9)) == kv_cache.KVCacheCreatedData([9, 0])
    assert told(2, core.BlocksRemoved([3, 4])) == kv_cache.KVCacheRemovedData([3, 4])
    updated = told(3, core.BlockUpdated(5, 6))
    assert isinstance(updated, kv_cache.KVCacheUpdatedData)
    assert (updated.block_hash, updated.cache_level, updated.priority.new_value) == (5, None, 6)
    stored = told(
        4, core.BlocksStored(7, [core.StoredBlock(8, [1, 2]), core.StoredBlock(9, [3])], KvOrigin(lora_id=33))
    )
    assert isinstance(stored, kv_cache.KVCacheStoredData) and stored.parent_hash == 7
    found = [(each.block_hash, [token.token_id for token in each.tokens], each.lora_id) for each in stored.blocks]
    assert found == [(8, [1, 2], 33), (9, [3], 33)]
    windowed = from_core.kv_event(core.KvEvent(5, core.BlocksCreated(1)), ModelInfo("m", 10, 64, 48))
    assert windowed.window_size == 48

"""ExecutorConfig as the engine's configuration, Request as the core's: what arrives, and what is refused by name."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from backend.api import AdditionalOutput, EngineConfig, OutputConfig, SamplingConfig
from backend.api.config.ranges import MAX_SECONDS
from backend.api.config.schema import DEBUG_INPUTS, ModelConfigSection, SpeculationConfig, WorkersConfig
from backend.api.config.schema import KvCacheConfig as CoreKvCacheConfig
from backend.api.request import RetentionConfig, TokenRangeRetention
from backend.executor.own_processors import OF_REQUEST
from compat import trtllm
from compat.trtllm.engine_config import engine_config, runs_in_own_process
from compat.trtllm.to_core import to_core

POLICY = trtllm.CapacitySchedulerPolicy
CHUNKING = trtllm.ContextChunkingPolicy


CHUNKED = {"enable_chunked_context": True}  # without it max_num_tokens cannot be tuned


def tuned(*options: Any) -> trtllm.SchedulerConfig:
    return trtllm.SchedulerConfig(dynamic_batch_config=trtllm.DynamicBatchConfig(*options))


@pytest.mark.parametrize(
    ("options", "key", "expected"),
    [
        ({}, "scheduler.max_batch_size", 64),
        ({"max_batch_size": 8}, "scheduler.max_batch_size", 8),
        ({}, "scheduler.max_num_tokens", 8192),
        ({"max_beam_width": 3}, "scheduler.max_beam_width", 3),
        ({"max_num_tokens": 128}, "scheduler.max_num_tokens", 128),
        ({}, "scheduler.policy", "guaranteed_no_evict"),
        ({"scheduler_config": trtllm.SchedulerConfig(POLICY.MAX_UTILIZATION)}, "scheduler.policy", "max_utilization"),
        ({"scheduler_config": trtllm.SchedulerConfig(POLICY.STATIC_BATCH)}, "scheduler.policy", "static_batch"),
        ({"scheduler_config": tuned(True, False, 7)}, "scheduler.enable_batch_size_tuning", True),
        ({"scheduler_config": tuned(False, True, 7), **CHUNKED}, "scheduler.enable_max_num_tokens_tuning", True),
        ({"scheduler_config": tuned(False, True, 7), **CHUNKED}, "scheduler.enable_batch_size_tuning", False),
        ({"scheduler_config": tuned(True, True, 7), **CHUNKED}, "scheduler.tuning_requests", 7),
        ({}, "scheduler.chunking_policy", "first_come_first_served"),
        (
            {"scheduler_config": trtllm.SchedulerConfig(context_chunking_policy=CHUNKING.EQUAL_PROGRESS)},
            "scheduler.chunking_policy",
            "equal_progress",
        ),
        ({}, "scheduler.enable_chunked_context", False),
        ({"enable_chunked_context": True}, "scheduler.enable_chunked_context", True),
        ({}, "scheduler.batching", "fused"),
        ({"batching_type": trtllm.BatchingType.STATIC}, "scheduler.batching", "static"),
        ({}, "kv_cache.enable_block_reuse", True),
        ({"kv_cache_config": trtllm.KvCacheConfig(False)}, "kv_cache.enable_block_reuse", False),
        ({"kv_cache_config": trtllm.KvCacheConfig(max_tokens=99)}, "kv_cache.max_tokens", 99),
        (
            {"kv_cache_config": trtllm.KvCacheConfig(free_gpu_memory_fraction=0.5)},
            "kv_cache.free_memory_fraction",
            0.5,
        ),
        (
            {"kv_cache_config": trtllm.KvCacheConfig(enable_partial_reuse=False)},
            "kv_cache.enable_partial_reuse",
            False,
        ),
        (
            {"kv_cache_config": trtllm.KvCacheConfig(max_attention_window=[7, 9])},
            "kv_cache.max_attention_window",
            (7, 9),
        ),
        ({"kv_cache_config": trtllm.KvCacheConfig(max_attention_window=[])}, "kv_cache.max_attention_window", None),
        ({"kv_cache_config": trtllm.KvCacheConfig(sink_token_length=4)}, "kv_cache.sink_tokens", 4),
        ({"kv_cache_config": trtllm.KvCacheConfig(host_cache_size=9999)}, "kv_cache.host_cache_bytes", 9999),
        ({"kv_cache_config": trtllm.KvCacheConfig(onboard_blocks=False)}, "kv_cache.onboard_blocks", False),
        (
            {"kv_cache_config": trtllm.KvCacheConfig(secondary_offload_min_priority=40)},
            "kv_cache.secondary_offload_min_priority",
            40,
        ),
        ({}, "kv_cache.sink_tokens", 0),
        ({"max_queue_size": 3}, "limits.max_queue_size", 3),
        ({"enable_trt_overlap": True}, "scheduler.look_ahead", True),
        ({}, "scheduler.look_ahead", None),
        ({"max_queue_size": 0}, "limits.max_queue_size", 1 << 40),
        ({"max_queue_size": -1}, "limits.max_queue_size", 1 << 40),
        ({"max_num_tokens": 16}, "scheduler.max_batch_size", 16),
        ({}, "lora.enabled", True),
        ({"peft_cache_config": None}, "lora.enabled", False),
        ({}, "limits.default_timeout_s", MAX_SECONDS),
        ({}, "records.max_iterations", 1000),
        ({"additional_model_outputs": [trtllm.AdditionalModelOutput("x")]}, "model.additional_outputs", ("x",)),
        ({"request_stats_max_iterations": 5}, "records.max_request_iterations", 5),
        ({"kv_cache_config": trtllm.KvCacheConfig(event_buffer_max_size=6)}, "records.max_kv_events", 6),
        ({"peft_cache_config": trtllm.PeftCacheConfig(lora_prefetch_dir="x")}, "lora.prefetch_dir", "x"),
        ({"debug_config": trtllm.DebugConfig(True, False, [], 7)}, "records.max_debug_iterations", 7),
        ({"debug_config": trtllm.DebugConfig(True, False, [], 7)}, "records.debug_tensors", DEBUG_INPUTS),
        ({"debug_config": trtllm.DebugConfig(False, True, [], 7)}, "records.debug_tensors", ("logits",)),
        (
            {
                "debug_config": trtllm.DebugConfig(True, True, [], 7),
                "additional_model_outputs": [trtllm.AdditionalModelOutput("hidden_states")],
            },
            "records.debug_tensors",
            (*DEBUG_INPUTS, "logits", "hidden_states"),
        ),
        ({"debug_config": trtllm.DebugConfig(True, True, ["slots"], 7)}, "records.debug_tensors", ("slots",)),
        ({"debug_config": trtllm.DebugConfig(False, False, [], 7)}, "records.max_debug_iterations", 0),
    ],
)
def test_what_the_engine_is_configured_with(options: dict[str, Any], key: str, expected: object) -> None:
    section, name = key.split(".")
    assert getattr(getattr(engine_config(trtllm.ExecutorConfig(**options)), section), name) == expected


def test_a_program_may_bring_what_the_bindings_have_no_name_for() -> None:
    config = trtllm.ExecutorConfig(max_batch_size=3)
    config.engine_config = EngineConfig(ModelConfigSection(num_threads=1), CoreKvCacheConfig(block_size=16))
    made = engine_config(config)
    assert (made.model.num_threads, made.kv_cache.block_size, made.scheduler.max_batch_size) == (1, 16, 3)
    config.engine_config = {"model": {}}
    with pytest.raises(TypeError, match="a backend.api.EngineConfig is needed"):
        engine_config(config)


def kv(**options: Any) -> dict[str, Any]:
    return {"kv_cache_config": trtllm.KvCacheConfig(**options)}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (kv(cross_kv_cache_fraction=0.5), "kv_cache_config.cross_kv_cache_fraction is 0.5"),
        (kv(use_uvm=True), "kv_cache_config.use_uvm is True"),
        (kv(max_gpu_total_bytes=1), "kv_cache_config.max_gpu_total_bytes is 1"),
        (
            {
                "batching_type": trtllm.BatchingType.STATIC,
                "logits_post_processor_config": trtllm.LogitsPostProcessorConfig({"mine": print}),
            },
            "logits_post_processor_config is given",
        ),
        ({"spec_dec_config": trtllm.SpeculativeDecodingConfig(True)}, "spec_dec_config.fast_logits is True"),
        ({"use_gpu_direct_storage": True}, "use_gpu_direct_storage is True"),
        ({"gpu_weights_percent": 0.5}, "gpu_weights_percent is 0.5"),
        ({"mm_embedding_offloading": True}, "mm_embedding_offloading is True"),
        (
            {"debug_config": trtllm.DebugConfig(debug_tensor_names=["x"])},
            "debug_config.debug_tensors_max_iterations is 0",
        ),
        (
            {"debug_config": trtllm.DebugConfig(True, debug_tensors_max_iterations=-1)},
            "debug_config.debug_tensors_max_iterations is -1",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(options: dict[str, Any], name: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        engine_config(trtllm.ExecutorConfig(**options))
    assert f"ExecutorConfig.{name}" in str(caught.value) and "not serve: " in str(caught.value)


def test_lookahead_is_lookup_of_so_many_tokens() -> None:
    """Of n-grams of 5 one token is known; the least is one guess, the most is what a step takes."""

    def speculation(*sizes: int) -> SpeculationConfig:
        decoding = trtllm.DecodingConfig(lookahead_decoding_config=trtllm.LookaheadDecodingConfig(*sizes))
        return engine_config(trtllm.ExecutorConfig(decoding_config=decoding)).speculation

    assert speculation(7, 5, 3) == SpeculationConfig("lookup", max_draft_tokens=4)
    assert [speculation(7, size, 3).max_draft_tokens for size in (1, 2, 1000)] == [1, 1, 256]
    only_the_mode = trtllm.DecodingConfig(trtllm.DecodingMode.Lookahead())
    assert engine_config(trtllm.ExecutorConfig(decoding_config=only_the_mode)).speculation == SpeculationConfig(
        "lookup"
    )
    another = trtllm.DecodingConfig(trtllm.DecodingMode.TopKTopP())
    assert engine_config(trtllm.ExecutorConfig(decoding_config=another)).speculation == SpeculationConfig()


def test_hints_and_neutral_values_are_taken() -> None:
    engine_config(
        trtllm.ExecutorConfig(
            recv_poll_period_ms=50,
            max_seq_idle_microseconds=1,
            extended_runtime_perf_knob_config=trtllm.ExtendedRuntimePerfKnobConfig(False, True),
            debug_config=trtllm.DebugConfig(),
            spec_dec_config=trtllm.SpeculativeDecodingConfig(),
            decoding_config=trtllm.DecodingConfig(trtllm.DecodingMode.TopKTopP()),
            kv_cache_config=trtllm.KvCacheConfig(onboard_blocks=False, sink_token_length=0, host_cache_size=0),
        )
    )


ORCHESTRATOR = trtllm.CommunicationMode.ORCHESTRATOR


@pytest.mark.parametrize(
    ("parallel", "own"),
    [
        (None, False),
        (trtllm.ParallelConfig(), False),
        (trtllm.ParallelConfig(device_ids=[0], participant_ids=[0], num_nodes=1), False),
        (trtllm.ParallelConfig(communication_mode=ORCHESTRATOR), True),
        (
            trtllm.ParallelConfig(
                communication_mode=ORCHESTRATOR, orchestrator_config=trtllm.OrchestratorConfig(True, "worker")
            ),
            True,
        ),
    ],
)
def test_the_parallel_configuration_says_where_the_engine_runs(parallel: Any, own: bool) -> None:
    assert runs_in_own_process(parallel) is own


@pytest.mark.parametrize(("ids", "size"), [(None, 1), ([], 1), ([0], 1), ([4, 5], 2)])
def test_there_are_as_many_ranks_as_participants(ids: list[int] | None, size: int) -> None:
    config = trtllm.ExecutorConfig(parallel_config=trtllm.ParallelConfig(participant_ids=ids))
    assert engine_config(config).workers.tensor_parallel_size == size


@pytest.mark.parametrize(("nodes", "address"), [(None, ""), (1, ""), (2, "env")])
def test_ranks_of_several_nodes_are_those_that_mpirun_has_started(nodes: int | None, address: str) -> None:
    parallel = trtllm.ParallelConfig(participant_ids=[0, 1], num_nodes=nodes)
    assert engine_config(trtllm.ExecutorConfig(parallel_config=parallel)).workers.join_address == address


def test_several_nodes_need_several_ranks() -> None:
    config = trtllm.ExecutorConfig(parallel_config=trtllm.ParallelConfig(num_nodes=2))
    with pytest.raises(RuntimeError, match="num_nodes is env and there is one rank"):
        engine_config(config)


def test_participants_are_the_ranks_of_all_stages() -> None:
    stages = EngineConfig(workers=WorkersConfig(pipeline_parallel_size=2))

    def of(ids: list[int]) -> WorkersConfig:
        config = trtllm.ExecutorConfig(parallel_config=trtllm.ParallelConfig(participant_ids=ids))
        config.engine_config = stages
        return engine_config(config).workers

    assert (of([0, 1]).tensor_parallel_size, of([0, 1]).pipeline_parallel_size) == (1, 2)
    assert of([0, 1, 2, 3]) == WorkersConfig(2, 2)
    with pytest.raises(RuntimeError, match="participant_ids has 3 ids, and .*pipeline_parallel_size is 2; give 2 ids"):
        of([0, 1, 2])


@pytest.mark.parametrize(
    ("parallel", "name"),
    [
        (trtllm.ParallelConfig(device_ids=[0, 1]), r"device_ids is \[0, 1\]"),
        (
            trtllm.ParallelConfig(
                communication_mode=ORCHESTRATOR, orchestrator_config=trtllm.OrchestratorConfig(is_orchestrator=False)
            ),
            "is_orchestrator is False",
        ),
        (
            trtllm.ParallelConfig(
                communication_mode=ORCHESTRATOR, orchestrator_config=trtllm.OrchestratorConfig(spawn_processes=False)
            ),
            "spawn_processes is False",
        ),
    ],
)
def test_more_ranks_than_there_are_are_refused_by_name(parallel: Any, name: str) -> None:
    with pytest.raises(RuntimeError, match=name):
        runs_in_own_process(parallel)


HIDDEN = trtllm.AdditionalModelOutput("hidden_states", True)


def converted(**options: Any) -> Any:
    return to_core(trtllm.Request([1, 2], 5, **options), vocab_size=10, max_beam_width=4)


@pytest.mark.parametrize(
    ("options", "name", "expected"),
    [
        ({}, "end_ids", ()),
        ({"end_id": -1}, "end_ids", ()),
        ({"end_id": 3}, "end_ids", (3,)),
        ({"streaming": True}, "streaming", True),
        ({"stop_words": [[1], [2, 3]]}, "stop_words", [[1], [2, 3]]),
        ({"bad_words": [[4]]}, "bad_words", [[4]]),
        ({"client_id": 7}, "client_id", 7),
        ({"return_all_generated_tokens": True}, "return_all_generated_tokens", True),
        ({"priority": 0.25}, "priority", 0.25),
        ({"allotted_time_ms": timedelta(milliseconds=250)}, "timeout_s", 0.25),
        ({"cache_salt_id": 9}, "cache_salt", "9"),
        ({}, "cache_salt", ""),
        ({}, "sampling_config", SamplingConfig()),
        ({"num_return_sequences": 3}, "sampling_config", SamplingConfig(num_return_sequences=3)),
        ({}, "output_config", OutputConfig()),
        ({"pad_id": 3}, "end_ids", ()),
        ({}, "max_draft_tokens", None),
        ({"lookahead_config": trtllm.LookaheadDecodingConfig(7, 5, 3)}, "max_draft_tokens", 4),
        ({"external_draft_tokens_config": trtllm.ExternalDraftTokensConfig([8, 9])}, "draft_tokens", [8, 9]),
        ({"logits_post_processor_name": "mine"}, "logits_post_processor", "mine"),
        ({"logits_post_processor": print}, "logits_post_processor", OF_REQUEST),
        (
            {"sampling_config": trtllm.SamplingConfig(top_p=0.5, top_p_decay=0.5, top_p_min=0.25, top_p_reset_ids=3)},
            "sampling_config",
            SamplingConfig(top_p=0.5, top_p_decay=0.5, top_p_min=0.25, top_p_reset_ids=3),
        ),
        (
            {"output_config": trtllm.OutputConfig(False, True, True, False, False, False, [HIDDEN])},
            "output_config",
            OutputConfig(
                return_context_logits=True,
                return_generation_logits=True,
                additional_outputs=(AdditionalOutput("hidden_states", True),),
            ),
        ),
        (
            {"output_config": trtllm.OutputConfig(True, exclude_input_from_output=True, return_perf_metrics=True)},
            "output_config",
            OutputConfig(return_log_probs=True, exclude_input_from_output=True, return_perf_metrics=True),
        ),
        (
            {
                "sampling_config": trtllm.SamplingConfig(
                    3, top_k=5, top_p=0.5, min_p=0.1, seed=7, temperature=0.5, min_tokens=2, num_return_sequences=2
                )
            },
            "sampling_config",
            SamplingConfig(3, 2, 0.5, 5, 0.5, 0.1, 7, min_tokens=2),
        ),
        (
            {
                "sampling_config": trtllm.SamplingConfig(
                    repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25, temperature=0.5
                )
            },
            "sampling_config",
            SamplingConfig(
                temperature=0.5, top_k=1, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25
            ),
        ),
        (
            {"embedding_bias": torch.tensor([0.0] * 8 + [1.5, -2.0])},
            "sampling_config",
            SamplingConfig(logit_bias={8: 1.5, 9: -2.0}),
        ),
        (
            {
                "kv_cache_retention_config": trtllm.KvCacheRetentionConfig(
                    [
                        trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig(2, None, 90),
                        trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig(0, 2, 30, timedelta(seconds=9)),
                    ],
                    80,
                    timedelta(seconds=1),
                )
            },
            "retention",
            RetentionConfig((TokenRangeRetention(0, 2, 30, 9.0), TokenRangeRetention(2, None, 90)), 80, 1.0),
        ),
    ],
)
def test_what_the_core_is_asked_for(options: dict[str, Any], name: str, expected: object) -> None:
    request = converted(**options)
    assert getattr(request, name) == expected
    assert (request.input_token_ids, request.max_tokens) == ([1, 2], 5)


def test_neutral_values_of_sampling_ask_for_nothing() -> None:
    neutral = trtllm.SamplingConfig(top_p_decay=0.0, top_p_min=0.0, top_p_reset_ids=-1)
    assert converted(sampling_config=neutral).sampling_config == SamplingConfig()


def test_what_beams_heed_is_handed_on_and_an_array_of_widths_refused_with_beams() -> None:
    search = {"length_penalty": 2.0, "early_stopping": 0, "beam_search_diversity_rate": 0.5}
    assert converted(sampling_config=trtllm.SamplingConfig(2, **search)).sampling_config == SamplingConfig(2, **search)
    converted(sampling_config=trtllm.SamplingConfig(1, beam_width_array=[2]))
    with pytest.raises(Exception, match="SamplingConfig.beam_width_array is not served"):
        converted(sampling_config=trtllm.SamplingConfig(2, beam_width_array=[2]))


@pytest.mark.feature("000-33")
def test_more_beams_than_the_executor_allows_are_refused() -> None:
    assert converted(sampling_config=trtllm.SamplingConfig(4)).sampling_config.beam_width == 4
    with pytest.raises(Exception, match="beam_width is 5, the limit is max_beam_width 4"):
        converted(sampling_config=trtllm.SamplingConfig(5))


def test_a_dense_bias_may_have_a_row_in_front_but_no_other_shape() -> None:
    assert converted(embedding_bias=torch.eye(1, 10)).sampling_config.logit_bias == {0: 1.0}
    with pytest.raises(Exception, match=r"it is \[10, 1\], \[10\] is needed"):
        converted(embedding_bias=torch.zeros(10, 1))

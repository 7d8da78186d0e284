"""The keyword arguments of LLM: what they change, what is refused, and what is unknown."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from backend.api import ConfigError, EngineConfig, InvalidRequest
from backend.api.config.schema import (
    KvCacheConfig,
    LimitsConfig,
    LoraSection,
    ModelConfigSection,
    RecordsConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from compat.llm import NotHere, ParameterError
from compat.llm.arguments import PROGRAM, LlmArguments


def config(**given: object) -> EngineConfig:
    return LlmArguments(given).config


def test_without_arguments_the_configuration_is_the_engines_own() -> None:
    assert config() == PROGRAM
    logits = ModelConfigSection(gather_context_logits=True, gather_generation_logits=True)
    assert msgspec.structs.replace(PROGRAM, limits=LimitsConfig()) == EngineConfig(
        model=logits, kv_cache=KvCacheConfig(sharing="all")
    )
    with pytest.raises(TypeError, match="engine_config is a dict, a backend.api.EngineConfig is needed"):
        config(engine_config={"scheduler": {}})
    mine = EngineConfig(scheduler=SchedulerConfig(max_batch_size=3))
    assert config(engine_config=mine) == mine


def test_arguments_change_their_keys() -> None:
    changed = config(
        dtype="float32", max_seq_len=99, max_batch_size=5, max_num_tokens=77, enable_chunked_prefill=False,
        disable_overlap_scheduler=True,
    )  # fmt: skip
    assert (changed.model.dtype, changed.model.max_seq_len) == ("float32", 99)
    scheduler = changed.scheduler
    assert (scheduler.max_batch_size, scheduler.max_num_tokens, scheduler.look_ahead) == (5, 77, False)
    assert scheduler.enable_chunked_context is False


def test_the_cache_is_configured_by_a_dictionary_an_object_or_our_own_section() -> None:
    fields = dict(enable_block_reuse=False, max_tokens=640, free_gpu_memory_fraction=0.5, max_attention_window=[64, 32])
    fields |= dict(sink_token_length=4)
    by_name = config(kv_cache_config=fields).kv_cache
    assert (by_name.enable_block_reuse, by_name.max_tokens, by_name.free_memory_fraction) == (False, 640, 0.5)
    assert (by_name.max_attention_window, by_name.sink_tokens) == ((64, 32), 4)
    theirs = SimpleNamespace(**fields, host_cache_size=None, onboard_blocks=True, use_uvm=False)
    level = {"host_cache_size": 1 << 20, "onboard_blocks": False, "secondary_offload_min_priority": 40}
    second = config(kv_cache_config=level).kv_cache
    assert (second.host_cache_bytes, second.onboard_blocks, second.secondary_offload_min_priority) == (
        1 << 20,
        False,
        40,
    )
    assert config(kv_cache_config=theirs).kv_cache == by_name
    assert config(kv_cache_config=KvCacheConfig(num_slots=100)).kv_cache.num_slots == 100


def test_the_scheduler_is_configured_by_names_or_by_members() -> None:
    by_name = config(scheduler_config={"capacity_scheduler_policy": "MAX_UTILIZATION"})
    member = SimpleNamespace(name="MAX_UTILIZATION")
    by_member = config(scheduler_config=SimpleNamespace(capacity_scheduler_policy=member, context_chunking_policy=None))
    assert by_name == by_member and by_name.scheduler.policy == "max_utilization"
    equal = config(scheduler_config={"context_chunking_policy": "EQUAL_PROGRESS"})
    assert equal.scheduler.chunking_policy == "equal_progress"


def test_records_of_iterations_are_kept_where_they_are_wanted() -> None:
    assert config(enable_iter_perf_stats=True).records == RecordsConfig(max_iterations=1000)
    asked = config(iter_stats_max_iterations=7, request_stats_max_iterations=5, enable_iter_perf_stats=True)
    assert asked.records == RecordsConfig(max_iterations=7, max_request_iterations=5)
    assert config(kv_cache_config={"event_buffer_max_size": 16}).records.max_kv_events == 16


REFUSED = {
    "context_parallel_size": 2,
    "tokenizer_mode": "slow",
    "trust_remote_code": True,
    "revision": "main",
    "tokenizer_revision": "main",
    "speculative_config": {"decoding_type": "Eagle", "max_draft_len": 4},
    "batch_wait_timeout_ms": 5,
    "orchestrator_type": "mpi",
    "kv_cache_config": {"use_uvm": True},
    "scheduler_config": {"capacity_scheduler_policy": "NO_SUCH"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_here_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(NotHere, match=f"^{name}"):
        LlmArguments({name: REFUSED[name]})


def test_what_asks_for_nothing_is_taken() -> None:
    nothing = dict(
        tensor_parallel_size=1, pipeline_parallel_size=1, context_parallel_size=1, enable_lora=False, lora_config=None,
        trust_remote_code=False, revision=None, guided_decoding_backend=None, batch_wait_timeout_ms=0, dtype="auto",
        max_batch_size=None, max_seq_len=None, max_input_len=None, max_beam_width=None, num_postprocess_workers=0,
        gather_generation_logits=True, batched_logits_processor=None, orchestrator_type=None, kv_cache_config=None,
        stream_interval=1,
    )  # fmt: skip
    assert config(**nothing) == PROGRAM


class NGramDecodingConfig:
    """As TensorRT-LLM's, which need not be installed."""

    max_draft_len = 5
    is_public_pool = False


class DraftTargetDecodingConfig:
    """Likewise; some versions name the draft model so."""

    speculative_model = Path("small")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, SpeculationConfig()),
        (NGramDecodingConfig(), SpeculationConfig("lookup", max_draft_tokens=5, max_shared_tokens=0)),
        ({"decoding_type": "NGram", "max_draft_len": None}, SpeculationConfig("lookup")),
        ({"decoding_type": "AUTO"}, SpeculationConfig("lookup")),
        ({"decoding_type": "Lookahead"}, SpeculationConfig("lookup", max_draft_tokens=2)),
        ({"decoding_type": "Lookahead", "max_ngram_size": 7}, SpeculationConfig("lookup", max_draft_tokens=6)),
        ({"decoding_type": "Lookahead", "max_ngram_size": 1}, SpeculationConfig("lookup", max_draft_tokens=1)),
        ({"decoding_type": "NGram", "is_public_pool": True}, SpeculationConfig("lookup")),
        (DraftTargetDecodingConfig(), SpeculationConfig("draft_model", "small")),
        (
            {"decoding_type": "Draft_Target", "max_draft_len": 3, "speculative_model_dir": "small"},
            SpeculationConfig("draft_model", "small", max_draft_tokens=3),
        ),
    ],
)
def test_speculative_configurations(given: object, expected: SpeculationConfig) -> None:
    """Lookahead's n-grams have 3 tokens unless it is said, and one of them is known. The least is one guess."""
    assert config(speculative_config=given).speculation == expected


@pytest.mark.parametrize("name", ["max_window_size", "max_ngram_size"])
def test_a_size_of_lookahead_that_is_0_is_not_one_that_is_left_out(name: str) -> None:
    with pytest.raises(InvalidRequest, match="the least are 1, 1 and 0"):
        LlmArguments({"speculative_config": {"decoding_type": "Lookahead", name: 0}})


def test_a_draft_target_needs_a_draft() -> None:
    with pytest.raises(ParameterError, match="give speculative_model_dir"):
        LlmArguments({"speculative_config": {"decoding_type": "Draft_Target"}})
    with pytest.raises(
        ParameterError, match="has no decoding_type; give one of NGram, Lookahead, AUTO and Draft_Target"
    ):
        LlmArguments({"speculative_config": {"method": "ngram"}})  # as vLLM writes it


@pytest.mark.feature("002-45")
def test_adapters_are_served_where_they_are_asked_for() -> None:
    assert config(enable_lora=True).lora == LoraSection(enabled=True)
    assert config(lora_config={"max_lora_rank": 8}).lora == LoraSection(enabled=True, max_rank=8)
    cache = SimpleNamespace(
        host_cache_size=7,
        device_cache_percent=0.5,
        max_adapter_size=32,
        num_put_workers=2,
        lora_prefetch_dir="x",
        optimal_adapter_size=16,
        num_ensure_workers=3,
        num_copy_streams=4,
        max_pages_per_block_host=5,
        max_pages_per_block_device=6,
    )
    expected = LoraSection(
        enabled=True,
        host_bytes=7,
        device_fraction=0.5,
        max_rank=32,
        put_workers=2,
        prefetch_dir="x",
        page_rank=16,
        ensure_workers=3,
        copy_streams=4,
        host_pages_per_block=5,
        device_pages_per_block=6,
    )
    assert config(enable_lora=True, peft_cache_config=cache).lora == expected


def test_an_unknown_argument_is_a_type_error_with_the_one_that_was_meant() -> None:
    message = r"max_batchsize of LLM is no known parameter; did you mean max_batch_size\?"
    with pytest.raises(TypeError, match=message):
        LlmArguments({"max_batchsize": 3})
    with pytest.raises(TypeError, match="zzz of LLM is no known parameter; docs/parameters.md lists"):
        LlmArguments({"zzz": 3})
    with pytest.raises(
        TypeError, match=r"kv_cache_config.max_token of LLM is no known .*; did you mean kv_cache_config.max_tokens\?"
    ):
        LlmArguments({"kv_cache_config": {"max_token": 3}})


def test_values_out_of_range_are_told_by_their_key() -> None:
    with pytest.raises(ConfigError, match="scheduler.max_batch_size is 0"):
        LlmArguments({"max_batch_size": 0})
    with pytest.raises(ValueError, match="^model.dtype would be 'float8'; docs/configuration.md says what it can be$"):
        LlmArguments({"dtype": "float8"})
    with pytest.raises(ValueError, match="stream_interval is 0, at least 1 is needed"):
        LlmArguments({"stream_interval": 0})


def test_the_engine_gets_a_process_of_its_own_where_that_is_asked_for() -> None:
    assert LlmArguments({"orchestrator_type": "rpc"}).has_own_process
    assert not LlmArguments({}).has_own_process

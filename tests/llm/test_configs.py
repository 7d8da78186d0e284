"""The classes of TensorRT-LLM's LLM API: each of their fields is honoured, without effect, or refused by name."""

from __future__ import annotations

from datetime import timedelta

import pytest

import compat.llm
from compat import llm
from compat.config_object import ConfigObject
from compat.llm import KvCacheRetentionConfig, NotHere
from compat.llm.arguments import PROGRAM, LlmArguments
from compat.llm.configs import DecodingBaseConfig
from compat.llm.mapping import retention
from compat.llm.parameters import ARGUMENTS

FOUND = [getattr(llm, name) for name in llm.__all__]
CLASSES = [each for each in FOUND if isinstance(each, type) and issubclass(each, ConfigObject)]
REFUSED = [each for each in CLASSES if each.refused]
TAKEN = [each for each in CLASSES if not each.refused]
SWITCHES = {"lora_config", "cache_transceiver_config", "speculative_config"}  # an object alone asks for something
# what user code of TensorRT-LLM 1.x imports from tensorrt_llm and tensorrt_llm.llmapi
IMPORTED = """
    LLM SamplingParams GuidedDecodingParams KvCacheConfig KvCacheRetentionConfig SchedulerConfig CapacitySchedulerPolicy
    ContextChunkingPolicy DynamicBatchConfig BatchingType BuildConfig QuantConfig QuantAlgo CalibConfig CudaGraphConfig MoeConfig
    TorchCompileConfig NGramDecodingConfig EagleDecodingConfig MedusaDecodingConfig LookaheadDecodingConfig MTPDecodingConfig
    DraftTargetDecodingConfig AutoDecodingConfig UserProvidedDecodingConfig LoRARequest LoraConfig PeftCacheConfig
    CacheTransceiverConfig DisaggregatedParams ExtendedRuntimePerfKnobConfig RequestOutput CompletionOutput RequestError
    MpiCommSession AttentionDpConfig SaveHiddenStatesDecodingConfig
"""


def config(**given: object) -> object:
    return LlmArguments(given).config


def test_what_programs_import_is_there() -> None:
    assert [name for name in IMPORTED.split() if not hasattr(compat.llm, name)] == []
    assert len(REFUSED) >= 6 and len(TAKEN) >= 15


@pytest.mark.parametrize("cls", TAKEN, ids=lambda cls: cls.__name__)
def test_every_field_is_in_the_table_and_its_default_is_taken(cls: type[ConfigObject]) -> None:
    assert [name for name in cls.fields if f"{cls.argument}.{name}" not in ARGUMENTS] == []
    section, _, inner = cls.argument.partition(".")
    whole = {name: value for name, value in cls().to_dict().items() if value is not None}
    if section == "speculative_config":
        whole |= {"speculative_model_dir": "small"}
    given = cls(**whole)
    config(**{section: {inner: given} if inner else given})
    if section not in SWITCHES:
        assert config(**{section: {inner: cls()} if inner else cls()}) == PROGRAM


def test_the_table_has_no_field_that_no_class_has() -> None:
    ours = {f"{cls.argument}.{name}" for cls in CLASSES for name in cls.fields}
    rows = {parameter.key for parameter in ARGUMENTS if "." in parameter.key}
    apart = {"speculative_config.decoding_type", "speculative_config.speculative_model"}  # of dictionaries
    assert rows - ours == apart


@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_a_class_that_is_not_served_is_refused_with_what_to_use_instead(cls: type[ConfigObject]) -> None:
    with pytest.raises(NotHere, match=f"^{cls.argument} is a {cls.__name__}, which this version does not serve: .*use"):
        config(**{cls.argument: cls(**{cls.fields[0]: 1})})


def test_fields_reach_the_engine() -> None:
    cache = llm.KvCacheConfig(max_tokens=640, enable_block_reuse=False, dtype="int8")
    made = config(
        kv_cache_config=cache,
        scheduler_config=llm.SchedulerConfig(
            capacity_scheduler_policy=llm.CapacitySchedulerPolicy.MAX_UTILIZATION,
            dynamic_batch_config=llm.DynamicBatchConfig(dynamic_batch_moving_average_window=7),
        ),
        build_config=llm.BuildConfig(max_batch_size=5, max_seq_len=99, max_input_len=30),
        quant_config=llm.QuantConfig(quant_algo=llm.QuantAlgo.W8A16),
        speculative_config=llm.NGramDecodingConfig(max_draft_len=5, is_public_pool=False),
        batching_type=llm.BatchingType.STATIC,
        cuda_graph_config=None,
    )
    assert (made.kv_cache.max_tokens, made.kv_cache.enable_block_reuse, made.kv_cache.dtype) == (640, False, "int8")
    assert made.kv_cache.free_memory_fraction is None  # the default of a class is not passed on
    assert (made.scheduler.policy, made.scheduler.tuning_requests) == ("max_utilization", 7)
    assert (made.scheduler.max_batch_size, made.model.max_seq_len) == (5, 99)
    assert (made.model.quantization, made.model.cuda_graphs) == ("int8", False)
    assert (made.speculation.mode, made.speculation.max_draft_tokens) == ("lookup", 5)
    assert (made.speculation.max_shared_tokens, made.scheduler.batching) == (0, "static")
    assert LlmArguments({"build_config": llm.BuildConfig(max_input_len=30)}).max_input_len == 30
    assert LlmArguments({"build_config": llm.BuildConfig(max_input_len=30), "max_input_len": 8}).max_input_len == 8
    draft = llm.DraftTargetDecodingConfig(max_draft_len=3, speculative_model_dir="small")
    assert config(speculative_config=draft).speculation.draft_model == "small"


def test_a_field_that_is_set_later_counts_as_given() -> None:
    cache = llm.KvCacheConfig()
    cache.max_tokens = 64
    assert config(kv_cache_config=cache).kv_cache.max_tokens == 64
    assert cache.model_dump(exclude_unset=True) == {"max_tokens": 64} and cache.to_dict()["onboard_blocks"] is True
    assert cache == llm.KvCacheConfig.from_dict({"max_tokens": 64}) != llm.KvCacheConfig()
    assert repr(cache) == "KvCacheConfig(max_tokens=64)"


def test_a_wrong_name_is_a_type_error_with_the_one_that_was_meant() -> None:
    with pytest.raises(
        TypeError, match=r"KvCacheConfig\(\) .* keyword argument 'max_token'; did you mean max_tokens\?"
    ):
        llm.KvCacheConfig(max_token=3)
    with pytest.raises(TypeError, match="'zzz'; known are batch_sizes, max_batch_size, enable_padding"):
        llm.CudaGraphConfig(zzz=3)
    with pytest.raises(AttributeError, match=r"SchedulerConfig has no field 'context_chunking_polic'; did you mean"):
        llm.SchedulerConfig().context_chunking_polic = "EQUAL_PROGRESS"
    for wrong in (5, "x", [1], b"x", True):
        with pytest.raises(
            TypeError, match="kv_cache_config is a .*, an object or a dictionary with its fields is needed"
        ):
            config(kv_cache_config=wrong)
    with pytest.raises(TypeError, match=r"kv_cache_config.capacity_scheduler_policy of LLM is no known parameter"):
        config(kv_cache_config=llm.SchedulerConfig(capacity_scheduler_policy="MAX_UTILIZATION"))


@pytest.mark.parametrize("algorithm", ["FP8", llm.QuantAlgo.NVFP4, 1e308, "nothing"])
def test_quantisations_that_are_not_made_while_loading_are_refused(algorithm: object) -> None:
    with pytest.raises(
        NotHere, match="quant_config.quant_algo of LLM is .*a float checkpoint is quantised to NO_QUANT, W8A16"
    ):
        config(quant_config=llm.QuantConfig(quant_algo=algorithm))
    with pytest.raises(NotHere, match="kv_cache_quant_algo of LLM is .*NO_QUANT or INT8 is expected"):
        config(quant_config={"kv_cache_quant_algo": algorithm})


def test_retention_is_that_of_the_engine_and_mpi_is_refused() -> None:
    span = KvCacheRetentionConfig.TokenRangeRetentionConfig(0, 8, 80, timedelta(seconds=3))
    found = retention(KvCacheRetentionConfig([span], 20, 500))
    assert found.token_ranges[0].duration_s == 3 and (found.decode_priority, found.decode_duration_s) == (20, 0.5)
    with pytest.raises(NotHere, match="transfer_mode and directory send retained KV to a file"):
        KvCacheRetentionConfig([], directory="x")
    with pytest.raises(NotHere, match="leave mpi_session out and set tensor_parallel_size"):
        llm.MpiCommSession(n_workers=2)


def test_all_kinds_of_speculative_decoding_have_their_own_name() -> None:
    kinds = [cls for cls in CLASSES if issubclass(cls, DecodingBaseConfig)]
    assert len({cls.decoding_type for cls in kinds}) == len(kinds) == 9

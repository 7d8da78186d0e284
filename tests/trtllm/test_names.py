"""Which names the module has, its enumerations and decoding modes, and the checks of single classes."""

from __future__ import annotations

import json
import pickle
import pydoc
import re
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch

import backend
from compat import trtllm
from compat.trtllm import bindings

# From section B, by hand.
CLASSES = """
Executor Request SamplingConfig OutputConfig AdditionalModelOutput ExternalDraftTokensConfig PromptTuningConfig LoraConfig
MultimodalInput MropeConfig LookaheadDecodingConfig EagleConfig KvCacheRetentionConfig ContextPhaseParams GuidedDecodingParams
RequestType FinishReason ModelType BatchingType CapacitySchedulerPolicy ContextChunkingPolicy CommunicationType CommunicationMode
RequestStage KvCacheTransferMode Response Result AdditionalOutput RequestPerfMetrics IterationStats KvCacheStats
InflightBatchingStats StaticBatchingStats RequestStats RequestStatsPerIteration DebugTensorsPerIteration ExecutorConfig
KvCacheConfig RuntimeDefaults SchedulerConfig DynamicBatchConfig PeftCacheConfig LogitsPostProcessorConfig GuidedDecodingConfig
DecodingConfig DecodingMode ParallelConfig OrchestratorConfig DebugConfig ExtendedRuntimePerfKnobConfig SpeculativeDecodingConfig
CacheTransceiverConfig
""".split()
EVENTS = """
KVCacheEventManager KVCacheEvent KVCacheCreatedData KVCacheStoredData KVCacheRemovedData KVCacheUpdatedData
""".split()
ENUMS = {
    "ModelType": "DECODER_ONLY ENCODER_ONLY ENCODER_DECODER",
    "BatchingType": "STATIC INFLIGHT",
    "CapacitySchedulerPolicy": "MAX_UTILIZATION GUARANTEED_NO_EVICT STATIC_BATCH",
    "ContextChunkingPolicy": "FIRST_COME_FIRST_SERVED EQUAL_PROGRESS",
    "CommunicationType": "MPI",
    "CommunicationMode": "LEADER ORCHESTRATOR",
    "RequestType": "REQUEST_TYPE_CONTEXT_AND_GENERATION REQUEST_TYPE_CONTEXT_ONLY REQUEST_TYPE_GENERATION_ONLY",
    "FinishReason": "NOT_FINISHED END_ID STOP_WORDS LENGTH TIMED_OUT CANCELLED",
    "RequestStage": "QUEUED ENCODER_IN_PROGRESS CONTEXT_IN_PROGRESS GENERATION_IN_PROGRESS GENERATION_COMPLETE",
    "KvCacheTransferMode": "DRAM GDS POSIX_DEBUG_FALLBACK",
}
NESTED_ENUMS = {
    trtllm.GuidedDecodingParams.GuideType: "JSON JSON_SCHEMA REGEX EBNF_GRAMMAR STRUCTURAL_TAG",
    trtllm.GuidedDecodingConfig.GuidedDecodingBackend: "XGRAMMAR LLGUIDANCE",
    bindings.TrtGptModelType: "V1 InflightBatching InflightFusedBatching",
}
Range = trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig


@pytest.mark.feature("000-56")
def test_help_of_the_module_lists_every_class() -> None:
    page = pydoc.plain(pydoc.render_doc(trtllm))
    assert [name for name in CLASSES if f"class {name}(" not in page] == []
    events = pydoc.plain(pydoc.render_doc(trtllm.kv_cache))
    assert [name for name in EVENTS if f"class {name}(" not in events] == []


# Names of the C++ API that its Python bindings have as well. Getters of fields are attributes in Python.
CPP = {
    "Executor": """
        enqueueRequest enqueueRequests awaitResponses getNumResponsesReady cancelRequest shutdown canEnqueueRequests
        getLatestIterationStats getLatestRequestStats getLatestDebugTensors
    """,
    "Response": "hasError errorMsg result requestId clientId",
    "Result": """
        isFinal outputTokenIds cumLogProbs logProbs contextLogits generationLogits finishReasons sequenceIndex isSequenceFinal
        additionalOutputs contextPhaseParams
    """,
    "Request": """
        inputTokenIds maxTokens streaming samplingConfig outputConfig endId padId badWords stopWords embeddingBias
        externalDraftTokensConfig promptTuningConfig loraConfig kvCacheRetentionConfig logitsPostProcessorName clientId
        returnAllGeneratedTokens priority requestType contextPhaseParams guidedDecodingParams allottedTimeMs
    """,
    "SamplingConfig": "beamWidth topK topP temperature minTokens numReturnSequences",
    "ExecutorConfig": "maxBeamWidth schedulerConfig kvCacheConfig logitsPostProcessorConfig guidedDecodingConfig parallelConfig",
    "LogitsPostProcessorConfig": "processorMap processorBatched replicate",
    "GuidedDecodingConfig": "backend encodedVocab tokenizerStr stopTokenIds",
    "OrchestratorConfig": "isOrchestrator workerExecutablePath spawnProcesses",
}


@pytest.mark.feature("000-58")
@pytest.mark.parametrize("name", CPP)
def test_names_of_the_cpp_api_are_kept_in_pythons_spelling(name: str) -> None:
    spelled = [re.sub("([A-Z])", r"_\1", each).lower() for each in CPP[name].split()]
    assert [each for each in spelled if each not in dir(getattr(trtllm, name))] == []


def test_the_version_is_the_project_s() -> None:
    assert trtllm.__version__ == backend.__version__
    assert bindings.binding_type == "pybind"


@pytest.mark.parametrize(
    ("enum", "names"), [(getattr(trtllm, name), names) for name, names in ENUMS.items()] + [*NESTED_ENUMS.items()]
)
def test_enumerations_have_the_documented_members_in_order(enum: Any, names: str) -> None:
    assert list(enum.__members__) == names.split()
    for number, name in enumerate(names.split()):
        member = getattr(enum, name)
        assert (int(member), member.value, member.name, enum(number)) == (number, number, name, member)
        assert str(member) == f"{enum.__name__}.{name}" and member != number
        assert pickle.loads(pickle.dumps(member)) is member


MODES = ("Auto", "TopK", "TopP", "TopKTopP", "BeamSearch", "Medusa", "Lookahead", "ExplicitDraftTokens", "Eagle")


@pytest.mark.parametrize("name", MODES)
def test_a_decoding_mode_knows_what_it_is(name: str) -> None:
    mode = getattr(trtllm.DecodingMode, name)()
    asked = {each: getattr(mode, "isTopKandTopP" if each == "TopKTopP" else f"is{each}")() for each in MODES}
    true = {each for each, answer in asked.items() if answer}
    assert true == ({"TopK", "TopP", "TopKTopP"} if name == "TopKTopP" else {name})
    assert mode.name == name and mode == getattr(trtllm.DecodingMode, name)()
    assert mode != trtllm.DecodingMode.Eagle() or name == "Eagle"
    assert pickle.loads(pickle.dumps(mode)) == mode


def test_the_part_of_a_decoding_mode_sets_the_mode() -> None:
    for part, value, is_mode in (
        ("lookahead_decoding_config", trtllm.LookaheadDecodingConfig(3, 5, 7), "isLookahead"),
        ("medusa_choices", [[0, 0], [0, 1]], "isMedusa"),
        ("eagle_config", trtllm.EagleConfig([[0]]), "isEagle"),
    ):
        config = trtllm.DecodingConfig()
        setattr(config, part, value)
        assert getattr(config.decoding_mode, is_mode)() and getattr(config, part) == value
        assert getattr(trtllm.DecodingConfig(**{part: value}).decoding_mode, is_mode)()


def test_sizes_of_lookahead_have_their_least() -> None:
    assert trtllm.LookaheadDecodingConfig(1, 1, 0).max_ngram_size == 1
    for sizes in ((0, 1, 0), (1, 0, 0), (1, 1, -1)):
        with pytest.raises(
            RuntimeError, match="window and n-gram size must be 1 or more, the verification set 0 or more"
        ):
            trtllm.LookaheadDecodingConfig(*sizes)


@pytest.mark.parametrize(
    "make",
    [
        lambda: trtllm.KvCacheRetentionConfig([Range(0, 10, 50), Range(5, 15, 50)], 50),
        lambda: trtllm.KvCacheRetentionConfig([Range(5, None, 50), Range(8, 9, 50)], 50),
        lambda: trtllm.KvCacheRetentionConfig([Range(0, 1, 50)], 101),
        lambda: Range(5, 5, 50),
        lambda: Range(5, 3, 50),
        lambda: Range(-1, 3, 50),
        lambda: Range(0, 3, 101),
    ],
)
def test_a_retention_that_makes_no_sense_is_refused(make: Any) -> None:
    with pytest.raises(RuntimeError):
        make()


def test_retention_ranges_may_come_in_any_order_and_the_last_may_be_open() -> None:
    config = trtllm.KvCacheRetentionConfig([Range(10, None, 0), Range(0, 10, 100, timedelta(seconds=30))], 80)
    assert [each.token_start for each in config.token_range_retention_configs] == [10, 0]


@pytest.mark.parametrize("kind", ["JSON_SCHEMA", "REGEX", "EBNF_GRAMMAR", "STRUCTURAL_TAG"])
def test_all_kinds_of_guides_but_json_need_a_guide(kind: str) -> None:
    guide_type = trtllm.GuidedDecodingParams.GuideType[kind]
    with pytest.raises(RuntimeError, match="guide string must be provided"):
        trtllm.GuidedDecodingParams(guide_type)
    assert trtllm.GuidedDecodingParams(guide_type, "x").guide == "x"
    assert trtllm.GuidedDecodingParams(trtllm.GuidedDecodingParams.GuideType.JSON).guide is None


@pytest.mark.feature("000-22")
def test_a_response_is_an_error_or_a_result_and_the_other_one_raises() -> None:
    error, answer = trtllm.Response(1, "wrong", 7), trtllm.Response(2, trtllm.Result())
    assert error.has_error() and not answer.has_error()
    assert (error.error_msg, error.client_id, answer.client_id) == ("wrong", 7, None)
    assert answer.result == trtllm.Result()
    with pytest.raises(RuntimeError):
        error.result  # noqa: B018
    with pytest.raises(RuntimeError):
        answer.error_msg  # noqa: B018
    assert trtllm.Response(request_id=2, result=trtllm.Result(), client_id=None) == answer
    assert pickle.loads(pickle.dumps(answer)) == answer


def test_logits_of_a_response_can_be_let_go_of() -> None:
    result = trtllm.Result(context_logits=torch.ones(2, 3), generation_logits=torch.ones(1, 2, 3))
    response = trtllm.Response(1, result)
    response.clear_context_logits()
    assert response.result.context_logits is None and response.result.generation_logits is not None
    response.clear_generation_logits()
    assert response.result.generation_logits is None


def test_iteration_statistics_have_the_documented_json() -> None:
    stats = trtllm.IterationStats(timestamp="01:23:56", iter=1, iter_latency_ms=100, gpu_mem_usage=1024)
    tree = json.loads(stats.to_json_str())
    assert set(tree) == set(
        "timestamp iter iterLatencyMS newActiveRequestsQueueLatencyMS numActiveRequests numQueuedRequests "
        "numCompletedRequests maxNumActiveRequests gpuMemUsage cpuMemUsage pinnedMemUsage kvCacheStats "
        "staticBatchingStats inflightBatchingStats".split()
    )
    assert (tree["timestamp"], tree["iter"], tree["iterLatencyMS"], tree["gpuMemUsage"]) == ("01:23:56", 1, 100, 1024)
    assert tree["kvCacheStats"] is tree["staticBatchingStats"] is tree["inflightBatchingStats"] is None
    stats.kv_cache_stats = trtllm.KvCacheStats(max_num_blocks=5, tokens_per_block=64)
    stats.static_batching_stats = trtllm.StaticBatchingStats(empty_gen_slots=3)
    stats.inflight_batching_stats = trtllm.InflightBatchingStats(micro_batch_id=1)
    tree = json.loads(stats.to_json_str())
    assert set(tree["kvCacheStats"]) == set(
        "maxNumBlocks freeNumBlocks usedNumBlocks tokensPerBlock allocTotalBlocks allocNewBlocks reusedBlocks "
        "missedBlocks cacheHitRate".split()
    )
    assert tree["kvCacheStats"]["maxNumBlocks"] == 5
    assert tree["staticBatchingStats"] == {
        "numScheduledRequests": 0,
        "numContextRequests": 0,
        "numCtxTokens": 0,
        "numGenTokens": 0,
        "emptyGenSlots": 3,
    }
    assert set(tree["inflightBatchingStats"]) == set(
        "numScheduledRequests numContextRequests numGenRequests numPausedRequests numCtxTokens microBatchId "
        "avgNumDecodedTokensPerIter".split()
    )


def test_request_statistics_have_the_documented_json() -> None:
    stats = trtllm.RequestStats(id=1, stage=trtllm.RequestStage.CONTEXT_IN_PROGRESS, context_prefill_position=2)
    tree = json.loads(stats.to_json_str())
    assert (tree["id"], tree["stage"], tree["contextPrefillPosition"]) == (1, "CONTEXT_IN_PROGRESS", 2)
    assert tree["disServingStats"] is None and tree["scheduled"] is False
    assert {"numGeneratedTokens", "avgNumDecodedTokensPerIter", "paused", "kvCacheHitRatePerRequest"} <= set(tree)
    tree = json.loads(trtllm.RequestStatsPerIteration(3, [stats]).to_json_str())
    assert (tree["iter"], tree["requestStats"][0]["id"]) == (3, 1)


def test_importing_the_module_loads_no_torch() -> None:
    program = "import sys; from compat import trtllm; from compat.trtllm import bindings; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"

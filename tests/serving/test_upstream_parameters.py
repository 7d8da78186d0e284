"""Parameters of TensorRT-LLM's config.pbtxt files."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from backend.api import ConfigError, EngineConfig, load_config
from backend.api.config.schema import KvCacheConfig, WorkersConfig
from backend.serving import assembly
from backend.serving.lifecycle import environment
from backend.serving.upstream_parameters import PARAMETERS, apply_parameters, set_parameters
from tests.e2e.wire import eventually
from tests.serving.fake_triton import InferenceRequest
from tests.serving.helpers import ints, strings, tokenizer_with_bos
from tests.serving.scripted import ScriptedExecutor
from tools import write_parameter_table

ROOT = Path(__file__).resolve().parents[2]
# Every key of upstream's template for tensorrt_llm.
UPSTREAM = """
gpt_model_type batching_strategy gpt_model_path encoder_model_path batch_scheduler_policy max_tokens_in_paged_kv_cache
kv_cache_free_gpu_mem_fraction cross_kv_cache_fraction kv_cache_host_memory_bytes kv_cache_onboard_blocks
enable_kv_cache_reuse sink_token_length max_attention_window_size max_beam_width decoding_mode enable_chunked_context
normalize_log_probs exclude_input_in_output cancellation_check_period_ms stats_check_period_ms recv_poll_period_ms
iter_stats_max_iterations request_stats_max_iterations gpu_device_ids participant_ids num_nodes gpu_weights_percent
executor_worker_path lora_cache_optimal_adapter_size lora_cache_max_adapter_size lora_cache_gpu_memory_fraction
lora_cache_host_memory_bytes lora_prefetch_dir multi_block_mode enable_context_fmha_fp32_acc cuda_graph_mode
cuda_graph_cache_size enable_trt_overlap lookahead_window_size lookahead_ngram_size lookahead_verification_set_size
medusa_choices eagle_choices speculative_decoding_fast_logits guided_decoding_backend tokenizer_dir
xgrammar_tokenizer_info_path
"""


def config_of(**parameters: str) -> dict[str, Any]:
    """A config.pbtxt as Triton's JSON."""
    return {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}


def applied(role: str = "tensorrt_llm", **parameters: str) -> EngineConfig:
    return apply_parameters(role, config_of(**parameters), EngineConfig()).config


@pytest.mark.feature("W-03")
def test_every_key_of_upstreams_template_has_a_fate() -> None:
    keys = [parameter.key for parameter in PARAMETERS["tensorrt_llm"]]
    assert sorted(keys) == sorted(UPSTREAM.split())


def test_every_target_is_a_key_of_the_configuration() -> None:
    for parameters in PARAMETERS.values():
        for parameter in parameters:
            if parameter.target:
                section, _, name = parameter.target.partition(".")
                assert hasattr(getattr(EngineConfig(), section), name)
            assert parameter.fate == "honoured" or parameter.note


@pytest.mark.feature("W-03")
@pytest.mark.parametrize(
    ("key", "text", "target", "value"),
    [
        ("gpt_model_type", "inflight_batching", "scheduler.batching", "separate"),
        ("gpt_model_type", "V1", "scheduler.batching", "static"),
        ("batching_strategy", "inflight_batching", "scheduler.batching", "separate"),
        ("gpt_model_path", "/models/llama", "model.path", "/models/llama"),
        ("batch_scheduler_policy", "max_utilization", "scheduler.policy", "max_utilization"),
        ("batch_scheduler_policy", "static_batch", "scheduler.policy", "static_batch"),
        ("max_beam_width", "4", "scheduler.max_beam_width", 4),
        ("max_tokens_in_paged_kv_cache", "2560", "kv_cache.max_tokens", 2560),
        ("kv_cache_free_gpu_mem_fraction", "0.4", "kv_cache.free_memory_fraction", 0.4),
        ("kv_cache_host_memory_bytes", "1000000", "kv_cache.host_cache_bytes", 1000000),
        ("kv_cache_onboard_blocks", "false", "kv_cache.onboard_blocks", False),
        ("enable_kv_cache_reuse", "False", "kv_cache.enable_block_reuse", False),
        ("max_attention_window_size", "64,128, 64", "kv_cache.max_attention_window", (64, 128, 64)),
        ("sink_token_length", "4", "kv_cache.sink_tokens", 4),
        ("enable_chunked_context", "0", "scheduler.enable_chunked_context", False),
        ("exclude_input_in_output", "True", "triton.exclude_input_in_output", True),
        ("cancellation_check_period_ms", "100", "triton.cancellation_check_period_ms", 100),
        ("stats_check_period_ms", "200", "triton.stats_period_ms", 200),
        ("gpu_device_ids", "1", "model.device", "cuda:1"),
        ("participant_ids", "4,5", "workers.tensor_parallel_size", 2),
        ("lora_cache_max_adapter_size", "32", "lora.max_rank", 32),
        ("lora_cache_optimal_adapter_size", "16", "lora.page_rank", 16),
        ("lora_cache_gpu_memory_fraction", "0.1", "lora.device_fraction", 0.1),
        ("lora_cache_host_memory_bytes", "1000", "lora.host_bytes", 1000),
        ("lora_prefetch_dir", "/loras", "lora.prefetch_dir", "/loras"),
        ("cuda_graph_mode", "false", "model.cuda_graphs", False),
        ("decoding_mode", "lookahead", "speculation.mode", "lookup"),
        ("lookahead_ngram_size", "5", "speculation.max_draft_tokens", 4),
        ("guided_decoding_backend", "xgrammar", "guided.backend", "xgrammar"),
        ("xgrammar_tokenizer_info_path", "info.json", "guided.tokenizer_info", "info.json"),
    ],
)
def test_what_is_honoured_changes_its_key_and_nothing_else(key: str, text: str, target: str, value: object) -> None:
    section, _, name = target.partition(".")
    tree = msgspec.to_builtins(EngineConfig())
    assert tree[section][name] != value
    tree[section][name] = value
    assert msgspec.to_builtins(applied(**{key: text})) == tree


def test_the_table_of_honoured_keys_above_is_complete() -> None:
    (mark,) = (
        mark for mark in test_what_is_honoured_changes_its_key_and_nothing_else.pytestmark if mark.name == "parametrize"
    )
    assert {row[0] for row in mark.args[1]} == {
        parameter.key for parameter in PARAMETERS["tensorrt_llm"] if parameter.fate == "honoured"
    }


@pytest.mark.parametrize("text", ["", "  ", "${gpt_model_type}"])
def test_what_a_template_leaves_behind_is_unset(text: str) -> None:
    assert set_parameters(config_of(gpt_model_type=text)) == {}
    assert applied(gpt_model_type=text, encoder_model_path=text) == EngineConfig()


def test_what_is_set_on_the_server_wins_and_the_log_says_so() -> None:
    config = load_config(overrides=["kv_cache.max_tokens=640"])
    settings = apply_parameters("tensorrt_llm", config_of(max_tokens_in_paged_kv_cache="1280"), config)
    assert settings.config.kv_cache.max_tokens == 640
    assert settings.sentences == [
        "max_tokens_in_paged_kv_cache of config.pbtxt is not used: kv_cache.max_tokens is set to 640 on the server"
    ]


@pytest.mark.feature("W-03", "W-04")
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"gpt_model_type": "inflight"}, "^Invalid gpt_model_type of config.pbtxt is 'inflight': inflight_fused"),
        ({"batch_scheduler_policy": "greedy"}, "guaranteed_no_evict or max_utilization or static_batch is expected"),
        (
            {"max_tokens_in_paged_kv_cache": "many"},
            "max_tokens_in_paged_kv_cache of config.pbtxt is 'many': a whole number",
        ),
        (
            {"max_tokens_in_paged_kv_cache": "-4"},
            r"config.pbtxt \(max_tokens_in_paged_kv_cache\): kv_cache.max_tokens is -4",
        ),
        ({"kv_cache_free_gpu_mem_fraction": "x"}, "a number is expected"),
        ({"kv_cache_free_gpu_mem_fraction": "nan"}, "kv_cache.free_memory_fraction is nan"),
        ({"enable_chunked_context": "perhaps"}, "true or false is expected"),
        ({"max_attention_window_size": "64,x"}, "is '64,x': a whole number is expected"),
        ({"max_attention_window_size": "64,0"}, "kv_cache.max_attention_window is 0, allowed is 1 to"),
        ({"sink_token_length": "-1"}, "kv_cache.sink_tokens is -1, allowed is 0 to"),
        ({"gpu_device_ids": "0,1"}, "several are not supported"),
        ({"participant_ids": "0,0"}, "different ids are expected"),
        ({"max_beam_width": "0"}, r"config.pbtxt \(max_beam_width\): scheduler.max_beam_width is 0"),
        ({"decoding_mode": "medusa"}, "decoding_mode of config.pbtxt is 'medusa': .* or lookahead is expected"),
        ({"encoder_model_path": "/x"}, "does not serve: only decoder models are served; leave it out$"),
        ({"normalize_log_probs": "false"}, "log-probabilities are always normalised; leave it out or set it to true$"),
        ({"guided_decoding_backend": "outlines"}, "xgrammar or llguidance is expected"),
        ({"lookahead_ngram_size": "many"}, "lookahead_ngram_size of config.pbtxt is 'many': a whole number"),
        (
            {"enable_trt_overlap": "true"},
            "enable_trt_overlap of config.pbtxt is 'true', which .* `scheduler.look_ahead` is like it; leave it out",
        ),
        (
            {"num_nodes": "2"},
            "num_nodes of config.pbtxt is '2', which this version does not serve: ranks of other nodes join by",
        ),
    ],
)
def test_what_is_wrong_or_refused_fails_with_its_name(parameters: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        applied(**parameters)


def test_neutral_values_of_what_is_refused_may_be_set() -> None:
    neutral = {"decoding_mode": "beam_search", "normalize_log_probs": "true", "num_nodes": "1"}
    assert applied(**neutral, gpu_weights_percent="1.0", enable_trt_overlap="False") == EngineConfig()


def test_participants_are_the_ranks_of_all_stages() -> None:
    config = EngineConfig(workers=WorkersConfig(pipeline_parallel_size=2))

    def of(ids: str) -> WorkersConfig:
        return apply_parameters("tensorrt_llm", config_of(participant_ids=ids), config).config.workers

    assert (of("0,1"), of("0,1,2,3")) == (WorkersConfig(1, 2), WorkersConfig(2, 2))
    with pytest.raises(ConfigError, match="participant_ids has 3 ids, and workers.pipeline_parallel_size is 2"):
        of("0,1,2")


def test_lookahead_decoding_is_lookup_of_so_many_tokens() -> None:
    """Of n-grams of 5 one token is known, and the least is one guess. A size of 0 asks for nothing."""
    sizes = {"lookahead_window_size": "7", "lookahead_ngram_size": "5", "lookahead_verification_set_size": "3"}
    speculation = applied(decoding_mode="lookahead", **sizes).speculation
    assert (speculation.mode, speculation.max_draft_tokens) == ("lookup", 4)
    assert applied(lookahead_ngram_size="1").speculation.max_draft_tokens == 1
    assert applied(decoding_mode="auto", lookahead_ngram_size="0") == EngineConfig()


@pytest.mark.feature("001-29", "001-30", "W-03")
def test_a_window_may_be_one_number_for_all_layers() -> None:
    assert applied(max_attention_window_size="64", sink_token_length="0").kv_cache == KvCacheConfig(
        max_attention_window=64
    )


def test_the_log_names_what_has_no_effect_and_what_is_not_known() -> None:
    given = config_of(role="tensorrt_llm", multi_block_mode="true", kv_cache_free_gpu_memory_fraction="0.5")
    no_effect, unknown = apply_parameters("tensorrt_llm", given, EngineConfig()).sentences
    assert no_effect.startswith(
        "multi_block_mode of config.pbtxt has no effect here: kernels are chosen by `model.kernels`"
    )
    assert unknown.endswith("is no known parameter; did you mean kv_cache_free_gpu_mem_fraction? It has no effect.")
    assert apply_parameters("everbatch", given, EngineConfig()).sentences == [], "its front reads its own"


@pytest.mark.parametrize("size", [12, "12"])
def test_the_dynamic_batchers_queue_is_the_limit_of_the_engines(size: object) -> None:
    given = {"dynamic_batching": {"default_queue_policy": {"max_queue_size": size}}}
    assert apply_parameters("tensorrt_llm", given, EngineConfig()).config.limits.max_queue_size == 12
    assert apply_parameters("ensemble", given, EngineConfig()).config == EngineConfig()
    unlimited = {"dynamic_batching": {"default_queue_policy": {"max_queue_size": 0}}}
    assert apply_parameters("tensorrt_llm", unlimited, EngineConfig()).config == EngineConfig()


def test_bls_accumulates_and_refuses_a_draft_model() -> None:
    assert applied(role="tensorrt_llm_bls", accumulate_tokens="true").triton.accumulate_tokens
    named = apply_parameters("tensorrt_llm_bls", config_of(tensorrt_llm_model_name="mine"), EngineConfig())
    assert named.config == EngineConfig() and "tensorrt_llm_model_name" in named.sentences[0]
    with pytest.raises(
        ConfigError, match="tensorrt_llm_draft_model_name of config.pbtxt is 'd', which this version does not serve"
    ):
        applied(role="tensorrt_llm_bls", tensorrt_llm_draft_model_name="d")


def test_the_page_of_parameters_is_up_to_date() -> None:
    page = (ROOT / "docs" / "parameters.md").read_text()
    fresh = write_parameter_table.PART.replaced(page, write_parameter_table.tables())
    assert fresh == page, "run python -m tools.write_parameter_table"


# ---- loading a model -------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[EngineConfig]:
    """The configurations with which an engine was launched; it runs scripted."""
    configs: list[EngineConfig] = []

    def launch(config: EngineConfig, socket_path: str) -> ScriptedExecutor:
        configs.append(config)
        return attach()

    def attach(socket_path: str = "", wait_s: float = 0) -> ScriptedExecutor:
        return ScriptedExecutor(model_path=str(ROOT / "models" / "default"))

    monkeypatch.setenv("EVERBATCH_RUN_DIR", str(tmp_path))
    monkeypatch.delenv("EVERBATCH_CONFIG", raising=False)
    monkeypatch.setattr(assembly.Executor, "launch", launch)
    monkeypatch.setattr(assembly.Executor, "attach", attach)
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    return configs


def load(model: str, **parameters: str) -> Any:
    config = msgspec.json.encode({**config_of(**parameters), "model_transaction_policy": {"decoupled": True}})
    return assembly.load_model({"model_name": model, "model_version": "1", "model_config": config.decode()})


@pytest.mark.feature("W-03")
def test_the_owner_launches_the_engine_with_its_parameters(
    launched: list[EngineConfig], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "everbatch.serving")
    load("tensorrt_llm", max_tokens_in_paged_kv_cache="1280").finalize()
    assert [config.kv_cache.max_tokens for config in launched] == [1280]
    assert "kv_cache.max_tokens is 1280, from max_tokens_in_paged_kv_cache of config.pbtxt" in caplog.text


@pytest.mark.feature("W-03")
def test_an_unknown_gpt_model_type_fails_the_load_before_an_engine_starts(launched: list[EngineConfig]) -> None:
    with pytest.raises(ConfigError, match="Invalid gpt_model_type"):
        load("tensorrt_llm", gpt_model_type="inflight")
    assert launched == []


def test_another_model_takes_the_configuration_that_the_engine_tells(
    launched: list[EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = load_config(overrides=["limits.max_request_batch=1"])
    executor = ScriptedExecutor(model_path=str(ROOT / "models" / "default"))
    executor.hello = msgspec.structs.replace(executor.hello, config=told)
    monkeypatch.setattr(assembly.Executor, "attach", lambda socket_path, wait_s: executor)
    server = load("ensemble")
    request = InferenceRequest({"text_input": strings("a", "b"), "max_tokens": ints(1, 1)})
    server.execute([request])
    assert "2 rows, the limit is 1" in request.sender.error()
    server.finalize()


def test_a_model_that_was_loaded_before_the_engine_takes_it_as_soon_as_it_hears_of_it(
    launched: list[EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = ScriptedExecutor(model_path=str(ROOT / "models" / "default"))
    hello, executor.hello = executor.hello, None
    monkeypatch.setattr(assembly.Executor, "attach", lambda socket_path, wait_s: executor)
    monkeypatch.setattr(environment, "OWNER_START_S", 0.01)
    server = load("ensemble")
    told = load_config(overrides=["triton.exclude_input_in_output=true"])
    executor.hello = msgspec.structs.replace(hello, config=told)
    assert eventually(server.is_ready, 10)
    request = InferenceRequest({"text_input": strings("the prompt"), "max_tokens": ints(1)})
    server.execute([request])
    assert executor.submitted.acquire(timeout=10)
    executor.end(1, 5)
    (text,) = request.sender.column("text_output")
    assert not text.startswith(b"the prompt")
    server.finalize()


@pytest.mark.feature("W-03")
def test_preprocessing_honours_its_own_parameters(
    launched: list[EngineConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="add_special_tokens of config.pbtxt is 'maybe'"):
        load("preprocessing", add_special_tokens="maybe")
    executor = ScriptedExecutor(model_path=str(ROOT / "models" / "default"))
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="tokenizer"):
        patch.setattr(assembly.Executor, "attach", lambda socket_path, wait_s: executor)
        load("preprocessing", tokenizer_dir=str(tmp_path))
    assert executor.was_shut_down, "nothing of a model that does not load is left running"

    def ids(**parameters: str) -> list[int]:
        server = load("preprocessing", **parameters)
        request = InferenceRequest({"QUERY": strings("x = 1"), "REQUEST_OUTPUT_LEN": ints(1)})
        server.execute([request])
        (response,) = request.sender.wait()
        server.finalize()
        return np.asarray(response.outputs()["INPUT_ID"]).reshape(-1).tolist()

    own = tokenizer_with_bos(tmp_path / "tokenizer", bos_id=2)
    assert ids(tokenizer_dir=own) == ids(tokenizer_dir=own, add_special_tokens="Yes") == [2, *ids()]
    assert ids(tokenizer_dir=own, add_special_tokens="0") == ids()

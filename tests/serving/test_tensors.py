from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backend.api import OutputConfig, SamplingConfig, SessionConfig
from backend.serving.model_config import DEFAULT_PROFILE, MODEL_ENTRY, render, write_repositories
from backend.serving.tensors import NUMPY_TYPES
from backend.serving.wires.roles import MODELS, PROFILES
from backend.serving.wires.trtllm_tensors import BLS, ENSEMBLE, ENSEMBLE_UINT32, TOKEN_MODEL

ROOT = Path(__file__).resolve().parents[2]

# The names that clients of tensorrtllm_backend rely on (docs/features.md, A2), and its outputs.
A2_INPUTS = """
input_ids input_lengths request_output_len streaming stop end_id pad_id beam_width num_return_sequences runtime_top_k
runtime_top_p runtime_top_p_min runtime_top_p_decay runtime_top_p_reset_ids temperature seed min_tokens
repetition_penalty presence_penalty frequency_penalty len_penalty early_stopping beam_search_diversity_rate
stop_words_list bad_words_list embedding_bias return_log_probs return_context_logits return_generation_logits
return_perf_metrics exclude_input_in_output return_num_input_tokens return_num_output_tokens draft_input_ids
draft_logits draft_acceptance_threshold prompt_embedding_table prompt_vocab_size prompt_table_extra_ids lora_task_id
lora_weights lora_config guided_decoding_guide_type guided_decoding_guide retention_token_range_starts
retention_token_range_ends retention_token_range_priorities retention_token_range_durations_ms
retention_decode_priority retention_decode_duration_ms lookahead_window_size lookahead_ngram_size
lookahead_verification_set_size min_length random_seed return_kv_cache_reuse_stats decoder_input_ids
decoder_input_lengths encoder_input_features encoder_output_lengths cross_attention_mask skip_cross_attn_blocks
mrope_rotary_cos_sin mrope_position_deltas context_phase_params
"""
A2_OUTPUTS = """
output_ids sequence_length cum_log_probs output_log_probs context_logits generation_logits batch_index sequence_index
num_input_tokens num_output_tokens kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks
arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns acceptance_rate
total_accepted_draft_tokens total_draft_tokens
"""

# Inputs of upstream's tensorrt_llm whose type or shape is not one number: type and dims without the batch dimension.
UPSTREAM_TYPES = """
input_ids INT32 -1; stop_words_list INT32 2,-1; bad_words_list INT32 2,-1; embedding_bias FP32 -1; seed UINT64 1;
random_seed UINT64 1; prompt_embedding_table FP16 -1,-1; prompt_table_extra_ids UINT64 -1; lora_task_id UINT64 1;
lora_weights FP16 -1,-1; lora_config INT32 -1,3; draft_input_ids INT32 -1; draft_logits FP32 -1,-1;
decoder_input_ids INT32 -1; encoder_input_features FP16 -1,-1; cross_attention_mask BOOL -1,-1;
mrope_rotary_cos_sin FP32 -1; mrope_position_deltas INT64 1; context_phase_params UINT8 -1;
retention_token_range_starts INT32 -1; retention_token_range_ends INT32 -1; retention_token_range_priorities INT32 -1;
retention_token_range_durations_ms INT32 -1; guided_decoding_guide_type STRING 1; guided_decoding_guide STRING 1
"""
OURS_ALONE = {
    "resume_output_ids",
    "resume_log_probs",
    "resume_ended",
    "CORRID",
    "START",
    "END",
    "STOP",
    "step",
    "session_len",
    "session_full_history",
    "top_log_probs",
} | {"lora_name"}
BOOLS = ("stop", "streaming", "early_stopping", "exclude_input_in_output", "skip_cross_attn_blocks")
FLOATS = (
    "temperature", "len_penalty", "repetition_penalty", "presence_penalty", "frequency_penalty", "runtime_top_p",
    "runtime_top_p_min", "runtime_top_p_decay", "beam_search_diversity_rate", "draft_acceptance_threshold",
)  # fmt: skip


def upstream_type(name: str) -> str:
    """The type of an input of one number."""
    if name in BOOLS or name.startswith("return_"):
        return "BOOL"
    return "FP32" if name in FLOATS else "INT32"


@pytest.mark.feature("W-01")
def test_the_token_models_inputs_have_upstreams_types_and_shapes() -> None:
    upstream = dict(entry.strip().split(maxsplit=1) for entry in UPSTREAM_TYPES.split(";"))
    declared = {spec.name: f"{spec.dtype} {','.join(map(str, spec.dims))}" for spec in TOKEN_MODEL.inputs}
    assert set(A2_INPUTS.split()) | OURS_ALONE == set(declared)
    for name in A2_INPUTS.split():
        assert declared[name] == upstream.get(name, f"{upstream_type(name)} 1"), name


@pytest.mark.feature("W-01")
def test_older_clients_of_the_ensemble_send_unsigned_integers() -> None:
    changed = {spec.name for spec in ENSEMBLE_UINT32.inputs if spec != ENSEMBLE.by_name()[spec.name]}
    assert changed == {"max_tokens", "end_id", "pad_id", "beam_width", "top_k", "min_length", "prompt_vocab_size"}
    assert all(ENSEMBLE_UINT32.by_name()[name].dtype == "UINT32" for name in changed)


def role_of(path: Path) -> str:
    profile = DEFAULT_PROFILE if path.parents[1].name == "model_repository" else path.parents[1].name
    return PROFILES[profile][path.parent.name]


def test_the_committed_repositories_equal_the_generated_ones(tmp_path: Path) -> None:
    paths = [path.relative_to(tmp_path) for path in write_repositories(tmp_path)]
    assert paths
    for path in paths:
        assert (ROOT / path).read_text() == (tmp_path / path).read_text()
        assert (ROOT / path.parent / "1" / "model.py").read_text() == MODEL_ENTRY.read_text()
    assert {path.parent.parent for path in (ROOT / "deploy").glob("profiles/*/*/config.pbtxt")} <= {
        (ROOT / path).parent.parent for path in paths
    }


@pytest.mark.feature("004-25")
@pytest.mark.parametrize("model", MODELS)
def test_a_config_is_decoupled_and_has_neither_batcher(model: str) -> None:
    text = render(MODELS[model])
    assert "dynamic_batching" not in text and "sequence_batching" not in text
    assert f"max_batch_size: {MODELS[model].max_batch_size}" in text and "kind: KIND_CPU count: 1" in text
    assert ("decoupled: true" in text) == (MODELS[model].always != "unary")
    assert f'key: "role" value: {{ string_value: "{model}" }}' in text


def test_the_unary_configs_differ_in_the_policy_alone(tmp_path: Path) -> None:
    for path in write_repositories(tmp_path, decoupled=False):
        model = MODELS[role_of(path)]
        policy = "decoupled: true" if model.always == "decoupled" else "decoupled: false"
        assert path.read_text() == render(model, name=path.parent.name).replace("decoupled: true", policy)


def test_the_token_model_declares_every_name_its_clients_know() -> None:
    assert set(A2_INPUTS.split()) <= {spec.name for spec in TOKEN_MODEL.inputs}
    assert set(A2_OUTPUTS.split()) <= {spec.name for spec in TOKEN_MODEL.outputs}


@pytest.mark.feature("004-29")
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "tensorrt_llm_bls"])
def test_every_model_declares_the_session_inputs_with_turbominds_names(model: str) -> None:
    specs = MODELS[model].by_name()
    types = {name: specs[name].dtype for name in ("START", "END", "STOP", "CORRID", "step", "session_len")}
    assert types == {
        "START": "INT32",
        "END": "INT32",
        "STOP": "INT32",
        "CORRID": "UINT64",
        "step": "INT32",
        "session_len": "INT32",
    }
    assert all(specs[name].optional and specs[name].dims == (1,) for name in types)


@pytest.mark.parametrize("model", MODELS)
def test_names_are_unique_types_known_and_targets_exist(model: str) -> None:
    tensors = MODELS[model]
    for table in (tensors.inputs, tensors.outputs):
        names = [spec.name for spec in table]
        assert len(names) == len(set(names)) and "parameters" not in names  # HTTP generate treats that key as its own
        assert all(np.dtype(NUMPY_TYPES[spec.dtype]) is not None for spec in table)
    fields = {"sampling": SamplingConfig, "output": OutputConfig, "session": SessionConfig}
    for spec in tensors.inputs:
        owner, _, field = spec.target.partition(".")
        if field:
            assert field in fields[owner].__struct_fields__
        else:
            assert owner in ("request", "ignored", "refused")
        assert spec.feature if owner == "refused" else owner == "ignored" or not spec.feature


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "tensorrt_llm_bls", "preprocessing", "llmapi"])
def test_what_is_ignored_says_why(model: str) -> None:
    assert all(spec.feature for spec in MODELS[model].inputs if spec.target == "ignored")


def test_only_what_upstream_requires_is_required() -> None:
    required = {model.model: {spec.name for spec in model.inputs if not spec.optional} for model in MODELS.values()}
    assert required == {
        "tensorrt_llm": {"input_ids", "input_lengths", "request_output_len"},
        "ensemble": {"text_input", "max_tokens"},
        "tensorrt_llm_bls": {"text_input", "max_tokens"},
        "everbatch": {"request"},
        "embedding": set(),
        "vllm": {"text_input"},
        "turbomind": {"input_ids", "input_lengths", "request_output_len"},
        "turbomind_preprocessing": {"QUERY"},
        "turbomind_postprocessing": {"TOKENS_BATCH", "sequence_length"},
        "lmdeploy": {"prompt", "max_tokens", "ignore_eos", "stream"},
        "ensemble_uint32": {"text_input", "max_tokens"},
        "preprocessing": {"QUERY", "REQUEST_OUTPUT_LEN"},
        "postprocessing": {"TOKENS_BATCH", "SEQUENCE_LENGTH"},
        "llmapi": {"text_input"},
    }


def test_the_two_text_models_share_all_but_what_bls_adds() -> None:
    assert BLS.outputs == ENSEMBLE.outputs
    assert {spec.name for spec in BLS.inputs} - {spec.name for spec in ENSEMBLE.inputs} == {
        "image_input",
        "video_bytes_input",
        "num_draft_tokens",
        "use_draft_logits",
    }

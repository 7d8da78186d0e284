"""Keys of config.json that others write and that change nothing are taken; those that change what is computed are not."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING, GenerationConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from backend.api.errors import ConfigError
from backend.architectures.registry import FAMILIES, read_config
from tests.families.published import CONFIGS

# Key -> a value that somebody has published, or that an older transformers has written.
WITHOUT_EFFECT: dict[str, Any] = {
    "is_llama_config": True,  # SmolLM and SmolLM2
    "rope_interleaved": False,
    "_model_name_or_path": "Smollm2 135M",  # transformers, of a GGUF file
    "unsloth_fixed": True,
    "unsloth_version": "2025.3.1",
    "_name_or_path": "org/model",
    "model_name": "a",
    "model_name_or_path": "a",
    "base_model_name_or_path": "org/base",
    "tokenizer_name": "a",
    "tokenizer_file": "a.json",
    "revision": "main",
    "parent_model": "org/base",
    "max_sequence_length": 2048,  # the first Llama, Vicuna
    "pretraining_tp": 1,
    "attn_implementation": "sdpa",
    "_attn_implementation": "eager",
    "_attn_implementation_autoset": True,
    "_flash_attn_2_enabled": True,
    "_use_flash_attention_2": True,
    "use_flash_attention_2": True,
    "neftune_noise_alpha": 5.0,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "transformers.js_config": {"dtype": "q4"},
    "torch_dtype": "float16",
    "use_bfloat16": True,
    "torchscript": True,
    "output_past": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "return_dict": True,
    "tf_legacy_loss": True,
    "chunk_size_feed_forward": 1,
    "finetuning_task": "sst2",
    "problem_type": "regression",
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "task_specific_params": {"a": 1},
    "summary_type": "cls_index",
    "summary_first_dropout": 0.1,
    "sep_token_id": 3,
    "decoder_start_token_id": 3,
    "forced_bos_token_id": 3,
    "is_encoder_decoder": False,
    "tie_encoder_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "pruned_heads": {},
    "use_mrope": False,
    "use_qk_norm": False,
}
# They change what a model computes, wherever they are not read.
WITH_EFFECT: dict[str, Any] = {
    "is_encoder_decoder": True,
    "tie_encoder_decoder": True,
    "add_cross_attention": True,
    "cross_attention_hidden_size": 64,
    "pruned_heads": {"0": [1]},
    "rope_interleaved": True,
    "use_logn_attn": True,
    "use_dynamic_ntk": True,
    "alibi": True,
    "clip_qkv": 8.0,
    "num_experts": 8,
    "kv_lora_rank": 384,
    "altup_num_inputs": 4,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_key_that_changes_nothing_is_taken(name: str) -> None:
    plain = read_config(CONFIGS[name])
    for key, value in WITHOUT_EFFECT.items():
        assert read_config({key: value, **CONFIGS[name]}) == plain, key


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_of_generation_are_taken_whatever_they_say(name: str) -> None:
    """Older versions of transformers wrote those that differ from the defaults into config.json."""
    plain = read_config(CONFIGS[name])
    given = CONFIGS[name] | CONFIGS[name].get("text_config", {})
    settings = {key: 0.5 for key in vars(GenerationConfig()) if not key.startswith("_") and key not in given}
    assert len(settings) > 60
    assert read_config({**settings, **CONFIGS[name]}) == plain


@pytest.mark.parametrize("name", CONFIGS)
def test_a_key_that_changes_what_is_computed_is_read_or_refused(name: str) -> None:
    plain = read_config(CONFIGS[name])
    for key, value in WITH_EFFECT.items():
        try:
            assert read_config({**CONFIGS[name], key: value}) != plain, key
        except ConfigError as error:
            assert key in str(error)


def model_type(architecture: str) -> str:
    """The name by which transformers knows the configuration of an architecture."""
    tables = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    kinds = [kind for table in tables for kind, names in table.items() if architecture == names]
    return max(kinds, key=lambda kind: kind.endswith("_text"))  # rather the text model than the one of images around it


@pytest.mark.parametrize("architecture", FAMILIES)
def test_everything_that_transformers_writes_of_a_family_is_taken(architecture: str) -> None:
    needed: dict[str, dict[str, Any]] = {
        "Glm4MoeForCausalLM": {"head_dim": 128},
        "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
        "Lfm2MoeForCausalLM": {"layer_types": ["conv"] * 32},
        "Dots1ForCausalLM": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    }
    own = needed.get(architecture, {})
    written = CONFIG_MAPPING[model_type(architecture)](**own).to_dict()
    assert len(written) > 15
    read_config({**written, "architectures": [architecture]})

"""LoRA adapters of families whose layers differ from Llama's. PEFT is the oracle: greedy tokens, float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backend.api import ErrorCode
from backend.api.lora import LoraConfig
from backend.executor import Executor
from tests.model.adapters import ALL, PeftOracle, make_adapter
from tests.model.test_lora import NUM_TOKENS, PROMPTS, config, error_of, request, run
from tests.model.tiers import TORCH, TierCase

TARGETS = {
    "phi-4-mini short": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "glm 4": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"],
    "olmo 2": ALL,
    "granite": ALL,
    "command r7b": ALL,
    "starcoder 2": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_family_s_adapter_does_what_peft_does(
    name: str, checkpoint: Callable[..., Path], tier: TierCase, tmp_path: Path
) -> None:
    base = checkpoint(name)
    adapter = make_adapter(base, tmp_path / "adapter", 1, target_modules=TARGETS[name])
    expected = [PeftOracle(base, path).greedy(PROMPTS[1], NUM_TOKENS) for path in (adapter, None)]
    assert expected[0] != expected[1]
    with Executor.from_directory(base, config(tier)) as executor:
        loras = [LoraConfig(1, path=str(adapter)), None]
        assert run(executor, *(request(PROMPTS[1], lora) for lora in loras)) == expected


@pytest.mark.parametrize(
    "base, trained, named",
    [
        ("llama", "phi-4-mini short", "it has gate_up_proj, which LlamaForCausalLM does not have"),
        ("starcoder 2", "llama", "it has gate_proj, which Starcoder2ForCausalLM does not have"),
        (
            "starcoder 2",
            "starcoder 2",
            "it has mlp.c_fc, which Starcoder2ForCausalLM does not have, or takes no adapters for",
        ),
        (
            "gpt-neox",
            "gpt-neox",
            "it has attention.query_key_value, which GPTNeoXForCausalLM does not have, or takes no",
        ),
    ],
)
def test_a_projection_that_a_model_does_not_have_is_told(
    base: str, trained: str, named: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    targets = {
        "phi-4-mini short": ["gate_up_proj"],
        "llama": ["gate_proj"],
        "starcoder 2": ["c_fc"],
        "gpt-neox": ["query_key_value"],
    }
    adapter = make_adapter(checkpoint(trained), tmp_path / "adapter", 1, target_modules=targets[trained])
    with Executor.from_directory(checkpoint(base), config(TORCH)) as executor:
        code, message = error_of(executor, request(PROMPTS[0], LoraConfig(1, path=str(adapter))))
    assert code is ErrorCode.UNSUPPORTED and named in message, message

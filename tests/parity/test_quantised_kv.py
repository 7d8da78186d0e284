"""Eviction with a quantised KV cache: what is computed again is the numbers that were lost.

The rule (docs/design/kernels.md): every query reads the pool as it was written, also its own chunk's keys. The native tier then
repeats itself bit for bit. On the torch tier a row of a product depends in its last bits on the rows beside it, and a key that
lies just between two steps of its quantisation may take the other one; that is far less than what quantisation itself changes.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tests.model.tiers import NATIVE, TORCH, TierCase
from tests.parity.scenario import BLOCK, Recording, RecordingEngine
from tests.parity.test_engine_parity import FAMILIES, TINY, random_tokens

NUM_TOKENS = 48


@pytest.fixture(scope="module", params=["llama2", "mistral", "default"])
def hf(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = FAMILIES[request.param]().eval()
    model.config.architectures = [type(model).__name__]
    return model


def run(hf: PreTrainedModel, tier: TierCase, kv: str, blocks_a_step: int, evict_every: int | None) -> list[Recording]:
    engine = RecordingEngine.of_transformers(hf, tier, blocks_a_step * BLOCK[tier], kv)
    rng = random.Random(1)
    recordings = [engine.start(random_tokens(rng, hf, 40 + 17 * index), NUM_TOKENS) for index in range(3)]
    engine.run(evict_every)
    assert (engine.core.counters.recomputed_tokens_total > 0) == (evict_every is not None)
    return recordings


def logits(recordings: list[Recording], count: int = NUM_TOKENS) -> Tensor:
    return torch.stack([torch.stack(recording.logits[:count]) for recording in recordings])


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


@pytest.mark.parametrize("tier", [TORCH, NATIVE], ids=lambda case: case.kernels)
@pytest.mark.parametrize("kv, most", [("int8", 0.02), ("k8v4", 0.2)])
def test_a_large_bias_of_keys_costs_next_to_nothing(tier: TierCase, kv: str, most: float, native_kernels: None) -> None:
    """As Qwen2 has it, in a pair that hardly turns: all keys that a query sees have the same."""
    torch.manual_seed(0)
    config = Qwen2Config(**TINY, rope_parameters={"rope_type": "default", "rope_theta": 1e7})
    hf = Qwen2ForCausalLM(config).eval()
    hf.config.architectures = [type(hf).__name__]
    for layer in hf.model.layers:
        layer.self_attn.k_proj.bias.data.view(-1, 8)[:, [3, 7]] = torch.tensor([-150.0, 90.0])
    exact, found = (logits(run(hf, tier, form, 64, None), 1) for form in ("auto", kv))
    assert 0 < rms(found - exact) <= most * rms(exact)


@pytest.mark.feature("004-14", "004-22", "003-72")
@pytest.mark.parametrize("kv", ["int8", "int4", "k8v4"])
def test_on_the_torch_tier_eviction_changes_no_token_and_next_to_nothing_of_the_logits(
    hf: PreTrainedModel, kv: str
) -> None:
    whole, evicted = run(hf, TORCH, kv, 64, None), run(hf, TORCH, kv, 2, 11)
    assert [recording.tokens for recording in evicted] == [recording.tokens for recording in whole]
    # Of the first token only: from then on the float model may go another way.
    quantisation = rms(logits(whole, 1) - logits(run(hf, TORCH, "auto", 64, None), 1))
    assert rms(logits(evicted) - logits(whole)) <= quantisation / 10


@pytest.mark.feature("004-14", "004-22")
@pytest.mark.parametrize("kv", ["int8", "int4", "k8v4"])
def test_on_the_native_tier_eviction_changes_no_bit(hf: PreTrainedModel, native_kernels: None, kv: str) -> None:
    whole, evicted = run(hf, NATIVE, kv, 64, None), run(hf, NATIVE, kv, 2, 11)
    assert torch.equal(logits(evicted), logits(whole))

"""Logits and greedy tokens equal transformers', whatever the engine does to the KV on the way.

Every combination of {whole, chunked} x {prefix miss, hit} x {stays, evicted and returned} x {alone, in a batch of 7}, for a
random tiny model of each family and for the default model, on both tiers. Lengths are told in blocks, so that prefixes and
what is computed again cross their borders on both.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from backend.api import SessionConfig
from tests.model.tiers import TierCase
from tests.parity.scenario import BLOCK, RecordingEngine, excused_ties, load_default

TINY = dict(
    vocab_size=199,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.2,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
FAMILIES = {
    "llama2": lambda: LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=False)),
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**TINY, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**TINY, sliding_window=24)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**TINY)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY, head_dim=16)),
    "default": load_default,
}
NUM_TOKENS = 40  # a border of a native block, five of a torch block, an eviction at 23
EXCUSED: list[int] = []


QUICK = ("llama3", "default")
LARGE = pytest.mark.slow("parity's large combinations")


@pytest.fixture(scope="module", params=[pytest.param(name, marks=() if name in QUICK else LARGE) for name in FAMILIES])
def hf(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = FAMILIES[request.param]().eval()
    model.config.architectures = [type(model).__name__]
    return model


COMBINATIONS = [
    pytest.param(*combination, marks=LARGE if combination[-1] > 1 else ())
    for combination in itertools.product((64, 2), (False, True), (None, 23), (1, 7))
]


@pytest.mark.feature("004-14", "004-26", "001-29", "001-33")
@pytest.mark.parametrize("blocks_a_step, prefix_hit, evict_every, batch", COMBINATIONS)
def test_the_engine_equals_transformers(
    hf: PreTrainedModel, tier: TierCase, blocks_a_step: int, prefix_hit: bool, evict_every: int | None, batch: int
) -> None:
    block = BLOCK[tier]
    engine = RecordingEngine.of_transformers(hf, tier, max_num_tokens=blocks_a_step * block)
    rng = random.Random(blocks_a_step + batch)
    common = random_tokens(rng, hf, 4 * block + block // 2 + 1)
    if prefix_hit:
        engine.start(common, 1)
        engine.run()
    prompts = [common + random_tokens(rng, hf, 1 + 3 * i * block // 8) for i in range(batch)]
    recordings = [engine.start(prompt, NUM_TOKENS) for prompt in prompts]
    engine.run(evict_every)
    counters = engine.core.counters
    assert engine.core.model.kernels == tier.kernels
    assert (counters.cached_tokens_total > 0) or not prefix_hit
    assert (counters.recomputed_tokens_total > 0) == (evict_every is not None)
    assert all(len(recording.tokens) == NUM_TOKENS for recording in recordings)
    EXCUSED.append(sum(excused_ties(hf, recording) for recording in recordings))


@pytest.mark.feature("004-05", "004-13", "004-14")
@pytest.mark.parametrize("evicted", [False, True])
def test_a_second_turn_equals_transformers_on_the_whole_conversation(
    hf: PreTrainedModel, tier: TierCase, evicted: bool
) -> None:
    block = BLOCK[tier]
    engine = RecordingEngine.of_transformers(hf, tier, max_num_tokens=8 * block)
    prompt = random_tokens(random.Random(0), hf, 3 * block + 6)
    first = engine.start(prompt, 20, session=SessionConfig(1, start=True))
    engine.run()
    if evicted:
        engine.core.kv.lose_everything()
    second = engine.start([5, 6, 7], 20, session=SessionConfig(1))
    before = engine.core.counters.context_tokens_total
    engine.run()
    ran = engine.core.counters.context_tokens_total - before
    assert ran == (len(prompt) + 20 + 3 if evicted else 3 + 1), (
        "a warm turn runs its new tokens and the last sampled one"
    )
    excused_ties(hf, second, history=first.prompt + first.tokens)


def random_tokens(rng: random.Random, hf: PreTrainedModel, count: int) -> list[int]:
    return [rng.randrange(4, hf.config.vocab_size) for _ in range(count)]


def test_near_ties_are_rare() -> None:
    """Runs last: how many of the compared tokens were excused."""
    compared = len(EXCUSED) * NUM_TOKENS * 4
    print(f"\nnear ties excused: {sum(EXCUSED)} of about {compared} tokens")
    assert sum(EXCUSED) <= compared / 1000

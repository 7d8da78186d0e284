"""Through the whole engine: a request's logits and tokens are the same, bit for bit, however the engine arranged its work."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from backend.api import EngineConfig, SamplingConfig
from backend.api.config.kv_bits import named
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.worker.group import InProcessWorkerGroup
from tests.native.families import VOCAB, Family, family_of_super_blocks, random_family
from tests.native.harness import Format, prompt
from tests.parity.scenario import RecordingEngine

BLOCK, NUM_TOKENS, WATCHED = 32, 40, 3
COMMON = prompt(4 * BLOCK + 17, VOCAB)
FAMILIES = {"qk_norm_no_window": 2, "window": 1, "windows_and_sink_tokens": 0}  # seeds of random_family
FORMATS = [
    Format("bfloat16"),
    Format("bfloat16", "w8a8", kv="int8"),
    Format("bfloat16", "w4a8", kv="int4"),
    Format("bfloat16", "w8a8", kv="k8v4"),
]
# max_num_tokens, whether the prompt's head is cached, steps from one eviction of everybody to the next, requests, threads
ARRANGEMENTS = [
    *itertools.product((512, 16), (False, True), (False, True), (1, 7), (1,)),
    *itertools.product((512, 16), (True,), (False, True), (7,), (2,)),
]


MODELS = [*itertools.product(FAMILIES, FORMATS), ("gguf", Format("bfloat16", super_blocks=True))]


@pytest.fixture(scope="module", params=MODELS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def model(
    request: pytest.FixtureRequest, native_kernels: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Family, Format]:
    family, form = request.param
    if form.super_blocks:
        return family_of_super_blocks(tmp_path_factory.mktemp(family)), form
    return random_family(tmp_path_factory.mktemp(family), FAMILIES[family]), form


@pytest.fixture(scope="module")
def plain(model: tuple[Family, Format]) -> tuple[list[int], Tensor]:
    """The watched request alone, its prompt at once, never evicted, nothing cached, one thread."""
    return arranged(model, 512, False, False, 1, 1)


def arranged(
    model: tuple[Family, Format],
    max_num_tokens: int,
    is_cached: bool,
    is_evicted: bool,
    num_requests: int,
    num_threads: int,
    look_ahead: bool = False,
) -> tuple[list[int], Tensor]:
    """Returns (tokens, logits [tokens, vocab]) of the watched request."""
    (directory, _, attention), form = model
    config = EngineConfig(
        ModelConfigSection(
            path=str(directory),
            dtype=form.dtype,
            kernels="native",
            quantization=form.quantization,
            num_threads=num_threads,
            device="cpu",
        ),
        KvCacheConfig(
            block_size=BLOCK,
            max_tokens=BLOCK * 400,
            max_attention_window=attention.windows,
            sink_tokens=attention.sink_tokens,
            **named(form.kv),
        ),
        SchedulerConfig(
            max_batch_size=8, max_num_tokens=max_num_tokens, policy="max_utilization", look_ahead=look_ahead
        ),
    )
    engine = RecordingEngine(config, InProcessWorkerGroup(config.model, config.scheduler, config.kv_cache))
    if is_cached:
        engine.start(COMMON, 1)
        engine.run()
    numbers = [WATCHED] if num_requests == 1 else range(num_requests)
    recordings = {
        number: engine.start(
            COMMON + prompt(1 + 9 * number, VOCAB, seed=number),
            NUM_TOKENS,
            sampling_config=SamplingConfig(temperature=1.0, seed=number),
        )
        for number in numbers
    }
    prompt_steps = -(-len(recordings[WATCHED].prompt) // max_num_tokens)
    engine.run(evict_every=prompt_steps + 4 if is_evicted else None)  # at least four tokens between evictions
    counters = engine.core.counters
    assert (counters.cached_tokens_total > 0) or not is_cached
    assert (counters.recomputed_tokens_total > 0) == is_evicted
    return recordings[WATCHED].tokens, torch.stack(recordings[WATCHED].logits)


@pytest.mark.feature("001-30", "004-14", "001-33")
@pytest.mark.parametrize("max_num_tokens, is_cached, is_evicted, num_requests, num_threads", ARRANGEMENTS[1:])
def test_logits_and_tokens_are_the_same_bits(
    model: tuple[Family, Format],
    plain: tuple[list[int], Tensor],
    max_num_tokens: int,
    is_cached: bool,
    is_evicted: bool,
    num_requests: int,
    num_threads: int,
) -> None:
    tokens, logits = arranged(model, max_num_tokens, is_cached, is_evicted, num_requests, num_threads)
    assert len(tokens) == NUM_TOKENS and len(set(tokens)) > 10, "tokens that hardly change would prove nothing"
    assert tokens == plain[0]
    assert torch.equal(logits, plain[1])


def test_looking_ahead_changes_no_bit(model: tuple[Family, Format], plain: tuple[list[int], Tensor]) -> None:
    tokens, logits = arranged(model, 16, True, False, 7, 1, look_ahead=True)
    assert tokens == plain[0] and torch.equal(logits, plain[1])

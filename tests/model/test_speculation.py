"""Drafts through real models: tokens and log-probabilities are those of plain decoding, bit for bit on the native tier."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from backend.api import EngineConfig, OutputConfig, Request, SamplingConfig
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig, SpeculationConfig
from backend.engine.core import EngineCore
from backend.scheduler.plan import StepPlan
from backend.worker.group import InProcessWorkerGroup
from tests.fakes.drafters import FixedStepCost, Prompter
from tests.model.conftest import Oracle

NUM_TOKENS = 40
Told = tuple[list[int], list[float]]  # tokens and their log-probabilities
WITH_STATE = {
    "greedy": SamplingConfig(),
    "sampled": SamplingConfig(temperature=1.3, seed=7),
    "filtered": SamplingConfig(temperature=1.1, top_k=20, top_p=0.9, min_p=0.01, seed=8),
    "top-n-sigma": SamplingConfig(temperature=1.3, top_n_sigma=0.8, seed=9),
    "penalties": SamplingConfig(
        temperature=0.9, seed=9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
    ),
    "ngrams": SamplingConfig(no_repeat_ngram_size=2, min_tokens=12, logit_bias={3: 2.0}),
}


def make_core(directory: Path, kernels: str, speculation: SpeculationConfig | None = None) -> EngineCore:
    config = EngineConfig(
        ModelConfigSection(path=str(directory), dtype="float32", device="cpu", kernels=kernels, num_threads=1),
        KvCacheConfig(block_size=32, max_tokens=32 * 60),
        SchedulerConfig(max_batch_size=8, policy="max_utilization"),
        speculation=speculation or SpeculationConfig(),
    )
    return EngineCore(config, InProcessWorkerGroup(config.model, config.scheduler, config.kv_cache))


def evict_everybody(core: EngineCore) -> None:
    """Pause all that run, and throw all cached KV away."""
    plan = StepPlan(core.kv.plan())
    for seq in reversed(core.scheduler.running):
        plan.kv.pause(seq)
    core.scheduler.commit(plan, step_id=-1, now_ns=0)
    core.kv.lose_everything()


def answers(core: EngineCore, requests: dict[int, Request], evict_every: int | None = None) -> dict[int, Told]:
    told: dict[int, Told] = {}
    for request_id, request in requests.items():
        core.enqueue(request_id, request)
    for step in range(10_000):
        if evict_every and step % evict_every == evict_every - 1:
            evict_everybody(core)
        for response in core.step():
            assert not response.has_error(), response.error_msg
            result = response.result
            told[response.request_id] = result.output_token_ids[0], (result.log_probs or [[]])[0]
        core.check_integrity()
        if not core.has_work:
            return told
    raise AssertionError("the engine does not come to an end")


def check_same(told: dict, plain: dict, kernels: str) -> None:
    for request_id, (tokens, log_probs) in plain.items():
        assert told[request_id][0] == tokens
        if kernels == "native":
            assert told[request_id][1] == log_probs
        else:  # a row of a float product depends on the shape of its batch
            assert told[request_id][1] == pytest.approx(log_probs, abs=1e-4)


def one_of_each() -> dict[int, Request]:
    """Requests of different lengths that need the state of their tokens in different ways."""
    output = OutputConfig(return_log_probs=True, exclude_input_from_output=True)
    return {
        number: Request(
            [Random(number).randrange(64) for _ in range(5 + 20 * number)],
            NUM_TOKENS,
            sampling_config=sampling,
            output_config=output,
            end_ids=(1,) if name == "ngrams" else (),
            bad_words=[[2, 3], [5]] if name == "filtered" else [],
        )
        for number, (name, sampling) in enumerate(WITH_STATE.items(), 1)
    }


@pytest.mark.feature("000-20")
@pytest.mark.parametrize("evict_every", [None, 5])
@pytest.mark.parametrize("family", ["llama2", "mistral"])
def test_tokens_and_log_probs_are_those_of_plain_decoding(
    checkpoint: Callable[[str], Path], kernels: str, family: str, evict_every: int | None
) -> None:
    """Right and wrong drafts of changing lengths, for rows that sample in every way, side by side; mistral has a window."""
    plain = answers(make_core(checkpoint(family), kernels), one_of_each())
    core = make_core(checkpoint(family), kernels)
    core.scheduler._drafter = Prompter({request_id: tokens for request_id, (tokens, _) in plain.items()})
    told = answers(core, one_of_each(), evict_every)
    counters = core.counters
    assert (
        counters.accepted_draft_tokens_total > 30 < counters.draft_tokens_total - counters.accepted_draft_tokens_total
    )
    assert (counters.recomputed_tokens_total > 0) == (evict_every is not None)
    check_same(told, plain, kernels)


def test_lookup_changes_no_token(checkpoint: Callable[[str], Path], kernels: str) -> None:
    """With a bias that leaves two tokens only, any three have been seen before, and about half of the guesses are right."""
    bias, output = {5: 80.0, 6: 80.0}, OutputConfig(exclude_input_from_output=True)
    requests = {
        number: Request([7, number] * 10, 200, sampling_config=sampling, output_config=output)
        for number, sampling in enumerate(
            (SamplingConfig(logit_bias=bias), SamplingConfig(temperature=0.8, seed=3, logit_bias=bias)), 1
        )
    }
    core = make_core(checkpoint("llama2"), kernels, SpeculationConfig(mode="lookup"))
    core.scheduler._drafter.cost = FixedStepCost()
    assert answers(core, requests) == answers(make_core(checkpoint("llama2"), kernels), requests)
    assert core.counters.accepted_draft_tokens_total > 50


def test_sampled_tokens_have_the_models_distribution(checkpoint: Callable[[str], Path], native_kernels: None) -> None:
    """The draft is the model's likeliest token behind the prompt, and then another one that is likely. Of the requests whose
    first token is the draft's, the second token comes from the verifying step. Chi-square over the four tokens of top-k, three
    degrees of freedom: 16.27 is exceeded by chance once in a thousand times.
    """
    prompt = [5, 9, 2, 11, 30]
    core = make_core(checkpoint("llama2"), "native")
    model = Oracle(AutoModelForCausalLM.from_pretrained(checkpoint("llama2"), dtype=torch.float32))
    first = model.logits(prompt)[-1].argmax().item()
    likely = model.logits([*prompt, first])[-1].topk(4)
    expected = torch.softmax(likely.values / 2.0, dim=0).tolist()
    drafts = [first, likely.indices[1].item(), 3]
    output = OutputConfig(exclude_input_from_output=True)
    counts: Counter[int] = Counter()
    for start in range(0, 1600, 200):
        requests = {
            seed: Request(
                prompt,
                3,
                sampling_config=SamplingConfig(temperature=2.0, top_k=4, seed=seed),
                output_config=output,
                draft_tokens=drafts,
            )
            for seed in range(start + 1, start + 201)
        }
        told = answers(core, requests)
        counts.update(tokens[1] for tokens, _ in told.values() if tokens[0] == first)
    total = counts.total()
    assert total > 300 and core.counters.accepted_draft_tokens_total > 50
    assert set(counts) <= set(likely.indices.tolist())
    chi_square = sum(
        (counts[token] - total * share) ** 2 / (total * share)
        for token, share in zip(likely.indices.tolist(), expected)
    )
    assert math.isfinite(chi_square) and chi_square < 16.27

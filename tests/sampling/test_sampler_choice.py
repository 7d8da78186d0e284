"""The chosen token: against the slow reference, and independent of everything but the row itself."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from backend.api.sampling import SamplingConfig
from kernels import sampling as kernel
from tests.sampling.conftest import Run
from tests.sampling.reference import Case, next_token, uniform

CONFIGS = [
    SamplingConfig(),
    SamplingConfig(temperature=1.0),
    SamplingConfig(temperature=0.3, seed=2**64 - 1),
    SamplingConfig(top_k=3, seed=5),
    SamplingConfig(top_p=0.7, seed=6),
    SamplingConfig(min_p=0.2, seed=7),
    SamplingConfig(temperature=1.7, top_k=20, top_p=0.9, min_p=0.01, seed=2**63),
    SamplingConfig(temperature=0.9, repetition_penalty=1.3, seed=1),
    SamplingConfig(repetition_penalty=0.7, presence_penalty=0.5),
    SamplingConfig(top_p=0.95, presence_penalty=-0.4, frequency_penalty=0.6, seed=11),
    SamplingConfig(temperature=1.2, logit_bias={0: 4.0, 5: -3.0}, min_tokens=4, seed=12),
    SamplingConfig(logit_bias={3: 100.0}),
    SamplingConfig(no_repeat_ngram_size=2, temperature=1.0, seed=13),
    SamplingConfig(no_repeat_ngram_size=1),
    SamplingConfig(no_repeat_ngram_size=3, repetition_penalty=1.2),
    SamplingConfig(top_p=0.9, top_p_decay=0.8, seed=14),
    SamplingConfig(temperature=1.5, top_p_decay=0.7, top_p_min=0.3, top_p_reset_ids=3, seed=15),
]


def random_case(rng: random.Random, config: SamplingConfig, vocab: int) -> Case:
    logits = np.random.default_rng(rng.randrange(2**32)).normal(0, 2, vocab).astype(np.float32)
    tokens = [rng.randrange(vocab) for _ in range(rng.randrange(1, 30))]
    words = [[rng.randrange(vocab) for _ in range(rng.randrange(1, 4))] for _ in range(rng.randrange(3))]
    if rng.random() < 0.5:
        words.append(tokens[-2:] + [int(logits.argmax())])  # one that is about to be completed
    return Case(
        tokens=tokens, num_prompt=rng.randrange(1, len(tokens) + 1), logits=logits, config=config,
        end_ids=(int(logits.argmax()), vocab - 1), bad_words=words, num_sampled_before=rng.randrange(1000),
    )  # fmt: skip


@pytest.mark.feature("000-13", "002-52")
@pytest.mark.parametrize("vocab", [7, 64, 1500])
def test_every_choice_agrees_with_a_slow_reference(run: Run, vocab: int) -> None:
    rng = random.Random(vocab)
    cases = [random_case(rng, config, vocab) for config in CONFIGS for _ in range(40 if vocab < 1000 else 8)]
    rng.shuffle(cases)
    for start in range(0, len(cases), 16):
        part = cases[start : start + 16]
        expected = [next_token(case) for case in part]
        assert [token.token_id for token in run(part)] == expected


@pytest.mark.feature("002-52")
@pytest.mark.parametrize("vocab", [33, 4097])
def test_a_row_gets_the_same_token_in_any_batch_order_size_and_slot(run: Run, vocab: int) -> None:
    rng = random.Random(vocab)
    cases = [random_case(rng, CONFIGS[i % len(CONFIGS)], vocab) for i in range(24)]
    alone = [run([case], return_log_probs=True, top_log_probs=5)[0] for case in cases]
    for size in (2, 5, 24):
        order = rng.sample(range(24), size)
        slots = rng.sample(range(40), size)
        result = run([cases[i] for i in order], slots=slots, num_slots=40, return_log_probs=True, top_log_probs=5)
        assert [token.slot for token in result] == slots
        for i, token in zip(order, result):
            same = (alone[i].token_id, alone[i].log_prob, alone[i].top_log_probs)
            assert (token.token_id, token.log_prob, token.top_log_probs) == same  # bit for bit


def test_the_weights_of_a_row_do_not_depend_on_the_batch_by_a_single_bit() -> None:
    logits = torch.randn(37, 1003, generator=torch.Generator().manual_seed(0)) * 4
    temperature = torch.linspace(0.2, 2.0, 37)
    together = kernel.weights_of(logits, temperature)
    for i in range(37):
        assert torch.equal(together[i : i + 1], kernel.weights_of(logits[i : i + 1].clone(), temperature[i : i + 1]))


@pytest.mark.feature("004-32")
def test_a_stream_that_continues_after_earlier_turns_equals_one_long_run(run: Run) -> None:
    config = SamplingConfig(temperature=1.5, seed=99)
    flat = np.zeros(1000, dtype=np.float32)
    prompt = [1, 2, 3]

    def generate(tokens: list[int], num: int, before: int) -> list[int]:
        history, output = list(tokens), []
        for _ in range(num):
            case = Case(history + output, len(history), flat, config, num_sampled_before=before)
            output.append(run([case])[0].token_id)
        return output

    long_run = generate(prompt, 12, before=0)
    first = generate(prompt, 5, before=0)
    second = generate(prompt + first + [7, 8], 7, before=5)  # another turn, with a prompt of its own
    assert first + second == long_run
    assert len(set(long_run)) > 6  # the stream moves


def test_a_sequence_that_returns_to_another_slot_draws_the_same_number(run: Run) -> None:
    config = SamplingConfig(temperature=1.0, seed=3)
    case = Case(list(range(20)), 5, np.zeros(500, dtype=np.float32), config)
    resumed = dataclasses.replace(case)  # after eviction a NewRow carries all token ids and the same boundary
    assert run([case], slots=[0])[0].token_id == run([resumed], slots=[6])[0].token_id


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_random_numbers_agree_with_splitmix64_for_seeds_up_to_the_last_uint64(seed: int) -> None:
    counters = [0, 1, 2, 1000, 2**31, 2**40]
    signed = seed - 2**64 if seed >= 2**63 else seed
    got = kernel.uniform(torch.full((6,), signed, dtype=torch.int64), torch.tensor(counters))
    assert got.tolist() == [uniform(seed, counter) for counter in counters]


def test_the_finaliser_gives_the_published_first_outputs_of_splitmix64() -> None:
    """State 1234567, as in the reference implementation's well-known test vector."""
    gamma = 0x9E3779B97F4A7C15
    states = [(1234567 + n * gamma) % 2**64 for n in range(1, 6)]
    signed = torch.tensor([state - 2**64 if state >= 2**63 else state for state in states])
    outputs = [value % 2**64 for value in kernel.mix64(signed).tolist()]
    assert outputs == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip


def test_random_numbers_stay_inside_the_open_interval_and_are_spread_evenly() -> None:
    seeds = torch.arange(200).repeat_interleave(200)
    counters = torch.arange(200).repeat(200)
    u = kernel.uniform(seeds, counters)
    assert 0.0 < float(u.min()) and float(u.max()) < 1.0
    counts = torch.histc(u.float(), bins=100, min=0.0, max=1.0).double()
    assert float(((counts - 400) ** 2 / 400).sum()) < 148.2  # chi-square, 99 degrees of freedom, p = 0.001


# Upper 0.1 % points of chi-square for 3, 5 and 7 degrees of freedom.
CRITICAL = {3: 16.27, 5: 20.52, 7: 24.32}


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (SamplingConfig(temperature=1.0, seed=17), 8),
        (SamplingConfig(temperature=2.0, seed=18), 8),
        (SamplingConfig(top_k=4, seed=19), 4),
        (SamplingConfig(top_p=0.945, seed=20), 6),
    ],
)
def test_many_draws_follow_the_distribution(config: SamplingConfig, kept: int) -> None:
    probabilities = torch.tensor([0.30, 0.22, 0.16, 0.12, 0.08, 0.07, 0.03, 0.02], dtype=torch.float64)
    num = 20000
    logits = probabilities.log().float().expand(num, -1)
    temperature = config.temperature or 1.0
    weights = kernel.weights_of(logits, torch.full((num,), temperature))
    u = kernel.uniform(torch.full((num,), config.seed), torch.arange(num))
    if config.temperature is not None:
        drawn = kernel.draw(weights, u)
    else:
        fill = lambda value, dtype: torch.full((num,), value, dtype=dtype)
        filters = (fill(config.top_k or 8, torch.int64), fill(config.top_p or 1.0, torch.float64), u * 0)
        drawn = kernel.draw_filtered(weights, u, *filters, k_max=8)
    expected = probabilities ** (1 / temperature)
    expected[kept:] = 0
    expected = num * expected / expected.sum()
    counts = torch.bincount(drawn, minlength=8).double()
    assert counts[kept:].sum() == 0
    assert float(((counts - expected)[:kept] ** 2 / expected[:kept]).sum()) < CRITICAL[kept - 1]


def test_the_greatest_random_number_never_picks_a_masked_token() -> None:
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(1))
    logits[0, 4000:] = -torch.inf
    weights = kernel.weights_of(logits, torch.ones(1))
    for u in (1.0, 1.0 - 2**-53, 1.0 - 2**-52):
        assert int(kernel.draw(weights, torch.tensor([u], dtype=torch.float64))) < 4000
    least = kernel.draw(weights, torch.tensor([2.0**-53], dtype=torch.float64))
    assert int(least) == 0


@pytest.mark.parametrize("case", kernel.CASES)
def test_the_launcher_gives_the_same_tokens_for_one_row_and_for_many(
    case: tuple[int, int, int, float, float, float],
) -> None:
    rows, vocab, top_k, top_p, min_p, temperature = case
    generator = torch.Generator().manual_seed(vocab + rows)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    u = torch.rand(rows, generator=generator, dtype=torch.float64)
    t = torch.full((rows,), temperature)
    k = torch.full((rows,), top_k or vocab)
    p, m = torch.full((rows,), top_p, dtype=torch.float64), torch.full((rows,), min_p, dtype=torch.float64)
    together = kernel.sample(logits.clone(), t, u, (k, p, m), int(k.max()))
    for i in range(rows):
        row = slice(i, i + 1)
        alone = kernel.sample(logits[row].clone(), t[row], u[row], (k[row], p[row], m[row]), int(k.max()))
        assert int(alone) == int(together[i])


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])  # nuclei of many tokens, some, and few
def test_sparing_the_full_sort_changes_no_choice(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    generator = torch.Generator().manual_seed(4)
    weights = kernel.weights_of(torch.randn(12, 3000, generator=generator) * scale, torch.ones(12))
    u = torch.rand(12, generator=generator, dtype=torch.float64)
    top_k = torch.tensor([3000, 40, 2000] * 4)
    top_p = torch.tensor([0.5, 0.9, 0.99, 1.0] * 3, dtype=torch.float64)
    min_p = torch.tensor([0.0, 0.0, 0.3] * 4, dtype=torch.float64)
    spared = kernel.draw_filtered(weights, u, top_k, top_p, min_p, 3000)
    sorted_in_full = kernel._draw_ranked(*kernel.rank(weights, 3000), weights.sum(-1), u, top_k, top_p, min_p)
    assert torch.equal(spared, sorted_in_full)

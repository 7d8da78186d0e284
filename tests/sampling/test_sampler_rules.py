"""Edge cases of each rule, and agreement with Hugging Face's logits processors where they exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from backend.api.sampling import SamplingConfig
from backend.core.step import NewRow, SlotId
from kernels import sampling as kernel
from tests.sampling.conftest import MakeSampler, Run
from tests.sampling.reference import Case

VOCAB = 50


def logits_of(seed: int, vocab: int = VOCAB, scale: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, vocab).astype(np.float32)


def support(run: Run, logits: np.ndarray, config: dict[str, Any], draws: int = 400) -> set[int]:
    """The tokens that come out over many positions of one stream."""
    cases = [Case([0], 1, logits, SamplingConfig(**config), num_sampled_before=i) for i in range(draws)]
    return {token.token_id for token in run(cases)}


# ------------------------------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize(
    "config",
    [{}, {"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.0, "top_p": 0.9}, {"top_k": 1, "temperature": 3.0}],
)
def test_greedy_takes_the_lowest_id_of_equal_maxima(run: Run, config: dict[str, Any]) -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[30, 11, 42]] = 5.0
    assert run([Case([0], 1, logits, SamplingConfig(**config))])[0].token_id == 11


@pytest.mark.parametrize("config", [{"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-30}, {"temperature": 1e-300}])
def test_filters_at_their_limit_leave_the_most_likely_token(run: Run, config: dict[str, Any]) -> None:
    logits = logits_of(1)
    assert support(run, logits, config, draws=50) == {int(logits.argmax())}


# ------------------------------------------------------------------------------------------------------------ filters


def test_top_k_beyond_the_vocabulary_filters_nothing(run: Run) -> None:
    logits = np.zeros(8, dtype=np.float32)
    assert support(run, logits, {"top_k": 1000}) == set(range(8))
    wide = run([Case([0], 1, logits, SamplingConfig(top_k=1000, seed=4))])
    assert wide == run([Case([0], 1, logits, SamplingConfig(top_k=0, seed=4))])


def test_top_k_keeps_exactly_k_and_prefers_low_ids_among_equal_tokens(run: Run) -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[40, 20, 30, 10]] = 3.0
    assert support(run, logits, {"top_k": 3}) == {10, 20, 30}


@pytest.mark.parametrize("scale", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("config", [{"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.6}])
def test_the_filters_leave_the_tokens_that_hugging_face_leaves(run: Run, config: dict[str, Any], scale: float) -> None:
    logits = logits_of(7, scale=scale)
    scores = torch.from_numpy(logits)[None]
    if "top_k" in config:
        scores = hf.TopKLogitsWarper(config["top_k"])(None, scores)
    if "top_p" in config:
        scores = hf.TopPLogitsWarper(config["top_p"])(None, scores)
    if "min_p" in config:
        scores = hf.MinPLogitsWarper(config["min_p"])(None, scores)
    allowed = set(scores[0].isfinite().nonzero().flatten().tolist())
    # every allowed token is reached by the random number in the middle of its share
    probabilities = torch.softmax(scores[0].double(), -1)
    order = sorted(allowed, key=lambda token: (-probabilities[token].item(), token))
    ends = probabilities[order].cumsum(0)
    middles = ends - probabilities[order] / 2
    weights = kernel.weights_of(torch.from_numpy(logits)[None].expand(len(order), -1), torch.ones(len(order)))
    fill = lambda value: torch.full((len(order),), value)
    k = config.get("top_k", VOCAB)
    filters = (fill(k), fill(config.get("top_p", 1.0)).double(), fill(config.get("min_p", 0.0)).double())
    assert kernel.draw_filtered(weights, middles, *filters, k_max=k).tolist() == order
    assert support(run, logits, config) <= allowed


# ---------------------------------------------------------------------------------------------------------- penalties


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_penalty_equals_hugging_face(penalty: float) -> None:
    logits = torch.from_numpy(logits_of(3))[None]
    tokens = torch.tensor([[4, 9, 4, 30, 7, 0]])
    expected = hf.RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits.clone())
    off = torch.zeros(1)
    got = kernel.penalize(
        logits.clone(), tokens, torch.tensor([2]), torch.tensor([6]), torch.tensor([penalty]), off, off
    )
    assert torch.equal(got, expected)


def test_tokens_beyond_the_known_length_are_not_penalised() -> None:
    logits = torch.ones(1, VOCAB)
    tokens = torch.tensor([[4, 9, 11, 12]])  # 11 and 12 are what a former owner of the slot left
    one = torch.ones(1)
    got = kernel.penalize(logits.clone(), tokens, torch.tensor([1]), torch.tensor([2]), one * 2, one, one)
    assert got[0, 4] == 0.5 and got[0, 9] == 0.5 - 2.0 and got[0, 11] == 1.0 and got[0, 12] == 1.0


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.zeros(1, VOCAB)
    tokens = torch.tensor([[5, 6, 6, 7, 7, 7]])
    got = kernel.penalize(
        logits, tokens, torch.tensor([3]), torch.tensor([6]), torch.ones(1), torch.tensor([10.0]), torch.tensor([0.5])
    )
    assert got[0, 5] == 0 and got[0, 6] == 0 and got[0, 7] == -11.5
    assert int((got != 0).sum()) == 1


def test_only_rows_with_penalties_are_penalised(run: Run) -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[3, 8]] = [2.0, 1.9]
    plain = Case([3], 1, logits, SamplingConfig())
    penalised = Case([3], 1, logits, SamplingConfig(repetition_penalty=1.5))
    assert [token.token_id for token in run([plain, penalised, plain])] == [3, 8, 3]


# -------------------------------------------------------------------------------------------- bad words, ends and bias


def generate(run: Run, scripted: np.ndarray, prompt: list[int], steps: int, **fields: Any) -> list[int]:
    tokens = list(prompt)
    for _ in range(steps):
        case = Case(tokens, len(prompt), scripted[len(tokens) % len(scripted)], SamplingConfig(), **fields)
        tokens.append(run([case])[0].token_id)
    return tokens[len(prompt) :]


def contains(tokens: list[int], word: list[int]) -> bool:
    return any(tokens[i : i + len(word)] == word for i in range(len(tokens)))


@pytest.mark.feature("000-15")
@pytest.mark.parametrize("word", [[7], [7, 8, 9]])
def test_a_bad_word_never_appears_though_the_logits_always_prefer_it(run: Run, word: list[int]) -> None:
    scripted = np.stack([logits_of(step) for step in range(len(word))])
    for step in range(len(scripted)):
        scripted[step][word[step]] = 50.0  # position n of the text wants word[n % len]
    prompt = [0] * len(word)
    free = generate(run, scripted, prompt, 12)
    assert contains(free, word)
    kept = generate(run, scripted, prompt, 12, bad_words=[word])
    assert not contains(kept, word)
    if len(word) == 3:
        assert contains(kept, word[:2])  # only the token that would complete it is held back


@pytest.mark.feature("000-15")
@pytest.mark.parametrize("mode", [{}, {"temperature": 1.0}, {"top_p": 0.9}, {"top_k": 2}])
def test_a_bad_word_is_masked_in_every_decoding_mode(run: Run, mode: dict[str, Any]) -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[9] = 60.0
    config = SamplingConfig(**mode)
    cases = [Case([1, 7, 8], 1, logits, config, bad_words=[[7, 8, 9]], num_sampled_before=i) for i in range(50)]
    assert 9 not in {token.token_id for token in run(cases)}


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([5, 6], [[5, 6, 1]]),
        ([5, 6], [[6, 1], [5, 1]]),
        ([5], [[9, 5, 1]]),
        ([5], [[5, 5, 1]]),  # the word is longer than what is known
        ([5, 6], [[6, 6, 1]]),
        ([6, 5], [[1]]),
    ],
)
def test_bad_words_equal_hugging_face_and_may_begin_in_the_prompt(
    run: Run, tokens: list[int], words: list[list[int]]
) -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[1] = 5.0
    processor = hf.NoBadWordsLogitsProcessor(bad_words_ids=words)
    expected = processor(torch.tensor([tokens]), torch.from_numpy(logits)[None].clone())
    got = run([Case(tokens, len(tokens), logits, SamplingConfig(), bad_words=words)])[0].token_id
    assert got == int(expected.argmax())


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_repeat_ngram_equals_hugging_face(run: Run, size: int) -> None:
    logits = logits_of(8, vocab=6)
    processor = hf.NoRepeatNGramLogitsProcessor(size)
    for tokens in ([1], [1, 2], [1, 2, 1], [3, 4, 3, 4, 3], [0, 5, 2, 1, 0, 5]):
        expected = processor(torch.tensor([tokens]), torch.from_numpy(logits)[None].clone())
        got = run([Case(tokens, 1, logits, SamplingConfig(no_repeat_ngram_size=size))])[0].token_id
        assert got == int(expected.argmax()), tokens


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_repeat_ngram_masks_exactly_what_would_repeat_whatever_lies_in_other_slots_and_behind_the_row(
    run: Run, size: int
) -> None:
    """Each token in turn is what the model prefers, in a slot that is not the row's number; all rows are chosen at once."""
    processor = hf.NoRepeatNGramLogitsProcessor(size)
    for tokens in ([5], [4, 5], [1, 2, 1], [3, 4, 3, 4, 3], [5, 0, 5, 2, 1, 0, 5]):
        cases, expected = [], []
        for preferred in range(6):
            logits = np.arange(6, dtype=np.float32)
            logits[preferred] = 9.0
            config = SamplingConfig(no_repeat_ngram_size=size)
            cases.append(Case(tokens, 1, logits, config))
            masked = processor(torch.tensor([tokens]), torch.from_numpy(logits)[None].clone())
            expected.append(int(masked.argmax()))
        cases.append(Case([0, 1, 2, 3, 4, 5], 1, np.zeros(6, dtype=np.float32), SamplingConfig(no_repeat_ngram_size=7)))
        got = [token.token_id for token in run(cases, slots=[6, 5, 4, 3, 2, 1, 0])]
        assert got[:6] == expected, tokens


def test_top_p_falls_to_its_least_and_is_set_back_by_a_token(run: Run) -> None:
    logits = np.zeros(16, dtype=np.float32)  # equal tokens: of 16, top_p keeps ceil(16 * top_p)
    decaying = {"top_p": 1.0, "top_p_decay": 0.5, "top_p_min": 0.1, "top_p_reset_ids": 9}

    def width(output: list[int]) -> int:
        cases = [
            Case([0, *output], 1, logits, SamplingConfig(**decaying), num_sampled_before=i) for i in range(0, 4000, 10)
        ]
        return len({token.token_id for token in run(cases)})

    assert [width(output) for output in ([], [1], [1, 1], [1, 1, 1], [1] * 9)] == [16, 8, 4, 2, 2]
    assert [width(output) for output in ([1, 1, 9], [1, 9, 1], [9])] == [16, 8, 16]
    assert width([9, 1, 1]) == 4


def test_min_tokens_masks_end_ids_until_enough_outputs_exist(run: Run) -> None:
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, 2], logits[0, 6] = 9.0, 8.0
    config = SamplingConfig(min_tokens=3)
    picked = []
    for outputs in range(5):
        case = Case([0, 0] + [6] * outputs, 2, logits[0], config, end_ids=(2, 40))
        picked.append(run([case])[0].token_id)
    assert picked == [6, 6, 6, 2, 2]


def test_logit_bias_is_added_before_the_choice_but_not_to_log_probs(run: Run) -> None:
    logits = logits_of(5)
    target = int(logits.argmin())
    case = Case([0], 1, logits, SamplingConfig(logit_bias={target: 100.0}))
    token = run([case], return_log_probs=True)[0]
    assert token.token_id == target
    expected = torch.log_softmax(torch.from_numpy(logits), -1)[target]
    assert token.log_prob == pytest.approx(float(expected), abs=1e-6)


# ---------------------------------------------------------------------------------------------------------- log-probs


@pytest.mark.feature("001-53")
def test_log_probs_are_those_of_the_models_own_distribution(run: Run, path: str) -> None:
    """On the torch path bit for bit torch's; the native ones are rounded from numbers of double precision."""
    config = SamplingConfig(temperature=0.3, top_k=5, repetition_penalty=1.4, frequency_penalty=1.0)
    cases = [Case([1, 2, 3], 1, logits_of(seed), config, bad_words=[[4]]) for seed in range(6)]
    for case, token in zip(cases, run(cases, return_log_probs=True, top_log_probs=4)):
        logits = torch.from_numpy(case.logits)
        expected = torch.log_softmax(logits if path == "torch" else logits.double(), -1)
        near = lambda values: values if path == "torch" else pytest.approx(values, rel=2e-7, abs=2e-7)
        assert token.log_prob == near(float(expected[token.token_id]))
        values, ids = expected.topk(4)
        assert [token for token, _ in token.top_log_probs] == ids.tolist()
        assert [value for _, value in token.top_log_probs] == near(values.tolist())


def test_top_log_probs_list_equal_tokens_by_id(run: Run) -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[44, 3]] = 1.0
    top = run([Case([0], 1, logits, SamplingConfig())], top_log_probs=4)[0].top_log_probs
    assert [token for token, _ in top] == [3, 44, 0, 1]


def test_only_rows_that_ask_get_log_probs(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(3, VOCAB)
    for slot, (wants, top) in enumerate([(False, 0), (True, 2), (False, 3)]):
        sampler.set_row(
            NewRow(SlotId(slot), [0], 1, 0, [], SamplingConfig(), return_log_probs=wants, top_log_probs=top)
        )
    logits = torch.from_numpy(np.stack([logits_of(i) for i in range(3)]))
    result = sampler.sample(logits.clone(), [0, 1, 2], torch.zeros(3, 4, dtype=torch.int64), [1, 1, 1])
    assert result[0].log_prob is None and result[0].top_log_probs == []
    assert result[1].log_prob is not None and len(result[1].top_log_probs) == 2
    assert result[2].log_prob is None and len(result[2].top_log_probs) == 3


# ---------------------------------------------------------------------------------------------------------- interface


def test_set_row_replaces_everything_the_slot_held(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(1, VOCAB)
    busy = SamplingConfig(temperature=1.0, top_k=3, logit_bias={5: 1e4}, repetition_penalty=9.0, min_tokens=9)
    sampler.set_row(NewRow(SlotId(0), [0], 1, 0, [], busy, end_ids=(5,), bad_words=[[1]], top_log_probs=3))
    sampler.set_row(NewRow(SlotId(0), [0], 1, 0, [], SamplingConfig()))
    logits = torch.zeros(1, VOCAB)
    logits[0, 1] = 1.0
    result = sampler.sample(logits, [0], torch.ones(1, 4, dtype=torch.int64), [2])
    assert result[0].token_id == 1 and result[0].top_log_probs == []


@pytest.mark.parametrize("mode", [{}, {"temperature": 1.0}, {"top_p": 0.9}, {"min_p": 0.1, "top_k": 4}])
def test_a_row_whose_tokens_are_all_masked_still_yields_a_token_of_the_vocabulary(
    run: Run, mode: dict[str, Any]
) -> None:
    masked = Case([0], 1, np.full(VOCAB, -np.inf, dtype=np.float32), SamplingConfig(**mode))
    sound = Case([0], 1, logits_of(2), SamplingConfig(**mode, seed=8))
    tokens = run([masked, sound])
    assert 0 <= tokens[0].token_id < VOCAB
    assert tokens[1].token_id == run([sound])[0].token_id


def test_the_token_buffer_is_only_read(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(2, VOCAB)
    config = SamplingConfig(top_p=0.5, repetition_penalty=2.0)
    sampler.set_row(NewRow(SlotId(1), [0], 1, 0, [], config, bad_words=[[1, 2]]))
    buffer = torch.arange(20).reshape(2, 10)
    sampler.sample(torch.randn(1, VOCAB), [1], buffer, [10])
    assert torch.equal(buffer, torch.arange(20).reshape(2, 10))


def test_wrong_shapes_and_unknown_slots_are_refused(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(2, VOCAB)
    sampler.set_row(NewRow(SlotId(0), [0], 1, 0, [], SamplingConfig()))
    buffer = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="expected is \\[1, 50\\]"):
        sampler.sample(torch.zeros(1, VOCAB - 1), [0], buffer, [1])
    with pytest.raises(ValueError, match="slot 1 has no sampling parameters"):
        sampler.sample(torch.zeros(1, VOCAB), [1], buffer, [1])
    assert sampler.sample(torch.zeros(0, VOCAB), [], buffer, []) == []


def test_the_mathematics_imports_nothing_but_torch() -> None:
    source = Path(kernel.__file__).read_text(encoding="utf-8")
    imports = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert imports == ["from __future__ import annotations", "import torch", "from torch import Tensor"]

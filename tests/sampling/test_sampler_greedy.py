"""Rows that want the greatest logit and nothing else: the model's step has found it, and the Sampler need not look."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from backend.api.sampling import SamplingConfig
from backend.core.step import NewRow, SampledToken, SlotId
from tests.sampling.conftest import MakeSampler

VOCAB = 50
BUFFER = torch.arange(40).reshape(4, 10)

# What is asked besides, and the tokens (0 to 10, the first 2 of them prompt) at which logits are needed
ASKED = [
    ({}, ()),
    ({"sampling": SamplingConfig(temperature=0.0)}, ()),
    ({"sampling": SamplingConfig(top_k=1, seed=3)}, ()),
    ({"end_ids": (3,)}, ()),
    ({"sampling": SamplingConfig(min_tokens=3)}, ()),  # nothing to hold back
    ({"sampling": SamplingConfig(min_tokens=3), "end_ids": (3,)}, range(5)),
    ({"sampling": SamplingConfig(temperature=1.0)}, range(11)),
    ({"sampling": SamplingConfig(top_p=0.9)}, range(11)),
    ({"sampling": SamplingConfig(repetition_penalty=1.1)}, range(11)),
    ({"sampling": SamplingConfig(presence_penalty=0.1)}, range(11)),
    ({"sampling": SamplingConfig(logit_bias={1: 1.0})}, range(11)),
    ({"bad_words": [[1]]}, range(11)),
    ({"return_log_probs": True}, range(11)),
    ({"top_log_probs": 2}, range(11)),
]


def new_row(slot: int, **fields: object) -> NewRow:
    return NewRow(SlotId(slot), [0, 1], 2, 0, [], **{"sampling": SamplingConfig(), **fields})


@pytest.mark.parametrize(("fields", "lengths"), ASKED)
def test_logits_are_needed_for_everything_but_the_greatest(
    make_sampler: MakeSampler, fields: dict[str, object], lengths: range | tuple[()]
) -> None:
    sampler = make_sampler(4, VOCAB)
    sampler.set_row(new_row(0))
    sampler.set_row(new_row(2, **fields))
    for known in range(11):
        assert sampler.needs_logits([0, 2], [7, known]) == [False, known in lengths]
    assert sampler.needs_logits([2, 0]) == [bool(lengths), False]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_rows_that_need_none_take_the_given_token_without_logits(
    make_sampler: MakeSampler, kind: Callable[[list[int]], list[int] | np.ndarray | Tensor]
) -> None:
    sampler = make_sampler(4, VOCAB)
    sampler.set_row(new_row(3))
    sampler.set_row(new_row(1))
    result = sampler.sample(None, [3, 1], BUFFER, [5, 6], greedy=kind([17, 4]))
    assert result == [SampledToken(SlotId(3), 17), SampledToken(SlotId(1), 4)]
    assert all(type(token.token_id) is int for token in result)


def test_with_and_without_the_given_tokens_the_result_is_the_same(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(len(ASKED), VOCAB)
    for slot, (fields, _) in enumerate(ASKED):
        sampler.set_row(new_row(slot, **fields))
    generator = torch.Generator().manual_seed(3)
    buffer = torch.randint(VOCAB, (len(ASKED), 10), generator=generator)
    for known in (2, 4, 5, 10):
        logits = torch.randn(len(ASKED), VOCAB, generator=generator).mul_(3).round_()  # equal ones among them
        slots = torch.randperm(len(ASKED), generator=generator).tolist()
        lengths = [known] * len(slots)
        greedy = [int((row == row.max()).nonzero()[0]) for row in logits]
        expected = sampler.sample(logits.clone(), slots, buffer, lengths)
        assert sampler.sample(logits.clone(), slots, buffer, lengths, greedy=greedy) == expected
        needed = sampler.needs_logits(slots, lengths)
        assert sampler.sample(logits.clone(), slots, buffer, lengths, greedy=greedy, needed=needed) == expected


def test_the_given_token_is_taken_only_where_nothing_else_is_asked(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(4, VOCAB)
    sampler.set_row(new_row(0))
    sampler.set_row(new_row(1, sampling=SamplingConfig(logit_bias={8: 100.0})))
    result = sampler.sample(torch.zeros(2, VOCAB), [0, 1], BUFFER, [2, 2], greedy=[33, 33])
    assert [token.token_id for token in result] == [33, 8]


def test_missing_logits_and_wrong_lengths_are_refused(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(4, VOCAB)
    sampler.set_row(new_row(0))
    sampler.set_row(new_row(1, sampling=SamplingConfig(temperature=1.0)))
    with pytest.raises(ValueError, match="logits are None"):
        sampler.sample(None, [0], BUFFER, [2])
    with pytest.raises(ValueError, match="logits are None"):
        sampler.sample(None, [0, 1], BUFFER, [2, 2], greedy=[1, 1])
    with pytest.raises(ValueError, match="greedy has 2 tokens for 1 slots"):
        sampler.sample(None, [0], BUFFER, [2], greedy=[1, 1])
    with pytest.raises(ValueError, match="1 slots and 2 lengths"):
        sampler.sample(None, [0], BUFFER, [2, 2], greedy=[1])
    with pytest.raises(ValueError, match="slot 3 has no sampling parameters"):
        sampler.needs_logits([0, 3])
    assert sampler.sample(None, [], BUFFER, [], greedy=[]) == []
    assert sampler.needs_logits([], []) == []

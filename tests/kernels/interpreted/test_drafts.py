"""Drafts on the runner of a GPU: several rows of one sequence in a step change no token."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from msgspec.structs import replace

from backend.api import OutputConfig, Request, Result
from backend.api.config import SpeculationConfig
from backend.core.sequence import Sequence
from backend.core.step import SequenceId
from backend.executor.tensors import as_tensor
from backend.scheduler.drafting import Draft, Drafter
from tests.kernels.interpreted.test_device_runner import (  # noqa: F401 (fixture)
    ASKED,
    SPECIAL,
    Replays,
    directory,
    finish,
    make_core,
    request,
)

NUM_TOKENS = 8


class Prompter(Drafter):
    """Guesses what plain decoding has said, with a wrong token somewhere at every other length."""

    def __init__(self, truths: list[list[int]]) -> None:
        super().__init__(SpeculationConfig())
        self._truths = truths

    def waits(self, seq: Sequence) -> bool:
        return seq.request.speculation

    def propose(self, generation: list[Sequence], room: int) -> dict[SequenceId, Draft]:
        drafts = {}
        for seq in generation:
            rng, num_output = Random(f"{seq.request_id} {seq.num_tokens}"), seq.num_output_tokens
            count = min(rng.randint(0, 4), room, seq.max_output_tokens - num_output - 1)
            token_ids = self._truths[seq.request_id][num_output : num_output + count]
            if not token_ids or seq.num_inflight_samples or not seq.request.speculation:
                continue
            if (seq.request_id + num_output) % 2 == 0:
                wrong = rng.randrange(len(token_ids))
                token_ids[wrong] = (token_ids[wrong] + 1) % 131
            drafts[seq.seq_id] = Draft(token_ids)
            room -= len(token_ids)
        return drafts


def check(path: Path, requests: list[Request], **options: object) -> list[tuple[Result, Result]]:
    """Tokens with drafts are those without; some were right and some were wrong. Returns the results without and with drafts."""
    without = finish(make_core(path, "triton", Replays()), requests)
    plain = [result.output_token_ids[0] for result in without]
    core = make_core(path, "triton", Replays(), **options)
    core.scheduler._drafter = Prompter(plain)
    results = finish(core, requests)
    assert [result.output_token_ids[0] for result in results] == plain
    assert 1 < core.counters.accepted_draft_tokens_total < core.counters.draft_tokens_total
    return list(zip(without, results))


@pytest.mark.feature("000-20")
def test_drafts_change_no_token(directory: Path) -> None:  # noqa: F811
    """A greedy row, and rows that are sampled with what changes logits, beside a prompt that is cut."""
    sampled = [request(9 + 8 * n, NUM_TOKENS, n, **ASKED[n]) for n in (1, 3)]
    special = request(6, NUM_TOKENS, 9, top=3, min_tokens=3, **SPECIAL)
    check(directory, [request(7, NUM_TOKENS), *sampled, special], look_ahead=True)


def test_beside_rows_that_want_more_than_tokens(directory: Path) -> None:  # noqa: F811
    """The logits of a neighbour without drafts are what they are without any."""
    output = OutputConfig(exclude_input_from_output=True, return_generation_logits=True)
    requests = [request(9 + 5 * n, NUM_TOKENS, n) for n in range(3)]
    asked = [replace(requests[0], output_config=output, speculation=False), *requests[1:]]
    (plain, drafted), *_ = check(directory, asked, look_ahead=False)
    logits = [as_tensor(result.generation_logits) for result in (plain, drafted)]
    assert torch.allclose(*logits, atol=1e-4) and logits[0].shape[-2:] == (NUM_TOKENS, 131)


def test_a_request_brings_its_own(directory: Path) -> None:  # noqa: F811
    """Six of eight tokens are drafts: the first comes from the prompt's step, and the second step verifies the other five."""
    plain = finish(make_core(directory, "triton"), [request(9, NUM_TOKENS)])[0].output_token_ids[0]
    core = make_core(directory, "triton", look_ahead=False)
    result = finish(core, [replace(request(9, NUM_TOKENS), draft_tokens=plain[:6])])[0]
    assert result.output_token_ids[0] == plain
    assert core.counters.accepted_draft_tokens_total == core.counters.draft_tokens_total == 5
    assert core.counters.steps_total == 3

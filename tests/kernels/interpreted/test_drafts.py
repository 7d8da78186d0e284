"""Drafts on the runner of a GPU: several rows of one sequence in a step change no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from backend.api import OutputConfig, Request, Response, Result
from backend.engine.core import EngineCore
from backend.worker.post_processors import PostProcessors
from compat.tensorrt_llm import as_tensor
from tests.fakes.drafters import Prompter
from tests.kernels.interpreted.test_device_runner import (  # noqa: F401 (fixture)
    ASKED,
    SPECIAL,
    Replays,
    directory,
    finish,
    make_core,
    request,
)
from tests.kernels.interpreted.test_guided_rows import END, GUIDE, take_guides

NUM_TOKENS = 8
Make = Callable[..., EngineCore]


def check(
    path: Path, requests: list[Request], make: Make = make_core, **options: object
) -> list[tuple[Result, Result]]:
    """Tokens with drafts are those of the torch tier without, which costs a tenth of the interpreter's time; some were right
    and some wrong. Returns the results without and with drafts.
    """
    without = finish(make(path, "torch"), requests)
    plain = [result.output_token_ids[0] for result in without]
    core = make(path, "triton", Replays(), **options)
    core.scheduler._drafter = Prompter(dict(enumerate(plain)))
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
    """The logits of neighbours without drafts are what they are without any: of one that generates, and of a prompt of 60 tokens,
    which steps of 24 cut.
    """
    output = OutputConfig(exclude_input_from_output=True, return_generation_logits=True)
    requests = [request(9 + 5 * n, NUM_TOKENS, n) for n in range(3)]
    generating = replace(requests[0], output_config=output, speculation=False)
    of_prompt = OutputConfig(exclude_input_from_output=True, return_context_logits=True)
    prompt = replace(request(60, NUM_TOKENS, 3), output_config=of_prompt, speculation=False)
    told = check(directory, [generating, *requests[1:], prompt], look_ahead=False)
    for (plain, drafted), name, rows in ((told[0], "generation_logits", NUM_TOKENS), (told[3], "context_logits", 60)):
        logits = [as_tensor(getattr(result, name)) for result in (plain, drafted)]
        assert torch.allclose(*logits, atol=1e-4) and logits[0].shape[-2:] == (rows, 131)


def test_beside_rows_with_a_post_processor(directory: Path) -> None:  # noqa: F811
    """It takes the place of the logits, so that its request says what no other one does."""

    def make(*arguments: object, **options: object) -> EngineCore:
        return make_core(*arguments, processors=PostProcessors({"reverse": reverse}), **options)

    def reverse(request_id: int, logits: torch.Tensor, token_ids: list[list[int]], stream: int) -> torch.Tensor:
        return -logits

    plain = [request(9 + 5 * n, NUM_TOKENS, n) for n in range(3)]
    processed = replace(plain[0], logits_post_processor="reverse", speculation=False)
    told = check(directory, [processed, *plain[1:]], make)
    assert told[0][1].output_token_ids != finish(make(directory, "torch"), plain[:1])[0].output_token_ids


def test_a_post_processor_that_fails_beside_drafts_ends_its_own_request(directory: Path) -> None:  # noqa: F811
    """It fails behind ten tokens, those of its prompt and the first: in the step that verifies all drafts of its neighbour."""

    def fail(request_id: int, logits: torch.Tensor, token_ids: list[list[int]], stream: int) -> None:
        if len(token_ids[0]) == 10:
            raise KeyError("secret")

    requests = [request(9, NUM_TOKENS, n) for n in range(2)]
    plain = finish(make_core(directory, "torch"), requests)[1].output_token_ids[0]
    core = make_core(directory, "triton", processors=PostProcessors({"fail": fail}), look_ahead=False)
    core.enqueue(0, replace(requests[0], logits_post_processor="fail"))
    core.enqueue(1, replace(requests[1], draft_tokens=plain[:6]))
    told: list[Response] = []
    while core.has_work:
        told += core.step()
    failed, drafted = sorted(told, key=lambda response: response.request_id)
    assert "post-processor 'fail' failed" in failed.error_msg
    assert drafted.result.output_token_ids[0] == plain
    assert core.counters.accepted_draft_tokens_total == core.counters.draft_tokens_total == 5


def test_beside_rows_with_guides(directory: Path) -> None:  # noqa: F811
    """Their masks, and the tokens that they go on by, stand at other places of the logits than without drafts."""

    def make(*arguments: object, **options: object) -> EngineCore:
        return take_guides(make_core(*arguments, **options))

    requests = [request(9 + 4 * n, 12, n, end_ids=(END,)) for n in range(3)]
    guided = replace(requests[1], guide=GUIDE, speculation=False)
    check(directory, [requests[0], guided, requests[2]], make, look_ahead=True)


def test_a_request_brings_its_own(directory: Path) -> None:  # noqa: F811
    """Six of eight tokens are drafts: the first comes from the prompt's step, and the second step verifies the other five."""
    plain = finish(make_core(directory, "torch"), [request(9, NUM_TOKENS)])[0].output_token_ids[0]
    core = make_core(directory, "triton", look_ahead=False)
    result = finish(core, [replace(request(9, NUM_TOKENS), draft_tokens=plain[:6])])[0]
    assert result.output_token_ids[0] == plain
    assert core.counters.accepted_draft_tokens_total == core.counters.draft_tokens_total == 5
    assert core.counters.steps_total == 3

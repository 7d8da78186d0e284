"""Drafts under guides: outputs are what they are without, and masks of positions that lie ahead what they are when these come."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from backend.api import EngineConfig, Request, SamplingConfig
from backend.api.config.schema import SpeculationConfig
from backend.api.guide import Guide, GuideType
from backend.api.response import FinishReason, Result
from backend.core.step import NewRow, Row, SampledToken
from backend.executor import Executor
from backend.guided.protocol import CompiledGuide, Matcher
from backend.scheduler import drafting
from backend.worker.guided_rows import GuidedRow, GuidedRows, MatcherSource
from tests.fakes.drafters import FixedStepCost
from tests.guided.test_outputs import JSON_SCHEMA, answers, config, request
from tests.guided.tools import MODEL, allowed, backend, tokenizer

ITEM = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
LIST = Guide(GuideType.JSON_SCHEMA, json.dumps({"type": "array", "items": ITEM, "minItems": 6, "maxItems": 8}))
END = tokenizer().eos_ids[0]


def with_lookup() -> EngineConfig:
    return msgspec.structs.replace(config(), speculation=SpeculationConfig(mode="lookup"))


@pytest.fixture(scope="module")
def guessing() -> Iterator[Executor]:
    """How many guesses are tried depends on what steps take, so that is fixed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "StepCost", FixedStepCost)
        made = Executor.from_directory(MODEL, with_lookup())
    with made:
        yield made


@pytest.fixture(scope="module")
def plain() -> Iterator[Executor]:
    with Executor.from_directory(MODEL, config()) as made:
        yield made


def told(result: Result) -> tuple[object, ...]:
    return result.output_token_ids, result.finish_reasons, result.log_probs, result.top_log_probs


def asked(guide: Guide, seed: int, **fields: object) -> Request:
    """With log-probabilities, and an end id that a draft may hold."""
    made = request(guide, seed, 200, end_ids=(END,), **fields)
    output = msgspec.structs.replace(made.output_config, return_log_probs=True, top_log_probs=2)
    return msgspec.structs.replace(made, output_config=output)


@pytest.mark.parametrize("guide", [LIST, JSON_SCHEMA], ids=["list", "object"])
def test_lookup_changes_no_token_of_a_guided_output(guessing: Executor, plain: Executor, guide: Guide) -> None:
    """Of a list of objects each says the same keys again. Eight requests at once, one greedy, the others sampled."""
    requests = [asked(guide, seed) for seed in range(7)] + [asked(guide, 7, sampling_config=SamplingConfig())]
    measured, expected = answers(guessing, requests), answers(plain, requests)
    assert [told(each) for each in measured] == [told(each) for each in expected]
    if guide is LIST:
        accepted = [each.perf_metrics.num_accepted_draft_tokens for each in measured if each.perf_metrics is not None]
        assert sum(accepted) > 300


@pytest.mark.parametrize(
    ("changes", "num_right"),
    [
        ({}, 30),
        ({7: 1}, 7),  # a token that the guide allows nowhere here
        ({9: END}, 9),
        ({9: END, 10: END}, 9),
    ],
    ids=["right", "forbidden", "an end", "ends"],
)
def test_a_client_s_draft_under_a_guide(plain: Executor, changes: dict[int, int], num_right: int) -> None:
    """It is accepted up to the token that was changed."""
    (expected,) = answers(plain, [asked(LIST, 3)])
    draft = expected.output_token_ids[0][:30]
    for place, token_id in changes.items():
        assert draft[place] != token_id
        draft[place] = token_id
    (measured,) = answers(plain, [msgspec.structs.replace(asked(LIST, 3), draft_tokens=draft)])
    assert told(measured) == told(expected)
    assert measured.perf_metrics is not None
    assert measured.perf_metrics.num_accepted_draft_tokens == num_right


def test_a_model_s_other_end_id_is_no_text(plain: Executor) -> None:
    """The model has two, the request names one: the other one is not allowed where the guide is complete."""
    assert len(tokenizer().eos_ids) == 2
    for result in answers(plain, [asked(guide, seed) for guide in (LIST, JSON_SCHEMA) for seed in range(4)]):
        ids = result.output_token_ids[0]
        assert tokenizer().eos_ids[1] not in ids
        assert (ids[-1] == END) == (result.finish_reasons == (FinishReason.END_ID,))


def test_a_draft_may_go_beyond_the_end(plain: Executor) -> None:
    (expected,) = answers(plain, [asked(JSON_SCHEMA, 5)])
    assert expected.finish_reasons == (FinishReason.END_ID,)
    draft = [*expected.output_token_ids[0], END, 17, 18]
    (measured,) = answers(plain, [msgspec.structs.replace(asked(JSON_SCHEMA, 5), draft_tokens=draft)])
    assert told(measured) == told(expected)


def bits(masks: np.ndarray, row: int) -> set[int]:
    return set(np.unpackbits(masks[row].view(np.uint8), bitorder="little").nonzero()[0].tolist())


def test_masks_ahead_are_those_of_their_positions() -> None:
    """The draft is `{"a":"b"}` and the end: each position's mask is what a matcher says that has come there token by token.
    Behind the end, and behind a token that is forbidden, all is allowed. The row has not moved.
    """
    compiled = backend().compile(Guide(GuideType.JSON_SCHEMA, '{"type":"object"}'))
    draft = tokenizer().encode('{"a":"b"}', add_special_tokens=False)
    row, masks = GuidedRow(compiled.matcher, [END], [], "stuck"), np.zeros((len(draft) + 3, 128), dtype=np.int32)
    for _ in range(2):
        row.fill_ahead(masks, 1, [*draft, END])
        matcher = compiled.matcher()
        for index, token_id in enumerate(draft):
            assert bits(masks, 1 + index) == allowed(matcher) - {END}
            matcher.accept(token_id)
        assert bits(masks, 1 + len(draft)) >= {END}
        assert bits(masks, 2 + len(draft)) == set(range(4096))
        assert not bits(masks, 0)
    forbidden = tokenizer().encode("x", add_special_tokens=False)
    row.fill_ahead(masks, 0, [*forbidden, *draft[:2]])
    assert len(bits(masks, 0)) < 4096
    assert bits(masks, 1) == bits(masks, 3) == set(range(4096))


class Limited:
    """Allows every token, and breaks at the fourth, as a matcher does whose work has a limit."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.error, self.is_complete = "", False

    def fill(self, masks: np.ndarray, row: int) -> None:
        assert not self.error
        masks[row] = -1
        masks[row, 3] = len(self.ids)

    def accept(self, token_id: int) -> bool:
        self.ids.append(token_id)
        self.error = "max is 3" if len(self.ids) > 3 else ""
        return not self.error

    def rollback(self, num_tokens: int) -> None:
        del self.ids[len(self.ids) - num_tokens :]


def test_a_limit_that_a_wrong_draft_meets_is_none_for_the_output() -> None:
    """After two tokens, a draft of two breaks the matcher. The output goes on otherwise, and meets the limit by itself."""
    row, masks = GuidedRow(Limited, [], [5, 6], "stuck"), np.zeros((3, 4), dtype=np.int32)
    for _ in range(2):
        row.fill_ahead(masks, 0, [7, 8])
        assert masks[:, 3].tolist() == [2, 3, -1] and not row.error
    row.accept(9)
    row.fill(masks, 0)
    assert masks[0, 3] == 3 and not row.error
    row.accept(9)
    assert "max is 3" in row.error


def test_each_guided_row_of_a_step_has_its_own_logits_and_its_own_sample() -> None:
    """Rows that sample nothing have neither; a row's drafts have logits, but one sample together. Of the rows that sample, the
    second one's token is forbidden by its guide: that row fails, and is the step's fifth.
    """
    compiled = backend().compile(Guide(GuideType.REGEX, "[0-9]+"))
    rows = GuidedRows(compiled_source(compiled), 8, 4096)
    digit, letter = (tokenizer().encode(text, add_special_tokens=False)[0] for text in "5x")
    for slot in (1, 2, 3):
        rows.set_row(NewRow(slot, [7], 1, 0, [], SamplingConfig(), (END,), guide=Guide(GuideType.REGEX, "[0-9]+")))
    step = rows.of_step(
        [
            Row(0, 0, 4, samples=False),
            Row(4, 0, 3, samples=True, drafts=[9, 9]),
            Row(1, 0, 2, samples=False),
            Row(2, 0, 3, samples=True, drafts=[digit, digit]),
            Row(3, 0, 1, samples=True),
        ]
    )
    assert step is not None
    assert [each[:3] for each in step._places] == [(3, 1, 3), (6, 2, 4)]
    masked = step.mask(torch.zeros(7, 4096))
    assert [bool((masked[i] == 0).all()) for i in range(7)] == [True] * 3 + [False] * 4
    samples = [SampledToken(slot, token_id) for slot, token_id in ((4, letter), (2, digit), (3, letter))]
    assert [number for number, _ in step.accept(samples)] == [4]


def compiled_source(compiled: CompiledGuide) -> MatcherSource:
    """A source of matchers of one guide."""

    class Source:
        def matcher(self, guide: Guide) -> Matcher:
            return compiled.matcher()

    return Source()

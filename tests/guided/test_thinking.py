"""Reasoning in the engine: where it ends, its budget, and the guide behind it; alone, evicted, as beams, with drafts."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import numpy as np
import pytest

from backend.api import Request, SamplingConfig
from backend.api.config.schema import SpeculationConfig
from backend.api.guide import Guide, GuideType, Thinking
from backend.api.response import FinishReason, Result
from backend.core.thinking import Phase, ReasoningCounter, ReasoningPlace, ThinkingCourse
from backend.executor import Executor
from backend.guided.thinking import ThinkingMatcher
from tests.executor.helpers import drain
from tests.guided.test_outputs import CODE, answers, config, error_of, request
from tests.guided.tools import MODEL, VOCAB, allowed, backend, tokenizer

START, END, FOLLOW = 3, (40, 41, 40, 42), (50, 51)
OPENED = Thinking(END, max_tokens=9)
EOS = 0


def course_of(thinking: Thinking, ids: list[int], is_guided: bool = False) -> ReasoningPlace:
    course = ThinkingCourse(thinking, is_guided)
    place: ReasoningPlace | None = course.beginning
    for token_id in ids:
        assert place is not None
        place = course.after(place, token_id)
    assert place is not None
    return place


@pytest.mark.parametrize("seed", range(40))
def test_reasoning_ends_behind_the_first_end_mark_wherever_it_begins(seed: int) -> None:
    """The end mark overlaps itself; the naive search for it is the judge."""
    chance = random.Random(seed)
    ids = [chance.choice([40, 41, 42, 7]) for _ in range(60)] + [1, *END]
    end = next(i for i in range(len(ids)) if tuple(ids[i : i + len(END)]) == END) + len(END)
    assert course_of(Thinking(END), ids[:end]).phase is Phase.ANSWER
    assert course_of(Thinking(END), ids[: end - 1]).phase is Phase.THINK
    counter = ReasoningCounter(Thinking(END))
    for token_id in [*ids[:end], 1, 2, 3]:
        counter.push([token_id])
    assert counter.count == end


def test_a_budget_forces_what_is_left_of_the_end_mark() -> None:
    thinking = Thinking(END, max_tokens=3)
    course, place = ThinkingCourse(thinking, False), course_of(thinking, [1, 40, 41])
    forced = []
    while (token_id := course.forced(place)) is not None:
        assert course.after(place, token_id + 1) is None, "nothing else may follow"
        forced.append(token_id)
        place = course_of(thinking, [1, 40, 41, *forced])
    assert forced == [40, 42] and place.phase is Phase.ANSWER
    assert course_of(Thinking(END, max_tokens=0), list(END)).phase is Phase.ANSWER


@pytest.mark.parametrize("is_guided", [False, True])
@pytest.mark.parametrize(
    ("max_tokens", "ids", "by_budget"),
    [
        (3, (1, 2, 3, *END), True),  # the whole mark is forced
        (3, (1, 40, 41, 40, 42), True),  # the rest of it
        (5, (1, *END), False),  # the model has ended it within its budget, with the last token
        (None, (1, *END), False),
    ],
)
def test_what_follows_the_end_mark_is_forced_where_a_budget_or_a_guide_needs_it(
    max_tokens: int | None, ids: tuple[int, ...], by_budget: bool, is_guided: bool
) -> None:
    """A budget without a guide, too: the model has not written the mark by itself and would not go on with what follows it."""
    thinking = Thinking(END, (), FOLLOW, max_tokens=max_tokens)
    course, place = ThinkingCourse(thinking, is_guided), course_of(thinking, list(ids), is_guided)
    forced = []
    while (token_id := course.forced(place)) is not None:
        forced.append(token_id)
        place = course_of(thinking, [*ids, *forced], is_guided)
    assert forced == (list(FOLLOW) if by_budget or is_guided else [])
    assert place.phase is Phase.ANSWER


def test_without_its_beginning_there_is_no_reasoning() -> None:
    thinking = Thinking(END, (START, 4))
    assert course_of(thinking, [START, 4]).phase is Phase.THINK
    assert course_of(thinking, [7]).phase is Phase.ANSWER
    assert course_of(thinking, [START, 5]).phase is Phase.ANSWER
    guided = ThinkingCourse(thinking, is_guided=True)
    assert guided.after(ReasoningPlace(Phase.START, 1), 5) is None, (
        "a guided output that has begun the mark completes it"
    )
    always = ThinkingCourse(Thinking(END, (START,), is_always=True), is_guided=True)
    assert always.forced(always.beginning) == START
    for ids, count in (([START, 4, 9, 9], 4), ([7, 8], 0), ([START, 5], 0)):
        counter = ReasoningCounter(thinking)
        counter.push(ids)
        assert counter.count == count


def test_a_guide_applies_behind_the_reasoning_and_what_follows_it() -> None:
    digits = backend().compile(Guide(GuideType.REGEX, "[0-9]{2}"))
    numbers = {tokenizer().encode(str(digit), add_special_tokens=False)[0] for digit in range(10)}
    matcher = ThinkingMatcher(Thinking(END, (START,), FOLLOW), digits.matcher())
    assert allowed(matcher) == numbers | {START} and not matcher.is_complete
    assert matcher.accept(START)
    for token_id in (900, *END):
        assert len(allowed(matcher)) == VOCAB and not matcher.is_complete
        assert matcher.accept(token_id)
    for token_id in FOLLOW:
        assert allowed(matcher) == {token_id} and not matcher.accept(token_id + 1)
        assert matcher.accept(token_id)
    assert allowed(matcher) == numbers
    number = min(numbers)
    assert matcher.accept(number) and matcher.accept(number) and matcher.is_complete
    matcher.rollback(2 + len(FOLLOW) + len(END))
    assert len(allowed(matcher)) == VOCAB, "back in the reasoning"


def test_a_guided_output_does_not_end_in_its_reasoning() -> None:
    """The guide would be complete at its beginning."""
    matcher = ThinkingMatcher(Thinking(END, (START,)), backend().compile(Guide(GuideType.REGEX, "x?")).matcher())
    assert matcher.is_complete, "an answer without reasoning may be empty"
    for token_id in (START, 900, *END):
        assert matcher.accept(token_id)
        assert matcher.is_complete == (token_id == END[-1])


@pytest.mark.parametrize("seed", range(10))
def test_rolling_back_is_as_if_the_tokens_had_never_come(seed: int) -> None:
    chance = random.Random(seed)
    guide = backend().compile(Guide(GuideType.REGEX, "([0-9]{2} )*")) if seed % 2 else None
    thinking = Thinking((40, 41), (START,), FOLLOW, max_tokens=chance.choice([None, 0, 4]))

    def new() -> ThinkingMatcher:
        return ThinkingMatcher(thinking, None if guide is None else guide.matcher())

    matcher, ids = new(), list[int]()
    for _ in range(120):
        if ids and chance.random() < 0.3:
            count = chance.randrange(1, len(ids) + 1)
            matcher.rollback(count)
            del ids[-count:]
        found = sorted(allowed(matcher))
        liked = [token_id for token_id in (START, 40, 41) if token_id in found]
        token_id = chance.choice(liked if liked and chance.random() < 0.5 else found)
        assert matcher.accept(token_id)
        ids.append(token_id)
        fresh = new()
        assert all(fresh.accept(one) for one in ids)
        masks = np.zeros((2, VOCAB // 32), np.int32)
        matcher.fill(masks, 0)
        fresh.fill(masks, 1)
        assert (masks[0] == masks[1]).all() and matcher.is_complete == fresh.is_complete


@pytest.fixture(scope="module", params=["native", "torch"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    with Executor.from_directory(MODEL, config(request.param)) as made:
        yield made


def thought(thinking: Thinking, seed: int, guide: Guide | None = None, max_tokens: int = 60) -> Request:
    sampling = SamplingConfig(temperature=1.5, seed=seed)
    return request(guide, seed, max_tokens, sampling_config=sampling, thinking=thinking, end_ids=(EOS,))


def output(result: Result) -> list[int]:
    return list(result.output_token_ids[0])


def place_of_end(ids: list[int]) -> int:
    return next((i for i in range(len(ids)) if tuple(ids[i : i + len(END)]) == END), -1)


def test_a_budget_ends_the_reasoning_and_nothing_else_is_changed_before(executor: Executor) -> None:
    free = [output(each) for each in answers(executor, [thought(Thinking(END), seed) for seed in range(6)])]
    held = [output(each) for each in answers(executor, [thought(OPENED, seed) for seed in range(6)])]
    for ids, other in zip(held, free):
        if len(other) >= 9:
            assert ids[:9] == other[:9] and place_of_end(ids) == 9
    assert sum(place_of_end(ids) == 9 for ids in held) >= 4
    assert all(len(ids) > 9 + len(END) for ids in held if place_of_end(ids) == 9), "the answer follows"


def test_a_guide_holds_behind_the_reasoning_that_a_budget_has_ended(executor: Executor) -> None:
    thinking = Thinking(END, follow_ids=FOLLOW, max_tokens=7)
    for result in answers(executor, [thought(thinking, seed, CODE) for seed in range(8)]):
        ids = output(result)
        assert tuple(ids[7 : 7 + 6]) == (*END, *FOLLOW)
        assert result.finish_reasons[0] is FinishReason.END_ID
        assert re.fullmatch(CODE.text, tokenizer().decode(ids[13:]))


def test_eviction_changes_neither_the_budget_nor_the_guide_behind_it() -> None:
    """160 cells of KV hold one or two of eight requests, so that they are paused within their reasoning and behind it."""
    guide = Guide(GuideType.REGEX, "([A-Z][a-z]{2,9} ){20,40}")
    requests = [thought(Thinking(END, max_tokens=10 * seed), seed, guide, 90) for seed in range(8)]
    with Executor.from_directory(MODEL, config()) as roomy:
        expected = [output(each) for each in answers(roomy, requests)]
    with Executor.from_directory(MODEL, config(max_tokens=160, policy="max_utilization")) as tight:
        results = answers(tight, requests)
    assert [output(each) for each in results] == expected
    assert sum(each.perf_metrics.num_recomputed_tokens for each in results if each.perf_metrics is not None) > 0
    assert [place_of_end(ids) for ids in expected] == [10 * seed for seed in range(8)]


def test_speculation_changes_nothing_of_it() -> None:
    requests = [thought(OPENED, seed, CODE) for seed in range(4)]
    plain = config()
    guessing = type(plain)(
        plain.model, plain.kv_cache, plain.scheduler, speculation=SpeculationConfig(mode="lookup", max_draft_tokens=4)
    )
    with Executor.from_directory(MODEL, plain) as made:
        expected = [output(each) for each in answers(made, requests)]
    with Executor.from_directory(MODEL, guessing) as made:
        assert [output(each) for each in answers(made, requests)] == expected


def test_beams_have_a_budget_each(executor: Executor) -> None:
    asked = request(CODE, sampling_config=SamplingConfig(beam_width=3), thinking=Thinking(END, max_tokens=5))
    ids = executor.enqueue_requests([asked])
    last = drain(executor, ids)[ids[0]][-1].result_or_none
    assert last is not None
    for beam in last.output_token_ids:
        assert tuple(beam[5 : 5 + len(END)]) == END
        assert re.fullmatch(CODE.text, tokenizer().decode(list(beam[5 + len(END) :])))


@pytest.mark.parametrize(
    ("thinking", "sentence"),
    [
        (Thinking(()), "thinking.end_ids has 0 tokens, allowed is 1 to 64"),
        (Thinking((VOCAB,)), f"thinking.end_ids has the token {VOCAB}, allowed is 0 to {VOCAB - 1}"),
        (Thinking(END, tuple(range(65))), "thinking.start_ids has 65 tokens, allowed is 0 to 64"),
        (Thinking(END, max_tokens=-1), "thinking.max_tokens is -1, allowed is 0 to 2147483647"),
    ],
)
def test_what_is_out_of_its_limits_is_refused(executor: Executor, thinking: Thinking, sentence: str) -> None:
    assert error_of(executor, thought(thinking, 0)) == sentence

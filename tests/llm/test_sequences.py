"""Several sequences of a prompt, log-probabilities and stop strings: what the engine says, and what the caller sees."""

from __future__ import annotations

import pytest

from backend.api import FinishReason, Result
from backend.api.response import PromptLogProb, TopLogProb
from backend.text.tokenizer import Tokenizer
from compat.llm import GenerationResult, Logprob
from tests.llm.helpers import PATIENCE_S, Engine, params, part

PROMPT = [3, 1]
LENGTH, STOP, END = FinishReason.LENGTH, FinishReason.STOP_WORDS, FinishReason.END_ID


def of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def submit(engine: Engine, *results: Result, streaming: bool = False, **fields: object) -> GenerationResult:
    """Ask, and let the engine answer at once."""
    result = engine.worker.generate_async(PROMPT, params(20, **fields), streaming=streaming)
    for each in results:
        engine.say(each)
    return result


def said(engine: Engine, *results: Result, **fields: object) -> GenerationResult:
    result = submit(engine, *results, **fields).result(PATIENCE_S)
    engine.worker.shutdown()
    return result


def test_sequences_are_told_apart_by_their_index_and_the_request_ends_with_the_last() -> None:
    engine = Engine()
    result = submit(engine, part([1], 0), part([7], 1), part([8], 1, LENGTH), n=2, top_k=5, streaming=True)
    steps = [next(result) for _ in range(3)]
    assert steps[0] is result and not result.finished
    assert [output.finish_reason for output in result.outputs] == [None, "length"]
    engine.say(part([2], 0, END, is_final=True))
    next(result)
    assert result.finished
    assert [output.token_ids for output in result.outputs] == [[1, 2], [7, 8]]
    assert [output.index for output in result.outputs] == [0, 1]
    engine.worker.shutdown()


def test_a_step_shows_what_it_has_added_and_nothing_of_other_sequences() -> None:
    engine = Engine()
    script = (part([1], 0), part([7], 1), part([2], 0, LENGTH), part([8], 1, LENGTH, is_final=True))
    result = submit(engine, *script, n=2, top_k=5, streaming=True)
    diffs = [[output.token_ids_diff for output in step.outputs] for step in result]
    assert diffs == [[[1], []], [[], [7]], [[2], []], [[], [8]]]
    engine.worker.shutdown()


def test_without_streaming_each_sequence_comes_whole() -> None:
    result = said(Engine(), part([7, 8], 1, LENGTH), part([1], 0, END, is_final=True), n=2, top_k=5)
    assert [(output.token_ids, output.finish_reason) for output in result.outputs] == [
        ([1], "stop"),
        ([7, 8], "length"),
    ]


def test_the_best_of_several_are_chosen_by_their_log_probability() -> None:
    likely = {0: -3.0, 1: -1.0, 2: -2.0}
    results = [
        part([index + 10], index, LENGTH, is_final=index == 2, cum_log_probs=[value], log_probs=[[value]])
        for index, value in likely.items()
    ]
    result = said(Engine(), *results, n=2, best_of=3, top_k=5)
    assert [(output.index, output.token_ids, output.cumulative_logprob) for output in result.outputs] == [
        (0, [11], -1.0),
        (1, [12], -2.0),
    ]
    assert [output.logprobs for output in result.outputs] == [[], []], "they were not asked for"


def beams(tokenizer: Tokenizer, *texts: str, is_final: bool = False) -> Result:
    """All beams so far."""
    return Result(
        [of(tokenizer, text) for text in texts],
        is_final=is_final,
        is_sequence_final=is_final,
        finish_reasons=(LENGTH if is_final else FinishReason.NOT_FINISHED,) * len(texts),
        cum_log_probs=[-float(n + 1) for n in range(len(texts))],
    )


def test_beams_that_have_met_a_stop_string_may_be_replaced_until_the_engine_ends(tokenizer: Tokenizer) -> None:
    engine = Engine(tokenizer)
    script = [
        beams(tokenizer, "a dog", "the dog"),
        beams(tokenizer, "a fox dog it", "a dog it"),
        beams(tokenizer, "a fox dog it is", "b", is_final=True),
    ]
    result = submit(engine, *script, n=2, use_beam_search=True, stop="dog").result(PATIENCE_S)
    assert [(output.text, output.finish_reason) for output in result.outputs] == [("a fox ", "stop"), ("b", "length")]
    assert engine.cancelled == []
    engine.worker.shutdown()


def test_beams_come_in_one_result_and_are_replaced_whole(tokenizer: Tokenizer) -> None:
    engine = Engine(tokenizer)
    script = [
        beams(tokenizer, "the fox", "the dog", "a"),
        beams(tokenizer, "the dog is", "the fox", "a b"),
        beams(tokenizer, "the dog is", "a b c", "x", is_final=True),
    ]
    result = submit(engine, *script, n=2, best_of=3, use_beam_search=True, streaming=True)
    texts = [[output.text for output in step.outputs] for step in result]
    assert texts == [["the fox", "the dog"], ["the dog is", "the fox"], ["the dog is", "a b c"]]
    assert [output.cumulative_logprob for output in result.outputs] == [-1.0, -2.0]
    assert [output.token_ids for output in result.outputs] == [of(tokenizer, "the dog is"), of(tokenizer, "a b c")]
    engine.worker.shutdown()


def test_a_request_that_is_cut_ends_all_its_sequences() -> None:
    cancelled = part([], 0, FinishReason.CANCELLED, is_final=True)
    result = said(Engine(), part([1], 1, LENGTH), cancelled, n=3, top_k=5)
    assert [output.finish_reason for output in result.outputs] == ["cancelled", "length", "cancelled"]


@pytest.mark.feature("002-28")
def test_log_probabilities_come_with_their_ranks_and_always_with_the_token_itself() -> None:
    tops = [[TopLogProb(1, -0.5), TopLogProb(2, -1.5)], [TopLogProb(4, -0.1), TopLogProb(5, -0.2)]]
    told = part(
        [1, 9], finish=LENGTH, is_final=True, cum_log_probs=[-6.5], log_probs=[[-0.5, -6.0]], top_log_probs=tops
    )
    output = said(Engine(), told, logprobs=2).outputs[0]
    assert output.logprobs == [
        {1: Logprob(-0.5, 1), 2: Logprob(-1.5, 2)},
        {4: Logprob(-0.1, 1), 5: Logprob(-0.2, 2), 9: Logprob(-6.0, None)},
    ]
    assert output.cumulative_logprob == -6.5


@pytest.mark.feature("002-11")
@pytest.mark.parametrize("include, text, tail", [(False, "the lazy ", ""), (True, "the lazy dog", "dog")])
def test_a_stop_string_ends_the_text_and_the_tokens(tokenizer: Tokenizer, include: bool, text: str, tail: str) -> None:
    ids = of(tokenizer, "the lazy dog; it's over")
    engine = Engine(tokenizer)
    result = submit(
        engine, *(part([token_id]) for token_id in ids), stop=["dog", "over"], include_stop_str_in_output=include
    )
    output = result.result(PATIENCE_S).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", "dog")
    shown = tokenizer.decode(PROMPT + output.token_ids)[len(tokenizer.decode(PROMPT)) :]
    assert shown.startswith(text) and output.token_ids == ids[: len(output.token_ids)]
    assert len(output.token_ids) < len(ids)
    assert engine.cancelled == [engine.engine_id()], "the engine would go on"
    engine.worker.shutdown()


def test_tokens_behind_a_stop_string_are_dropped_though_they_came_with_it(tokenizer: Tokenizer) -> None:
    ids = of(tokenizer, "the lazy dog; it's over")
    shortest = of(tokenizer, "the lazy dog")
    assert ids[: len(shortest)] == shortest
    output = said(Engine(tokenizer), part(ids), stop="dog", include_stop_str_in_output=True).outputs[0]
    assert (output.text, output.token_ids) == ("the lazy dog", shortest)


def test_a_stream_never_shows_a_part_of_a_stop_string(tokenizer: Tokenizer) -> None:
    ids = of(tokenizer, "the lazy dog; it's over")
    engine = Engine(tokenizer)
    result = submit(engine, *(part([token_id]) for token_id in ids), stop="dog; it", streaming=True)
    pieces = [step.text_diff for step in result]
    assert "".join(pieces) == result.text == "the lazy "
    assert result.outputs[0].stop_reason == "dog; it"
    engine.worker.shutdown()


def test_a_stop_string_of_one_sequence_leaves_the_others_alone(tokenizer: Tokenizer) -> None:
    engine = Engine(tokenizer)
    result = submit(engine, part(of(tokenizer, "a dog"), 0), n=2, top_k=5, stop="dog", streaming=True)
    next(result)
    assert (result.outputs[0].finish_reason, result.outputs[1].finish_reason) == ("stop", None)
    assert engine.cancelled == []
    engine.say(part(of(tokenizer, "more"), 0))
    engine.say(part(of(tokenizer, "a fox"), 1, LENGTH, is_final=True))
    result.result(PATIENCE_S)
    assert [output.text for output in result.outputs] == ["a ", "a fox"]
    engine.worker.shutdown()


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_taken_off_unless_it_is_to_be_included(tokenizer: Tokenizer, include: bool) -> None:
    ids = of(tokenizer, "the fox")
    last = ids[-1]
    result = said(
        Engine(tokenizer),
        part(ids, finish=STOP, is_final=True, log_probs=[[-1.0] * len(ids)], cum_log_probs=[-float(len(ids))]),
        stop_token_ids=[5, last],
        include_stop_str_in_output=include,
        logprobs=0,
    )
    output = result.outputs[0]
    kept = ids if include else ids[:-1]
    assert (output.token_ids, output.stop_reason, output.finish_reason) == (kept, last, "stop")
    assert output.text == tokenizer.decode(kept)
    assert len(output.logprobs) == len(kept) and output.cumulative_logprob == -len(kept)


def test_a_stop_word_of_the_engine_is_named_by_its_text_without_detokenising(tokenizer: Tokenizer) -> None:
    ids = of(tokenizer, "the fox")
    assert [tokenizer.decode([token_id]) for token_id in ids] == ["the", " ", "fox"]
    output = said(Engine(tokenizer), part(ids, finish=STOP, is_final=True), stop="fox", detokenize=False).outputs[0]
    assert (output.stop_reason, output.text, output.token_ids) == ("fox", "", ids[:-1])


def test_an_end_id_stays_and_is_a_stop_without_a_reason() -> None:
    output = said(Engine(), part([4, 9], finish=END, is_final=True)).outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([4, 9], "stop", None)


def test_half_a_character_at_the_end_is_no_text(tokenizer: Tokenizer) -> None:
    ids = of(tokenizer, "人")
    half = ids[:-1] if len(ids) > 1 else of(tokenizer, "\u00ff")[:1]
    output = said(Engine(tokenizer), part(half, finish=LENGTH, is_final=True)).outputs[0]
    assert (output.text, output.token_ids) == ("", half)


def test_log_probabilities_of_the_prompt_come_with_sequence_0_and_reach_all() -> None:
    """The prompt is [3, 1]: entry 0 is of token 1, entry 1 of each sequence's own first token. 9 is the likeliest at both."""
    engine = Engine()
    top = [TopLogProb(9, -0.5)]
    of_prompt = [PromptLogProb(-2.0, 4, top)]
    told = dict(log_probs=[[-1.0]], top_log_probs=[top], cum_log_probs=[-1.0])
    fields = dict(n=2, top_k=5, streaming=True, prompt_logprobs=1)
    result = submit(engine, part([7], 1, **told), part([1], 0, **told, prompt_log_probs=of_prompt), **fields)
    steps = [[output.prompt_logprobs for output in next(result).outputs] for _ in range(2)]
    first = {9: Logprob(-0.5, 1), 1: Logprob(-2.0, 4)}
    behind = {9: Logprob(-0.5, 1), 1: Logprob(-1.0)}
    assert steps == [[[], []], [[first, behind], []]], "sequence 1 was told before they were known"
    engine.say(part([8], 1, LENGTH, **told))
    engine.say(part([2], 0, END, is_final=True, **told))
    ends = [each.outputs for each in result][-1]
    assert [output.prompt_logprobs for output in ends] == [
        [first, behind],
        [first, {9: Logprob(-0.5, 1), 7: Logprob(-1.0)}],
    ]
    assert [output.logprobs for output in ends] == [[], []]
    engine.worker.shutdown()

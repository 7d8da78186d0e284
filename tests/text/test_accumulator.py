"""OutputAccumulator: one way from token results to text, for streams, for whole answers and for output that may be withdrawn."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from backend.api import FinishReason, Result
from backend.text.accumulator import OutputAccumulator, OutputDelta
from backend.text.stream import TextStream
from backend.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(Backend(models.WordLevel({"a": 0, "b": 1, "x": 2}, unk_token="a")))  # a space between two tokens
A, B, X = 0, 1, 2
LENGTH, RUNNING = FinishReason.LENGTH, FinishReason.NOT_FINISHED


def tokens(*ids: int, last: bool = False, **fields: Any) -> Result:
    reason = LENGTH if last else RUNNING
    fields = {"finish_reasons": (reason,), "log_probs": [[-1.0] * len(ids)], **fields}
    return Result([list(ids)], is_final=last, **fields)


def accumulator(*stops: str, **options: Any) -> OutputAccumulator:
    return OutputAccumulator(TextStream(TOKENIZER, stops=stops), **options)


def followed(deltas: list[OutputDelta]) -> tuple[list[int], str]:
    """The tokens and the text of a client that applies the deltas of an output that may be withdrawn."""
    ids: list[int] = []
    text = ""
    for delta in deltas:
        ids[delta.tokens_kept :] = delta.ids
        text = text[: delta.text_kept] + delta.text
    return ids, text


@pytest.mark.parametrize("splits", [[1, 1, 1, 1], [4], [2, 2], [1, 3]])
@pytest.mark.parametrize("may_withdraw", [False, True])
def test_text_and_tokens_do_not_depend_on_how_they_came(splits: list[int], may_withdraw: bool) -> None:
    ids, output, deltas = [A, X, X, A], accumulator(may_withdraw=may_withdraw), []
    for count in splits:
        new, ids = ids[:count], ids[count:]
        output.append(tokens(*new, last=not ids))
        deltas.append(output.take())
    assert [token_id for delta in deltas for token_id in delta.ids] == [A, X, X, A]
    assert "".join(delta.text for delta in deltas) == "a x x a"
    assert deltas[-1].num_tokens == 4 and deltas[-1].cum_log_prob == -4.0 and deltas[-1].finish is LENGTH
    if may_withdraw:
        assert followed(deltas) == ([A, X, X, A], "a x x a")


def test_taken_tokens_of_a_stop_string_stay_counted() -> None:
    output = accumulator(" b x")
    assert output.append(tokens(A)) is None and output.append(tokens(B)) is None
    assert output.take().ids == [A, B]
    assert output.append(tokens(X, A)) == 3, "the engine is to stop behind the stop string"
    last = output.take()
    assert (last.ids, last.text, last.num_tokens, last.cum_log_prob) == ([X], "", 3, -3.0)
    assert output.finish is FinishReason.STOP_WORDS and last.finish is None, "the engine has not ended it yet"
    output.append(tokens(A, A, last=True))
    end = output.take()
    assert (end.ids, end.stop, end.finish) == ([], " b x", FinishReason.STOP_WORDS)


def test_output_that_may_be_withdrawn_keeps_only_the_tokens_of_the_shown_text() -> None:
    output = accumulator(" b x", may_withdraw=True)
    output.append(tokens(A))
    output.append(tokens(B))
    deltas = [output.take()]
    output.append(tokens(X, A))
    deltas.append(output.take())
    assert deltas[0].ids == [A, B] and followed(deltas) == ([A], "a")
    assert deltas[1].tokens_kept == 1 and deltas[1].num_tokens == 1 and deltas[1].cum_log_prob == -1.0


def test_a_beam_that_continues_another_one_replaces_its_text() -> None:
    output, deltas = accumulator(may_withdraw=True, prefix="> "), []
    for ids, is_last in (([A, X], False), ([A, X, B], False), ([B, B], True)):
        reasons = (LENGTH if is_last else RUNNING,) * 2
        output.replace(Result([[9], ids], is_final=is_last, finish_reasons=reasons, cum_log_probs=[0.0, -2.0]), 1)
        deltas.append(output.take())
    assert [delta.tokens_kept for delta in deltas] == [0, 2, 0]
    assert followed(deltas) == ([B, B], "> b b") and deltas[-1].cum_log_prob == -2.0


def test_an_end_id_is_counted_and_its_text_may_be_hidden() -> None:
    output = accumulator(hidden_ends=[X])
    output.append(tokens(A, X, last=True, finish_reasons=(FinishReason.END_ID,)))
    end = output.take()
    assert (end.ids, end.text, end.stop, end.finish) == ([A, X], "a", X, FinishReason.END_ID)


def test_results_after_the_end_add_metrics_only() -> None:
    output = accumulator(may_withdraw=True)
    output.end(FinishReason.CANCELLED)
    output.append(tokens(A, last=True))
    assert output.finish is FinishReason.CANCELLED and output.take().ids == []


def test_a_stream_that_begins_again_has_all_its_settings() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "x": 2}, unk_token="a"))
    backend.add_special_tokens(["<m>", "<n>"])
    tokenizer, m, n = Tokenizer(backend), 3, 4
    settings: list[dict[str, Any]] = [
        {},
        {"prompt_ids": [A]},
        {"stops": ["x b"]},
        {"stops": ["x b"], "include_stop": True},
        {"skip_special_tokens": False},
        {"shown_ids": frozenset({m})},
    ]
    found = []
    for each in settings:
        stream = TextStream(tokenizer, **each)
        runs = [
            [*(run.push([token_id]) for token_id in (A, m, n, X, B, A)), run.flush()]
            for run in (stream, stream.restarted(), stream.restarted().restarted())
        ]
        assert runs[0] == runs[1] == runs[2]
        found.append(runs[0])
    assert all(one not in found[:i] for i, one in enumerate(found)), "each setting makes a difference"


@pytest.mark.parametrize("prefix", ["", "p "])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_tokens_that_are_withdrawn_take_their_text_along_and_nothing_ahead_of_it(count: int, prefix: str) -> None:
    output = accumulator(prefix=prefix, may_withdraw=True)
    output.append(tokens(A, X, A, last=True))
    deltas = [output.take()]
    output.withdraw(count)
    deltas.append(output.take())
    assert followed(deltas) == ([A, X, A][: 3 - count], prefix + " ".join("axa"[: 3 - count]))

"""Stop strings: stream == non-stream == naive oracle, however the text is cut."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.api.errors import InvalidRequest
from backend.text.stop_strings import StopMatcher
from backend.text.stream import TextStream
from backend.text.tokenizer import Tokenizer
from tests.text.random_sequences import text_in_characters

SMALL = st.text(alphabet="abé🙂", max_size=40)
STOPS = st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=6), min_size=1, max_size=16)

EXAMPLES = int(os.environ.get("EVERBATCH_EXAMPLES", "2000"))


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Try every end in order, and at each end the longest stop."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def cut(rng: random.Random, text: str) -> list[str]:
    places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(len(text) + 2)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)])]


def naive_holdback(text: str, stops: list[str]) -> int:
    return max((k for stop in stops for k in range(len(stop)) if k <= len(text) and text.endswith(stop[:k])), default=0)


@settings(max_examples=EXAMPLES, deadline=None)
@given(text=SMALL, stops=STOPS, include=st.booleans(), seed=st.integers(0, 2**32))
def test_any_split_gives_what_the_oracle_gives_on_the_whole_text(
    text: str, stops: list[str], include: bool, seed: int
) -> None:
    expected, stop = oracle(text, stops, include)
    rng = random.Random(seed)
    for pieces in (cut(rng, text), list(text), [text]):
        matcher = StopMatcher(stops, include)
        shown = ""
        for piece in pieces:
            safe, matched = matcher.push(piece)
            shown += safe
            assert expected.startswith(shown)  # nothing is ever shown that must be taken back
        assert matcher.matched == matched == stop or (not pieces and stop is None)
        shown += matcher.flush()
        assert shown == expected


@settings(max_examples=500, deadline=None)
@given(text=SMALL, stops=STOPS)
def test_no_more_is_held_back_than_a_stop_string_may_still_need(text: str, stops: list[str]) -> None:
    if oracle(text, stops, False)[1] is not None:
        return
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(char)[0] for char in text)
    assert len(text) - len(shown) == naive_holdback(text, stops)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["bc", "abcd"], "xabcd", ("xa", "bc")),  # the one that ends first
        (["b", "ab"], "xab", ("x", "ab")),  # of stops with the same end the longest wins
        (["aab"], "aaab", ("a", "aab")),
        (["\n\n"], "one\n\ntwo", ("one", "\n\n")),
        ([], "free", ("free", None)),
    ],
)
def test_which_match_wins(stops: list[str], text: str, expected: tuple[str, str | None]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(char)[0] for char in text) + matcher.flush()
    assert (shown, matcher.matched) == expected


def test_an_unfinished_stop_is_shown_when_the_stream_ends() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("go ST") == ("go ", None)
    assert matcher.flush() == "ST"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="stop string is empty"):
        StopMatcher(["a", ""])


def test_many_stop_strings_cost_no_more_per_character_than_one() -> None:
    """Counted in automaton steps: each character moves down at most once, and every fall was paid by a step down."""
    rng = random.Random(0)
    matcher = StopMatcher(["".join(rng.choices("ab", k=30)) for _ in range(500)])
    falls = 0

    class Counting(list):
        def __getitem__(self, state: int) -> int:
            nonlocal falls
            falls += 1
            return list.__getitem__(self, state)

    matcher._fail = Counting(matcher._fail)
    text = "".join(rng.choices("ab", k=20000))
    matcher.push(text)
    assert falls <= matcher.end


# --------------------------------------------------------------------------------------------------------- TextStream


def drain(stream: TextStream, ids: list[int], rng: random.Random) -> tuple[str, str | None, int]:
    text = ""
    rest = ids
    while rest:
        size = rng.choice([1, 1, 2, 4])
        delta = stream.push(rest[:size])
        rest = rest[size:]
        text += delta.text
    delta = stream.flush()
    return text + delta.text, delta.finished_by, delta.num_tokens_kept


def least_tokens(tokenizer: Tokenizer, prompt: list[int], ids: list[int], text_to_stop: str) -> int:
    start = len(tokenizer.decode(prompt))
    return next(n for n in range(len(ids) + 1) if tokenizer.decode(prompt + ids[:n])[start:].startswith(text_to_stop))


def test_the_stream_of_tokens_ends_where_the_whole_text_has_its_stop(tokenizer: Tokenizer, family: str) -> None:
    rng = random.Random(family)
    stopped = 0
    for _ in range(500):
        prompt = tokenizer.encode(rng.choice(["The quick", "x"]), add_special_tokens=False)
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 25))]
        start, full = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
        if not full.startswith(start):
            continue
        text = text_in_characters(tokenizer, prompt, ids, True)
        stops = [text[at : at + rng.randrange(1, 6)] for at in [rng.randrange(len(text) + 1)] * 2] + ["zzz"]
        stops = [stop for stop in stops if stop]
        include = rng.random() < 0.5
        got, stop, kept = drain(TextStream(tokenizer, prompt, stops, include), ids, rng)
        assert (got, stop) == oracle(text, stops, include)
        if stop is None:
            assert kept == len(ids)
            continue
        stopped += 1
        through = oracle(text, stops, True)[0]
        assert kept == least_tokens(tokenizer, prompt, ids, through)
    assert stopped > 200


def test_nothing_changes_after_the_stop(family_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = family_tokenizers["byte_level_bpe"]
    stream = TextStream(tokenizer, stops=["END"])
    ids = tokenizer.encode("go END now", add_special_tokens=False)
    first = stream.push(ids)
    assert (first.text, first.finished_by) == ("go ", "END")
    assert tokenizer.decode(ids[: first.num_tokens_kept]).startswith("go END")
    later = stream.push(tokenizer.encode("more", add_special_tokens=False))
    assert (later.text, later.finished_by, later.num_tokens_kept) == ("", "END", first.num_tokens_kept)
    assert stream.flush() == later


def test_a_stop_that_only_the_end_of_the_output_reveals_is_found_by_flush(
    family_tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = family_tokenizers["sentencepiece_bpe"]
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "x🙂y".encode()]
    stream = TextStream(tokenizer, stops=["🙂"])
    assert stream.push(ids).text == ""  # a run of bytes is certain only when it is over
    delta = stream.flush()
    assert (delta.text, delta.finished_by, delta.num_tokens_kept) == ("x", "🙂", 5)


def test_a_stop_string_in_the_prompt_does_not_end_the_output(family_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = family_tokenizers["byte_level_bpe"]
    prompt = tokenizer.encode("EN", add_special_tokens=False)
    stream = TextStream(tokenizer, prompt, stops=["END"])
    assert stream.push(tokenizer.encode("D.", add_special_tokens=False)).finished_by is None


def test_what_was_held_back_is_given_once_and_the_next_text_begins_without_it() -> None:
    matcher = StopMatcher(["abc"])
    assert matcher.push("xab") == ("x", None)
    assert matcher.flush() == "ab" and matcher.flush() == ""
    assert matcher.push("cab") == ("c", None), "no stop string across the end"
    assert matcher.flush() == "ab"

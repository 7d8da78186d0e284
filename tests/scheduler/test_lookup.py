"""Lookup: which tokens are proposed behind which. Expectations are worked out by hand."""

from __future__ import annotations

from random import Random

from backend.scheduler.lookup import Lookup, OtherOutputs


def seen(ids: list[int], others: OtherOutputs | None = None, namespace: str = "") -> Lookup:
    lookup = Lookup(namespace, others)
    lookup.see(ids)
    return lookup


def test_what_followed_the_last_three_tokens_is_proposed() -> None:
    assert seen([1, 2, 3, 4, 9, 1, 2, 3]).propose(2) == [4, 9]


def test_two_tokens_are_no_match() -> None:
    assert seen([1, 2, 4, 9, 1, 2]).propose(2) == []


def test_of_two_places_the_longer_match_is_taken() -> None:
    """The six tokens 1-6 are followed by 7, and a later place of 4-6 alone by 8."""
    assert seen([1, 2, 3, 4, 5, 6, 7, 0, 4, 5, 6, 8, 0, 1, 2, 3, 4, 5, 6]).propose(1) == [7]


def test_a_repetition_copies_from_itself() -> None:
    """Of a, b, c, a, b, c only three tokens stand behind the place, the rest of the draft is made of the draft."""
    assert seen([1, 2, 3, 1, 2, 3]).propose(8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_equal_hashes_prove_nothing() -> None:
    """In CPython hash(-1) == hash(-2), so these two runs of three have one hash."""
    assert hash((-1, 5, 6)) == hash((-2, 5, 6))
    assert seen([-1, 5, 6, 7, -2, 5, 6]).propose(1) == []


def test_the_place_is_kept_while_it_is_right() -> None:
    """[5, 6, 7, 1] and [5, 6, 7, 2] both stand in the text. Once the second has gone on as told, its successor is 8, though
    the latest place of (6, 7, 2) is another.
    """
    ids = [3, 4, 5, 6, 7, 2, 8, 0, 6, 7, 2, 9, 0, 3, 4, 5, 6, 7]
    lookup = seen(ids)
    assert lookup.propose(2) == [2, 8]
    lookup.see([*ids, 2])
    assert lookup.propose(1) == [8]


def proposed(prompt: list[int], output: list[int], others: OtherOutputs | None = None) -> list[int]:
    """The two tokens that are proposed behind an output."""
    lookup = seen(prompt, others, "a")
    lookup.see([*prompt, *output])
    return lookup.propose(2)


def test_behind_a_word_that_was_replaced_one_token_is_enough() -> None:
    """1-9 again, with 0 in place of 5: there the place is left, and found again by the 6 alone."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 77, 1, 2, 3]
    assert proposed(prompt, [4, 0]) == []
    assert proposed(prompt, [4, 0, 6]) == [7, 8]


def test_words_may_come_or_go_where_a_place_was_left() -> None:
    """1-9 again, first with 50 and 51 ahead of the 5, then without 5 and 6."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 77, 1, 2, 3]
    assert proposed(prompt, [4, 50, 51, 5]) == [6, 7]
    assert proposed(prompt, [4, 7]) == [8, 9]


def test_a_place_that_was_left_long_ago_is_far() -> None:
    """After 16 tokens without a match one token says nothing any more, nor does one that stands more than 16 behind there."""
    prompt, new = [*range(100, 140), 77, *range(100, 104)], list(range(200, 216))
    assert proposed(prompt, [*new[:15], 104]) == [105, 106]
    assert proposed(prompt, [*new, 104]) == []
    assert proposed(prompt, [119]) == [120, 121]
    assert proposed(prompt, [120]) == []


def test_a_match_of_one_token_is_no_place_to_come_back_to() -> None:
    """119 stands near where the place was left, by chance: 200 follows. 106 is still found from there."""
    prompt = [*range(100, 140), 77, *range(100, 104)]
    assert proposed(prompt, [119, 200, 106]) == [107, 108]


def test_a_place_in_an_output_of_others_is_found_again_too() -> None:
    others = OtherOutputs(100)
    others.add("a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    prompt = [9, 1, 2, 3, 4, 5, 6]
    assert proposed(prompt, [0], others) == []
    assert proposed(prompt, [0, 8], others) == [9, 10]
    assert proposed(prompt, [0, 10], others) == proposed(prompt, [0, 10, 11], others) == [], (
        "nothing follows the last one"
    )


def test_a_long_text_without_matches_is_looked_at_now_and_then() -> None:
    """100 tokens that never occurred, then the first 16 again. After 32 without a match every eighth token is looked at, so the
    repetition is found by the eleventh of them at the latest: three must match, and seven may pass before.
    """
    ids = [*range(100), *range(16)]
    lookup = seen(ids[:1])
    found = []
    for end in range(2, len(ids) + 1):
        lookup.see(ids[:end])
        found.append(bool(lookup.propose(1)))
    assert not any(found[:100])
    assert all(found[110:])
    assert lookup.propose(2) == [16, 17]


def test_it_knows_the_same_however_often_it_is_asked() -> None:
    rng = Random(3)
    ids = [rng.randrange(3) for _ in range(300)]
    often = seen(ids[:50])
    for end in range(51, 301):
        often.see(ids[:end])
        often.propose(4)
    at_last = seen(ids[:50])
    for end in range(100, 301, 50):
        at_last.see(ids[:end])
    assert at_last.propose(20) == often.propose(20) != []
    assert [at_last.confidence(n) for n in range(20)] == [often.confidence(n) for n in range(20)]


def test_many_tokens_at_once_are_not_looked_at_one_by_one() -> None:
    """After a rest of 65 tokens what stands in them is found, though how often matches were right is not known."""
    start, rest = [1, 2, 3] * 3, [*range(100, 162), 5, 6, 7]
    lookup = seen(start)
    lookup.see(start + rest)
    assert lookup.propose(2) == [] and lookup.confidence(0) == 0
    lookup.see([*start, *rest, 100, 101, 102])
    assert lookup.propose(2) == [103, 104]


def test_confidence_is_what_came_of_it() -> None:
    """Matches in a text of two random symbols are right half of the time, those of a repetition nearly always."""
    rng = Random(5)
    coin = seen([rng.randrange(2) for _ in range(20)])
    for _ in range(20):
        coin.see(coin._ids + [rng.randrange(2) for _ in range(30)])
    assert 0.2 < coin.confidence(0) < 0.8
    loop = seen([1, 2, 3] * 3)
    for count in range(20, 61, 20):
        loop.see([1, 2, 3] * count)
    assert loop.confidence(0) > 0.98


def test_outputs_of_others_are_found_in_their_namespace_only() -> None:
    others = OtherOutputs(100)
    others.add("a", [1, 2, 3, 4, 5, 6, 7, 8])
    assert seen([9, 1, 2, 3, 4, 5, 6], others, "a").propose(5) == [7, 8]
    assert seen([9, 1, 2, 3, 4, 5, 6], others, "b").propose(5) == []
    assert seen([9, 9, 2, 3, 4, 5, 6], others, "a").propose(5) == [], "five tokens are too few"


def test_old_outputs_are_forgotten() -> None:
    """Three outputs of 10 tokens, room for 25: the first one goes, and what the second says besides stays."""
    others = OtherOutputs(25)
    for start in (0, 100, 200):
        others.add("a", list(range(start, start + 10)))
    assert not seen(list(range(6)), others, "a").propose(1)
    assert seen(list(range(100, 106)), others, "a").propose(1) == [106]
    for _ in range(50):
        others.add("b", list(range(10)))
    assert list(others._places) == ["b"] and others._num_tokens <= 25
    assert len(others._places["b"]) == 4, "positions 6 to 9 of one output"

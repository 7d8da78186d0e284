"""Whose text is read next: lanes for short and long texts, and turns of namespaces in each."""

from __future__ import annotations

import pytest

from backend.serving.intake.text_turns import LONG_BYTES, TextTurn, TextTurns

LONG = LONG_BYTES + 1


def taken(turns: TextTurns[str]) -> list[TextTurn[str]]:
    """All that may be read at once."""
    return list(iter(turns.take, None))


def names(turns: list[TextTurn[str]]) -> list[str]:
    return [turn.key for turn in turns]


@pytest.mark.parametrize("num_threads, most", [(1, 1), (2, 1), (4, 2), (5, 2), (8, 4)])
def test_a_namespace_has_at_most_half_of_the_threads_for_short_texts(num_threads: int, most: int) -> None:
    turns: TextTurns[str] = TextTurns(num_threads)
    for number in range(20):
        turns.put(f"a{number}", "a", 10)
        turns.put(f"b{number}", "b", 10)
    begun = taken(turns)
    assert sum(turn.namespace == "a" for turn in begun) == sum(turn.namespace == "b" for turn in begun) == most


@pytest.mark.parametrize("num_threads, most, of_one", [(1, 1, 1), (2, 1, 1), (4, 2, 1), (8, 4, 2)])
def test_long_texts_have_at_most_half_of_the_threads_and_one_namespace_half_of_those(
    num_threads: int, most: int, of_one: int
) -> None:
    turns: TextTurns[str] = TextTurns(num_threads)
    for number in range(20):
        turns.put(f"a{number}", "a", LONG)
    assert len(begun := taken(turns)) == of_one
    for number in range(20):
        turns.put(f"b{number}", "b", LONG)
        turns.put(f"c{number}", "c", LONG)
    assert len(begun) + len(taken(turns)) == most


def test_namespaces_take_turns_and_within_one_the_oldest_comes_first() -> None:
    turns: TextTurns[str] = TextTurns(1)
    for key in ("a1", "a2", "a3", "b1", "b2", "c1"):
        turns.put(key, key[0], LONG)
    order = []
    while (turn := turns.take()) is not None:
        order.append(turn.key)
        turns.done(turn)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_what_was_discarded_is_not_taken() -> None:
    turns: TextTurns[str] = TextTurns(2)
    turns.put("gone", "a", LONG)
    turns.put("stays", "a", 10)
    turns.discard("gone")
    turns.discard("never there")
    assert names(taken(turns)) == ["stays"]

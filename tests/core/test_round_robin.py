"""RoundRobin: namespaces take turns, none has more than its share, and nothing is kept of those that have gone."""

from __future__ import annotations

from backend.core.round_robin import RoundRobin


def made(share: int, **lines: str) -> RoundRobin[str]:
    """A namespace for each name, with a key for each letter."""
    turns: RoundRobin[str] = RoundRobin(share)
    for namespace, keys in lines.items():
        for key in keys:
            turns.put(namespace, key)
    return turns


def all_of(turns: RoundRobin[str]) -> str:
    """The keys in the order in which they have their turns, each one ending before the next begins."""
    taken = ""
    while (turn := turns.take()) is not None:
        taken += turn.key
        turns.done(turn.namespace)
    return taken


def test_namespaces_take_turns_each_in_its_own_order() -> None:
    assert all_of(made(1, a="abcd", b="xy", c="s")) == "axsbycd"


def test_a_namespace_has_its_share_of_places_at_once() -> None:
    turns = made(2, a="abcd")
    assert [turns.take(), turns.take(), turns.take()] == [("a", "a"), ("a", "b"), None]
    turns.put("b", "x")
    assert turns.take() == ("b", "x")
    turns.done("a")
    assert turns.take() == ("a", "c") and turns.take() is None


def test_who_may_not_is_passed_over_and_keeps_its_place() -> None:
    turns = made(1, a="a", b="x")
    assert turns.take(lambda namespace: namespace != "a") == ("b", "x")
    assert turns.take(lambda namespace: namespace == "b") is None
    assert turns.take() == ("a", "a")


def test_a_key_of_several_namespaces_has_one_turn() -> None:
    turns = made(1, a="abc", b="c")
    assert turns.num_waiting("a") == 3 and turns.num_waiting("b") == 1
    assert all_of(turns) == "acb"


def test_what_is_discarded_has_no_turn_and_nothing_stays() -> None:
    turns = made(1, a="ab", b="b")
    turns.discard("b")
    assert turns.num_waiting("a") == 1 and turns.num_waiting("b") == 0
    assert all_of(turns) == "a"
    assert not turns and not turns._lines and not turns._running


def test_what_runs_keeps_its_place_when_all_others_are_cleared() -> None:
    turns = made(1, a="ab")
    turns.take()
    turns.clear()
    assert not turns
    turns.put("a", "c")
    assert turns.take() is None
    turns.done("a")
    assert turns.take() == ("a", "c")

"""Placement: sessions stay, conversations stay while that is worth it, everything else spreads."""

from __future__ import annotations

import random

import pytest

from backend.api.request import Request, SessionConfig, SessionId
from backend.replicas.placement import PIECE, TOKENS_PER_STREAM, Placement, ReplicaLoad


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(num_tokens)]


def turn(session: int, start: bool = False, end: bool = False, salt: str = "") -> Request:
    return Request([1, 2, 3], 4, session=SessionConfig(SessionId(session), start, end), cache_salt=salt)


def loads(*tokens: int) -> list[ReplicaLoad]:
    return [ReplicaLoad(waiting_tokens=each) for each in tokens]


def test_equal_replicas_are_taken_by_their_numbers_and_by_their_load() -> None:
    placement = Placement()
    assert placement.place(Request(prompt(10), 4), [0, 1, 2], loads(0, 0, 0)).replica == 0
    assert placement.place(Request(prompt(10), 4), [0, 1, 2], loads(9, 0, 1)).replica == 1
    assert placement.place(Request(prompt(10), 4), [2], loads(0, 0, 99)).replica == 2


def test_a_longer_turn_of_a_conversation_goes_where_its_beginning_is() -> None:
    placement, text = Placement(), prompt(10 * PIECE)
    assert placement.place(Request(text[: 6 * PIECE], 4), [0, 1], loads(1, 0)).replica == 1
    place = placement.place(Request(text, 4), [0, 1], loads(0, 0))
    assert (place.replica, place.num_new_tokens) == (1, 4 * PIECE)


def test_a_replica_that_is_much_busier_loses_a_conversation() -> None:
    placement, text = Placement(), prompt(6 * PIECE)
    placement.place(Request(text, 4), [0, 1], loads(1, 0))
    num_known = 6 * PIECE - 1  # at least one token of a prompt is computed
    assert placement.place(Request(text, 4), [0, 1], loads(0, num_known - 1)).replica == 1
    assert placement.place(Request(text, 4), [0, 1], loads(0, num_known + 1)).replica == 0
    assert placement.place(Request(text, 4), [0, 1], loads(0, 0)).replica == 0, "both know it now"


def test_requests_that_generate_count_as_well() -> None:
    busy, free = ReplicaLoad(num_live=2), ReplicaLoad()
    assert busy.tokens == 2 * TOKENS_PER_STREAM
    assert Placement().place(Request(prompt(10), 4), [0, 1], [busy, free]).replica == 1


@pytest.mark.parametrize("other", [{"cache_salt": "b"}, {"extra_inputs": {"image": b"x"}}])
def test_what_shares_no_kv_is_not_taken_for_the_same_beginning(other: dict[str, object]) -> None:
    placement, text = Placement(), prompt(4 * PIECE)
    placement.place(Request(text, 4), [0, 1], loads(1, 0))
    assert placement.place(Request(text, 4, **other), [0, 1], loads(0, 0)).replica == 0  # type: ignore[arg-type]


def test_a_difference_in_the_first_token_makes_another_prompt() -> None:
    placement, text = Placement(), prompt(4 * PIECE)
    placement.place(Request(text, 4), [0, 1], loads(1, 0))
    assert placement.place(Request([text[0] + 1, *text[1:]], 4), [0, 1], loads(0, 0)).num_new_tokens == 4 * PIECE


def test_turns_of_a_session_stay_whatever_the_load_is() -> None:
    placement = Placement()
    assert placement.place(turn(7, start=True), [0, 1], loads(1, 0)).replica == 1
    assert placement.place(turn(7), [0, 1], loads(0, 10**6)).replica == 1
    assert placement.place(turn(7, salt="another client"), [0, 1], loads(0, 10**6)).replica == 0
    assert placement.holder("", SessionId(7)) == 1
    placement.end("", SessionId(7))
    assert placement.holder("", SessionId(7)) is None


def test_a_session_moves_when_its_replica_is_gone() -> None:
    placement = Placement()
    placement.place(turn(7, start=True), [0, 1], loads(1, 0))
    assert placement.place(turn(7, start=True), [0], loads(0, 0)).replica == 0
    assert placement.holder("", SessionId(7)) == 0


def test_the_cache_of_a_replica_that_starts_again_is_forgotten_and_its_sessions_are_not() -> None:
    placement, text = Placement(), prompt(4 * PIECE)
    placement.place(Request(text, 4), [0, 1], loads(1, 0))
    placement.place(turn(7, start=True), [0, 1], loads(1, 0))
    placement.forget(1)
    assert placement.holder("", SessionId(7)) == 1
    assert placement.place(Request(text, 4), [0, 1], loads(0, 0)).num_new_tokens == 4 * PIECE


def test_memory_is_bounded_and_the_least_recently_used_goes_first() -> None:
    placement = Placement(max_pieces=8, max_sessions=2)
    kept = prompt(4 * PIECE, seed=1)
    placement.place(Request(kept, 4), [1], loads(0, 0))
    for seed in range(2, 12):
        placement.place(Request(prompt(2 * PIECE, seed), 4), [0], loads(0, 0))
        assert placement.place(Request(kept, 4), [0, 1], loads(0, 0)).replica == 1
        placement.place(turn(seed, start=True), [0], loads(0, 0))
    assert len(placement._seen) <= 8 and len(placement._sessions) == 2
    assert placement.holder("", SessionId(11)) == 0 and placement.holder("", SessionId(2)) is None


def test_what_the_other_replicas_know_stays_when_one_starts_again() -> None:
    placement, texts = Placement(), [prompt(4 * PIECE, seed) for seed in range(3)]
    for replica, text in enumerate(texts):
        placement.place(Request(text, 4), [replica], loads(0, 0, 0))
    placement.forget(1)
    places = [placement.place(Request(text, 4), [0, 1, 2], loads(1, 2, 0)) for text in texts]
    assert [(each.replica, each.num_new_tokens) for each in places] == [(0, 1), (2, 4 * PIECE), (2, 1)]

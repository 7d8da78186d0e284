"""The rules of a Front, one by one, over replicas that are unlike each other (tests/replicas/fakes.py)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from backend.api import ErrorCode, Request
from backend.api.request import RequestId, SessionConfig
from backend.api.stats import IterationRequests, RequestStage, RequestStats
from backend.core.messages import Cancel, ClientGone, NameAdapter, StopSession
from backend.replicas.live import are_alike, has_stopped
from backend.replicas.placement import ReplicaLoad
from tests.replicas.fakes import LOST, MODEL, Replica, Served


def prompts(replica: Replica) -> list[int]:
    """The first tokens of all requests that it was given."""
    return [each.input_token_ids[0] for each in replica.told if isinstance(each, Request)]


def _in_step(request_id: RequestId) -> RequestStats:
    return RequestStats(request_id, RequestStage.CONTEXT)


def test_clients_are_told_what_every_replica_can_hold() -> None:
    for sizes in ((300, 100, 200), (100, 300, 200)):
        served = Served(*(Replica(number, size) for number, size in enumerate(sizes)))
        hello = served.front.hello(7)
        assert (hello.max_kv_tokens, hello.client_index, hello.config.workers.replicas) == (100, 7, 3)
        assert hello.engine == served.front.hello(8).engine != served.replicas[0].hello.engine


def test_a_request_that_was_lost_twice_does_not_return_to_where_it_was_lost_first() -> None:
    served = Served(*map(Replica, range(4)))
    for each in (2, 3):
        served.replicas[each].is_connected = False  # they come later
    served.ask(first=5)
    first, second, third, _ = served.replicas
    first.say(1, error=LOST)
    served.turn()
    assert prompts(second) == [5]
    second.say(1, error=LOST)
    third.is_connected = True
    served.turn()
    assert prompts(third) == [5] and prompts(first) == [5], "the first one is there again, and has less to do"
    third.say(1, error=LOST)
    served.turn()
    assert [each.error_code for each in served.door.answers] == [ErrorCode.UNAVAILABLE], "all have lost it"
    assert served.loads() == [(0, 0)] * 4


def test_an_answer_or_another_error_is_not_sent_elsewhere() -> None:
    served = Served(Replica(0), Replica(1))
    started, refused = served.ask(), served.ask()
    one, other = served.replicas
    one.say(1, 7)
    served.turn()
    one.say(1, error=LOST)  # it has begun: its client has some of it
    other.say(1, error="too long")
    served.turn()
    assert [each.request_id for each in served.door.answers] == [started, started, refused]
    assert served.errors() == [LOST, "too long"] and served.loads() == [(0, 0)] * 2


@pytest.mark.parametrize("has_begun", [False, True])
def test_the_load_of_a_request_moves_with_it_and_is_gone_in_the_end(has_begun: bool) -> None:
    """The replicas know unequal parts of its prompt, so that it weighs there what it did not weigh here."""
    served = Served(Replica(0), Replica(1))
    one, other = served.replicas
    other.is_connected = False
    request_id = served.ask(64, first=3)
    one.say(1, 4, is_final=True)
    served.turn()
    served.ask(65, first=3)
    assert served.loads() == [(1, 1), (0, 0)]
    if has_begun:
        one.say(2, 4)
        served.turn()
        assert served.loads() == [(1, 0), (0, 0)]
    one.is_connected, other.is_connected = False, True
    served.turn()
    assert other.told == [(0, 2)] and served.loads() == [(0, 0), (1, 0 if has_begun else 65)]
    other.say(1, 9, is_final=True)
    served.turn()
    assert served.loads() == [(0, 0), (0, 0)]
    assert request_id != served.door.answers[-1].request_id and not served.errors()


def test_only_a_replica_of_the_same_checkpoint_goes_on_with_a_request() -> None:
    one, other = Replica(0, checkpoint="a"), Replica(1, checkpoint="b")
    served = Served(one, other)
    served.ask()
    one.is_connected = False
    served.turn()
    assert other.told == []
    other.checkpoint = "a"
    other.start()
    served.turn()
    assert other.told == [(0, 1)]


@pytest.mark.parametrize(
    ("change", "alike"),
    [
        ({}, True),
        ({"model": replace(MODEL, remarks=("slow",))}, True),
        ({"model": replace(MODEL, vocab_size=999)}, False),
        ({"checkpoint": "b"}, False),
        ({"max_kv_tokens": 5}, True),
        (None, False),
    ],
)
def test_replicas_are_alike_where_they_give_the_same_bytes(change: dict[str, Any] | None, alike: bool) -> None:
    one, other = Replica(0, checkpoint="a"), Replica(1, checkpoint="a")
    other.hello = None if change is None else replace(other.hello, **change)  # type: ignore[assignment]
    assert are_alike(one, other) is alike is are_alike(other, one)  # type: ignore[arg-type]


def test_a_replica_has_stopped_when_it_is_connected_and_silent_for_longer_than_the_watchdog_waits() -> None:
    replica = Replica(0)
    limit_s = replica.hello.config.triton.watchdog_timeout_s
    for silent_s, is_connected, expected in ((limit_s, True, False), (limit_s + 1, True, True), (1e9, False, False)):
        replica.silent_s, replica.is_connected = silent_s, is_connected
        assert has_stopped(replica) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize("failed", [0, 1, None])
def test_an_adapters_name_is_known_once_all_replicas_know_it(failed: int | None) -> None:
    """An error of one of them is the client's answer, in whatever order they answer."""
    served = Served(Replica(0), Replica(1))
    request_id = served.tell(lambda request_id: NameAdapter(request_id, "new", "/b"))
    for number, each in enumerate(served.replicas):
        assert not served.door.answers
        each.say(1, is_final=True, error="not readable" if number == failed else "")
        served.turn()
    (answer,) = served.door.answers
    assert answer.request_id == request_id and answer.has_error() == (failed is not None)
    known = {"builtin": "/a"} if failed is not None else {"builtin": "/a", "new": "/b"}
    assert dict(served.front.hello(1).adapters) == known
    assert served.door.adapters == ([] if failed is not None else [known])


def test_a_replica_that_starts_again_learns_the_names_and_no_client_hears_of_it() -> None:
    served = Served(Replica(0), Replica(1))
    one, other = served.replicas
    for directory in ("/b", "/c"):
        served.tell(lambda request_id, at=directory: NameAdapter(request_id, "new", at))
        for each in served.replicas:
            each.say(max(each.tellers), is_final=True)
        served.turn()
    num_answers = len(served.door.answers)
    for _ in range(2):
        one.start()
        served.turn()
        assert one.told[-1] == ("new", "/c"), "the latest directory of the name"
        one.say(max(one.tellers), is_final=True)
        served.turn()
    assert len(served.door.answers) == num_answers == 2 and len(one.told) == 4 and len(other.told) == 2
    served.tell(lambda request_id: NameAdapter(request_id, "new", None))
    for each in served.replicas:
        each.say(max(each.tellers), is_final=True)
    served.turn()
    other.start()
    served.turn()
    assert len(other.told) == 3, "a name that was taken away is not learnt again"


def test_records_have_the_id_of_the_client_whose_replica_wrote_them() -> None:
    """Both replicas call their first request 1."""
    served = Served(Replica(0), Replica(1))
    ids = [served.ask(), served.ask()]
    for number in (0, 1):
        mine, gone = (_in_step(RequestId(each)) for each in (1, 99))
        served.replicas[number].steps.append(IterationRequests(number, [mine, gone]))
    served.turn()
    got = [[each.request_id for each in records.requests[0].requests] for records in served.door.records]
    assert got == [[ids[0]], [ids[1]]], "and without requests that have ended"


@pytest.mark.parametrize("way", ["an END turn", "a stop with end"])
def test_a_session_that_was_erased_may_begin_anywhere(way: str) -> None:
    served = Served(Replica(0), Replica(1))
    one, other = served.replicas
    served.ask(session=SessionConfig(7, start=True))
    assert served.front._placement.holder("", 7) == 0
    served.ask(100, session=SessionConfig(7))
    served.ask(100, session=SessionConfig(7), cache_salt="another client's")
    assert len(one.told) == 2 and len(other.told) == 1
    if way == "an END turn":
        served.ask(session=SessionConfig(7, end=True))
    else:
        served.tell(lambda request_id: StopSession(request_id, 7))
        assert served.front._placement.holder("", 7) == 0, "it goes on"
        served.tell(lambda request_id: StopSession(request_id, 7, True))
        assert one.told[-1] == (7, True, "")
    assert served.front._placement.holder("", 7) is None
    assert served.front._placement.holder("another client's", 7) == 1


def test_a_turn_that_starts_a_session_anew_need_not_wait_for_its_lost_replica() -> None:
    served = Served(Replica(0), Replica(1))
    served.ask(session=SessionConfig(7, start=True))
    served.replicas[0].say(1, 4, is_final=True)
    served.turn()
    served.replicas[0].is_connected = False
    served.ask(session=SessionConfig(7))
    assert len(served.errors()) == 1 and served.front._placement.holder("", 7) == 0
    served.ask(session=SessionConfig(7, start=True))
    assert len(served.errors()) == 1 and served.front._placement.holder("", 7) == 1


def test_a_client_that_has_gone_leaves_its_load_until_its_requests_have_ended() -> None:
    served = Served(Replica(0), Replica(1))
    one = served.replicas[0]
    mine = [served.ask(client=1), served.ask(client=2)]
    one.say(1, 3)
    served.turn()
    served.front.post(ClientGone(1))
    served.turn()
    assert one.told[-1] == ("cancel", 1) and served.loads() == [(1, 0), (1, 1)]
    one.say(1, 4, is_final=True)
    served.turn()
    assert served.loads() == [(0, 0), (1, 1)]
    assert [each.request_id for each in served.door.answers] == mine[:1], "nothing behind its end"
    served.front.post(ClientGone(1))
    served.turn()
    assert served.replicas[1].told == [served.replicas[1].told[0]], "the other client's goes on"


def test_cancelling_twice_and_after_the_end_does_no_harm() -> None:
    served = Served(Replica(0))
    (one,) = served.replicas
    request_id = served.ask()
    for keep in (None, 3):
        served.front.post(Cancel(request_id, keep))
    served.turn()
    assert one.told[1:] == [("cancel", 1, None, None), ("cancel", 1, 3, None)]
    one.say(1, 4, is_final=True)
    served.turn()
    served.front.post(Cancel(request_id))
    served.turn()
    assert len(one.told) == 3 and served.loads() == [(0, 0)]


def test_the_door_closes_when_no_replica_is_connected_and_opens_with_the_next() -> None:
    served = Served(Replica(0), Replica(1))
    served.ask()
    for each in served.replicas:
        each.is_connected = False
    served.turn()
    assert served.door.num_closed == 1 and served.front._door is None and not served.front.is_serving
    assert served.replicas[0].told[-1] == ("cancel", 1), "its client is gone"
    served.replicas[1].start()
    served.turn()
    assert served.front._door is served.door and served.front.is_serving


def test_a_load_counts_waiting_tokens_and_streams() -> None:
    assert (ReplicaLoad(5, 0).tokens, ReplicaLoad(0, 2).tokens) == (5, 64)

"""Places: nobody's share is so large that nothing is left for the others."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from gateway.answers import Answer, Outlet, Running
from gateway.counters import Counters
from gateway.middleware import Middleware
from gateway.places import SHARE, Places
from gateway.request_log import RouteNames
from gateway.settings import Settings
from tests.gateway.fake_triton import FakeTriton
from tests.gateway.test_keys import ALICE, BOB, LINES, Serve, keyed, write
from tests.gateway.test_limits import COMPLETION, HOLD, connect, post


def filled(places: Places, name: str) -> int:
    """How many places a client gets that takes all it can."""
    count = 0
    while places.take(name):
        count += 1
    return count


def test_a_client_alone_gets_three_quarters_and_those_behind_it_a_share_of_the_rest() -> None:
    places = Places(256, with_shares=True)
    assert [filled(places, name) for name in ("a", "b", "c")] == [192, 48, 12]
    assert places.taken == 252 and places.take("newcomer")


def test_without_keys_all_places_are_everybodys() -> None:
    assert filled(Places(256, with_shares=False), "") == 256


@pytest.mark.parametrize("total", [1, 2, 3])
def test_few_places_are_given_to_whoever_holds_none(total: int) -> None:
    places = Places(total, with_shares=True)
    assert [places.take(str(i)) for i in range(total + 1)] == [True] * total + [False]


class Found(NamedTuple):
    """What a client finds when a part of its answer has come."""

    part: bytes
    requests: int  # that are being answered
    replies: int  # that are being generated
    counted: int  # requests that have ended, in the counters


@pytest.mark.parametrize("is_stream", [True, False])
def test_places_are_free_and_the_request_is_counted_when_the_last_part_is_sent(is_stream: bool) -> None:
    """Its client may ask at once for the next one, or for the load."""
    counters, requests, replies = Counters(), Places(3, with_shares=False), Running(Places(3, with_shares=False))
    found = list[Found]()

    async def work(out: Outlet) -> None:
        if is_stream:
            await out.event(b"first")
            await out.end_of_events(b"last")
        else:
            await out.json([b"{}"])

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            found.append(Found(message["body"], requests.taken, replies.choices, sum(counters.requests.values())))

    async def body_limit(size: int) -> int:
        return Settings().max_body_bytes

    body = asyncio.Queue[Message]()
    body.put_nowait({"type": "http.request", "body": b"", "more_body": False})
    app = Middleware(Answer(work, replies, 2, 60.0), RouteNames([]), Settings(), None, counters, requests, body_limit)
    scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": [(b"host", b"127.0.0.1")]}
    asyncio.run(app(scope, body.get, send))
    assert found[-1] == Found(b"last" if is_stream else b"{}", 0, 0, 1)
    assert found[:-1] and all(each[1:] == (1, 2, 0) for each in found[:-1])
    assert found[-2].part == b"", "ahead of it the client has read the rest: otherwise it keeps its places"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.booleans())))
def test_places_are_counted_for_each_client_and_never_more_than_there_are(
    steps: list[tuple[str, int, bool]],
) -> None:
    places, held = Places(12, with_shares=True), dict.fromkeys("abc", 0)
    for name, count, take in steps:
        before = held[name]
        if take:
            given_now = places.take(name, count)
            held[name] += count * given_now
            assert not given_now or before == 0 or held[name] <= SHARE * (12 - sum(held.values()))
        elif before >= count:
            places.give_back(name, count)
            held[name] -= count
        assert {key: places.held(key) for key in "abc"} == held and places.taken == sum(held.values()) <= 12


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_requests": 8}, "6 requests with this key are being answered, its share of 8"),
        ({"max_choices": 8}, "6 replies with this key are being generated, its share of 8"),
    ],
)
def test_a_key_holder_is_served_whatever_another_one_holds(
    settings: dict[str, Any], sentence: str, serve: Serve, triton: FakeTriton, tmp_path: Path
) -> None:
    with serve(api_keys=write(tmp_path / "keys", LINES), **settings) as served, ExitStack() as open_ones:
        for _ in range(6):
            connection = open_ones.enter_context(connect(served))
            connection.sendall(post(HOLD, headers=f"Authorization: Bearer {ALICE}\r\n"))
            assert b" 200 " in connection.recv(1000)
        status, body, _ = served.request("POST", "/v1/completions", COMPLETION, keyed(ALICE))
        assert status == 429 and sentence in body["error"]["message"]
        assert served.request("POST", "/v1/completions", COMPLETION, keyed(BOB))[0] == 200
        deadline = time.monotonic() + 10  # a place is given back behind the last byte of an answer
        while (taken := (served.gateway.requests.taken, served.gateway.running.choices)) != (6, 6):
            assert time.monotonic() < deadline, taken
            time.sleep(0.01)

"""GET /everbatch/live: one poller for all viewers, while there are some, and what they see of an engine that is away."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway import core, live
from tests.gateway.conftest import Served
from tests.gateway.fake_triton import FakeTriton
from tests.gateway.test_keys import ALICE, BOB, write
from tests.gateway.views import view

Serve = Callable[..., AbstractContextManager[Served]]
DEADLINE_S = 60.0


class Viewer:
    """An open stream."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def next(self) -> tuple[str, Any]:
        """The name and the object of the next event."""
        lines = iter(self._response.readline, b"")
        name = next(line for line in lines if line.strip()).decode().removeprefix("event: ").strip()
        return name, json.loads(next(lines).decode().removeprefix("data: "))

    def until(self, name: str) -> Any:
        """The object of the next event of this name."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            found, value = self.next()
            if found == name:
                return value
        raise AssertionError(f"no event {name} comes")

    def rest(self) -> bytes:
        return self._response.read()


@contextmanager
def watching(served: Served, hz: float = 10, **headers: str) -> Iterator[Viewer]:
    connection = http.client.HTTPConnection(served.address, timeout=DEADLINE_S)
    connection.request("GET", f"/everbatch/live?hz={hz}", headers=headers)
    response = connection.getresponse()
    try:
        assert response.status == 200, response.read()
        yield Viewer(response)
    finally:
        response.close()
        connection.close()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def looks(triton: FakeTriton) -> int:
    return sum("look" in seen.body for seen in list(triton.requests))


@pytest.fixture(autouse=True)
def usual_view(triton: FakeTriton) -> None:
    triton.live = view()


def test_a_viewer_sees_what_the_engine_answers(served: Served, triton: FakeTriton) -> None:
    with watching(served) as viewer:
        assert viewer.next() == ("view", view())
        triton.live = view(output=11)
        wait_until(lambda: viewer.until("view") == view(output=11), "the viewer does not see the next view")


def test_the_engine_is_asked_once_for_all_viewers_and_not_at_all_without(served: Served, triton: FakeTriton) -> None:
    feed = served.gateway.live
    wait_until(lambda: feed._poller is None, "the poller of an earlier test goes on")
    assert not looks(triton)
    with watching(served) as first, watching(served) as second, watching(served) as third:
        for viewer in (first, second, third):
            viewer.until("view")
        asked, begun = looks(triton), feed._number
        for _ in range(5):
            first.until("view")
        assert looks(triton) - asked <= feed._number - begun + 1, "more is asked than there are new views"
    wait_until(lambda: feed._poller is None and not feed._rates, "the poller goes on without viewers")
    asked = looks(triton)
    time.sleep(0.5)  # five periods of the poller, had it not ended
    assert looks(triton) == asked


def test_the_fastest_viewer_sets_the_pace(served: Served) -> None:
    feed = served.gateway.live

    def renewed(viewer: Viewer) -> int:
        """How often the event is renewed from one event of the viewer to the next."""
        viewer.until("view")
        before = feed._number
        viewer.until("view")
        return feed._number - before

    with watching(served, hz=1) as slow, watching(served, hz=10) as fast:
        fast.until("view")
        wait_until(lambda: renewed(slow) >= 3, "the slow viewer sets the pace")


def test_a_new_viewer_does_not_get_what_an_earlier_one_has_seen(served: Served, triton: FakeTriton) -> None:
    with watching(served) as viewer:
        viewer.until("view")
    wait_until(lambda: served.gateway.live._poller is None, "the poller goes on without viewers")
    triton.live = view(output=99)
    with watching(served) as viewer:
        assert viewer.next() == ("view", view(output=99))


@pytest.mark.parametrize("hz", ["0.99", "10.01", "nan", "inf", "-inf", "1e308", "-1", "", "x" * 500, "10\0"])
def test_a_rate_out_of_bounds_is_refused(served: Served, hz: str) -> None:
    status, body, _ = served.request("GET", "/everbatch/live?hz=" + hz.replace("\0", "%00"))
    assert status == 400
    assert "a number from 1 to 10 is expected" in body["error"]["message"] and len(body["error"]["message"]) < 120


def test_an_engine_that_is_away_is_an_event_and_the_stream_goes_on(triton: FakeTriton, serve: Serve) -> None:
    with serve() as served:
        served.wait_healthy()
        with watching(served) as viewer:
            viewer.until("view")
            triton.stop()
            try:
                assert "cannot be reached" in viewer.until("away")["message"]
            finally:
                triton.start()
            triton.live = view(engine="e2")
            assert viewer.until("view")["engine"] == "e2"


@pytest.mark.parametrize(("live", "sentence"), [(None, "it is of an older version")])
def test_a_model_without_views_is_said(served: Served, triton: FakeTriton, live: Any, sentence: str) -> None:
    triton.live = live
    with watching(served) as viewer:
        assert sentence in viewer.until("away")["message"]
        triton.live = view()
        assert viewer.until("view") == view()


def test_viewers_do_not_wait_for_ever_after_an_answer_that_is_empty(
    served: Served, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, empty = triton._obey, [True]

    def obey(seen: Any) -> Any:
        answer = whole(seen)
        if empty:
            empty.pop()
            answer.infer_response.raw_output_contents[0] = b""
        return answer

    monkeypatch.setattr(triton, "_obey", obey)
    with watching(served) as viewer:
        assert viewer.next()[0] == "away" and viewer.until("view") == view()


def test_a_failure_of_the_poller_is_an_event_and_the_stream_goes_on(
    served: Served, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, failing = live.view_event, [True]

    def fails_once(data: bytes) -> bytes:
        if failing:
            failing.pop()
            raise RuntimeError("secret")
        return whole(data)

    monkeypatch.setattr(live, "view_event", fails_once)
    with watching(served) as viewer:
        name, told = viewer.next()
        assert name == "away" and "secret" not in str(told) and viewer.until("view") == view()


def test_there_is_a_bound_of_viewers_and_a_place_is_free_again(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MOST_VIEWERS", 2)
    with serve() as served:
        served.wait_healthy()
        with watching(served) as first, watching(served):
            first.until("view")
            status, body, _ = served.request("GET", "/everbatch/live")
            assert status == 429 and body["error"]["message"] == "2 viewers watch, the limit is 2; try later"
            assert served.request("GET", "/health")[0] == 200
        wait_until(lambda: served.gateway.viewers.choices == 0, "the places of viewers who left stay taken")
        with watching(served) as viewer:
            viewer.until("view")


def test_a_viewer_who_reads_nothing_holds_up_none_of_the_others(served: Served, triton: FakeTriton) -> None:
    triton.live = view() | {"padding": "x" * 1_000_000}
    with watching(served), watching(served) as reading:
        for number in range(8):
            triton.live = view(output=number) | {"padding": "x" * 1_000_000}
            wait_until(lambda: reading.until("view")["rows"][0].get("num_output_tokens") == number, "views stop")  # noqa: B023


def test_views_are_for_keys_with_the_word_metrics(triton: FakeTriton, serve: Serve, tmp_path: Path) -> None:
    keys = write(tmp_path / "keys", f"alice {ALICE} metrics\nbob {BOB}\n")
    with serve(api_keys=keys) as served:
        served.wait_healthy()
        assert served.request("GET", "/everbatch/live")[0] == 401
        status, body, _ = served.request("GET", "/everbatch/live", headers={"Authorization": f"Bearer {BOB}"})
        assert status == 403 and "this key may not read metrics" in body["error"]["message"]
        assert not looks(triton)
        with watching(served, Authorization=f"Bearer {ALICE}") as viewer:
            assert viewer.until("view") == view()


def test_a_stream_ends_after_the_time_of_a_request_so_that_keys_are_compared_again(serve: Serve) -> None:
    with serve(request_timeout_s=0.5) as served:
        served.wait_healthy()
        with watching(served) as viewer:
            rest = viewer.rest()
            assert b"event: view" in rest and b"event: away" not in rest


def test_viewers_do_not_hold_up_the_end_of_the_server(serve: Serve) -> None:
    with serve(shutdown_grace_s=300.0) as served, contextlib.ExitStack() as stack:
        served.wait_healthy()
        viewer = stack.enter_context(watching(served))
        viewer.until("view")
        stopper = threading.Thread(target=served.stop)
        stopper.start()
        assert "the server is being stopped" in viewer.until("away")["message"]
        stack.close()
        stopper.join(DEADLINE_S)
        assert not stopper.is_alive()

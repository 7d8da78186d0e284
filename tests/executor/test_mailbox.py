"""Mailboxes by themselves: a box is there from its request's opening to its final response, and no longer."""

from __future__ import annotations

import pytest

from backend.api import ErrorCode, Response
from backend.api.response import Result
from backend.executor import mailbox
from backend.executor.mailbox import Mailboxes


def part(request_id: int, is_final: bool = False, error: str = "") -> Response:
    if error:
        return Response(request_id, error_or_none=error)
    return Response(request_id, result_or_none=Result([[1]], is_final=is_final))


def boxes(*ids: int) -> Mailboxes:
    made = Mailboxes()
    for each in ids:
        made.open(each)
    return made


def is_gone(made: Mailboxes, request_id: int) -> bool:
    (answer,) = made.take(request_id, 0.0)
    return answer.has_error() and answer.error_code is ErrorCode.NOT_FOUND


def test_a_box_goes_with_its_final_response_and_not_before() -> None:
    for end in (part(1, is_final=True), part(1, error="failed")):
        made = boxes(1, 2)
        made.put(part(1))
        assert made.take(1, 0.0) == [part(1)] and made.take(1, 0.0) == []
        made.put(part(1))
        made.put(end)
        assert (made.num_ready(1), made.num_ready(2), made.num_ready(3), made.num_ready(None)) == (2, 0, 0, 2)
        assert made.take(1, 0.0) == [part(1), end]
        assert is_gone(made, 1) and is_gone(made, 1) and not made.num_ready(None)
        assert made.take(2, 0.0) == [], "the other one is still open"


def test_all_that_is_there_is_taken_at_once_and_final_ones_are_gone() -> None:
    made = boxes(1, 2, 3)
    made.put(part(1))
    made.put(part(2, is_final=True))
    assert made.take_any(0.0) == [part(1), part(2, is_final=True)]
    assert made.take_any(0.0) == []
    assert is_gone(made, 2) and made.take(1, 0.0) == made.take(3, 0.0) == []


def test_a_request_that_was_never_sent_leaves_nothing() -> None:
    made = boxes(1)
    made.forget(1)
    made.forget(1)
    assert is_gone(made, 1) and made.take_any(0.0) == []
    made.open(1)
    assert made.take(1, 0.0) == [], "its id is opened again"


def test_several_ids_share_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    made, now_s, waited = boxes(1, 2, 3), [100.0], []

    def take(request_id: int, timeout_s: float) -> list[Response]:
        waited.append(timeout_s)
        now_s[0] += 2.0
        return []

    monkeypatch.setattr(mailbox.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(made, "take", take)
    assert made.take_each([1, 2, 3], 3.0) == [[], [], []] and waited == [3.0, 1.0, 0.0]


def test_after_closing_what_is_there_is_taken_and_nobody_waits() -> None:
    made = boxes(1, 2)
    made.put(part(1))
    made.close()
    made.close()
    assert made.take(2, None) == [] and made.take(1, None) == [part(1)] and made.take_any(None) == []

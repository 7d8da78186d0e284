"""The text pool alone, with a clock of its own: order, bounds, deadlines, and threads that never come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from backend.api import EngineUnavailable, ErrorCode, InvalidRequest, Overloaded
from backend.serving.intake import text_pool
from backend.serving.intake.text_pool import TextJob, TextPool
from backend.serving.intake.text_turns import LONG_BYTES, TextTurns
from backend.text.chat import ChatTemplate

TIMEOUT_S = 10.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Asked:
    """A request whose reading the test holds back, and what became of it."""

    def __init__(self, name: str, log: list[str], held: bool = False) -> None:
        self.name = name
        self.log = log
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.over = threading.Event()
        self.refused: tuple[ErrorCode, str] | None = None
        if not held:
            self.may_end.set()

    def job(self, *keys: str, **options: Any) -> TextJob:
        return TextJob(self._read, self._hand_over, self._refuse, keys=frozenset(keys), **options)

    def _read(self) -> str:
        self.begun.set()
        assert self.may_end.wait(20)
        return self.name

    def _hand_over(self, result: str) -> None:
        self.log.append(result)
        self.over.set()

    def _refuse(self, code: ErrorCode, message: str) -> None:
        self.refused = (code, message)
        self.over.set()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_pool(clock: Clock) -> Iterator[Callable[..., TextPool]]:
    made: list[TextPool] = []

    def make(num_threads: int = 2, max_jobs: int = 100) -> TextPool:
        made.append(TextPool(num_threads, TIMEOUT_S, max_jobs, clock))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def wait(event: threading.Event) -> None:
    assert event.wait(20)


def test_what_was_read_is_handed_over(make_pool: Callable[..., TextPool]) -> None:
    log: list[str] = []
    asked = Asked("a", log)
    make_pool().submit(asked.job())
    wait(asked.over)
    assert log == ["a"] and asked.refused is None


def test_a_refusal_and_a_bug_of_reading_are_answered_and_the_thread_lives_on(
    make_pool: Callable[..., TextPool],
) -> None:
    pool = make_pool(num_threads=1)

    def refuse() -> None:
        raise InvalidRequest("no")

    outcomes = []
    for read in (refuse, lambda: 1 / 0):
        asked = Asked("x", [])
        pool.submit(TextJob(read, asked._hand_over, asked._refuse))
        wait(asked.over)
        outcomes.append(asked.refused)
    assert outcomes[0] == (ErrorCode.INVALID_ARGUMENT, "no")
    assert outcomes[1] == (ErrorCode.INTERNAL, "the request could not be taken in; see the server's log")
    last = Asked("last", [])
    pool.submit(last.job())
    wait(last.over)


def test_turns_of_one_session_keep_their_order_and_others_overtake_them(make_pool: Callable[..., TextPool]) -> None:
    pool, log = make_pool(num_threads=4), []
    first, second, third, other = (Asked(name, log) for name in ("first", "second", "third", "other"))
    first.may_end.clear()
    pool.submit(first.job("s"))
    wait(first.begun)
    pool.submit(second.job("s"))
    pool.submit(third.job("s"))
    pool.submit(other.job("t"))
    wait(other.over)
    assert log == ["other"] and not second.begun.is_set()
    first.may_end.set()
    wait(third.over)
    assert log == ["other", "first", "second", "third"]


def test_a_job_is_handed_over_before_the_next_of_its_session_is_read(make_pool: Callable[..., TextPool]) -> None:
    pool, log = make_pool(num_threads=2), []
    first, second = Asked("first", log), Asked("second", log)
    handing_over, may_go_on = threading.Event(), threading.Event()

    def hand_over(result: str) -> None:
        handing_over.set()
        assert may_go_on.wait(20)
        first._hand_over(result)

    pool.submit(TextJob(first._read, hand_over, first._refuse, keys=frozenset("s")))
    pool.submit(second.job("s"))
    wait(handing_over)
    other = Asked("other", log)
    pool.submit(other.job())
    wait(other.over)  # the other thread is free, and the second turn still waits
    assert not second.begun.is_set()
    may_go_on.set()
    wait(second.over)
    assert log == ["other", "first", "second"]


def test_a_request_of_several_sessions_waits_for_all_of_them(make_pool: Callable[..., TextPool]) -> None:
    pool, log = make_pool(num_threads=4), []
    a, b, both, after = (Asked(name, log) for name in ("a", "b", "both", "after"))
    for asked in (a, b):
        asked.may_end.clear()
    pool.submit(a.job("a"))
    pool.submit(b.job("b"))
    pool.submit(both.job("a", "b"))
    pool.submit(after.job("b"))
    a.may_end.set()
    wait(a.over)
    assert not both.begun.wait(0.05) and not after.begun.is_set()
    b.may_end.set()
    wait(after.over)
    assert log == ["a", "b", "both", "after"]


def test_a_full_queue_refuses_at_once(make_pool: Callable[..., TextPool]) -> None:
    pool = make_pool(num_threads=1, max_jobs=2)
    held = Asked("held", [], held=True)
    pool.submit(held.job())
    wait(held.begun)
    waiting = [Asked(str(n), []) for n in range(2)]
    for asked in waiting:
        pool.submit(asked.job())
    with pytest.raises(
        Overloaded,
        match=r"^Exceeds maximum queue size: 2 requests of 0 bytes wait .* the limits are 2 \(limits.max_queue_size\)",
    ):
        pool.submit(Asked("one too many", []).job())
    held.may_end.set()
    wait(waiting[1].over)
    again = Asked("again", [])
    pool.submit(again.job())
    wait(again.over)


def test_the_queue_is_bounded_in_bytes_as_well(
    make_pool: Callable[..., TextPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_pool, "MAX_BYTES", 100)
    pool = make_pool(num_threads=1)
    held, waiting = Asked("held", [], held=True), Asked("waiting", [])
    pool.submit(held.job(num_bytes=100))
    wait(held.begun)  # it has left the queue, and its bytes with it
    pool.submit(waiting.job(num_bytes=100))
    with pytest.raises(Overloaded, match="of 100 bytes wait"):
        pool.submit(Asked("one too many", []).job(num_bytes=1))
    held.may_end.set()
    wait(waiting.over)
    again = Asked("again", [])
    pool.submit(again.job(num_bytes=100))
    wait(again.over)


def test_what_waits_longer_than_the_timeout_is_refused_and_never_read(
    make_pool: Callable[..., TextPool], clock: Clock
) -> None:
    pool = make_pool(num_threads=1)
    held, early, late = Asked("held", [], held=True), Asked("early", []), Asked("late", [])
    clock.now = 1
    pool.submit(early.job("s"))  # waits behind nothing but the clock: the thread is taken first
    wait(early.over)
    pool.submit(held.job("s"))
    wait(held.begun)
    clock.now = 2
    pool.submit(late.job("s"))
    clock.now = 2 + TIMEOUT_S - 0.001
    pool._reading.clear()  # the reading itself is not looked at here
    pool.expire()
    assert late.refused is None
    clock.now = 2 + TIMEOUT_S
    pool.expire()
    assert late.refused is not None and late.refused[0] == ErrorCode.UNAVAILABLE
    assert "waited 10 s for a text thread (triton.text_timeout_s)" in late.refused[1]
    held.may_end.set()
    assert not late.begun.is_set()


def test_a_turn_that_waited_too_long_does_not_hold_up_the_next_of_its_session(
    make_pool: Callable[..., TextPool], clock: Clock
) -> None:
    pool, log = make_pool(num_threads=1), []
    held, late, following, last = (
        Asked("held", log, held=True),
        Asked("late", log),
        Asked("next", log),
        Asked("last", log),
    )
    pool.submit(held.job("s"))
    wait(held.begun)
    pool.submit(late.job("s"))
    clock.now = 1
    pool.submit(following.job("s"))
    clock.now = TIMEOUT_S
    pool.expire()  # ends the reading of the first and the wait of the second
    assert held.refused is not None and late.refused is not None
    pool.submit(last.job())  # it has no session: the only thread reads it after all that need not wait
    wait(last.over)
    held.may_end.set()
    assert log == ["next", "last"] and following.refused is None


def test_a_template_in_an_endless_loop_is_ended_and_its_place_given_to_a_new_thread(
    make_pool: Callable[..., TextPool], clock: Clock
) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
    template = ChatTemplate(endless + "{% endfor %}" * 3)
    pool = make_pool(num_threads=1)
    looping, next_turn = Asked("looping", []), Asked("next", [])
    begun = threading.Event()

    def read() -> str:
        begun.set()
        return template.render([{"role": "user", "content": "x"}])

    pool.submit(TextJob(read, looping._hand_over, looping._refuse, keys=frozenset("s")))
    pool.submit(next_turn.job("s"))
    wait(begun)
    (thread,) = (reading.thread for reading in pool._reading.values())
    clock.now = TIMEOUT_S - 0.001
    pool.expire()
    assert looping.refused is None
    pool._queued[next(iter(pool._queued))] = clock.now  # the next turn has only just come
    clock.now = TIMEOUT_S
    pool.expire()
    assert looping.refused is not None and looping.refused[0] == ErrorCode.INVALID_ARGUMENT
    assert "took longer than 10 s (triton.text_timeout_s)" in looping.refused[1]
    wait(next_turn.over)
    assert next_turn.refused is None
    thread.join(20)
    assert not thread.is_alive(), "the loop was ended"


def test_threads_that_cannot_be_ended_are_replaced_up_to_a_bound(
    make_pool: Callable[..., TextPool], clock: Clock
) -> None:
    pool = make_pool(num_threads=1)
    stuck: list[Asked] = []
    most = (text_pool.GIVEN_UP + 1) * TextTurns(1).num_threads
    while not pool.is_stuck:  # each waits inside a library, where no exception reaches it
        stuck.append(Asked("stuck", [], held=True))
        pool.submit(stuck[-1].job())
        wait(stuck[-1].begun)
        clock.now += TIMEOUT_S
        pool.expire()
        assert stuck[-1].refused is not None
        assert len(stuck) <= most
    assert len(stuck) == most
    with pytest.raises(EngineUnavailable, match="all text threads are stuck"):
        pool.submit(Asked("one too many", []).job())
    threads = list(pool._given_up)
    for asked, thread in zip(stuck, threads[: TextTurns(1).num_threads]):
        asked.may_end.set()
        thread.join(20)
    assert not pool.is_stuck
    again = Asked("again", [])
    pool.submit(again.job())
    wait(again.over)
    assert again.refused is None and not stuck[0].log, "what was refused is not handed over when its thread comes back"
    for asked in stuck:
        asked.may_end.set()


def test_what_was_refused_is_not_handed_over_though_its_reading_ends(
    make_pool: Callable[..., TextPool], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_pool, "_interrupt", lambda thread: None)  # it comes too late to be noticed
    pool = make_pool(num_threads=1)
    late = Asked("late", [], held=True)
    pool.submit(late.job())
    wait(late.begun)
    (thread,) = (reading.thread for reading in pool._reading.values())
    clock.now = TIMEOUT_S
    pool.expire()
    late.may_end.set()
    thread.join(20)
    assert not thread.is_alive(), "its place was given away"
    assert late.refused is not None and late.log == []


def test_a_job_that_nobody_wants_any_more_is_not_read_and_holds_up_nobody(make_pool: Callable[..., TextPool]) -> None:
    pool = make_pool(num_threads=1)
    held, unwanted, after = Asked("held", [], held=True), Asked("unwanted", []), Asked("after", [])
    pool.submit(held.job("s"))
    wait(held.begun)
    pool.submit(unwanted.job("s", wanted=lambda: False))
    pool.submit(after.job("s"))
    held.may_end.set()
    wait(after.over)
    assert not unwanted.begun.is_set() and unwanted.refused is None


def test_a_hand_over_that_fails_does_not_end_its_thread(make_pool: Callable[..., TextPool]) -> None:
    pool = make_pool(num_threads=1)
    pool.submit(TextJob(lambda: 1, lambda result: result / 0, lambda code, message: None, keys=frozenset("s")))
    after = Asked("after", [])
    pool.submit(after.job("s"))
    wait(after.over)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("num_bytes", [LONG_BYTES, LONG_BYTES + 1], ids=["short", "long"])
def test_a_namespace_whose_texts_take_long_keeps_no_other_waiting(
    make_pool: Callable[..., TextPool], num_threads: int, num_bytes: int
) -> None:
    pool = make_pool(num_threads)
    slow = [Asked("slow", [], held=True) for _ in range(12)]
    for asked in slow:
        pool.submit(asked.job(namespace="slow", num_bytes=num_bytes))
    wait(slow[0].begun)
    quick = [Asked("quick", []) for _ in range(3)]
    for asked in quick:
        pool.submit(asked.job(namespace="quick"))
    for asked in quick:
        wait(asked.over)  # while all that the other namespace may have in hand is held back
    for asked in slow:
        asked.may_end.set()
    for asked in slow:
        wait(asked.over)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_one_long_text_does_not_keep_short_ones_of_its_own_namespace_waiting(
    make_pool: Callable[..., TextPool], num_threads: int
) -> None:
    pool = make_pool(num_threads)
    slow, quick = Asked("slow", [], held=True), Asked("quick", [])
    pool.submit(slow.job(num_bytes=LONG_BYTES + 1))
    wait(slow.begun)
    pool.submit(quick.job())
    wait(quick.over)
    slow.may_end.set()
    wait(slow.over)


def test_a_turn_comes_free_when_a_text_that_took_too_long_is_given_up(
    make_pool: Callable[..., TextPool], clock: Clock
) -> None:
    pool = make_pool(num_threads=1)
    stuck, following = Asked("stuck", [], held=True), Asked("next", [])
    pool.submit(stuck.job(num_bytes=LONG_BYTES + 1))
    wait(stuck.begun)
    clock.now = TIMEOUT_S
    pool.submit(following.job(num_bytes=LONG_BYTES + 1))
    pool.expire()
    wait(following.over)
    stuck.may_end.set()

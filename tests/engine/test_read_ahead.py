"""ReadAhead: adapters are read ahead of their requests' turns, fairly between namespaces, as many as there is room for."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from backend.api import Request
from backend.api.errors import EngineUnavailable
from backend.api.guide import Guide, GuideType
from backend.engine.core import EngineCore
from tests.engine.test_preparation_adapters import Reader, admit_all, make_core, note_reads, request, serve
from tests.engine.test_preparation_guides import FakeGuides


def admit_until(core: EngineCore, is_so: Callable[[], bool]) -> None:
    woken = threading.Event()
    core.preparation.on_ready(woken.set)
    core.admit()
    while not is_so():
        assert woken.wait(10)
        woken.clear()
        core.admit()


def guided(request: Request) -> Request:
    return msgspec.structs.replace(request, guide=Guide(GuideType.REGEX, "a"))


def make_guided_core(**options: object) -> EngineCore:
    """Whose guides are never compiled."""
    workers = Reader()
    workers.guides = FakeGuides()
    workers.info = msgspec.structs.replace(workers.info, eos_ids=(7,), guide_refusal="")
    return make_core(workers, **options)  # type: ignore[arg-type]


def test_an_adapter_whose_request_waits_for_its_guide_keeps_no_reader() -> None:
    """One reader: the adapters behind it are read all the same, in its own namespace and in others."""
    core = make_guided_core()
    core.enqueue(1, guided(request(1, "slow", salt="a")))
    core.enqueue(2, request(2, "b", salt="a"))
    core.enqueue(3, request(3, "c", salt="b"))
    admit_until(core, lambda: core.live_ids() == [2, 3, 1])
    core.fail_all(EngineUnavailable("over"))


def test_adapters_that_are_read_and_wait_are_bounded_for_each_namespace() -> None:
    """Room for 55 bytes in adapters of 10, all of which wait for guides. Namespace a may have as much as it leaves, so that the
    first of its own always finds room for b and c. Requests that end give their room back.
    """
    core = make_guided_core(host_bytes=55)
    read, reading = note_reads(core), core.preparation._reading
    for number in range(6):
        core.enqueue(number, guided(request(number, f"a{number}", salt="a")))
    admit_until(core, lambda: len(read) == 3 and reading._num_reading == 0)
    for number, path in enumerate(["b0", "b1", "c0"], 6):
        core.enqueue(number, guided(request(number, path, salt=path[0])))
    admit_until(core, lambda: len(read) == 6 and reading._num_reading == 0)
    assert read == ["a0", "a1", "a2", "b0", "b1", "c0"]
    core.cancel(0)
    core.cancel(1)
    admit_until(core, lambda: len(read) == 7 and reading._num_reading == 0)
    assert read[6] == "a3"
    core.fail_all(EngineUnavailable("over"))
    assert not reading._held and reading._threads is None


def test_an_adapter_of_another_namespace_is_the_next_to_be_read() -> None:
    """One reader, which is busy with the first of a hundred of namespace a when b's comes."""
    workers = Reader(is_open=False)
    core = make_core(workers, host_bytes=10_000)
    read = note_reads(core)
    for number in range(100):
        core.enqueue(number, request(number, f"a{number}", salt="a"))
    core.enqueue(100, request(100, "b", salt="b"))
    workers.gate.set()
    admit_all(core)
    assert read.index("b") <= 2 and len(read) == 101
    core.fail_all(EngineUnavailable("over"))


def test_adapters_that_have_gone_through_leave_nothing_behind() -> None:
    core = make_core(Reader(), put_workers=2)
    got = serve(
        core, request(1, "a"), request(2, "bad"), request(1, "b"), request(2, "worse"), request(3, "c", salt="x")
    )
    assert [got[number].has_error() for number in range(1, 6)] == [False, True, False, True, False]
    reading = core.preparation._reading
    assert not reading._held and not reading._unread and reading._num_reading == 0
    assert not reading._unread._running and not core.preparation._lines and not core.preparation._due

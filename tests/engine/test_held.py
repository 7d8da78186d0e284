"""Requests that wait for their guides: nobody waits for them, and they end like all others."""

from __future__ import annotations

from collections.abc import Callable

from backend.api import Request
from backend.api.errors import EngineUnavailable
from backend.api.guide import Guide, GuideType
from backend.api.request import RequestId
from backend.api.response import FinishReason
from backend.engine.core import EngineCore
from tests.engine.driver import Driver

GUIDE = Guide(GuideType.REGEX, "a")


class FakeGuides:
    """A guide is compiled when the test says so; `ended` are the requests that need theirs no longer."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.is_ready = False

    def on_compiled(self, tell: Callable[[RequestId, str], None]) -> None:
        pass

    def begin(self, request_id: RequestId, guide: Guide) -> bool:
        self.begun.append(request_id)
        return self.is_ready

    def end(self, request_id: RequestId) -> None:
        self.ended.append(request_id)


def make() -> tuple[Driver, FakeGuides, EngineCore]:
    guides = FakeGuides()
    driver = Driver(eos_ids=(7,), guides=guides)
    return driver, guides, driver.core


def enqueue(core: EngineCore, request_id: int, guide: Guide | None = GUIDE, **fields: object) -> None:
    core.enqueue(RequestId(request_id), Request([1, 2, 3], 4, guide=guide, **fields))  # type: ignore[arg-type]


def finish(core: EngineCore) -> dict[int, list[object]]:
    found: dict[int, list[object]] = {}
    for response in core.take_responses():
        found.setdefault(response.request_id, []).append(response)
    while core.has_work:
        for response in core.step():
            found.setdefault(response.request_id, []).append(response)
    return found


def test_nobody_waits_for_a_guide() -> None:
    _, guides, core = make()
    enqueue(core, 1)
    enqueue(core, 2, None)
    assert core.num_live == 2 and core.live_ids() == [2, 1] and guides.begun == [1]
    assert set(finish(core)) == {2}
    core.guide_compiled(RequestId(1), "")
    assert set(finish(core)) == {1} and guides.ended == [1] and core.num_live == 0


def test_a_guide_that_is_compiled_already_holds_nothing_up() -> None:
    _, guides, core = make()
    guides.is_ready = True
    enqueue(core, 1)
    assert len(core.held) == 0 and set(finish(core)) == {1} and guides.ended == [1]


def test_a_guide_that_cannot_be_used_ends_its_request() -> None:
    _, guides, core = make()
    enqueue(core, 1)
    core.guide_compiled(RequestId(1), "the guide is bad")
    (response,) = core.take_responses()
    assert response.error_or_none == "the guide is bad" and core.num_live == 0 and guides.ended == [1]
    core.guide_compiled(RequestId(1), "")  # told twice: nothing happens
    assert core.take_responses() == [] and core.num_live == 0


def test_a_request_is_cancelled_while_its_guide_is_compiled() -> None:
    _, guides, core = make()
    enqueue(core, 1)
    core.cancel(RequestId(1))
    (response,) = core.take_responses()
    assert response.result_or_none is not None
    assert response.result_or_none.finish_reasons == (FinishReason.CANCELLED,)
    assert core.num_live == 0 and guides.ended == [1]
    core.guide_compiled(RequestId(1), "")
    assert core.take_responses() == [] and not core.has_work


def test_the_end_of_the_engine_ends_who_is_held() -> None:
    _, guides, core = make()
    enqueue(core, 1)
    core.fail_all(EngineUnavailable("bye"))
    assert [response.error_or_none for response in core.take_responses()] == ["bye"]
    assert guides.ended == [1] and core.num_live == 0


def test_the_id_of_a_request_that_is_held_is_in_use() -> None:
    _, _, core = make()
    enqueue(core, 1)
    enqueue(core, 1)
    (response,) = core.take_responses()
    assert "is in use" in (response.error_or_none or "") and len(core.held) == 1


def test_a_guide_needs_an_end_id() -> None:
    """The request's own, or the model's; without any nothing is compiled."""
    guides = FakeGuides()
    driver = Driver(guides=guides)
    enqueue(driver.core, 1)
    (response,) = driver.core.take_responses()
    assert "needs an end id" in (response.error_or_none or "") and guides.begun == []
    enqueue(driver.core, 2, end_ids=(5,))
    assert guides.begun == [2]


def test_without_guided_decoding_a_guide_is_refused() -> None:
    driver = Driver()
    enqueue(driver.core, 1)
    (response,) = driver.core.take_responses()
    assert response.error_or_none == "GuidedDecoder is not setup"

"""Requests that wait for their guides: nobody waits for them, and they end like all others."""

from __future__ import annotations

from backend.api import ErrorCode, Request, SessionConfig
from backend.api.config.schema import LimitsConfig
from backend.api.errors import EngineUnavailable, InvalidRequest
from backend.api.guide import Guide, GuideType
from backend.api.outputs import OutputConfig
from backend.api.request import RequestId, SessionId
from backend.api.response import FinishReason
from backend.core.step import OnCompiled
from backend.engine.core import EngineCore
from tests.engine.driver import Driver

GUIDE = Guide(GuideType.REGEX, "a")


class FakeGuides:
    """A guide is compiled when the test says so; `ended` are the requests that need theirs no longer."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.namespaces: list[str] = []
        self.ended: list[int] = []
        self.is_ready = False

    def on_compiled(self, tell: OnCompiled) -> None:
        self._tell = tell

    def tell(self, request_id: RequestId, error: str = "") -> None:
        self._tell(request_id, InvalidRequest(error) if error else None)

    def begin(self, request_id: RequestId, guide: Guide, namespace: str) -> bool:
        self.begun.append(request_id)
        self.namespaces.append(namespace)
        return self.is_ready

    def notes(self, request_id: RequestId) -> tuple[str, ...]:
        return (".here: pattern",)

    def end(self, request_id: RequestId) -> None:
        self.ended.append(request_id)


def make(limits: LimitsConfig | None = None) -> tuple[Driver, FakeGuides, EngineCore]:
    guides = FakeGuides()
    driver = Driver(eos_ids=(7,), guides=guides, limits=limits)
    return driver, guides, driver.core


def enqueue(core: EngineCore, request_id: int, guide: Guide | None = GUIDE, **fields: object) -> None:
    core.enqueue(RequestId(request_id), Request([1, 2, 3], 4, guide=guide, **fields))  # type: ignore[arg-type]


def compiled(driver: Driver, request_id: int, error: str = "") -> None:
    driver.workers.guides.tell(RequestId(request_id), error)
    driver.core.admit()


def finish(core: EngineCore) -> dict[int, list[object]]:
    found: dict[int, list[object]] = {}
    for response in core.take_responses():
        found.setdefault(response.request_id, []).append(response)
    while core.has_work:
        for response in core.step():
            found.setdefault(response.request_id, []).append(response)
    return found


def test_nobody_waits_for_a_guide() -> None:
    driver, guides, core = make()
    enqueue(core, 1)
    enqueue(core, 2, None)
    assert core.num_live == 2 and core.live_ids() == [2, 1] and guides.begun == [1]
    assert set(finish(core)) == {2}
    compiled(driver, 1)
    assert set(finish(core)) == {1} and guides.ended == [1] and core.num_live == 0


def test_a_request_tells_how_long_it_was_prepared_and_what_of_its_guide_is_not_held() -> None:
    driver, guides, core = make()
    wanted = OutputConfig(return_perf_metrics=True)
    enqueue(core, 1, output_config=wanted)
    enqueue(core, 2, None, output_config=wanted)
    driver.clock.advance(0.005)
    compiled(driver, 1)
    found = {number: responses[-1].result.perf_metrics for number, responses in finish(core).items()}
    assert found[1].prepared_ns - found[1].arrival_ns == 5_000_000 and found[1].guide_notes == (".here: pattern",)
    assert found[1].queued_ns == found[1].prepared_ns
    assert (found[2].prepared_ns, found[2].guide_notes) == (0, ()) and found[2].queued_ns == found[2].arrival_ns


def test_a_guide_is_compiled_for_the_namespace_of_its_request() -> None:
    _, guides, core = make()
    enqueue(core, 1, cache_salt="a")
    enqueue(core, 2)
    assert guides.namespaces == ["a", ""]


def test_a_guide_that_is_compiled_already_holds_nothing_up() -> None:
    driver, guides, core = make()
    guides.is_ready = True
    enqueue(core, 1)
    assert len(core.preparation) == 0 and set(finish(core)) == {1} and guides.ended == [1]


def test_a_guide_that_cannot_be_used_ends_its_request() -> None:
    driver, guides, core = make()
    enqueue(core, 1)
    compiled(driver, 1, "the guide is bad")
    (response,) = core.take_responses()
    assert response.error_or_none == "the guide is bad" and core.num_live == 0 and guides.ended == [1]
    compiled(driver, 1)  # told twice: nothing happens
    assert core.take_responses() == [] and core.num_live == 0


def test_a_request_is_cancelled_while_its_guide_is_compiled() -> None:
    driver, guides, core = make()
    enqueue(core, 1)
    core.cancel(RequestId(1))
    (response,) = core.take_responses()
    assert response.result_or_none is not None
    assert response.result_or_none.finish_reasons == (FinishReason.CANCELLED,)
    assert core.num_live == 0 and guides.ended == [1]
    compiled(driver, 1)
    assert core.take_responses() == [] and not core.has_work


def test_the_end_of_the_engine_ends_who_is_held() -> None:
    driver, guides, core = make()
    enqueue(core, 1)
    core.fail_all(EngineUnavailable("bye"))
    assert [response.error_or_none for response in core.take_responses()] == ["bye"]
    assert guides.ended == [1] and core.num_live == 0


def test_the_id_of_a_request_that_is_held_is_in_use() -> None:
    _, _, core = make()
    enqueue(core, 1)
    enqueue(core, 1)
    (response,) = core.take_responses()
    assert "is in use" in (response.error_or_none or "") and len(core.preparation) == 1


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


def reasons(core: EngineCore) -> dict[int, FinishReason]:
    return {each.request_id: each.result.finish_reasons[0] for each in core.take_responses()}


def test_who_waits_too_long_times_out() -> None:
    """Of two requests with 5 s and 9 s that wait from the start, the first has timed out at 5 s, and the second at 9 s."""
    driver, guides, core = make()
    enqueue(core, 1, timeout_s=5.0)
    enqueue(core, 2, timeout_s=9.0)
    for seconds, expected in ((4.5, []), (0.5, [1]), (3.5, []), (0.5, [2])):
        driver.clock.advance(seconds)
        core.expire()
        assert list(reasons(core)) == expected
    assert guides.ended == [1, 2] and core.num_live == 0
    assert core.counters.requests_accepted_total == 2


def test_the_time_that_a_request_waits_for_its_guide_counts() -> None:
    driver, _, core = make()
    enqueue(core, 1, timeout_s=5.0)
    driver.clock.advance(4.0)
    compiled(driver, 1)
    driver.clock.advance(1.5)
    assert finish(core)[1][0].result.finish_reasons == (FinishReason.TIMED_OUT,)


def test_a_turn_that_waits_can_be_stopped_and_has_not_begun() -> None:
    driver, guides, core = make()
    enqueue(core, 1, None, session=SessionConfig(9, start=True))
    finish(core)
    before = driver.log(9)
    enqueue(core, 2, session=SessionConfig(9))
    core.stop_session(RequestId(3), SessionId(9), end=False)
    assert reasons(core) == {2: FinishReason.CANCELLED, 3: FinishReason.CANCELLED}
    assert guides.ended == [2] and driver.log(9) == before


def test_a_first_turn_that_waits_can_be_stopped() -> None:
    """No session is known yet, and still there is something to stop."""
    _, _, core = make()
    enqueue(core, 1, session=SessionConfig(9, start=True))
    core.stop_session(RequestId(2), SessionId(9), end=True)
    assert reasons(core) == {1: FinishReason.CANCELLED, 2: FinishReason.CANCELLED}
    core.stop_session(RequestId(3), SessionId(9), end=True)
    assert "there is nothing to stop" in core.take_responses()[0].error_msg


def test_a_session_has_one_turn_that_waits() -> None:
    _, _, core = make()
    enqueue(core, 1, session=SessionConfig(9, start=True))
    enqueue(core, 2, None, session=SessionConfig(9))
    (response,) = core.take_responses()
    assert response.request_id == 2 and "has a turn that waits to begin" in response.error_msg


def test_only_so_many_wait() -> None:
    driver, _, core = make(LimitsConfig(max_queue_size=2))
    for request_id in (1, 2, 3):
        enqueue(core, request_id)
    (response,) = core.take_responses()
    assert response.request_id == 3 and response.error_code is ErrorCode.UNAVAILABLE
    assert "2 requests wait for their guides, images or adapters, Maximum queue size of 2" in response.error_msg
    core.cancel(RequestId(1))
    enqueue(core, 4)
    assert list(core.preparation) == [2, 4]

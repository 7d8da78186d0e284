"""GuideCompiler: off the caller's thread, bounded in time and bytes, fair between namespaces, everybody told once.

What compiles here is a stub on threads of this process; tests/guided/test_compile_process.py has the real one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from backend.api.config.schema import GuidedConfig
from backend.api.errors import ConfigError, ErrorCode, EverbatchError, Overloaded
from backend.api.guide import Guide, GuideType
from backend.api.request import RequestId
from backend.core.limited_messages import Ending, Outcome
from backend.core.limited_process import LimitedJob
from backend.guided.compiler import GuideCompiler
from backend.guided.protocol import GuideBackend
from tests.guided.fake_jobs import FakeJobs, Stub

_made: list[GuideCompiler] = []


class Told:
    def __init__(self) -> None:
        self.errors: list[tuple[int, EverbatchError | None]] = []

    def __call__(self, request_id: RequestId, error: EverbatchError | None) -> None:
        self.errors.append((request_id, error))

    @property
    def news(self) -> list[tuple[int, str]]:
        return [(request_id, "" if error is None else error.message) for request_id, error in self.errors]

    def wait(self, count: int) -> list[tuple[int, str]]:
        wait_for(lambda: len(self.errors) >= count)
        return self.news


def wait_for(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not is_so() and time.monotonic() < until:
        time.sleep(0.002)
    assert is_so()


def guide(text: str) -> Guide:
    return Guide(GuideType.REGEX, text)


@pytest.fixture(autouse=True)
def _closing() -> Iterator[None]:
    yield
    while _made:
        _made.pop().close()


def make(
    jobs: FakeJobs, make_backend: Callable[[], GuideBackend] = Stub, **config: object
) -> tuple[GuideCompiler, Told]:
    compiler, told = GuideCompiler(GuidedConfig(**config), make_backend, jobs), Told()  # type: ignore[arg-type]
    compiler.on_compiled(told)
    _made.append(compiler)
    return compiler, told


def begin(compiler: GuideCompiler, request_id: int, text: str, namespace: str = "") -> bool:
    return compiler.begin(RequestId(request_id), guide(text), namespace)


def test_a_guide_is_compiled_once_for_all_who_give_it() -> None:
    jobs = FakeJobs()
    compiler, told = make(jobs)
    jobs.gate.clear()
    assert not begin(compiler, 1, "a")
    assert not begin(compiler, 2, "a", "another namespace")
    assert told.news == []
    jobs.gate.set()
    assert sorted(told.wait(2)) == [(1, ""), (2, "")]
    assert begin(compiler, 3, "a") and jobs.begun == ["a"]


def test_the_same_text_of_another_type_is_another_guide() -> None:
    jobs = FakeJobs()
    compiler, told = make(jobs)
    compiler.begin(RequestId(1), Guide(GuideType.REGEX, "{}"), "")
    told.wait(1)
    assert not compiler.begin(RequestId(2), Guide(GuideType.JSON_SCHEMA, "{}"), "")
    told.wait(2)
    assert jobs.begun == ["{}", "{}"]


def test_a_matcher_is_of_the_guide_that_is_asked_for() -> None:
    compiler, told = make(FakeJobs())
    for request_id, text in enumerate("abc"):
        begin(compiler, request_id, text)
    told.wait(3)
    with pytest.raises(NotImplementedError, match="b"):
        compiler.matcher(guide("b"))


def test_a_guide_that_cannot_be_compiled_is_told_in_a_sentence_without_paths() -> None:
    compiler, told = make(FakeJobs())
    for request_id, text in enumerate(["bad", "crash", "panic", "good"]):
        begin(compiler, request_id, text)
    news = dict(told.wait(4))
    assert news[0] == "guide.structures[3]: it is bad"
    assert news[1] == "guide: it cannot be compiled (RuntimeError); the engine's log says why"
    assert news[2] == "guide: it cannot be compiled (KeyboardInterrupt); the engine's log says why"
    assert news[3] == "", "whatever a library raises, others go on"
    assert begin(compiler, 5, "good") and not begin(compiler, 6, "bad")
    assert told.wait(5)[4] == (6, news[0]), "an error is not kept, and told to the next one too"


@pytest.mark.parametrize(
    ("ending", "sentence", "code"),
    [
        (Ending.OVER_CPU, "more than 0.25 s of processor time (guided.compile_cpu_s); simplify", "INVALID_ARGUMENT"),
        (Ending.OVER_MEMORY, "more than 2097152 bytes of memory (guided.compile_bytes); simplify", "INVALID_ARGUMENT"),
        (Ending.LOST, "their process has ended; try again later", "UNAVAILABLE"),
    ],
)
def test_who_goes_over_a_limit_is_told_which(ending: Ending, sentence: str, code: str) -> None:
    jobs = FakeJobs()
    jobs.endings = [ending, ending]
    compiler, told = make(jobs, compile_cpu_s=0.25, compile_bytes=2 << 20)
    begin(compiler, 1, "a")
    told.wait(1)
    ((_, error),) = told.errors
    assert error is not None and sentence in error.message and error.code == ErrorCode(code)


def test_a_guide_that_was_lost_with_its_process_is_compiled_again() -> None:
    jobs = FakeJobs()
    jobs.endings = [Ending.LOST]
    compiler, told = make(jobs)
    begin(compiler, 1, "a")
    assert told.wait(1) == [(1, "")] and jobs.begun == ["a", "a"]


def test_without_a_process_clients_are_told_to_try_again() -> None:
    class NoJobs(FakeJobs):
        def run(self, job: LimitedJob, guide: Guide) -> Outcome:
            raise BlockingIOError("Resource temporarily unavailable")

    compiler, told = make(NoJobs())
    begin(compiler, 1, "a")
    told.wait(1)
    error = told.errors[0][1]
    assert error is not None and error.code is ErrorCode.UNAVAILABLE


def test_who_waits_too_long_is_told_so_though_nobody_waited_for_a_while() -> None:
    """The watch sleeps without a limit once the first guide's 0.05 s are over; the second one's wait must wake it."""
    jobs = FakeJobs()
    compiler, told = make(jobs, compile_timeout_s=0.05)
    begin(compiler, 1, "quick")
    assert told.wait(1) == [(1, "")]
    time.sleep(0.15)
    jobs.gate.clear()
    begin(compiler, 2, "slow")
    begin(compiler, 3, "slow")
    news = told.wait(3)
    assert [request_id for request_id, _ in news] == [1, 2, 3] and "within 0.05 s" in news[2][1]
    assert isinstance(told.errors[2][1], Overloaded), "a state of the server, not a mistake of the client"


def test_nobody_s_time_runs_while_the_process_starts() -> None:
    jobs = FakeJobs()
    jobs.gate.clear()
    jobs.is_ready.clear()
    compiler, told = make(jobs, compile_timeout_s=0.05)
    begin(compiler, 1, "slow")
    time.sleep(0.15)
    assert told.news == []
    jobs.is_ready.set()
    assert "within 0.05 s" in told.wait(1)[0][1]


def test_what_nobody_waits_for_any_more_is_dropped_and_costs_nobody_anything() -> None:
    """One process. The first guide's time is up, the second one's request ends: the third has the process at once."""
    jobs = FakeJobs()
    compiler, told = make(jobs, compile_timeout_s=0.1, compile_processes=1)
    jobs.gate.clear()
    begin(compiler, 1, "slow")
    assert "within 0.1 s (guided.compile_timeout_s), for the machine is busy; try again later" in told.wait(1)[0][1]
    begin(compiler, 2, "slower")
    wait_for(lambda: jobs.begun == ["slow", "slower"])
    compiler.end(RequestId(2))
    wait_for(lambda: jobs.dropped == ["slow", "slower"])
    jobs.gate.set()
    begin(compiler, 3, "quick")
    told.wait(2)
    compiler.end(RequestId(1))
    assert told.news[1:] == [(3, "")], "who has ended is not told, and nobody twice"
    assert not begin(compiler, 4, "slow"), "nothing was kept of it"


def test_a_guide_that_is_given_up_before_its_turn_has_none() -> None:
    jobs = FakeJobs()
    compiler, told = make(jobs, compile_processes=1)
    jobs.gate.clear()
    begin(compiler, 1, "slow")
    wait_for(lambda: jobs.begun == ["slow"])
    begin(compiler, 2, "gone")
    compiler.end(RequestId(2))
    begin(compiler, 3, "quick")
    jobs.gate.set()
    assert told.wait(2) == [(1, ""), (3, "")] and jobs.begun == ["slow", "quick"]


def test_a_guide_that_somebody_else_waits_for_is_not_dropped() -> None:
    jobs = FakeJobs()
    compiler, told = make(jobs)
    jobs.gate.clear()
    begin(compiler, 1, "a")
    begin(compiler, 2, "a")
    compiler.end(RequestId(1))
    jobs.gate.set()
    assert told.wait(1) == [(2, "")] and not jobs.dropped


def test_who_waits_too_long_for_others_is_told_to_try_again() -> None:
    """There is nothing to simplify about a guide that never had its turn."""
    jobs = FakeJobs()
    compiler, told = make(jobs, compile_timeout_s=0.2, compile_processes=1)
    jobs.gate.clear()
    begin(compiler, 1, "slow")
    wait_for(lambda: jobs.begun == ["slow"])
    compiler._config = msgspec.structs.replace(compiler._config, compile_timeout_s=0.05)
    begin(compiler, 2, "waits")
    told.wait(1)
    ((request_id, error),) = told.errors[:1]
    assert request_id == 2 and isinstance(error, Overloaded)
    assert "has waited 0.05 s for others" in error.message and "waits" not in jobs.begun


def test_the_cache_is_bounded_by_bytes_and_keeps_what_live_requests_use() -> None:
    """Guides of 100 bytes and room for 250: of five that nobody uses two stay; one in use stays whatever its age."""
    compiler, told = make(FakeJobs(), cache_bytes=250)
    begin(compiler, 100, "used")
    told.wait(1)
    for i in range(5):
        begin(compiler, i, f"g{i}")
        told.wait(2 + i)
        compiler.end(RequestId(i))
    assert compiler.num_bytes == 200
    assert begin(compiler, 101, "used") and begin(compiler, 102, "g4")
    assert not begin(compiler, 103, "g0")


def test_what_was_asked_for_last_stays_in_the_cache() -> None:
    compiler, told = make(FakeJobs(), cache_bytes=250)
    for i, text in enumerate(["old", "older", "old", "new"]):
        was_there = begin(compiler, i, text)
        assert was_there == (i == 2)
        wait_for(lambda: begin(compiler, 99, text))  # noqa: B023
        compiler.end(RequestId(i))
        compiler.end(RequestId(99))
    assert compiler.num_bytes == 200
    assert begin(compiler, 10, "old") and begin(compiler, 11, "new") and not begin(compiler, 12, "older")


def test_the_cache_is_trimmed_when_the_last_user_ends() -> None:
    """And not before: 300 bytes in use of a cache of 250."""
    compiler, told = make(FakeJobs(), cache_bytes=250)
    for i, text in enumerate(["100", "101", "99"]):
        begin(compiler, i, text)
        told.wait(1 + i)
    assert compiler.num_bytes == 300
    compiler.end(RequestId(0))
    assert compiler.num_bytes == 200


def test_too_many_guides_of_one_namespace_are_refused() -> None:
    jobs = FakeJobs()
    compiler, told = make(jobs, max_compiling=2, compile_processes=1)
    jobs.gate.clear()
    begin(compiler, 1, "a")
    wait_for(lambda: jobs.begun == ["a"])
    begin(compiler, 2, "b")
    begin(compiler, 3, "c")
    with pytest.raises(Overloaded, match=r"2 guides wait .* \(guided.max_compiling\)"):
        begin(compiler, 4, "d")
    assert not begin(compiler, 5, "b"), "one that is compiled already, or soon, costs nothing"
    assert not begin(compiler, 6, "d", "another namespace")
    jobs.gate.set()
    assert {request_id for request_id, _ in told.wait(5)} == {1, 2, 3, 5, 6}
    assert not begin(compiler, 7, "e"), "nobody waits any more"


def test_a_hundred_slow_guides_of_one_namespace_do_not_hold_up_another_one_s() -> None:
    """Of three processes one namespace has two at most, so the other one's guide runs at once."""
    jobs = FakeJobs()
    compiler, told = make(jobs, compile_processes=3)
    jobs.gate.clear()
    for i in range(100):
        begin(compiler, i, f"slow {i}", "a")
    wait_for(lambda: len(jobs.begun) == 2)
    begin(compiler, 100, "quick", "b")
    wait_for(lambda: len(jobs.begun) == 3)
    assert jobs.begun[2] == "quick"
    jobs.gate.set()
    told.wait(101)


def test_namespaces_take_turns_at_one_process() -> None:
    jobs = FakeJobs()
    compiler, told = make(jobs, compile_processes=1)
    jobs.gate.clear()
    for i in range(100):
        begin(compiler, i, f"slow {i}", "a")
    begin(compiler, 100, "quick", "b")
    jobs.gate.set()
    told.wait(101)
    assert jobs.begun.index("quick") <= 2


def test_a_guide_that_waits_behind_another_namespace_s_has_its_own_namespace_s_turn() -> None:
    jobs = FakeJobs()
    compiler, told = make(jobs, compile_processes=1)
    jobs.gate.clear()
    for i in range(10):
        begin(compiler, i, f"slow {i}", "a")
    begin(compiler, 10, "slow 9", "b")
    jobs.gate.set()
    told.wait(11)
    assert jobs.begun.index("slow 9") <= 2 and len(jobs.begun) == 10


def test_compiled_guides_of_live_requests_are_bounded_and_shared_between_namespaces() -> None:
    """1 MiB. Namespace a may have as much as it leaves: 500,000 bytes and no more; b as much as is left then."""
    compiler, told = make(FakeJobs(), live_bytes=1 << 20)
    for i, (text, namespace) in enumerate([("500000", "a"), ("40000", "a"), ("250000", "b"), ("200000", "b")]):
        begin(compiler, i, text, namespace)
        told.wait(1 + i)
    errors = dict(told.errors)
    assert [isinstance(errors[i], Overloaded) for i in range(4)] == [False, True, False, True]
    assert "40000 bytes has no room" in told.news[1][1] and "1048576 bytes (guided.live_bytes)" in told.news[1][1]
    begin(compiler, 4, "300000", "c")
    assert isinstance(told.wait(5) and told.errors[4][1], Overloaded), "no room at all"
    compiler.end(RequestId(0))
    begin(compiler, 5, "40001", "a")
    assert told.wait(6)[5] == (5, "")
    for request_id in (2, 5):
        compiler.end(RequestId(request_id))
    begin(compiler, 6, "600000", "a")
    assert told.wait(7)[6] == (6, ""), "what is only cached is in nobody's way"


def test_a_guide_that_several_wait_for_needs_room_for_the_one_who_has_least() -> None:
    jobs = FakeJobs()
    compiler, told = make(jobs, live_bytes=1 << 20)
    begin(compiler, 0, "500000", "a")
    told.wait(1)
    jobs.gate.clear()
    begin(compiler, 1, "300000", "a")
    begin(compiler, 2, "300000", "b")
    jobs.gate.set()
    assert sorted(told.wait(3)) == [(0, ""), (1, ""), (2, "")]


def test_a_backend_that_cannot_be_made_is_not_set_up() -> None:
    def fail() -> GuideBackend:
        raise ConfigError("the model directory has no tokenizer.json")

    compiler, told = make(FakeJobs(), fail)
    begin(compiler, 1, "a")
    assert told.wait(1) == [(1, "GuidedDecoder is not setup: the model directory has no tokenizer.json")]
    assert told.errors[0][1].code is ErrorCode.INVALID_ARGUMENT  # type: ignore[union-attr]


def test_an_idle_compiler_that_is_closed_leaves_no_thread() -> None:
    compiler, told = make(FakeJobs())
    begin(compiler, 1, "a")
    told.wait(1)
    mine = set(compiler._threads)
    compiler.close()
    assert mine and not any(thread.is_alive() for thread in mine)


def test_a_compiler_that_is_closed_leaves_no_thread_and_tells_nobody() -> None:
    jobs = FakeJobs()
    compiler, told = make(jobs, compile_processes=2)
    jobs.gate.clear()
    begin(compiler, 1, "slow")
    wait_for(lambda: jobs.begun == ["slow"])
    begin(compiler, 2, "slower")
    mine = set(compiler._threads)
    assert {thread.name for thread in mine} == {"guide-watch", "guide-compiler-0", "guide-compiler-1"}
    compiler.close()
    assert not any(thread.is_alive() for thread in mine) and jobs.is_closed
    assert told.news == [] and jobs.dropped == ["slow"]

"""LimitedServer with what compiles guides: limits that the kernel holds, and nothing left behind.

These tests fork this process instead of starting one: what runs is the same, and its library does to its process what it is told.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from backend.api.guide import Guide, GuideType
from backend.core import limited_server
from backend.core.limited_messages import Begin, Drop, Ending, Frames, Limits, Outcome, decode_outcome, frame
from backend.core.limited_server import LimitedServer
from backend.guided.compile_jobs import encode_guide
from backend.guided.compile_process import NICENESS, compile_guide
from backend.guided.protocol import CompiledGuide, GuideBackend, GuideError, Matcher
from tests.guided.processes import children_of, is_alive, wait_for

MIB = 1 << 20


class Rogue:
    """A library that does to its process what a guide's text says."""

    name = "rogue"

    def compile(self, guide: Guide) -> CompiledGuide:
        match guide.text.split():
            case ["compute"]:
                while True:
                    pass
            case ["sleep"]:
                time.sleep(60)
            case ["take", num_bytes]:
                bytearray(int(num_bytes))
            case ["hold", num_bytes]:
                return _Held(b"", bytearray(int(num_bytes)))
            case ["abort"]:
                os.abort()
            case ["crash"]:
                os.kill(os.getpid(), signal.SIGSEGV)
            case ["exit"]:
                os._exit(3)
            case ["panic"]:
                raise KeyboardInterrupt("of no Exception class")
            case ["refuse"]:
                raise GuideError("it is bad", ".here")
            case ["write", num_bytes]:
                return _Held(b"x" * int(num_bytes))
            case [("niceness" | "pid") as asked]:
                return _Held(b"%d" % (os.getpid() if asked == "pid" else os.nice(0)))
            case ["speak"]:
                os.write(2, b"words of a library")
                os.write(1, b"words of a library")
        return _Held(b"")

    def load(self, portable: bytes) -> CompiledGuide:
        return _Held(portable)


class _Held:
    def __init__(self, portable: bytes, held: object = None) -> None:
        self.portable, self.held, self.notes = portable, held, ()

    def matcher(self) -> Matcher:
        raise NotImplementedError


class Forked:
    """A LimitedServer over a library, in a fork of this process."""

    def __init__(
        self,
        library: GuideBackend,
        cpu_s: float = 30.0,
        num_bytes: int = 64 * MIB,
        before: Callable[[], None] = lambda: None,
        jobs_of_child: int = 1,
    ) -> None:
        self.ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            try:
                before()
                faulthandler.disable()  # pytest's tells of signals at length
                gc.disable()  # a collection of pytest's heap would take a guide's whole CPU time; main() freezes its own
                self.ours.close()
                perform, limits = partial(compile_guide, library), Limits(cpu_s, num_bytes)
                server = LimitedServer(
                    theirs, Frames(), perform, limits, niceness=NICENESS, jobs_of_child=jobs_of_child
                )
                server.run()
            finally:
                os._exit(0)
        theirs.close()
        self.ours.settimeout(20)
        self._frames = Frames()
        self._num_jobs = 100

    def begin(self, job: int, text: str) -> None:
        self.ours.sendall(frame(Begin(job, encode_guide(Guide(GuideType.REGEX, text)))))

    def outcome(self) -> Outcome:
        while True:
            for body in self._frames:
                return decode_outcome(body)
            data = self.ours.recv(MIB)
            assert data, "the server has ended"
            self._frames.add(data)

    def of(self, text: str) -> Outcome:
        self._num_jobs += 1
        self.begin(self._num_jobs, text)
        outcome = self.outcome()
        assert outcome.job == self._num_jobs
        return outcome

    def close(self) -> None:
        self.ours.close()
        os.waitpid(self.pid, 0)


@pytest.fixture
def forked() -> Iterator[Callable[..., Forked]]:
    made: list[Forked] = []

    def make(**limits: float) -> Forked:
        made.append(Forked(Rogue(), **limits))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("text", "ending", "told"),
    [
        ("compute", Ending.OVER_CPU, ""),
        ("take 8000000000", Ending.OVER_MEMORY, ""),
        ("abort", Ending.OVER_MEMORY, ""),
        ("crash", Ending.FAILED, "SIGSEGV"),
        ("exit", Ending.FAILED, "exit code 3"),
        ("panic", Ending.FAILED, "KeyboardInterrupt"),
        ("refuse", Ending.REFUSED, "it is bad"),
        ("take 1000000", Ending.DONE, ""),
    ],
)
def test_a_guide_that_ends_its_process_ends_no_other(
    forked: Callable[..., Forked], text: str, ending: Ending, told: str
) -> None:
    server = forked(cpu_s=0.5)
    outcome = server.of(text)
    assert outcome.ending is ending and told in outcome.text
    assert outcome.place == (".here" if ending is Ending.REFUSED else "")
    assert server.of("fine").ending is Ending.DONE
    wait_for(lambda: not children_of(server.pid))


def test_a_guide_is_killed_at_its_limit_and_not_a_second_later(forked: Callable[..., Forked]) -> None:
    server = forked(cpu_s=0.1)
    assert server.of("compute").ending is Ending.OVER_CPU
    wait_for(lambda: not children_of(server.pid))
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    of_children_s = sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")
    assert 0.08 <= of_children_s < 0.6


def test_guides_are_compiled_side_by_side_and_each_outcome_is_its_own(forked: Callable[..., Forked]) -> None:
    server = forked()
    for job, text in enumerate(["sleep", "sleep", "write 3000000", "refuse"], 1):
        server.begin(job, text)
    outcomes = {each.job: each for each in (server.outcome(), server.outcome())}
    assert outcomes[3].result == b"x" * 3_000_000 and outcomes[4].ending is Ending.REFUSED
    wait_for(lambda: len(children_of(server.pid)) == 2)


def test_a_guide_that_is_dropped_is_killed_and_others_are_not(forked: Callable[..., Forked]) -> None:
    server = forked()
    server.begin(1, "sleep")
    server.begin(2, "sleep")
    wait_for(lambda: len(children_of(server.pid)) == 2)
    first, second = sorted(children_of(server.pid))
    server.ours.sendall(frame(Drop(1)) + frame(Drop(1)) + frame(Drop(77)))
    wait_for(lambda: children_of(server.pid) == [second])
    assert not Path(f"/proc/{first}").exists(), "it is not left behind as a zombie either"
    assert server.of("fine").ending is Ending.DONE


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_child_ends_with_its_process_and_with_the_engine_s_end_of_the_socket(is_killed: bool) -> None:
    server = Forked(Rogue())
    server.begin(1, "sleep")
    wait_for(lambda: children_of(server.pid))
    (child,) = children_of(server.pid)
    if is_killed:
        os.kill(server.pid, signal.SIGKILL)
    server.close()
    wait_for(lambda: not is_alive(child))


def test_a_child_ends_when_its_parent_ended_before_the_kernel_was_asked_to_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end_parent() -> None:
        parent = os.getppid()
        os.kill(parent, signal.SIGKILL)
        wait_for(lambda: os.getppid() != parent)

    monkeypatch.setattr(limited_server, "_silence", end_parent)
    reading, writing = os.pipe()
    server = Forked(Rogue())
    os.close(writing)  # the server and its child hold it now, and the pipe ends with the last of them
    server.begin(1, "sleep")
    server.close()
    with open(reading, "rb") as pipe:
        assert select.select([pipe], [], [], 20)[0], "the child goes on after its parent"


def test_a_child_may_do_several_jobs_as_long_as_all_goes_well(forked: Callable[..., Forked]) -> None:
    server = forked(cpu_s=0.3, jobs_of_child=4)

    def pid() -> int:
        return int(server.of("pid").result)

    first = pid()
    assert server.of("refuse").ending is Ending.REFUSED
    assert [pid(), pid()] == [first, first]
    second = pid()
    assert second != first, "it has done four jobs"
    assert server.of("take 8000000000").ending is Ending.OVER_MEMORY
    third = pid()
    assert third not in (first, second)
    assert server.of("compute").ending is Ending.OVER_CPU and pid() not in (first, second, third)
    server.ours.sendall(frame(Drop(server._num_jobs)))  # that job is over: nobody is killed for it
    assert server.of("fine").ending is Ending.DONE


def test_what_a_guide_holds_is_measured(forked: Callable[..., Forked]) -> None:
    """One that takes 20 MB and gives them back holds nothing; the order does not matter."""
    server = forked()
    held = [server.of(text).num_bytes for text in ("hold 5000000", "take 20000000", "hold 1000000", "fine")]
    assert 5_000_000 <= held[0] < 5_100_000 and 1_000_000 <= held[2] < 1_100_000
    assert held[1] < 100_000 and held[3] < 100_000


def test_the_limit_of_memory_is_that_of_one_guide(forked: Callable[..., Forked]) -> None:
    """As many guides as one likes may have it, one after the other and side by side."""
    server = forked(num_bytes=32 * MIB)
    assert {server.of("hold 24000000").ending for _ in range(3)} == {Ending.DONE}
    assert server.of("hold 40000000").ending is Ending.OVER_MEMORY


def test_a_process_that_may_have_little_itself_compiles_all_the_same() -> None:
    """Its own hard limits are below those of a guide, and cannot be raised."""
    server = Forked(Rogue(), cpu_s=10_000.0, num_bytes=1 << 40, before=lambda: _limit_all(64 << 30, 5_000))
    assert server.of("fine").ending is Ending.DONE
    server.close()


def _limit_all(num_bytes: int, cpu_s: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))


def test_children_are_niced_and_silent(forked: Callable[..., Forked], capfd: pytest.CaptureFixture[str]) -> None:
    server = forked()
    assert int(server.of("niceness").result) == min(19, os.nice(0) + NICENESS)
    assert server.of("speak").ending is Ending.DONE
    said = "".join(capfd.readouterr())
    assert "words of a library" not in said, (
        said
    )  # gRPC, where pytest has loaded it, tells of each fork of this process

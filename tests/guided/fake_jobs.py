"""What compiles guides in the tests of GuideCompiler: a stub, on threads of this process."""

from __future__ import annotations

import threading
from functools import partial

import msgspec

from backend.api.guide import Guide
from backend.core.limited_messages import Begin, Ending, Outcome
from backend.core.limited_process import LimitedJob
from backend.core.limited_server import outcome_of
from backend.guided.compile_jobs import encode_guide
from backend.guided.compile_process import compile_guide
from backend.guided.protocol import CompiledGuide, GuideError, Matcher


class Stub:
    """A backend. What follows `noted` are notes.

    A text of `bad` cannot be compiled, `crash` is a library's bug, and so is `panic` when it is loaded.
    """

    name = "stub"

    def compile(self, guide: Guide) -> CompiledGuide:
        if guide.text == "bad":
            raise GuideError("it is bad", ".structures[3]")
        if guide.text == "crash":
            raise RuntimeError("/secret/path")
        return _Compiled(guide.text)

    def load(self, portable: bytes) -> CompiledGuide:
        if portable == b"panic":
            raise KeyboardInterrupt("/secret/path")  # like a panic of Rust, no Exception
        return _Compiled(portable.decode())


class _Compiled:
    def __init__(self, text: str) -> None:
        self.portable = text.encode()
        self.notes = tuple(text.split()[1:]) if text.startswith("noted ") else ()

    def matcher(self) -> Matcher:
        raise NotImplementedError(self.portable.decode())


class FakeJobs:
    """Compiles when `gate` is open. A compiled guide holds 100 bytes, or as many as its text says."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.is_ready = threading.Event()
        self.is_ready.set()
        self.begun: list[str] = []
        self.dropped: list[str] = []
        self.endings: list[Ending] = []  # instead of what would come of the next jobs
        self.is_closed = False

    def start(self) -> None: ...

    def wait_until_ready(self) -> None:
        self.is_ready.wait(10)

    def run(self, job: LimitedJob, guide: Guide) -> Outcome:
        self.begun.append(guide.text)
        threading.Thread(target=self._compile, args=(job, guide), daemon=True).start()
        outcome = job.wait()
        if outcome.ending is Ending.DROPPED:
            self.dropped.append(guide.text)
        return outcome

    def _compile(self, job: LimitedJob, guide: Guide) -> None:
        self.gate.wait(10)
        ending = self.endings.pop(0) if self.endings else Ending.DONE
        outcome = (
            outcome_of(partial(compile_guide, Stub()), Begin(1, encode_guide(guide)))
            if ending is Ending.DONE
            else Outcome(1, ending)
        )
        job.finish(msgspec.structs.replace(outcome, num_bytes=int(guide.text) if guide.text.isdigit() else 100))

    def close(self) -> None:
        self.is_closed = True

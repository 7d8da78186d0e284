"""Bugs planted in how guides are compiled: who waits, what is kept, the process with its limits, turns of namespaces."""

from __future__ import annotations

from backend.core import limited_server
from backend.core.limited_process import _Running
from backend.core.round_robin import RoundRobin
from backend.guided import compile_process
from backend.guided.compiler import GuideCompiler
from tests.mutants.changes import change

COMPILER = ["tests/guided/test_compiler.py"]
LIMITS = ["tests/guided/test_compile_limits.py"]
PROCESS = ["tests/guided/test_compile_process.py"]
TURNS = ["tests/core/test_round_robin.py"]

MUTANTS = {
    "who_has_ended_is_told": (
        change(GuideCompiler, "end", ("waiting.pop(request_id, None) is", "waiting.get(request_id) is")),
        COMPILER,
    ),
    "guides_hold_what_their_texts_do": (
        change(GuideCompiler, "_book", ("entry.num_bytes = num_bytes", "entry.num_bytes = len(entry.guide.text)")),
        COMPILER,
    ),
    "a_closed_compiler_keeps_its_threads": (
        change(GuideCompiler, "close", ("self._work.notify_all()", "pass"), ("thread.join()", "thread.join(1)")),
        COMPILER,
    ),
    "a_panic_ends_the_thread": (
        change(GuideCompiler, "_compile", ("except BaseException", "except Exception")),
        COMPILER,
    ),
    "a_key_has_a_turn_in_each_namespace": (change(RoundRobin, "take", ("self.discard(key)", "line.pop(key)")), TURNS),
    "what_was_there_before_is_counted": (
        change(compile_process, "compile_guide", ("before = allocated_bytes()", "before = 0")),
        LIMITS,
    ),
    "a_panic_has_no_outcome": (
        change(limited_server, "outcome_of", ("except BaseException", "except Exception")),
        LIMITS,
    ),
    "a_lost_job_is_waited_for": (
        change(_Running, "_listen", ("self._process.wait()\n    self._lose_jobs()", "self._process.wait()")),
        PROCESS,
    ),
}

"""Bugs planted in how guides are compiled: who waits, what is kept, the process with its limits, turns of namespaces."""

from __future__ import annotations

from backend.core.round_robin import RoundRobin
from backend.guided import compile_jobs, compile_process
from backend.guided.compile_errors import lateness
from backend.guided.compile_jobs import CompileProcess, _Running
from backend.guided.compile_process import CompileServer
from backend.guided.compiler import GuideCompiler
from backend.worker.group import InProcessWorkerGroup
from tests.mutants.changes import change, change_everywhere

COMPILER = ["tests/guided/test_compiler.py"]
LIMITS = ["tests/guided/test_compile_limits.py"]
PROCESS = ["tests/guided/test_compile_process.py"]
TURNS = ["tests/core/test_round_robin.py"]

MUTANTS = {
    "who_has_ended_is_told": (
        change(GuideCompiler, "end", ("waiting.pop(request_id, None) is", "waiting.get(request_id) is")),
        COMPILER,
    ),
    "nothing_is_trimmed_at_an_end": (change(GuideCompiler, "end", ("self._shrink()", "pass")), COMPILER),
    "the_oldest_stays_though_another_was_asked_for": (
        change(GuideCompiler, "begin", ("self._entries.move_to_end(key)", "pass")),
        COMPILER,
    ),
    "what_was_given_up_is_compiled_on": (change(GuideCompiler, "_give_up", ("entry.job.drop()", "pass")), COMPILER),
    "what_was_given_up_keeps_its_turn": (
        change(GuideCompiler, "_give_up", ("self._queue.discard(key)", "pass")),
        COMPILER,
    ),
    "what_others_wait_for_is_given_up": (change(GuideCompiler, "_give_up", (" and not entry.waiting", "")), COMPILER),
    "guides_hold_what_their_texts_do": (
        change(GuideCompiler, "_book", ("entry.num_bytes = num_bytes", "entry.num_bytes = len(entry.guide.text)")),
        COMPILER,
    ),
    "a_namespace_may_hold_everything": (
        change(GuideCompiler, "_book", ("(least and least + num_bytes > free)", "False")),
        COMPILER,
    ),
    "live_guides_have_no_bound": (change(GuideCompiler, "_book", ("free < 0", "False")), COMPILER),
    "cached_guides_count_as_live": (
        change(
            GuideCompiler,
            "_book",
            ("for each in self._entries.values() if each.users", "for each in self._entries.values()"),
        ),
        COMPILER,
    ),
    "a_turn_never_ends": (change(GuideCompiler, "_run", ("self._queue.done(work.namespace)", "pass")), COMPILER),
    "an_error_is_kept": (change(GuideCompiler, "_run", ("if compiled is None and", "if False and")), COMPILER),
    "a_closed_compiler_keeps_its_threads": (
        change(GuideCompiler, "close", ("self._work.notify_all()", "pass"), ("thread.join()", "thread.join(1)")),
        COMPILER,
    ),
    "a_closed_compiler_keeps_its_process": (change(GuideCompiler, "close", ("self._jobs.close()", "pass")), COMPILER),
    "a_closed_compiler_tells": (change(GuideCompiler, "_run", ("[] if self._is_closed else ", "")), COMPILER),
    "one_namespace_has_all_processes": (
        change(GuideCompiler, "__init__", ("config.compile_processes - 1", "config.compile_processes")),
        COMPILER,
    ),
    "a_lost_guide_is_lost": (change(GuideCompiler, "_outcome", ("range(MAX_LOSSES - 1)", "range(0)")), COMPILER),
    "who_waited_for_others_is_to_simplify": (change_everywhere(lateness, ("if is_begun:", "if True:")), COMPILER),
    "time_runs_while_the_process_starts": (
        change(GuideCompiler, "_watch", ("self._await_process()", "pass")),
        COMPILER,
    ),
    "a_panic_ends_the_thread": (
        change(GuideCompiler, "_compile", ("except BaseException", "except Exception")),
        COMPILER,
    ),
    "namespaces_do_not_take_turns": (change(RoundRobin, "take", ("self._lines.move_to_end(namespace)", "pass")), TURNS),
    "a_share_is_endless": (change(RoundRobin, "take", ("self._running[namespace] < self._share and ", "")), TURNS),
    "whoever_may_not_has_a_turn": (change(RoundRobin, "take", (" and may(namespace)", "")), TURNS),
    "a_key_has_a_turn_in_each_namespace": (change(RoundRobin, "take", ("self.discard(key)", "line.pop(key)")), TURNS),
    "namespaces_without_work_are_kept": (change(RoundRobin, "discard", ("if not line:", "if False:")), TURNS),
    "namespaces_without_places_are_kept": (
        change(RoundRobin, "done", ("if not self._running[namespace]:", "if False:")),
        TURNS,
    ),
    "memory_has_no_limit": (
        change(compile_process, "_limit", ("_lower(resource.RLIMIT_AS, most)", "pass")),
        LIMITS,
    ),
    "processor_time_has_the_limit_of_a_broken_library": (
        change(compile_process, "_limit", ("signal.setitimer(signal.ITIMER_PROF, cpu_s)", "pass")),
        LIMITS,
    ),
    "children_are_not_niced": (change(compile_process, "_limit", ("os.nice(NICENESS)", "pass")), LIMITS),
    "children_outlive_their_parent": (
        change(compile_process, "_limit", ("_libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)", "pass")),
        LIMITS,
    ),
    "what_is_held_is_not_limited": (
        change(compile_process, "_within", ("if outcome.num_bytes > num_bytes", "if False")),
        LIMITS,
    ),
    "children_speak": (change(compile_process, "_silence", ("os.dup2(nowhere, 2)", "pass")), LIMITS),
    "large_blocks_are_not_counted": (
        change(compile_process, "allocated_bytes", ("heap.uordblks + heap.hblkhd", "heap.uordblks")),
        LIMITS,
    ),
    "what_was_there_before_is_counted": (
        change(compile_process, "outcome_of", ("before = allocated_bytes()", "before = 0")),
        LIMITS,
    ),
    "a_panic_has_no_outcome": (
        change(compile_process, "outcome_of", ("except BaseException", "except Exception")),
        LIMITS,
    ),
    "a_child_that_ends_well_has_failed": (
        change(CompileServer, "_hear", ("if not child.has_sent:", "if True:")),
        LIMITS,
    ),
    "a_dropped_job_goes_on": (
        change(
            CompileServer,
            "_obey",
            ("case Drop(job):\n                self._drop(job)", "case Drop(job):\n                pass"),
        ),
        LIMITS,
    ),
    "an_abort_is_a_failure": (
        change(compile_process, "_of_death", ("-status == signal.SIGABRT", "False")),
        LIMITS,
    ),
    "nobody_drops_a_job": (change(CompileProcess, "run", ("running.send(Drop(number))", "pass")), PROCESS),
    "dropped_jobs_are_remembered": (change(CompileProcess, "run", ("running.forget(number)", "pass")), PROCESS),
    "a_closed_process_is_started_again": (
        change(CompileProcess, "_started", ("if self._is_closed:", "if False:")),
        PROCESS,
    ),
    "a_dead_process_gets_the_next_job": (
        change(CompileProcess, "_started", (" or not self._running.is_alive", "")),
        PROCESS,
    ),
    "a_lost_job_is_waited_for": (
        change(_Running, "_listen", ("self._process.wait()\n    self._lose_jobs()", "self._process.wait()")),
        PROCESS,
    ),
    "a_failed_start_leaves_its_socket": (change(compile_jobs, "_spawn", ("ours.close()", "pass")), PROCESS),
    "an_engine_leaves_its_process": (
        change(InProcessWorkerGroup, "shutdown", ("self.guides.close()", "pass")),
        PROCESS,
    ),
}

"""Planted bugs of the watch and the supervisor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backend.executor import engine_process
from backend.executor.engine_supervisor import EngineProcess
from backend.executor.watch import Watch

SetAttribute = Callable[[object, str, object], None]
NOTHING: Callable[..., None] = lambda *arguments, **others: None


def a_silent_engine_is_not_killed(set_attribute: SetAttribute) -> None:
    set_attribute(Watch, "_judge", NOTHING)


def a_silent_engine_counts_as_ready(set_attribute: SetAttribute) -> None:
    set_attribute(Watch, "is_fresh", True)


def the_watch_kills_only_once(set_attribute: SetAttribute) -> None:
    original = Watch._judge

    def judge(self: Watch, process: Any) -> None:
        had_killed = self._has_killed
        original(self, process)
        self._has_killed = self._has_killed or had_killed

    set_attribute(Watch, "_judge", judge)


def the_age_of_a_step_outlives_its_engine(set_attribute: SetAttribute) -> None:
    original = Watch._judge

    def judge(self: Watch, process: Any) -> None:
        age_s = self._turn_age_s
        original(self, process)
        self._turn_age_s = age_s

    set_attribute(Watch, "_judge", judge)


def a_killed_engine_is_only_asked_to_end(set_attribute: SetAttribute) -> None:
    def kill(self: EngineProcess, reason: str, stuck_s: float) -> None:
        self._process.terminate()

    set_attribute(EngineProcess, "kill", kill)


def an_engine_that_ended_well_is_not_started_again(set_attribute: SetAttribute) -> None:
    original = EngineProcess._count_death
    set_attribute(
        EngineProcess,
        "_count_death",
        lambda self, now_s: original(self, now_s) if self._process.poll() else None,
    )


def an_engine_that_cannot_be_started_is_given_up(set_attribute: SetAttribute) -> None:
    original = EngineProcess._spawn

    def spawn(self: EngineProcess) -> None:
        try:
            original(self)
        except OSError:
            self._stopping.set()

    set_attribute(EngineProcess, "_spawn", spawn)


def the_supervisor_ends_after_the_first_restart(set_attribute: SetAttribute) -> None:
    original = EngineProcess._spawn

    def spawn(self: EngineProcess) -> None:
        original(self)
        if self.num_restarts:
            self._first_result = "started again"

    set_attribute(EngineProcess, "_spawn", spawn)


def a_stopped_engine_is_started_again(set_attribute: SetAttribute) -> None:
    def stop(self: EngineProcess) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()

    set_attribute(EngineProcess, "stop", stop)


def an_engine_is_started_though_it_is_to_stop(set_attribute: SetAttribute) -> None:
    original = EngineProcess._spawn

    def spawn(self: EngineProcess) -> None:
        was_set, self._stopping._is_set = self._stopping._is_set, False  # type: ignore[attr-defined]
        original(self)
        self._stopping._is_set = was_set  # type: ignore[attr-defined]

    set_attribute(EngineProcess, "_spawn", spawn)
    set_attribute(
        EngineProcess,
        "_supervise",
        _without_the_wait(EngineProcess._supervise),
    )


def _without_the_wait(original: Callable[[EngineProcess], None]) -> Callable[[EngineProcess], None]:
    """The supervisor, whose wait for the back-off does not hear of the stop."""

    def supervise(self: EngineProcess) -> None:
        event = self._stopping
        wait = event.wait

        def deaf(timeout: float | None = None) -> bool:
            wait(timeout)
            return False

        event.wait = deaf  # type: ignore[method-assign]
        original(self)

    return supervise


def an_engine_outlives_its_parent(set_attribute: SetAttribute) -> None:
    set_attribute(engine_process, "_die_with_parent", NOTHING)


def a_new_engine_keeps_the_age_of_the_old_one(set_attribute: SetAttribute) -> None:
    original = EngineProcess._spawn

    def spawn(self: EngineProcess) -> None:
        ready_at_s = self._ready_at_s
        original(self)
        self.num_signs -= 1
        self._ready_at_s = ready_at_s

    set_attribute(EngineProcess, "_spawn", spawn)

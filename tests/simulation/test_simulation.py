"""Random schedules in the normal run: twice as many as show every planted bug (test_mutants.py).

EVERBATCH_SCHEDULES says how many; `python -m tests.simulation` searches for as long as wanted.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from backend.core.step import StepInput, StepOutput
from backend.scheduler.scheduler import StepPlan
from tests.simulation.shrink import report
from tests.simulation.simulator import Simulation

NUM_SCHEDULES = int(os.environ.get("EVERBATCH_SCHEDULES", "600"))
CHUNK = 100


@pytest.fixture(autouse=True)
def quiet_engine(caplog: pytest.LogCaptureFixture) -> None:
    """Worker failures are planted: their tracebacks would drown everything else."""
    caplog.set_level(logging.CRITICAL, logger="everbatch.engine")


@pytest.mark.feature("003-05", "003-16", "004-15", "001-27", "000-24", "000-28", "000-32", "000-34", "003-50")
@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, CHUNK))
def test_every_schedule_answers_as_if_each_request_ran_alone_with_an_infinite_pool(first: int) -> None:
    for seed in range(first, min(first + CHUNK, NUM_SCHEDULES)):
        simulation = Simulation(seed)
        try:
            simulation.run()
        except Exception:
            pytest.fail(f"{report(seed)}\nrun it again with: python -m tests.simulation --start {seed} --seeds 1")


def test_the_same_seed_gives_the_same_trace() -> None:
    for seed in range(100):
        first, second = Simulation(seed), Simulation(seed)
        first.run()
        second.run()
        assert first.trace_hash == second.trace_hash, f"seed {seed}"
        assert first.events == second.events, f"seed {seed}"


def test_a_plan_that_is_dropped_changes_nothing() -> None:
    for seed in range(100):
        plain, dropping = Simulation(seed), Simulation(seed, drops_plans=True)
        plain.run()
        dropping.run()
        assert plain.trace_hash == dropping.trace_hash, f"seed {seed}"


def test_replaying_the_events_of_a_schedule_gives_the_same_answers() -> None:
    for seed in range(20):
        simulation, replayed = Simulation(seed), Simulation(seed)
        for _ in range(60):
            simulation.apply(simulation.next_event())
        for event in simulation.events:
            replayed.apply(event)
        assert simulation.trace_hash == replayed.trace_hash


def test_the_schedules_reach_what_drafts_can_meet() -> None:
    """Right drafts, wrong ones, both at once, and sequences that end within a run, or are paused with KV of wrong drafts."""
    seen: Counter[str] = Counter()
    for seed in range(200):
        simulation = Simulation(seed)
        if simulation.has_drafts:
            simulation.core.workers.collect = _noted(simulation, seen)
            simulation.run()
            counters = simulation.core.counters
            seen["right"] += counters.accepted_draft_tokens_total
            seen["wrong"] += counters.draft_tokens_total - counters.accepted_draft_tokens_total
            seen["pauses"] += counters.pauses_total
    least = {"right": 500, "wrong": 500, "pauses": 20, "ends within a run": 20}
    assert all(seen[what] >= count for what, count in least.items()), seen


def _noted(simulation: Simulation, seen: Counter[str]) -> Callable[[], StepOutput]:
    collect = simulation.core.workers.collect

    def noting() -> StepOutput:
        step, output = simulation.core._in_flight._flights[0].step, collect()
        running = {seq.slot: seq for seq in simulation.core.scheduler.running}
        for slot, further in output.further.items():
            seq = running.get(slot)
            if seq is not None:
                truth = simulation.model.live[seq.request_id].family[seq.sequence_index].tokens
                seen["ends within a run"] += seq.num_output_tokens + 1 + len(further) > len(truth)
        assert step.step_id == output.step_id
        return output

    return noting


def test_the_schedules_reach_what_requests_for_several_sequences_can_meet() -> None:
    """Beams that go their whole way, are paused, and wait for another width; sequences that find their prompt computed."""
    seen: Counter[str] = Counter()
    for seed in range(300):
        simulation = Simulation(seed)
        if not (simulation.setup.has_beams or simulation.has_several):
            continue
        simulation.core.scheduler.commit = _counted(simulation.core.scheduler.commit, seen)
        simulation.run()
    least = (
        "rows of beams",
        "paused rows of beams",
        "changes of the width",
        "rows of several",
        "paused rows of several",
    )
    assert {name: seen[name] for name in least if seen[name] < 20} == {}


def _counted(commit: Callable[..., StepInput], seen: Counter[str]) -> Callable[..., StepInput]:
    def counted(plan: StepPlan, *rest: int) -> StepInput:
        kind = "beams" if plan.beam_width > 1 else "several"
        seen[f"rows of {kind}"] += sum(seq.group is not None for seq, _ in plan.rows)
        seen[f"paused rows of {kind}"] += sum(seq.group is not None and not seq.is_dormant for seq in plan.paused)
        seen["changes of the width"] += plan.changes_width
        return commit(plan, *rest)

    return counted


def test_the_schedules_reach_what_guides_can_meet() -> None:
    """Outputs that a guide ends, that go on after a pause, beams, several sequences, sessions, and all ends of a wait."""
    seen: Counter[str] = Counter()
    for seed in range(300):
        simulation = Simulation(seed)
        if simulation.has_guides:
            simulation.workers.on_submit = partial(_note_guides, simulation, simulation.workers.on_submit, seen)
            simulation.run()
            seen.update(simulation.rejections)
    least = {
        "rows": 500,
        "rows that go on": 5,
        "rows of beams": 50,
        "rows of several": 50,
        "rows of sessions": 50,
        "namespaces": 50,
        "guide": 50,
        "compiling": 20,
        "CANCELLED while its guide is compiled": 20,
        "TIMED_OUT while its guide is compiled": 5,
        "stuck": 1,
    }
    assert {name: seen[name] for name, count in least.items() if seen[name] < count} == {}


def _note_guides(simulation: Simulation, on_submit: Callable[[], None], seen: Counter[str]) -> None:
    on_submit()
    running = {seq.slot: seq for seq in simulation.core.scheduler.running}
    for row in simulation.workers.steps[-1].new_rows:
        if row.guide is not None:
            seq = running[row.slot]
            seen["rows"] += 1
            seen["rows that go on"] += len(row.token_ids) > row.num_prompt_tokens and seq.beam_width == 1
            seen["rows of beams"] += seq.beam_width > 1
            seen["rows of several"] += seq.beam_width == 1 and seq.group is not None
            seen["rows of sessions"] += seq.session_key is not None
            seen["namespaces"] += bool(row.cache_namespace)


def test_the_schedules_reach_what_they_are_meant_to_reach() -> None:
    """A simulator that never evicts proves nothing about eviction."""
    seen: Counter[str] = Counter()
    for seed in range(200):
        simulation = Simulation(seed)
        simulation.run()
        counters, kv = simulation.core.counters, simulation.core.stats().latest.kv_cache
        seen["pauses"] += counters.pauses_total
        seen["recomputed tokens"] += counters.recomputed_tokens_total
        seen["evicted sequences"] += counters.sequences_evicted_total
        seen["cached tokens"] += counters.cached_tokens_total
        seen["evicted blocks"] += kv.evicted_blocks_total
        seen["reused blocks"] += kv.reused_blocks_total
        seen["copied blocks"] += simulation.workers.num_copies
        seen.update({f"{name} ends": count for name, count in counters.requests_finished_total.items()})
        seen.update(simulation.rejections)
    least = (
        "pauses",
        "recomputed tokens",
        "evicted sequences",
        "cached tokens",
        "evicted blocks",
        "reused blocks",
        "copied blocks",
        "END_ID ends",
        "STOP_WORDS ends",
        "LENGTH ends",
        "TIMED_OUT ends",
        "CANCELLED ends",
        "ERROR ends",
        "duplicate",
        "field",
        "queue",
        "pool",
        "session 1",
        "session 2",
        "session 3",
        "session 4",
        "session 6",
    )
    assert {name: seen[name] for name in least if seen[name] < 20} == {}

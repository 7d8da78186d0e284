"""What random schedules reach: observers that count beside a simulation and change nothing of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from backend.core.step import StepInput, StepOutput
from backend.scheduler.plan import StepPlan
from tests.simulation.simulator import Simulation


@dataclass
class Reached:
    """Counters of some schedules, by what they are about."""

    engine: Counter[str] = field(default_factory=Counter)
    drafts: Counter[str] = field(default_factory=Counter)
    several: Counter[str] = field(default_factory=Counter)  # requests for several sequences, or for beams
    guides: Counter[str] = field(default_factory=Counter)
    level: Counter[str] = field(default_factory=Counter)  # the second level of KV

    def __add__(self, other: Reached) -> Reached:
        return Reached(
            self.engine + other.engine,
            self.drafts + other.drafts,
            self.several + other.several,
            self.guides + other.guides,
            self.level + other.level,
        )

    def run(self, simulation: Simulation) -> None:
        """Run the simulation's own schedule to its end, and count."""
        if simulation.has_drafts:
            simulation.core.workers.collect = _noting_drafts(simulation, self.drafts)
        if simulation.setup.has_beams or simulation.has_several:
            simulation.core.scheduler.commit = _noting_several(simulation.core.scheduler.commit, self.several)
        if simulation.has_guides:
            note = partial(_note_guides, simulation, simulation.workers.on_submit, self.guides)
            simulation.workers.on_submit = note
        simulation.run()
        self._count_the_end(simulation)

    def _count_the_end(self, simulation: Simulation) -> None:
        counters, kv = simulation.core.counters, simulation.core.stats().latest.kv_cache
        self.level += simulation.level.seen
        self.engine["pauses"] += counters.pauses_total
        self.engine["recomputed tokens"] += counters.recomputed_tokens_total
        self.engine["evicted sequences"] += counters.sequences_evicted_total
        self.engine["cached tokens"] += counters.cached_tokens_total
        self.engine["evicted blocks"] += kv.evicted_blocks_total
        self.engine["reused blocks"] += kv.reused_blocks_total
        self.engine["blocks swapped in"] += simulation.workers.num_swapped_in
        self.engine["copied blocks"] += simulation.workers.num_copies
        self.engine.update({f"{name} ends": count for name, count in counters.requests_finished_total.items()})
        self.engine.update(simulation.rejections)
        if simulation.has_drafts:
            self.drafts["right"] += counters.accepted_draft_tokens_total
            self.drafts["wrong"] += counters.draft_tokens_total - counters.accepted_draft_tokens_total
            self.drafts["pauses"] += counters.pauses_total
        if simulation.has_guides:
            self.guides.update(simulation.rejections)


def _noting_drafts(simulation: Simulation, seen: Counter[str]) -> Callable[[], StepOutput]:
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


def _noting_several(commit: Callable[..., StepInput], seen: Counter[str]) -> Callable[..., StepInput]:
    def noting(plan: StepPlan, *rest: int) -> StepInput:
        kind = "beams" if plan.beam_width > 1 else "several"
        seen[f"rows of {kind}"] += sum(seq.group is not None for seq, _ in plan.rows)
        seen[f"paused rows of {kind}"] += sum(seq.group is not None and not seq.is_dormant for seq in plan.paused)
        seen["changes of the width"] += plan.changes_width
        return commit(plan, *rest)

    return noting


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

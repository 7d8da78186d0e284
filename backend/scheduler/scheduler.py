"""Scheduler: plan the next step on a snapshot, then commit it once. A plan that is dropped changes nothing.

One step, in order:
    1. rows that run: one token for each in the generation phase, chunks for those in the context phase
    2. room for them in the KV pool, oldest first; the youngest are paused when there is none
    3. unless somebody was paused: admit from the head of the queue while slots, blocks, tokens and room for adapters last;
       nobody overtakes
    4. share the token budget among context rows

A sequence is in exactly one of `waiting` and `running`, or in neither (idle, retired). Steps may be in flight meanwhile: what
they compute and sample counts as there (Sequence), and who has its longest end in flight gets nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from backend.api.config import SchedulerConfig
from backend.api.sampling import SamplingConfig
from backend.core.sequence import BeamSequence, Event, Sequence, Status
from backend.core.step import BlockId, NewRow, Row, SequenceId, StepInput
from backend.kvcache.manager import KVCacheManager, TableChange
from backend.kvcache.plan import Admission, KVPlan
from backend.scheduler.adapters import AdapterCache
from backend.scheduler.capacity import (
    CapacityScheduler,
    GuaranteedNoEvict,
    MaxUtilization,
    StaticBatch,
    admit_beams,
    extend_or_pause,
)
from backend.scheduler.drafting import NO_DRAFT, Draft, Drafter
from backend.scheduler.micro_batch import MicroBatchScheduler
from backend.scheduler.queue import WaitingQueue
from backend.scheduler.tuning import BatchTuner


@dataclass(slots=True)
class StepPlan:
    """What a step will do. It has no blocks to swap: KV of the paused is computed again, never moved off the device."""

    kv: KVPlan
    generation: list[Sequence] = field(default_factory=list)  # one token each; the first rows of the flat batch
    context: list[tuple[Sequence, int]] = field(default_factory=list)  # the rows behind them, with the tokens to run
    admitted: list[Sequence] = field(default_factory=list)
    drafts: dict[SequenceId, Draft] = field(default_factory=dict)  # for rows that generate, if there are some
    rejected: list[Sequence] = field(default_factory=list)  # will never fit
    num_cached_tokens: int = 0  # written by commit: KV found by turns that are admitted for the first time
    num_evicted: int = 0  # written by commit: admitted sequences that had lost KV
    num_empty_slots: int = 0  # written by commit: sequences of a static batch that have ended before it
    beam_width: int = 1  # of all rows
    changes_width: bool = False  # from that of the step before it

    @property
    def rows(self) -> list[tuple[Sequence, int]]:
        """(sequence, tokens to run), in flat-batch order."""
        return [*((seq, 1) for seq in self.generation), *self.context]

    @property
    def paused(self) -> list[Sequence]:
        return self.kv.pauses

    @property
    def is_empty(self) -> bool:
        return not (self.generation or self.context or self.paused or self.rejected)

    @property
    def must_wait(self) -> bool:
        """Whether steps in flight have to land first.

        A pause would give up what they compute, and steps of different beam widths are never in flight together.
        """
        return bool(self.paused) or self.changes_width


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        on_cpu: bool,
        has_matrix_units: bool = False,
        adapters: AdapterCache | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """`drafter`: of workers that take drafts."""
        self.config = config
        self.adapters = adapters or AdapterCache()
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # oldest first
        self._kv = kv
        self._drafter = drafter
        self.guesses = drafter is not None and drafter.guesses  # rows may get drafts that no request has brought
        self._tuner = BatchTuner(config)
        self._micro_batch = MicroBatchScheduler(config, on_cpu, has_matrix_units)
        self.is_static = config.batching == "static"  # a batch runs in lockstep, and is answered together
        self._separate = config.batching != "fused"
        self._capacity = _capacity_scheduler(config, kv)
        self._num_batch = 0  # sequences of the static batch when it began
        self._beam_width = 1  # of the latest step
        self._stale: dict[SequenceId, Sequence] = {}  # what runs, though the worker does not know its newest state

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self.waiting))

    @property
    def max_prompt_tokens(self) -> int | None:
        """The longest prompt that may be asked for; None = as long as the model takes."""
        return self._micro_batch.max_prompt_tokens

    def blocks_needed(self, num_prompt: int, max_output: int, beam_width: int) -> int:
        """Blocks that the pool must have for a request, at its longest end."""
        return self._capacity.blocks_needed(num_prompt, max_output, beam_width)

    def renew(self, seq: Sequence) -> None:
        """Tell the worker all of a running sequence with the next step, because its tokens or blocks are not those it knows."""
        self._stale[seq.seq_id] = seq

    def add(self, seq: Sequence) -> None:
        """Put a sequence that is WAITING in line, behind all of its priority."""
        self.adapters.hold(seq.adapter)
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out of wherever it is. Its blocks and slot are the caller's business."""
        self._stale.pop(seq.seq_id, None)
        self.adapters.let_go(seq.adapter)
        if self._drafter is not None:
            self._drafter.end(seq)
        if seq.status is Status.RUNNING:
            self.adapters.stop(seq.adapter)
            self.running.remove(seq)
            self._tuner.note_end(seq.num_prompt_tokens, seq.num_output_tokens)
        else:
            self.waiting.remove(seq)

    def schedule(self) -> StepPlan:
        """Plan one step. Deterministic in the state of queue, sequences and cache."""
        plan = StepPlan(self._kv.plan())
        if self._waits_for_tokens():
            return plan
        if self.running:
            plan.beam_width = self.running[0].beam_width
        context, generation = self._split_by_phase()
        growing = [s for s in generation if s.num_computed_tokens + s.num_inflight_tokens >= s.num_writable_cells]
        if not (growing or context or len(self.waiting)):
            plan.generation = generation  # all go on in the blocks they hold, and nobody waits
            self._add_drafts(plan)
            return plan
        admit_first = self._separate and not context  # no chunk is open: a step for new ones, else for generation
        if admit_first:
            self._admit(plan, [], self._context_budget(plan, [], []))
        if self._separate and (context or plan.admitted):
            generation, growing = [], []
        budget = self._context_budget(plan, generation, context)
        shares = self._cut(plan, context, budget)
        num_tokens = {seq.seq_id: 1 for seq in growing}
        num_tokens.update((seq.seq_id, share) for seq, share in zip(context, shares, strict=True))
        if num_tokens:
            extend_or_pause(plan.kv, self.running, num_tokens)
        plan.generation = generation
        if plan.paused:  # the others run what room was planned for, and nobody is admitted
            paused = {seq.seq_id for seq in plan.paused}
            plan.generation = [seq for seq in generation if seq.seq_id not in paused]
            cut = zip(context, shares, strict=True)
            plan.context = [(seq, share) for seq, share in cut if share and seq.seq_id not in paused]
            return plan
        if not admit_first:
            self._admit(plan, context, budget)
        rows = [*context, *(seq for seq in plan.admitted if not seq.is_dormant)]
        plan.context = [(seq, share) for seq, share in zip(rows, self._cut(plan, rows, budget), strict=True) if share]
        self._add_drafts(plan)
        return plan

    def commit(self, plan: StepPlan, step_id: int, now_ns: int) -> StepInput:
        """Carry a plan out: blocks, slots, queues, states. Rejected sequences stay in the queue for the caller to fail."""
        known = {seq.seq_id: seq.num_computed_tokens for seq in plan.admitted}
        changes = self._kv.commit(plan.kv)
        self._beam_width = plan.beam_width
        for seq in plan.paused:
            self._stale.pop(seq.seq_id, None)
            seq.apply(Event.PAUSE)
            seq.num_pauses += 1
            self.adapters.stop(seq.adapter)
            self.running.remove(seq)
            self.waiting.put_back(seq)
        if self.is_static:
            if plan.admitted:
                self._num_batch = len(plan.admitted)
            plan.num_empty_slots = self._num_batch - len(self.running or plan.admitted)
        for seq in plan.admitted:
            self.waiting.remove(seq)
            self.running.append(seq)
            seq.apply(Event.ADMIT)
            self.adapters.start(seq.adapter)
            _note_admission(plan, seq, known[seq.seq_id], now_ns)
        for seq in self._stale.values():
            assert seq.slot is not None  # it runs
            changes.changes[seq.seq_id] = TableChange(seq.slot, [], is_new=True)
        rows = _take_rows(plan, changes.changes)
        # What is left in `changes` was not told by a row: tables of sequences that are new to their slots, and tables that have
        # grown though their sequence runs no token in this step. Both are sent whole.
        new = [self._stale.get(seq_id) or plan.kv.grants[seq_id].seq for seq_id in changes.changes]
        new_rows = [_new_row(seq, self._kv) for seq in new if not seq.is_dormant]
        self._stale.clear()
        adapters = self.adapters.take_changes()
        return StepInput(step_id, rows, new_rows, changes.copies, self._kv.num_backed_blocks, *adapters)

    def _split_by_phase(self) -> tuple[list[Sequence], list[Sequence]]:
        context: list[Sequence] = []
        generation: list[Sequence] = []
        for seq in self.running:
            if not seq.is_awaited:
                (generation if seq.is_generating else context).append(seq)
        return context, generation

    def _waits_for_tokens(self) -> bool:
        """Whether guesses at the tokens behind those in flight are likely to bring more than planning ahead."""
        in_flight = [seq for seq in self.running if seq.num_inflight_samples]
        return bool(in_flight) and self._drafter is not None and self._drafter.waits(in_flight)

    def _add_drafts(self, plan: StepPlan) -> None:
        """Let rows that generate guess, with what is left of the step's tokens and of the pool."""
        if self._drafter is None or plan.beam_width > 1:
            return
        room = self._tuner.max_num_tokens - len(plan.generation) - sum(num_tokens for _, num_tokens in plan.context)
        plan.drafts = self._drafter.propose(plan.generation, room)
        for seq in plan.generation if plan.drafts else ():
            draft = plan.drafts.get(seq.seq_id)
            if draft is not None:
                num_cells = seq.num_computed_tokens + seq.num_inflight_tokens + 1 + draft.num_tokens
                if num_cells > seq.num_writable_cells and not plan.kv.widen(seq, num_cells):
                    del plan.drafts[seq.seq_id]

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """A step has taken so long."""
        if self._drafter is not None and plan.generation and not plan.context:
            self._drafter.note(len(plan.generation), plan.drafts.values(), seconds)

    def _context_budget(self, plan: StepPlan, generation: list[Sequence], context: list[Sequence]) -> int:
        num_waiting = len(context) + min(len(self.waiting), plan.kv.free_slots)
        return self._micro_batch.context_budget(len(generation), num_waiting, self._tuner.max_num_tokens)

    def _admit(self, plan: StepPlan, context: list[Sequence], budget: int) -> None:
        wants = [seq.num_uncomputed_tokens for seq in context]
        most = self._tuner.max_sequences(self._kv.usable_blocks, self._kv.blocks_needed)
        for seq in self.waiting:
            if seq.group is not None and seq.group.holds_back(seq):
                break
            beams = seq.rows
            if seq is not beams[0]:
                continue  # the first of them was asked for all
            others = len(self.running) + len(plan.admitted)
            if others and others + len(beams) > most:
                break
            if seq.beam_width != plan.beam_width:
                if self.running or plan.admitted:
                    break
                plan.beam_width = seq.beam_width
            room = self._micro_batch.has_room(wants, budget, seq.num_tokens - seq.num_computed_tokens)
            if not (room or self.is_static):  # a static batch is as large as the slots and the pool allow
                break
            if not self.adapters.has_room({seq.adapter, *(other.adapter for other in plan.admitted)}):
                break
            answer = self._ask(plan, beams)
            if answer is Admission.NEVER:
                plan.rejected.append(seq)
            elif answer is Admission.LATER:
                break
            else:
                plan.admitted += beams
                wants += [self._uncomputed(plan, beam) for beam in beams if not beam.is_dormant]
        plan.changes_width = plan.beam_width != self._beam_width
        if not (plan.admitted or plan.rejected or self.running) and self.waiting.head is not None:
            plan.rejected.append(self.waiting.head)  # nothing runs and still there is no room: it would wait for ever

    def _ask(self, plan: StepPlan, beams: list[Sequence]) -> Admission:
        """Whether a sequence, or all beams of a request, can be admitted."""
        if len(beams) == 1:
            return self._capacity.admit(plan.kv, beams[0], self.running, plan.admitted)
        return admit_beams(self._capacity, plan.kv, beams, self.running, plan.admitted)

    def _cut(self, plan: StepPlan, rows: list[Sequence], budget: int) -> list[int]:
        return self._micro_batch.cut([self._uncomputed(plan, seq) for seq in rows], budget)

    def _uncomputed(self, plan: StepPlan, seq: Sequence) -> int:
        grant = plan.kv.grants.get(seq.seq_id)
        if grant is not None and grant.admitted:
            return seq.num_tokens - grant.computed
        return seq.num_uncomputed_tokens


def _capacity_scheduler(config: SchedulerConfig, kv: KVCacheManager) -> CapacityScheduler:
    if config.batching == "static" or config.policy == "static_batch":
        return StaticBatch(kv)
    return MaxUtilization(kv) if config.policy == "max_utilization" else GuaranteedNoEvict(kv)


def _note_admission(plan: StepPlan, seq: Sequence, known: int, now_ns: int) -> None:
    """Book what an admission found: KV reused, or KV lost since the sequence last ran (`known` tokens then).

    KV that others have computed helps the sequence, and its client is told that the tokens were run for it.
    """
    own = plan.kv.grants[seq.seq_id].own
    seq.num_context_tokens += seq.num_computed_tokens - own
    seq.num_recomputed_tokens += max(0, min(seq.num_computed_tokens, seq.max_computed_tokens) - own)
    if not seq.first_scheduled_ns:
        seq.first_scheduled_ns = now_ns
        seq.num_cached_tokens = own
        plan.num_cached_tokens += seq.num_computed_tokens
    else:  # paused within its prompt, of which others have computed more since
        more = max(0, own - max(seq.max_computed_tokens, seq.num_cached_tokens))
        seq.num_cached_tokens += more
        plan.num_cached_tokens += more
    if seq.num_computed_tokens < min(known, seq.max_found_tokens):
        seq.num_evictions += 1
        plan.num_evicted += 1


def _take_rows(plan: StepPlan, changes: dict[SequenceId, TableChange]) -> list[Row]:
    """The rows of a step; their tokens are in flight from now on. Takes out of `changes` what the rows tell."""
    rows = []
    for seq in plan.generation:
        new_blocks = _take_new_blocks(seq, changes) if changes else []
        assert seq.slot is not None  # it runs
        draft = plan.drafts.get(seq.seq_id, NO_DRAFT)
        start, num_tokens = seq.num_computed_tokens + seq.num_inflight_tokens, 1 + draft.num_tokens
        rows.append(Row(seq.slot, start, num_tokens, True, new_blocks, draft.token_ids, draft.num_guesses))
        seq.num_inflight_tokens += num_tokens
        seq.num_inflight_samples += 1
        seq.num_inflight_drafts = draft.num_tokens
    for seq, num_tokens in plan.context:
        start = seq.num_computed_tokens + seq.num_inflight_tokens
        seq.num_inflight_tokens += num_tokens
        samples = seq.num_uncomputed_tokens == 0 and seq.max_output_tokens > 0
        seq.num_inflight_samples += samples
        assert seq.slot is not None  # it runs
        rows.append(Row(seq.slot, start, num_tokens, samples, _take_new_blocks(seq, changes)))
    return rows


def _take_new_blocks(seq: Sequence, changes: dict[SequenceId, TableChange]) -> list[BlockId]:
    """Blocks appended to a table that the worker knows; a table that is new to it stays in `changes`."""
    change = changes.get(seq.seq_id)
    if change is None or change.is_new:
        return []
    del changes[seq.seq_id]
    return change.new_block_ids


def _new_row(seq: Sequence, kv: KVCacheManager) -> NewRow:
    request = seq.request
    assert seq.slot is not None  # it runs
    if isinstance(seq, BeamSequence):
        return _new_beam_row(seq, kv)
    return NewRow(
        slot=seq.slot,
        token_ids=list(seq.token_ids),
        num_prompt_tokens=seq.num_prompt_tokens,
        num_sampled_before=seq.num_sampled_before,
        block_ids=kv.block_ids(seq),
        sampling=msgspec.structs.replace(request.sampling_config, seed=seq.seed),
        end_ids=request.end_ids,
        bad_words=request.bad_words,
        return_log_probs=request.output_config.return_log_probs,
        top_log_probs=request.output_config.top_log_probs,
        cache_namespace=seq.namespace,
        extra_inputs=request.extra_inputs,
        gather=[] if seq.gathered is None else seq.gathered.asked(),
        prompt_embeddings=request.prompt_embeddings,
        position_ids=request.position_ids,
        guide=request.guide,
        post_processor=request.logits_post_processor,
        request_id=seq.request_id,
        client_id=request.client_id,
        adapter=seq.adapter,
    )


def _new_beam_row(seq: BeamSequence, kv: KVCacheManager) -> NewRow:
    """A row that is to tell the candidates for its next token: a greedy one, whose own token is mostly the best of them."""
    assert seq.slot is not None  # it runs
    return NewRow(
        slot=seq.slot,
        token_ids=list(seq.token_ids),
        num_prompt_tokens=seq.num_prompt_tokens,
        num_sampled_before=0,
        block_ids=kv.block_ids(seq),
        sampling=SamplingConfig(),
        end_ids=seq.request.end_ids if seq.request.guide is not None else (),
        top_log_probs=seq.search.num_candidates,
        guide=seq.request.guide,
        cache_namespace=seq.namespace,
        extra_inputs=seq.request.extra_inputs,
        adapter=seq.adapter,
    )

"""Scheduler: plan the next step on a snapshot, then commit it once. A plan that is dropped changes nothing.

One step, in order:
    1. rows that run: one token for each in the generation phase, chunks for those in the context phase
    2. room for them in the KV pool, oldest first; the youngest are paused when there is none
    3. unless somebody was paused: admit from the head of the queue while slots, blocks and tokens last; nobody overtakes
    4. share the token budget among context rows

A sequence is in exactly one of `waiting` and `running`, or in neither (idle, retired).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from backend.api.config import SchedulerConfig
from backend.core.sequence import Event, Sequence
from backend.core.step import NewRow, Row, SequenceId, StepInput
from backend.kvcache.manager import KVCacheManager, KVCommit
from backend.kvcache.plan import Admission, KVPlan
from backend.scheduler.capacity import CapacityScheduler, GuaranteedNoEvict, MaxUtilization, extend_or_pause
from backend.scheduler.micro_batch import MicroBatchScheduler
from backend.scheduler.queue import WaitingQueue


@dataclass(slots=True)
class StepPlan:
    kv: KVPlan
    rows: list[tuple[Sequence, int]] = field(default_factory=list)  # (sequence, tokens to run), in flat-batch order
    admitted: list[Sequence] = field(default_factory=list)
    rejected: list[Sequence] = field(default_factory=list)  # will never fit
    num_generation_rows: int = 0  # the first of `rows`; the others are context chunks
    num_cached_tokens: int = 0  # written by commit: KV found by turns that are admitted for the first time
    num_evicted: int = 0  # written by commit: admitted sequences that had lost KV

    @property
    def paused(self) -> list[Sequence]:
        return self.kv.pauses

    @property
    def is_empty(self) -> bool:
        return not (self.rows or self.paused or self.rejected)


class Scheduler:
    def __init__(self, config: SchedulerConfig, kv: KVCacheManager):
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # oldest first
        self._kv = kv
        self._micro_batch = MicroBatchScheduler(config)
        self._separate = config.batching == "separate"
        policies = {"guaranteed_no_evict": GuaranteedNoEvict, "max_utilization": MaxUtilization}
        self._capacity: CapacityScheduler = policies[config.policy](kv)

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self.waiting))

    def add(self, seq: Sequence) -> None:
        """Put a sequence that is WAITING last in line."""
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out of wherever it is. Its blocks and slot are the caller's business."""
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)

    def schedule(self) -> StepPlan:
        """Plan one step. Deterministic in the state of queue, sequences and cache."""
        plan = StepPlan(self._kv.plan())
        context, generation = self._split_by_phase()
        admit_first = self._separate and not context  # no chunk is open: a step for new ones, else for generation
        if admit_first:
            self._admit(plan, [], self._micro_batch.max_num_tokens)
        if self._separate and (context or plan.admitted):
            generation = []
        budget = self._micro_batch.max_num_tokens - len(generation)
        shares = self._extend(plan, context, generation, budget)
        plan.rows = [(seq, 1) for seq in generation if seq.seq_id in shares]
        plan.num_generation_rows = len(plan.rows)
        if plan.paused:  # the others run what room was planned for, and nobody is admitted
            plan.rows += [(seq, shares[seq.seq_id]) for seq in context if shares.get(seq.seq_id)]
            return plan
        if not admit_first:
            self._admit(plan, context, budget)
        self._add_context_rows(plan, context, budget)
        return plan

    def commit(self, plan: StepPlan, step_id: int, now_ns: int) -> StepInput:
        """Carry a plan out: blocks, slots, queues, states. Rejected sequences stay in the queue for the caller to fail."""
        known = {seq.seq_id: seq.num_computed_tokens for seq in plan.admitted}
        changes = self._kv.commit(plan.kv)
        for seq in plan.paused:
            seq.apply(Event.PAUSE)
            seq.num_pauses += 1
            self.running.remove(seq)
            self.waiting.put_back(seq)
        for seq in plan.admitted:
            self.waiting.remove(seq)
            self.running.append(seq)
            seq.apply(Event.ADMIT)
            self._note_admission(plan, seq, known[seq.seq_id], now_ns)
        for seq, num_tokens in plan.rows:
            seq.num_inflight_tokens += num_tokens
        return _step_input(step_id, plan, changes, self._kv)

    @staticmethod
    def _note_admission(plan: StepPlan, seq: Sequence, known: int, now_ns: int) -> None:
        """Book what an admission found: KV reused, or KV lost since the sequence last ran (`known` tokens then)."""
        if not seq.first_scheduled_ns:
            seq.first_scheduled_ns = now_ns
            seq.num_cached_tokens = seq.num_computed_tokens
            plan.num_cached_tokens += seq.num_computed_tokens
        if seq.num_computed_tokens < min(known, seq.num_tokens - 1):
            seq.num_evictions += 1
            plan.num_evicted += 1

    def _split_by_phase(self) -> tuple[list[Sequence], list[Sequence]]:
        context, generation = [], []
        for seq in self.running:
            (generation if seq.is_generating else context).append(seq)
        return context, generation

    def _extend(
        self, plan: StepPlan, context: list[Sequence], generation: list[Sequence], budget: int
    ) -> dict[SequenceId, int]:
        """Plan KV for what the running rows compute in this step. Returns the tokens of those that still run."""
        num_tokens = {seq.seq_id: 1 for seq in generation}
        num_tokens.update(zip((seq.seq_id for seq in context), self._cut(plan, context, budget), strict=True))
        kept = extend_or_pause(plan.kv, self.running, num_tokens)
        return {seq.seq_id: num_tokens[seq.seq_id] for seq in kept if seq.seq_id in num_tokens}

    def _admit(self, plan: StepPlan, context: list[Sequence], budget: int) -> None:
        wants = [seq.num_uncomputed_tokens for seq in context]
        for seq in self.waiting:
            if not self._micro_batch.has_room(wants, budget, seq.num_tokens - seq.num_computed_tokens):
                break
            answer = self._capacity.admit(plan.kv, seq, self.running, plan.admitted)
            if answer is Admission.NEVER:
                plan.rejected.append(seq)
            elif answer is Admission.LATER:
                break
            else:
                plan.admitted.append(seq)
                wants.append(self._uncomputed(plan, seq))
        if (
            not (plan.rows or context or plan.admitted or plan.rejected or self.running)
            and self.waiting.head is not None
        ):
            plan.rejected.append(self.waiting.head)  # nothing runs and still there is no room: it would wait for ever

    def _add_context_rows(self, plan: StepPlan, context: list[Sequence], budget: int) -> None:
        rows = [*context, *plan.admitted]
        plan.rows += [(seq, share) for seq, share in zip(rows, self._cut(plan, rows, budget), strict=True) if share]

    def _cut(self, plan: StepPlan, rows: list[Sequence], budget: int) -> list[int]:
        return self._micro_batch.cut([self._uncomputed(plan, seq) for seq in rows], budget)

    def _uncomputed(self, plan: StepPlan, seq: Sequence) -> int:
        grant = plan.kv.grants.get(seq.seq_id)
        if grant is not None and grant.admitted:
            return seq.num_tokens - grant.computed
        return seq.num_uncomputed_tokens


def _step_input(step_id: int, plan: StepPlan, commit: KVCommit, kv: KVCacheManager) -> StepInput:
    rows = []
    for seq, num_tokens in plan.rows:
        change = commit.changes.pop(seq.seq_id, None)
        samples = seq.num_uncomputed_tokens == 0 and seq.max_output_tokens > 0
        appended = change.new_block_ids if change and not change.is_new else []
        rows.append(Row(seq.slot, seq.num_computed_tokens, num_tokens, samples, appended))
        if change and change.is_new:
            commit.changes[seq.seq_id] = change
    # What is left is new to its slot, or has new blocks but no tokens in this step: it is told in full.
    grants = plan.kv.grants
    new_rows = [_new_row(grants[seq_id].seq, kv) for seq_id in commit.changes]
    return StepInput(step_id, rows, new_rows, commit.copies, kv.blocks.num_backed)


def _new_row(seq: Sequence, kv: KVCacheManager) -> NewRow:
    request = seq.request
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
    )

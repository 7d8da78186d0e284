"""Scheduler: plans the next step, then commits the plan once. A plan that is not committed changes nothing, but it may have begun
to load KV of a second level.

One step, in order:
    1. running sequences: one token for each in the generation phase, chunks for those in the context phase
    2. blocks for them from the KV pool, oldest first; if there are not enough, the youngest are paused
    3. if none was paused: admit in the order of the queue while slots, blocks, tokens and room for adapters last. It ends at the
       first sequence that does not fit, so that smaller ones do not overtake it
    4. divide the token budget among the context rows

Background sequences have as many tokens of a step as Background says. Where others find no room, the youngest are paused.

A sequence is in exactly one of `waiting` and `running`, or in neither (idle, retired). While steps are in flight, the tokens that
they compute and sample count as known (Sequence), and a sequence that reaches its full length in flight gets no row.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from backend.api.config.schema import SchedulerConfig
from backend.api.request import RequestId
from backend.core.sequence import Event, Sequence, Status
from backend.core.step import SequenceId, StepInput
from backend.kvcache.adapters import AdapterCache
from backend.kvcache.manager import KVCacheManager
from backend.kvcache.plan import Admission, TableChange
from backend.scheduler.admission import LevelLoads, note_admission, note_pause
from backend.scheduler.background import Background, cut_background
from backend.scheduler.capacity import (
    CapacityScheduler,
    GuaranteedNoEvict,
    MaxUtilization,
    StaticBatch,
    admit_beams,
    extend_or_pause,
)
from backend.scheduler.drafting import Drafter
from backend.scheduler.micro_batch import MicroBatchScheduler
from backend.scheduler.plan import StepPlan
from backend.scheduler.queue import WaitingQueue
from backend.scheduler.shares import Shares
from backend.scheduler.step_rows import new_row, take_rows
from backend.scheduler.tuning import BatchTuner
from backend.scheduler.whole_images import WholeImages

# 1 / KEPT_SLOTS of the slots stay free for others, beside a request of many sequences or a namespace that crowds the batch.
KEPT_SLOTS = 8


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        on_cpu: bool,
        has_matrix_units: bool = False,
        adapters: AdapterCache | None = None,
        drafter: Drafter | None = None,
        loads: LevelLoads | None = None,
        whole_images: bool = False,
    ) -> None:
        """`drafter`: None for workers that take no drafts. `loads`: None without a second level of KV. `whole_images`: True if no
        step may end within an image.
        """
        self.config = config
        self.adapters = adapters or AdapterCache()
        self.waiting = WaitingQueue(config.weights, config.max_overtakes)
        self.running: list[Sequence] = []  # oldest first
        self._shares = Shares(config.max_batch_size)
        self._background = Background(config.background_share, on_cpu)
        self._kv = kv
        self._loads = loads
        if loads is not None:
            loads.queued_tokens = lambda: sum(
                seq.num_uncomputed_tokens for seq in self.running if not seq.is_generating
            )
        self._drafter = drafter
        self.guesses = drafter is not None and drafter.guesses  # True if the engine itself proposes drafts
        self._tuner = BatchTuner(config)
        self._micro_batch = MicroBatchScheduler(config, on_cpu, has_matrix_units)
        self._images = WholeImages() if whole_images else None
        self.is_static = config.batching == "static"  # True: a batch runs in lockstep and is answered together
        self._separate = config.batching != "fused"
        self._capacity = _capacity_scheduler(config, kv)
        self._kept_slots = config.max_batch_size // KEPT_SLOTS
        self._num_batch = 0  # size of the present static batch at its start
        self._beam_width = 1  # that of the latest step
        self.only: RequestId | None = None  # the one request that may run (engine/trials.py); None: all may
        self._stale: dict[SequenceId, Sequence] = {}  # running sequences whose state at the worker is out of date

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self.waiting))

    @property
    def max_prompt_tokens(self) -> int | None:
        """The longest prompt that requests may have; None = the limit of the model."""
        return self._micro_batch.max_prompt_tokens

    def blocks_needed(self, num_prompt: int, max_output: int, beam_width: int) -> int:
        """The blocks that the pool must have to accept a request."""
        return self._capacity.blocks_needed(num_prompt, max_output, beam_width)

    def renew(self, seq: Sequence) -> None:
        """Send the whole state of a running sequence with the next step: the worker's tokens or blocks are outdated."""
        self._stale[seq.seq_id] = seq

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that is WAITING."""
        self.adapters.hold(seq.adapter)
        self._background.num_live += seq.request.is_background
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence from the queue or the batch. The caller releases its blocks and slot."""
        self._stale.pop(seq.seq_id, None)
        self._background.num_live -= seq.request.is_background
        if self._loads is not None:
            self._loads.forget(seq)
        self.adapters.let_go(seq.adapter)
        if self._images is not None:
            self._images.forget(seq)
        if self._drafter is not None:
            self._drafter.end(seq)
        if seq.status is Status.RUNNING:
            self.adapters.stop(seq.adapter)
            self.running.remove(seq)
            self._shares.leave(seq.request)
            self._tuner.note_end(seq.num_prompt_tokens, seq.num_output_tokens)
        else:
            self.waiting.remove(seq)

    def schedule(self) -> StepPlan:
        """Plan one step. The plan depends only on the state of queue, sequences and cache."""
        plan = self._plan()
        if not plan.is_blocked or self._separate:
            return plan
        return self._background.making_room(self._kv.plan(), self.running, self.waiting) or plan

    def _plan(self) -> StepPlan:
        plan = StepPlan(self._kv.plan())
        if self._waits_for_tokens() or self._sets_others_aside(plan):
            return plan
        if self.running:
            plan.beam_width = self.running[0].beam_width
        context, generation = self._split_by_phase()
        if self._background.num_live and not self._separate:
            context, generation = self._background.limit(
                plan, context, generation, next(self._line(), None), self._loads
            )
        growing = [s for s in generation if s.num_computed_tokens + s.num_inflight_tokens >= s.num_writable_cells]
        if not (growing or context or len(self.waiting)):
            plan.generation = generation  # the fast path: all rows continue in blocks that they hold, and none waits
            self._add_drafts(plan)
            return plan
        admit_first = (
            self._separate and not context
        )  # no prompt is half done: the step admits new prompts, or else generates
        if admit_first:
            self._admit(plan, [], self._context_budget(plan, [], []))
        if self._separate and (context or plan.admitted):
            generation, growing = [], []
        budget = self._context_budget(plan, generation, context)
        in_turn = self._in_turn(context)  # as below: those who are admitted only make their shares smaller
        shares = self._cut(plan, in_turn, budget)
        num_tokens = {seq.seq_id: 1 for seq in growing}
        num_tokens.update((seq.seq_id, share) for seq, share in zip(in_turn, shares, strict=True))
        if num_tokens:
            extend_or_pause(plan.kv, self._background.ranked(self.running), num_tokens)
        plan.generation = generation
        if plan.paused:  # the others run in the room that was planned; none is admitted
            paused = {seq.seq_id for seq in plan.paused}
            plan.generation = [seq for seq in generation if seq.seq_id not in paused]
            cut = zip(in_turn, shares, strict=True)
            plan.context = [(seq, share) for seq, share in cut if share and seq.seq_id not in paused]
            return plan
        if not admit_first:
            self._admit(plan, context, budget)
        rows = self._in_turn([*context, *(seq for seq in plan.admitted if not seq.is_dormant)])
        plan.context = [(seq, share) for seq, share in zip(rows, self._cut(plan, rows, budget), strict=True) if share]
        self._add_drafts(plan)
        return plan

    def commit(self, plan: StepPlan, step_id: int, now_ns: int) -> StepInput:
        """Carry out a plan: blocks, slots, queue and states. Rejected sequences stay in the queue; the caller fails them."""
        known = {seq.seq_id: seq.num_computed_tokens for seq in plan.admitted}
        changes = self._kv.commit(plan.kv)
        plan.no_room = changes.no_room
        self._background.note_plan(plan, now_ns)
        self._beam_width = plan.beam_width
        for seq in plan.paused:
            self._stale.pop(seq.seq_id, None)
            seq.apply(Event.PAUSE)
            note_pause(seq, now_ns)
            self.adapters.stop(seq.adapter)
            self.running.remove(seq)
            self._shares.leave(seq.request)
            self.waiting.put_back(seq)
        if self.is_static:
            if plan.admitted:
                self._num_batch = len(plan.admitted)
            plan.num_empty_slots = self._num_batch - len(self.running or plan.admitted)
        for seq in plan.admitted:
            self.waiting.take(seq)
            self.running.append(seq)
            seq.apply(Event.ADMIT)
            if self._loads is not None:
                self._loads.forget(seq)
            self._shares.admit(seq.request)
            self.adapters.start(seq.adapter)
            note_admission(plan, seq, known[seq.seq_id], now_ns)
        for seq in self._stale.values():
            assert seq.slot is not None  # it runs
            changes.changes[seq.seq_id] = TableChange(seq.slot, [], is_new=True)
        states = self._kv.states
        rows = take_rows(plan, changes.changes, states)
        # Some changes are not part of a row and are sent whole: block tables of sequences that are new in their slots, and tables
        # that have grown although their sequence runs no token in this step.
        new = [self._stale.get(seq_id) or plan.kv.grants[seq_id].seq for seq_id in changes.changes]
        new_rows = [new_row(seq, self._kv) for seq in new if not seq.is_dormant]
        self._stale.clear()
        adapters = self.adapters.take_changes()
        assert not (changes.swap_out and changes.swap_in), "KV is swapped out and in by one step"
        swaps = changes.swap_out, changes.swap_in
        copies = [] if states is None else states.take_copies()
        return StepInput(step_id, rows, new_rows, changes.copies, self._kv.num_backed_blocks, *swaps, *adapters, copies)

    def _sets_others_aside(self, plan: StepPlan) -> bool:
        """Plan to pause what runs beside the `only` request. Returns False if there is nothing."""
        if self.only is None:
            return False
        others = [seq for seq in self.running if seq.request_id != self.only]
        for seq in reversed(others):
            plan.kv.pause(seq)
        return bool(others)

    def _line(self) -> Iterator[Sequence]:
        """The sequences that may be admitted, in the order of the queue."""
        return (seq for seq in self.waiting if self.only in (None, seq.request_id))

    def _split_by_phase(self) -> tuple[list[Sequence], list[Sequence]]:
        context: list[Sequence] = []
        generation: list[Sequence] = []
        for seq in self.running:
            if not seq.is_awaited:
                (generation if seq.is_generating else context).append(seq)
        return context, generation

    def _waits_for_tokens(self) -> bool:
        """True if drafts behind the tokens in flight are likely to gain more than planning ahead does."""
        in_flight = [seq for seq in self.running if seq.num_inflight_samples]
        return bool(in_flight) and self._drafter is not None and self._drafter.waits(in_flight)

    def _add_drafts(self, plan: StepPlan) -> None:
        """Give generation rows drafts, within the tokens and blocks that are left."""
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
        """Note the seconds that a step has taken, for the cost models of drafts, loads and the background."""
        self._background.note_step(plan, seconds)
        if self._loads is not None and plan.context:
            self._loads.note_step(sum(num_tokens for _, num_tokens in plan.context), seconds)
        if self._drafter is not None and plan.generation and not plan.context:
            self._drafter.note(len(plan.generation), plan.drafts.values(), seconds)

    def _context_budget(self, plan: StepPlan, generation: list[Sequence], context: list[Sequence]) -> int:
        num_waiting = len(context) + min(len(self.waiting), plan.kv.free_slots)
        return self._micro_batch.context_budget(len(generation), num_waiting, self._tuner.max_num_tokens)

    def _admit(self, plan: StepPlan, context: list[Sequence], budget: int) -> None:
        wants = [(seq, seq.num_uncomputed_tokens) for seq in context]
        most = self._tuner.max_sequences(self._kv.usable_blocks, self._kv.blocks_needed)
        for seq in self._line():
            if self._leaves_others_ahead(seq, plan):
                continue
            if seq.request.is_background and not self._background.takes_one_more(plan, self.running):
                break
            beams = seq.rows
            if seq is not beams[0]:
                continue  # it is a further beam: the first one stood for all
            if self._loads is not None and self._loads.is_loading(seq):
                plan.has_held = True
                continue
            if self._finds_no_place(plan, beams, most):
                plan.is_blocked = not seq.request.is_background
                break
            plan.beam_width = seq.beam_width
            ahead = self._ahead_of(seq, wants)
            room = self._micro_batch.has_room(ahead, budget, seq.num_tokens - seq.num_computed_tokens)
            if not (room or self.is_static):  # a static batch is limited by the slots and the pool only
                break
            mark = plan.kv.mark() if self._loads is not None else None
            answer = self._ask(plan, beams)
            if answer is Admission.NEVER:
                plan.rejected.append(seq)
            elif answer is Admission.LATER:
                plan.is_blocked = not seq.request.is_background
                break
            elif mark is not None and self._is_held_back(plan, seq):
                plan.kv.rollback(mark)
                plan.has_held = True
            else:
                plan.admitted += beams
                wants += [(beam, self._uncomputed(plan, beam)) for beam in beams if not beam.is_dormant]
        plan.changes_width = plan.beam_width != self._beam_width
        if not (plan.admitted or plan.rejected or plan.has_held or self.running):
            plan.rejected += islice(self._line(), 1)  # nothing runs and it still does not fit: it would wait for ever

    def _finds_no_place(self, plan: StepPlan, beams: list[Sequence], most: int) -> bool:
        """True if a request waits for others to end, whatever slots and blocks there are: they are `most`, or as wide as it is
        not, or their adapters leave no room for its own.
        """
        others, seq = len(self.running) + len(plan.admitted), beams[0]
        if others and (others + len(beams) > most or seq.beam_width != plan.beam_width):
            return True
        return not self.adapters.has_room({seq.adapter, *(other.adapter for other in plan.admitted)})

    def _is_held_back(self, plan: StepPlan, seq: Sequence) -> bool:
        """True if the second level has more KV of a sequence than the pool, and is about to bring it."""
        assert self._loads is not None  # the caller has seen it
        return self._loads.holds_back(seq, plan.kv.grants[seq.seq_id].computed)

    @property
    def waits_for_loads(self) -> bool:
        """True if nothing can run until KV comes from the second level."""
        loads = self._loads
        if loads is None or self.running or not len(self.waiting):
            return False
        return all(seq.group is not None or loads.is_loading(seq) for seq in self._line())

    def _leaves_others_ahead(self, seq: Sequence, plan: StepPlan) -> bool:
        """True if a sequence is passed over, although there may be room.

        The last free slots are kept for others, beside a further sequence of a request and beside a namespace that crowds the
        batch; and a further sequence waits for another one that still computes their prompt.
        """
        keeps_slots = seq.status is Status.WAITING and not self.is_static and plan.kv.free_slots <= self._kept_slots
        if seq.group is None or not seq.sequence_index or seq.beam_width > 1:
            namespace = seq.request.cache_salt
            return keeps_slots and self._shares.crowds(namespace, _num_of(plan.admitted, namespace))
        return keeps_slots or seq.group.holds_back(seq)

    def _crowds(self, seq: Sequence) -> bool:
        return self._shares.crowds(seq.request.cache_salt)

    def _ahead_of(self, seq: Sequence, wants: list[tuple[Sequence, int]]) -> list[int]:
        """The tokens of the context rows that are served before a sequence."""
        if not self._shares.is_contended or self._crowds(seq):
            return [want for _, want in wants]
        return [want for other, want in wants if not self._crowds(other)]

    def _in_turn(self, rows: list[Sequence]) -> list[Sequence]:
        """The context rows that get tokens in this step: those of namespaces that do not crowd the batch, else all."""
        if not self._shares.is_contended:
            return rows
        return [seq for seq in rows if not self._crowds(seq)] or rows

    def _ask(self, plan: StepPlan, beams: list[Sequence]) -> Admission:
        """Ask the capacity scheduler about a sequence, or about all beams of a request."""
        if len(beams) == 1:
            return self._capacity.admit(plan.kv, beams[0], self.running, plan.admitted)
        return admit_beams(self._capacity, plan.kv, beams, self.running, plan.admitted)

    def _cut(self, plan: StepPlan, rows: list[Sequence], budget: int) -> list[int]:
        wants = [self._uncomputed(plan, seq) for seq in rows]
        shares = self._micro_batch.cut(cut_background(rows, wants, plan, self._micro_batch.is_chunked), budget)
        if self._images is None:
            return shares
        return self._images.cut(rows, wants, shares, self.config.max_num_tokens - len(plan.generation))

    def _uncomputed(self, plan: StepPlan, seq: Sequence) -> int:
        grant = plan.kv.grants.get(seq.seq_id)
        if grant is not None and grant.admitted:
            return seq.num_tokens - grant.computed
        return seq.num_uncomputed_tokens


def _capacity_scheduler(config: SchedulerConfig, kv: KVCacheManager) -> CapacityScheduler:
    if config.batching == "static" or config.policy == "static_batch":
        return StaticBatch(kv)
    return MaxUtilization(kv) if config.policy == "max_utilization" else GuaranteedNoEvict(kv)


def _num_of(sequences: list[Sequence], namespace: str) -> int:
    return sum(seq.request.cache_salt == namespace for seq in sequences)

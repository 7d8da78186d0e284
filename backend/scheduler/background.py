"""Background: how many tokens of priority BACKGROUND a step may have: those of work without a client that waits, as batches are.

    no others have run for QUIET_S      no limit: they have the server
    others have run lately               as many as keep a step within SHORT times a step of one token, because others that
                                         come wait for the step that runs
    others generate                      as many as their credit pays for: each such step earns a share of its time
    others wait, or compute a prompt     none

Rows that get no token keep their slots and blocks. Where somebody else cannot be admitted, the youngest of them are paused
(Scheduler). What a step costs is learnt from those that only generate (StepCost), so that rows which cost nothing, as on a GPU
whose steps wait for weights, run beside others all the time.
"""

from __future__ import annotations

from backend.core.sequence import Sequence
from backend.kvcache.plan import KVPlan
from backend.scheduler.admission import LevelLoads
from backend.scheduler.plan import StepPlan
from backend.scheduler.queue import WaitingQueue
from backend.scheduler.step_cost import StepCost

GPU_SHARE = 0.05
QUIET_S = 60.0
SHORT = 2.0
MOST_CREDIT = 0.5  # a token of somebody else's comes half a step later at the most
MOST_CHARGE, MOST_DEBT = 20.0, 100.0  # steps; a step that took even longer was held up by other programs
MOST_RIDERS = 1024


class Background:
    def __init__(self, share: float | None, on_cpu: bool = True) -> None:
        """`share`: of the time of others' steps, which these may take longer on average; 0: nothing runs beside others. None:
        GPU_SHARE on a GPU, 0 on a CPU, where each row costs time and few would run.
        """
        self._share = (0.0 if on_cpu else GPU_SHARE) if share is None else share
        self.num_live = 0  # background sequences that run or wait
        self._cost = StepCost()
        self._credit = 0.0  # as a share of a step without background
        self._others_ns: int | None = None  # when the latest step with others was planned; None: there was none
        self._now_ns = 0  # when the latest step was planned

    def room(self, num_generation: int, others_wait: bool) -> int | None:
        """Background tokens of the next step; None: as many as there are. `num_generation`: rows of others that generate.
        `others_wait`: a prompt of others waits, or is being computed.
        """
        if others_wait:
            return 0
        if num_generation and not self._share:
            return 0
        if num_generation:
            return self._largest(num_generation, (1 + self._credit) * self._cost.seconds(num_generation), 0)
        if self._others_ns is None or self._now_ns - self._others_ns > QUIET_S * 1e9:
            return None
        return self._largest(0, SHORT * self._cost.seconds(1), 1)

    def limit(
        self,
        plan: StepPlan,
        context: list[Sequence],
        generation: list[Sequence],
        head: Sequence | None,
        loads: LevelLoads | None,
    ) -> tuple[list[Sequence], list[Sequence]]:
        """The rows of a step in each phase: all of others, and of the background as many as may have tokens. Notes in the plan
        how many tokens are left for background prompts. `head`: the next sequence to be admitted.
        """
        others_wait = head is not None and not head.request.is_background and not (loads and loads.is_loading(head))
        others = [seq for seq in generation if not seq.request.is_background]
        prompts = [seq for seq in context if not seq.request.is_background]
        if plan.beam_width > 1 and not (others or prompts):
            return context, generation  # beams take their steps together
        room = self.room(len(others), bool(prompts) or others_wait)
        if room is None:
            return context, generation
        if plan.beam_width > 1 or not room:
            plan.background_room = 0
            return prompts, others
        own = [seq for seq in generation if seq.request.is_background][:room]
        plan.background_room = room - len(own)
        return context, [*others, *own]

    def takes_one_more(self, plan: StepPlan, running: list[Sequence]) -> bool:
        """True if one more background sequence may be admitted: where their tokens are limited, each has one in a step."""
        if plan.background_room is None:
            return True
        room = plan.background_room + len(self._of(plan.generation))
        return len(self._of(running)) + len(self._of(plan.admitted)) < room

    def ranked(self, running: list[Sequence]) -> list[Sequence]:
        """The running ones, oldest first, the background behind all others: the last one is the first to be paused."""
        own = self._of(running)
        return [*(seq for seq in running if not seq.request.is_background), *own] if own else running

    def making_room(self, kv: KVPlan, running: list[Sequence], waiting: WaitingQueue) -> StepPlan | None:
        """A step that only pauses background sequences, those admitted last, one for each other sequence that waits, and the
        beams beside them; None where none runs.
        """
        plan, own = StepPlan(kv), self._of(running)
        chosen = {row.seq_id for seq in own[waiting.num_background - len(waiting) :] for row in seq.rows}
        for seq in reversed(own):
            if seq.seq_id in chosen:
                kv.pause(seq)
        return plan if plan.paused else None

    def _of(self, sequences: list[Sequence]) -> list[Sequence]:
        return [seq for seq in sequences if seq.request.is_background] if self.num_live else []

    def _largest(self, num_others: int, seconds: float, least: int) -> int:
        """The largest power of two of tokens that keeps a step of others within the time; `least` if even one does not. Sizes are
        tried one after the other: what was not measured lately may be far slower than it is expected to be.
        """
        most, count = least, 1
        while count <= MOST_RIDERS and self._cost.seconds(num_others + count) <= seconds:
            most = count
            if not self._cost.is_known(num_others + count):
                break
            count *= 2
        return most

    def note_plan(self, plan: StepPlan, now_ns: int) -> None:
        """A step is about to run."""
        self._now_ns = now_ns
        if not self.num_live or any(not seq.request.is_background for seq, _ in plan.rows):
            self._others_ns = now_ns

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """A step has taken so long."""
        if plan.drafts or any(not seq.request.is_background for seq, _ in plan.context):
            return
        own = sum(num_tokens for _, num_tokens in plan.context) + len(self._of(plan.generation))
        others = len(plan.generation) - len(self._of(plan.generation))
        if others:
            longer = min(seconds / max(self._cost.seconds(others), 1e-6) - 1, MOST_CHARGE) if own else 0.0
            self._credit = max(-MOST_DEBT, min(self._credit + self._share - longer, MOST_CREDIT))
        if own or others:
            self._cost.note(own + others, seconds)


def cut_background(rows: list[Sequence], wants: list[int], plan: StepPlan, is_chunked: bool) -> list[int]:
    """The tokens that context rows want, with those of background rows cut to the room of the plan. Without chunking a prompt
    runs as a whole, and the first one always.
    """
    if plan.background_room is None:
        return wants
    cut, room, is_first = [], plan.background_room, True
    for seq, want in zip(rows, wants, strict=True):
        if seq.request.is_background:
            if is_chunked:
                want = min(want, room)
            elif want > room and not (is_first and room):
                want = 0
            is_first = is_first and not want
            room = max(0, room - want)
        cut.append(want)
    return cut

"""Sequence: the engine's mutable state of one request, or of one session over its turns. It never leaves the engine process.

Progress is a number, not a mode. With n = num_tokens (all ids known) and c = num_computed_tokens (KV in blocks):

    0 .... num_history .... num_prompt_tokens .... n          token_ids
    | earlier turns | prompt of this turn | output of this turn |
    0 ......... c ......... c + num_inflight                  KV

    context phase      n - c > 1 or no output yet
    generation phase   n - c == 1 and the last token is an output

While steps are in flight, their outcome counts as known: n then includes the tokens that these steps will append
(num_inflight_samples), and c includes the KV that they will write.

Who writes what:
    gathered                       engine.gathered adds the tensors of a step, engine.publish takes them out
    token_ids, log_prob sums       engine.update, when a step's samples are applied; engine.sessions on truncation
    num_computed_tokens            KVCacheManager.commit (truncated to the KV that survived), engine.update (advanced)
    num_inflight_tokens, num_inflight_samples      Scheduler.commit adds a step's, engine.update subtracts them when it lands
    num_inflight_drafts            the same; while it is not 0, the number of tokens that the step will append is unknown
    slot                           KVCacheManager.commit
    num_guessed_tokens, num_right_guesses, num_extra_tokens    engine.update
    num_writable_cells, kv_due_at  KVCacheManager; they let the scheduler and the engine skip it in steps that do not need it
    token_ids, request             `end_turn` packs them for the time between two turns, `begin_turn` unpacks them
    status                         `apply` below, called by Scheduler.commit and the engine; illegal events raise
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import ClassVar, NamedTuple, cast

from backend.api.request import KvOrigin, Request, RequestId, SessionId
from backend.api.response import FinishReason, Interruption
from backend.core.gathered import Gathered
from backend.core.group import BeamGroup, SequenceGroup
from backend.core.step import SampledToken, SequenceId, SlotId


class Status(enum.Enum):
    WAITING = "waiting"  # in the queue for its first admission (of this turn)
    RUNNING = "running"  # in a slot, blocks locked
    PAUSED = "paused"  # taken off the batch; its KV may be reclaimed
    IDLE = "idle"  # a session between turns; its KV is cached until evicted
    RETIRED = "retired"  # will not run again


class Event(enum.Enum):
    ADMIT = "admit"  # the scheduler gives it a slot
    PAUSE = "pause"  # the scheduler takes the slot back
    REST = "rest"  # a session's turn is over
    RETURN = "return"  # a session's next turn is queued
    RETIRE = "retire"  # finished, cancelled, failed, erased


TRANSITIONS: dict[tuple[Status, Event], Status] = {
    (Status.WAITING, Event.ADMIT): Status.RUNNING,
    (Status.WAITING, Event.REST): Status.IDLE,
    (Status.WAITING, Event.RETIRE): Status.RETIRED,
    (Status.RUNNING, Event.PAUSE): Status.PAUSED,
    (Status.RUNNING, Event.REST): Status.IDLE,
    (Status.RUNNING, Event.RETIRE): Status.RETIRED,
    (Status.PAUSED, Event.ADMIT): Status.RUNNING,
    (Status.PAUSED, Event.REST): Status.IDLE,
    (Status.PAUSED, Event.RETIRE): Status.RETIRED,
    (Status.IDLE, Event.RETURN): Status.WAITING,
    (Status.IDLE, Event.RETIRE): Status.RETIRED,
}


class SessionKey(NamedTuple):
    """Names a session: numbers are chosen by clients, so each client namespace has its own."""

    namespace: str
    id: SessionId


_NO_REQUEST = Request([], 0)  # the request of a session between two turns


class IllegalTransition(RuntimeError):
    """An event that the table does not allow; the sequence is unchanged."""


@dataclass(slots=True, init=False, eq=False, repr=False)
class Sequence:
    """The module's docstring says what the counters mean and who writes them. Fields that every step reads come first."""

    is_dormant: ClassVar[bool] = False  # True for a beam's row that holds a slot but no hypothesis (BeamSequence)

    token_ids: list[int]  # between two turns of a session an array, which takes 4 bytes a token
    num_prompt_tokens: int
    num_computed_tokens: int
    num_inflight_tokens: int  # tokens that steps in flight are running
    num_inflight_samples: int  # tokens that steps in flight will append
    num_inflight_drafts: int  # draft tokens among the tokens in flight
    num_writable_cells: int  # KV positions below this lie in blocks of this sequence alone: writing them needs no plan
    kv_due_at: int  # the value of num_computed_tokens at which KVCacheManager.advance must be called next
    max_computed_tokens: int  # the largest num_computed_tokens so far; running a token below it again is recomputation
    max_output_tokens: int
    num_published_tokens: int  # token_ids up to here have left in responses
    slot: SlotId | None
    request: Request
    request_id: RequestId
    finish_reason: FinishReason
    first_token_ns: int
    first_iteration: int  # the step that sampled the first token of this turn
    last_token_ns: int
    sequence_index: int  # number of this sequence among those that the request returns
    group: SequenceGroup | None  # the sequences of a request that returns several; None if it returns one

    seq_id: SequenceId
    session_key: SessionKey | None
    kv_origin: KvOrigin
    namespace: str  # that of kv_origin, at hand
    adapter: str  # content hash of its LoRA adapter, the same in all turns of a session; empty = none
    turn: str  # name of a session's latest turn, the same in all its lives (core/messages.py); written by the intake
    is_anonymous: bool  # the client named no namespace
    kv_is_foreign: bool  # KV of its prompt came from outside, so that no other sequence may reuse its blocks
    status: Status
    arrival: int  # order of acceptance
    arrival_ns: int
    deadline_ns: int | None
    num_history_tokens: int
    seed: int  # given by the latest turn that names one; turns without a seed continue its random stream
    num_sampled_before: int  # tokens sampled in earlier turns: the RNG counter continues from here
    erase_when_finished: bool  # a session that was stopped with END
    cum_log_prob: float
    log_probs: list[float]
    top_log_probs: list[list[tuple[int, float]]]
    prepared_ns: int
    guide_notes: tuple[str, ...]
    first_scheduled_ns: int
    num_cached_tokens: int
    num_context_tokens: int
    num_recomputed_tokens: int
    num_evictions: int
    num_pauses: int
    interruptions: tuple[
        Interruption, ...
    ]  # written by scheduler.admission; engine.row_step says when a loss is made good
    num_new_blocks: int
    num_copied_blocks: int
    num_reused_blocks: int
    num_guessed_tokens: int  # draft tokens that the engine itself proposed for the output
    num_right_guesses: int  # guessed tokens that verification accepted
    num_extra_tokens: int  # output tokens beyond the first of a step, which accepted drafts brought
    gathered: Gathered | None  # tensors that the client asked for
    random_state_before: tuple[
        int, int
    ]  # (seed, num_sampled_before) of the turn before, for undo_turn and the log of sessions

    def __init__(
        self, seq_id: SequenceId, request_id: RequestId, request: Request, arrival: int, arrival_ns: int
    ) -> None:
        self.seq_id = seq_id
        self.session_key = SessionKey(request.cache_salt, request.session.id) if request.session else None
        self.kv_origin = request.kv_origin
        self.namespace = self.kv_origin.namespace
        self.adapter = request.adapter
        self.turn = ""
        self.is_anonymous = not request.cache_salt
        self.kv_is_foreign = False
        self.token_ids = []
        self.num_computed_tokens = 0
        self.num_inflight_tokens = 0
        self.num_inflight_samples = 0
        self.num_inflight_drafts = 0
        self.num_writable_cells = 0
        self.kv_due_at = 0
        self.max_computed_tokens = 0
        self.num_sampled_before = 0
        self.seed = 0
        self.erase_when_finished = False
        self.slot = None
        self.sequence_index = 0
        self.group = None
        self.status = Status.WAITING
        self.begin_turn(request_id, request, list(request.content_ids), arrival, arrival_ns)

    def begin_turn(
        self, request_id: RequestId, request: Request, new_ids: list[int], arrival: int, arrival_ns: int
    ) -> None:
        """Append a turn's prompt and reset everything that belongs to one request. The caller changes the status."""
        self.random_state_before = (self.seed, self.num_sampled_before)
        self.request_id = request_id
        self.request = request
        self.arrival = arrival
        self.arrival_ns = arrival_ns
        self.num_history_tokens = len(self.token_ids)
        self.token_ids = [*self.token_ids, *new_ids]
        self.num_prompt_tokens = len(self.token_ids)
        self.max_output_tokens = request.max_tokens
        if request.sampling_config.seed is not None:
            self.seed, self.num_sampled_before = request.sampling_config.seed, 0
        self.deadline_ns = None
        self.num_published_tokens = self.num_prompt_tokens
        self.finish_reason = FinishReason.NOT_FINISHED
        self.cum_log_prob = 0.0
        self.log_probs = []
        self.top_log_probs = []
        self.prepared_ns = 0
        self.guide_notes = ()
        self.first_scheduled_ns = 0
        self.first_token_ns = 0
        self.first_iteration = 0
        self.last_token_ns = 0
        self.num_cached_tokens = 0
        self.num_context_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_evictions = 0
        self.num_pauses = 0
        self.interruptions = ()
        self.num_new_blocks = 0
        self.num_copied_blocks = 0
        self.num_reused_blocks = 0
        self.num_guessed_tokens = 0
        self.num_right_guesses = 0
        self.num_extra_tokens = 0
        self.gathered = Gathered.of(request, self.num_history_tokens, self.num_prompt_tokens)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.value}, slot={self.slot}, tokens={self.num_prompt_tokens}+"
            f"{self.num_output_tokens}, computed={self.num_computed_tokens}+{self.num_inflight_tokens})"
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that must still be scheduled before the next one can be sampled."""
        return len(self.token_ids) + self.num_inflight_samples - self.num_computed_tokens - self.num_inflight_tokens

    @property
    def max_found_tokens(self) -> int:
        """The number of tokens whose KV an admission may reuse. The newest token always runs, for its logits are needed."""
        most = len(self.token_ids) - 1
        return most if self.gathered is None else min(most, self.gathered.needed_from)

    @property
    def is_generating(self) -> bool:
        """True if it is in the generation phase: every token but the newest output token is computed or in flight."""
        num_tokens = len(self.token_ids) + self.num_inflight_samples
        return (
            num_tokens > self.num_prompt_tokens
            and num_tokens - self.num_computed_tokens - self.num_inflight_tokens <= 1
        )

    @property
    def is_awaited(self) -> bool:
        """True if nothing can be scheduled until a step lands: steps in flight reach max_output_tokens, or verify drafts."""
        if self.num_inflight_drafts:
            return True
        samples = self.num_inflight_samples
        if samples:
            return len(self.token_ids) - self.num_prompt_tokens + samples >= self.max_output_tokens
        return self.num_inflight_tokens > 0 and self.num_uncomputed_tokens == 0

    @property
    def beam_width(self) -> int:
        """Beams of the request; 1 without beam search. Requests of different widths never share a step."""
        return 1 if self.group is None else self.group.beam_width

    @property
    def rows(self) -> list[Sequence]:
        """The sequences that are admitted and paused together with it: all rows of its beam search, or itself alone."""
        return [self] if self.group is None or self.group.beam_width == 1 else self.group.members

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens for the output of this turn, given by the request or proposed by the engine."""
        return len(self.request.draft_tokens) + self.num_guessed_tokens

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Draft tokens of this turn that verification accepted."""
        pairs = zip(self.request.draft_tokens, islice(self.token_ids, self.num_prompt_tokens, None))
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) + self.num_right_guesses

    @property
    def num_sampled_tokens(self) -> int:
        """Position of the next token in this sequence's random stream."""
        return self.num_sampled_before + self.num_output_tokens

    def apply(self, event: Event) -> None:
        """Move along TRANSITIONS. Raises IllegalTransition and changes nothing when the table has no such row."""
        target = TRANSITIONS.get((self.status, event))
        if target is None:
            raise IllegalTransition(f"{event.value} is not allowed for {self!r}")
        self.status = target

    def end_turn(self) -> None:
        """Turn the output into history; the next turn continues the random stream.

        There may be thousands of idle sessions, so the request, log-probabilities and tensors of the turn are dropped.
        """
        self.num_sampled_before = self.num_sampled_tokens
        self.num_prompt_tokens = len(self.token_ids)
        self.token_ids = cast("list[int]", array("i", self.token_ids))
        self.request = _NO_REQUEST
        self.log_probs, self.top_log_probs, self.gathered = [], [], None

    def undo_turn(self) -> None:
        """Remove the prompt and output of this turn from the log, and reset the random stream to its state before the turn.

        Also between two turns, for the latest one.
        """
        self.truncate(self.num_history_tokens)
        self.num_prompt_tokens = self.num_history_tokens
        self.seed, self.num_sampled_before = self.random_state_before

    def truncate(self, num_tokens: int) -> None:
        """Drop the token ids from `num_tokens` on, and lower the KV counters to match. Only between two turns, or for tokens
        that no client has received.
        """
        del self.token_ids[num_tokens:]
        self.num_computed_tokens = min(self.num_computed_tokens, num_tokens)
        self.max_computed_tokens = min(self.max_computed_tokens, num_tokens)


class BeamSequence(Sequence):
    """A row of a beam search. It holds one hypothesis at a time, or none (dormant). See core/group.py."""

    __slots__ = ("candidates", "is_dormant")

    candidates: SampledToken | None  # candidates for its next token; None until a step has computed them
    is_dormant: bool  # type: ignore[misc]  # a constant in the base class

    def __init__(
        self, seq_id: SequenceId, request_id: RequestId, request: Request, arrival: int, arrival_ns: int
    ) -> None:
        super().__init__(seq_id, request_id, request, arrival, arrival_ns)
        self.candidates = None
        self.is_dormant = True

    @property
    def search(self) -> BeamGroup:
        """The search that this row belongs to."""
        assert isinstance(self.group, BeamGroup)
        return self.group

    @property
    def is_awaited(self) -> bool:
        """True if nothing can be scheduled until all hypotheses of the search have their candidates."""
        if self.is_dormant or self.candidates is not None or self.num_inflight_samples:
            return True
        return self.num_inflight_tokens > 0 and self.num_uncomputed_tokens == 0

    def apply(self, event: Event) -> None:
        """A paused row loses its candidates, and their tensors: it runs its last token again after it returns."""
        super().apply(event)
        if event is Event.PAUSE:
            self.candidates = None
            if self.gathered is not None:
                self.gathered.keep_generation(self.num_output_tokens)

    def become(self, parent: BeamSequence) -> None:
        """Fork the hypothesis of another row into this one. KVCacheManager.fork does the same for its KV."""
        self.token_ids = list(parent.token_ids)
        self.max_computed_tokens = parent.max_computed_tokens
        self.cum_log_prob = parent.cum_log_prob
        self.log_probs = list(parent.log_probs)
        self.gathered = None if parent.gathered is None else parent.gathered.fork()
        self.first_token_ns, self.first_scheduled_ns = parent.first_token_ns, parent.first_scheduled_ns
        self.first_iteration = parent.first_iteration
        self.is_dormant = False

    def clear(self) -> None:
        """Drop the hypothesis."""
        self.token_ids = self.token_ids[: self.num_prompt_tokens]
        self.cum_log_prob, self.log_probs = 0.0, []
        self.num_computed_tokens = self.max_computed_tokens = 0
        self.is_dormant = True

"""The naive model: what each request must answer and what each session must remember, worked out one request at a time.

It knows nothing of block tables, slots, steps or eviction: a request's output is what it would be alone with an
infinite pool. Where the engine may choose (how far a cancelled request got), the model accepts what it saw.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from backend.api import FinishReason, Request
from backend.engine.beams import FORBIDDEN
from backend.engine.groups import stream_seed
from backend.engine.sessions import idle_bytes
from tests.fakes.beam_oracle import Beam, beam_search
from tests.fakes.hash_worker import cell_of, cells_of, in_reach, next_token, seed_of, top_tokens
from tests.simulation.guides import choose, ends_of, first_state, may_follow, next_state, top_allowed
from tests.simulation.setups import MAX_SEQ_LEN, VOCAB, Setup
from tests.simulation.workers import penalised_seed

Key = tuple[str, int]  # a session's key: the namespace of its client, and its number there


def key_of(request: Request) -> Key:
    return request.cache_salt, request.session.id


@dataclass
class Session:
    log: list[int]
    seed: int
    counter: int  # tokens sampled under this seed
    namespace: str
    turn: Turn | None = None
    last_used_ns: int = 0


@dataclass
class Turn:
    """One sequence of an accepted request, of a session or not."""

    request: Request
    history: list[int]
    new_ids: list[int]
    max_output: int
    seed: int
    counter: int
    namespace: str
    deadline_ns: int
    before: tuple[int, int] = (0, 0)  # seed and counter of the session, should the turn not take place
    tokens: list[int] = field(default_factory=list)  # the answer that is due when nobody interferes
    reason: FinishReason = FinishReason.NOT_FINISHED
    seen: list[int] = field(default_factory=list)  # outputs published so far
    reason_seen: FinishReason = FinishReason.NOT_FINISHED
    was_stepped: bool = False
    beams: list[Beam] = field(default_factory=list)  # of a request with beams, instead of `tokens`
    index: int = 0
    family: list[Turn] = field(default_factory=list)  # the sequences of the request, by index

    @property
    def open(self) -> list[Turn]:
        """The sequences of the request that have not ended."""
        return [turn for turn in self.family if turn.reason_seen is FinishReason.NOT_FINISHED]

    @property
    def is_stuck(self) -> bool:
        """Whether a beam search finds no token to begin with: its guide leaves the end only, which min_tokens forbids."""
        return self.request.sampling_config.beam_width > 1 and self.max_output > 0 and not self.beams

    @property
    def prompt(self) -> list[int]:
        return self.history + self.new_ids

    @property
    def max_cells(self) -> int:
        return len(self.prompt) + max(0, self.max_output - 1)


def reference_output(turn: Turn, setup: Setup) -> tuple[list[int], FinishReason]:
    """Output and finish reason of a request alone."""
    ids, outputs, cells = list(turn.prompt), [], []
    sampling, guide, ends = turn.request.sampling_config, turn.request.guide, ends_of(turn.request)
    state = 0 if guide is None else first_state(guide)
    while len(outputs) < turn.max_output:
        for position in range(len(cells), len(ids)):
            cells.append(cell_of(cells[-1] if cells else 0, ids[position], position, seed_of(turn.namespace)))
        seed = penalised_seed(turn.seed, outputs, sampling.presence_penalty)
        seen, counter = in_reach(cells, setup.window, setup.sink_tokens), turn.counter + len(outputs)
        if guide is None:
            token = next_token(seen, seed, counter, VOCAB)
        else:
            token = choose(seen, seed, counter, may_follow(state, ends))
            state = next_state(state, token)
        outputs.append(token)
        ids.append(token)
        if len(outputs) < (sampling.min_tokens or 0):
            continue
        if token in ends:
            return outputs, FinishReason.END_ID
        if any(outputs[-len(word) :] == word for word in turn.request.stop_words):
            return outputs, FinishReason.STOP_WORDS
    return outputs, FinishReason.LENGTH


def reference_beams(turn: Turn, setup: Setup) -> list[Beam]:
    """The hypotheses of a beam search alone, the best first."""
    request, config = turn.request, turn.request.sampling_config

    def top(ids: list[int], count: int) -> list[tuple[int, float]]:
        cells = cells_of(ids, turn.namespace)
        seen, num_output = in_reach(cells, setup.window, setup.sink_tokens), len(ids) - len(turn.prompt)
        if request.guide is None:
            return top_tokens(seen, num_output, count, VOCAB)
        state = first_state(request.guide)
        for token in ids[len(turn.prompt) :]:
            state = next_state(state, token)
        told = top_allowed(seen, num_output, count, may_follow(state, ends_of(request)))
        return [pair for pair in told if pair[1] > FORBIDDEN]

    found = beam_search(
        turn.prompt,
        turn.max_output,
        config.beam_width,
        top,
        ends_of(request),
        tuple(request.stop_words),
        min_tokens=config.min_tokens or 0,
        length_penalty=config.length_penalty or 0.0,
        early_stopping=1 if config.early_stopping is None else config.early_stopping,
    )
    return found[: config.num_return_sequences or config.beam_width]


def num_rows(request: Request) -> int:
    """Sequences of a request in the engine."""
    config = request.sampling_config
    return config.beam_width if config.beam_width > 1 else config.num_return_sequences or 1


class Held(NamedTuple):
    """A request whose guide is being compiled: no session or queue knows it."""

    request: Request
    arrival_ns: int
    deadline_ns: int


class Model:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.block_size = setup.config.kv_cache.block_size
        self.capacity = setup.num_blocks
        self.watermark = int(setup.config.kv_cache.watermark * setup.num_blocks)
        scheduler = setup.config.scheduler
        self.max_prompt_tokens = 1 << 30 if scheduler.enable_chunked_context else scheduler.max_num_tokens
        self.live: dict[int, Turn] = {}
        self.held: dict[int, Held] = {}  # requests whose guides are being compiled
        self.sessions: OrderedDict[Key, Session] = OrderedDict()  # least recently used first
        self.polled: set[Key] = set()

    def exceeds_pool(self, num_prompt: int, max_output: int, width: int) -> bool:
        """Beams share the whole blocks of their prompt where nobody is ever paused."""
        needed = -(-(num_prompt + max(0, max_output - 1)) // self.block_size)
        scheduler = self._setup.config.scheduler
        keeps = scheduler.policy == "guaranteed_no_evict" and self._setup.window is None
        shared = num_prompt // self.block_size if keeps else 0
        return shared + width * (needed - shared) > self.capacity - self.watermark

    def _may_have_several(self, request: Request) -> bool:
        config, limits = request.sampling_config, self._setup.config
        if config.beam_width > 1:
            count = config.num_return_sequences or 1
            return count <= config.beam_width <= min(8, limits.scheduler.max_batch_size)
        return (config.num_return_sequences or 1) <= limits.limits.max_queue_size

    def judge_fields(self, request_id: int, request: Request) -> str:
        """What `judge` says of the request by itself, which is all that counts before its guide is compiled."""
        if request_id in self.live or request_id in self.held:
            return "duplicate"
        if not request.input_token_ids or max(request.input_token_ids) >= VOCAB:
            return "field"
        if request.guide is not None and (request.sampling_config.min_tokens or 0) > 1:
            return "field"
        return "ok" if self._may_have_several(request) else "field"

    def held_turn(self, key: Key) -> int | None:
        """The request that is a session's turn and waits for its guide."""
        return next((i for i, held in self.held.items() if held.request.session and key_of(held.request) == key), None)

    def hold(self, request_id: int, request: Request, now_ns: int) -> None:
        timeout_s = request.timeout_s or self._setup.config.limits.default_timeout_s
        self.held[request_id] = Held(request, now_ns, now_ns + int(timeout_s * 1e9))

    def judge(self, request_id: int, request: Request) -> str:
        """`ok`, or the class of error that the request must be answered with."""
        if (verdict := self.judge_fields(request_id, request)) != "ok":
            return verdict
        session = request.session
        if session is not None:
            known = self.sessions.get(key_of(request))
            if key_of(request) in self.polled:
                return "session 2"
            if known is not None and known.turn is not None:
                return "session 3"
            if known is None and not session.start:
                return "session 1"
        history, new_ids = self.split(request)
        limit = self._limit(request)
        if len(history) + len(new_ids) + min(1, request.max_tokens) > limit:
            return "session 6" if session else "field"
        if len(new_ids) > self.max_prompt_tokens:
            return "session 6" if session else "step"
        max_output = min(request.max_tokens, limit - len(history) - len(new_ids))
        width = request.sampling_config.beam_width
        return "pool" if self.exceeds_pool(len(history) + len(new_ids), max_output, width) else "ok"

    def accept(self, request_id: int, request: Request, now_ns: int) -> Turn:
        """Book a request that `judge` found ok. Mirrors what the engine must do to the session at once."""
        session, config = request.session, self._setup.config
        history, new_ids = self.split(request)
        seed, counter, namespace, before = request.sampling_config.seed or 0, 0, request.cache_salt, (0, 0)
        if session is not None and not session.start:
            known = self.sessions[key_of(request)]
            namespace, before = known.namespace, (known.seed, known.counter)
            if request.sampling_config.seed is None:
                seed, counter = before
        max_output = min(request.max_tokens, self._limit(request) - len(history) - len(new_ids))
        deadline_ns = now_ns + int((request.timeout_s or config.limits.default_timeout_s) * 1e9)
        family: list[Turn] = []
        has_beams = request.sampling_config.beam_width > 1
        for index in range(1 if has_beams else num_rows(request)):
            own = stream_seed(seed, index)
            turn = Turn(request, history, new_ids, max_output, own, counter, namespace, deadline_ns, before)
            if has_beams:
                turn.beams = reference_beams(turn, self._setup)
                turn.reason = FinishReason[turn.beams[0].reason] if turn.beams else FinishReason.LENGTH
            else:
                turn.tokens, turn.reason = reference_output(turn, self._setup)
            turn.index, turn.family = index, family
            family.append(turn)
        turn = self.live[request_id] = family[0]
        if session is not None:
            key = key_of(request)
            self.polled.add(key)
            if session.start:
                self.sessions[key] = Session([], seed, 0, namespace)
            self.sessions[key].turn = turn
            self._touch(key, now_ns)
        return turn

    def finish(
        self, request_id: int, log: list[int] | None, was_error: bool, keep: int | None, erase: bool, now_ns: int
    ) -> None:
        """A request has had its final response. `log`: what the engine's session holds, for turns that ran in part."""
        turn = self.live.pop(request_id)
        request = turn.request
        if request.session is None:
            return
        key = key_of(request)
        session = self.sessions[key]
        session.turn = None
        if request.session.end or erase:
            del self.sessions[key]
            return
        outputs = turn.seen[:keep] if keep is not None else turn.seen
        cut = (FinishReason.CANCELLED, FinishReason.TIMED_OUT, FinishReason.STOP_WORDS)
        may_vanish = not turn.seen and turn.reason_seen in cut
        if was_error or (may_vanish and (not turn.was_stepped or log == turn.history)):
            session.log, (session.seed, session.counter) = turn.history, turn.before
        else:
            session.log, session.seed, session.counter = turn.prompt + outputs, turn.seed, turn.counter + len(outputs)
        self._touch(key, now_ns)

    def expire_sessions(self, now_ns: int) -> None:
        limit_ns = now_ns - int(self._setup.config.sessions.idle_ttl_s * 1e9)
        for key, session in list(self.sessions.items()):
            if session.turn is None and session.last_used_ns <= limit_ns:
                del self.sessions[key]

    def _touch(self, used: Key, now_ns: int) -> None:
        self.sessions.move_to_end(used)
        self.sessions[used].last_used_ns = now_ns
        for key in [key for key, session in self.sessions.items() if session.turn is None and key != used]:
            if self._holds_too_much():
                del self.sessions[key]

    def _holds_too_much(self) -> bool:
        bounds = self._setup.config.sessions
        idle = [session for session in self.sessions.values() if session.turn is None]
        num_bytes = sum(idle_bytes(len(session.log), self.block_size) for session in idle)
        return len(self.sessions) > bounds.max_sessions or num_bytes > bounds.max_bytes

    def _limit(self, request: Request) -> int:
        asked = request.session.session_len if request.session else None
        return min(MAX_SEQ_LEN, asked or MAX_SEQ_LEN)

    def split(self, request: Request) -> tuple[list[int], list[int]]:
        """Returns (tokens of the session that stay, tokens that this turn adds)."""
        session, prompt = request.session, request.input_token_ids
        if session is None or session.start:
            return [], prompt
        log = self.sessions[key_of(request)].log
        if session.full_history:
            keep = 0
            while keep < min(len(log), len(prompt) - 1) and log[keep] == prompt[keep]:
                keep += 1
            return log[:keep], prompt[keep:]
        return (log if session.step is None else log[: session.step]), prompt

"""Intake: turns a Request into a waiting Sequence, or refuses it. A refusal changes nothing.

`check` comes first and checks the limits of every field; before it nothing may be computed from the values of a request.
`accept` then checks the queue limits, the rules of sessions, and whether the sequence fits into the model's length, a step and
the pool. Only after all checks is a session truncated or a sequence made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from backend.api.config.schema import EngineConfig, max_beam_width
from backend.api.errors import EverbatchError, InvalidRequest, Overloaded, SessionError, SessionStatus
from backend.api.image_limits import ImageLimits
from backend.api.limits import RequestLimits, check_request
from backend.api.lora import LoraConfig
from backend.api.request import Request, RequestId
from backend.core.gathered import wanted
from backend.core.messages import Resume
from backend.core.sequence import BeamSequence, Event, Sequence, SessionKey
from backend.core.step import ModelInfo, SequenceId
from backend.engine.beams import make_beams
from backend.engine.gathered import promise
from backend.engine.groups import make_sequences
from backend.engine.resume import check_resume, check_room, take_up
from backend.engine.sessions import SessionTable, tell_if_cut
from backend.engine.transfer import Transfer
from backend.kvcache.manager import KVCacheManager
from backend.scheduler.plan import StepPlan
from backend.scheduler.scheduler import Scheduler

SPARE = 8  # 1 / SPARE of the queue's size is kept beyond its limit, for namespaces that have less than that in it


class Intake:
    def __init__(
        self,
        config: EngineConfig,
        model: ModelInfo,
        kv: KVCacheManager,
        scheduler: Scheduler,
        sessions: SessionTable,
        transfer: Transfer,
    ) -> None:
        limits = config.limits
        self._caps = limits
        self._model = model
        self._kv = kv
        self._scheduler = scheduler
        self._sessions = sessions
        self._transfer = transfer
        self._limits = RequestLimits(
            model.vocab_size,
            model.max_seq_len,
            limits,
            model.takes_extra_inputs,
            max_beam_width(scheduler.config),
            model.context_logits,
            model.generation_logits,
            model.additional_outputs,
            model.post_processors,
            scheduler.is_static,
            model.prompt_embedding_width,
            model.guide_refusal,
            config.guided.max_bytes,
            scheduler.adapters.is_enabled and model.lora_module_bytes > 0,
            model.takes_drafts,
            scheduler.guesses,
            model.has_head,
            tuple(model.output_widths),
            model.reads_whole_texts,
            _image_limits(model, config),
        )
        self._next_seq_id = itertools.count(1)
        self._next_arrival = itertools.count(1)
        # Sessions that have got a turn, with the turn's name; cleared by the engine before each poll of the inbox.
        self.sessions_this_poll: dict[SessionKey, str] = {}

    def check(self, request: Request, resume: Resume | None = None) -> Request:
        """Check every field against its limits, before anything is computed, compiled or read for the request.

        Returns the request. A request with a guide and without end ids gets those of the model, which its guide allows at its
        end. Raises EverbatchError.
        """
        check_request(request, self._limits)
        self._transfer.check(request)
        if resume is not None:
            check_resume(resume, request, self._model.vocab_size, self._model.max_seq_len)
        if request.guide is None or request.end_ids:
            return request
        if not self._model.eos_ids:
            raise InvalidRequest("a request with a guide needs an end id, and the model names none; give end_ids")
        return msgspec.structs.replace(request, end_ids=self._model.eos_ids)

    def deadline_ns(self, request: Request, now_ns: int) -> int:
        """The deadline of a checked request that arrives at `now_ns`."""
        return now_ns + int((request.timeout_s or self._caps.default_timeout_s) * 1e9)

    def accept(self, request_id: RequestId, request: Request, now_ns: int, resume: Resume | None = None) -> Sequence:
        """Queue the sequences of a request and return the first. Raises EverbatchError and then changes nothing.

        `now_ns`: arrival of the request, which must have passed `check`. Its guide must be compiled, its adapter in the cache
        (engine/preparation.py). `resume`: of one that an earlier engine has begun.
        """
        request = self._with_content(request)
        beam_width = request.sampling_config.beam_width
        count = beam_width if beam_width > 1 else request.sampling_config.num_return_sequences or 1
        if resume is None or not resume.is_again:
            self._check_queue(
                request, count, 0 if resume is None else sum(len(each.token_ids) for each in resume.delivered)
            )
        state = self._transfer.read(request)
        if request.session is None:
            max_output = self._check_room(request, 0, len(request.input_token_ids))
            check_room(resume, max_output)
            sets = 2 if beam_width > 1 else count  # of beams: the hypotheses that go on, and those that have ended
            promised = self._promise(request, len(request.input_token_ids), max_output, sets)
            if beam_width > 1:
                promised = -(-sets * promised // beam_width)
                sequences = make_beams(lambda: self._make_beam(request_id, request, now_ns), request)
            else:
                sequences = make_sequences(lambda: self._make(request_id, request, now_ns), count)
        else:
            seq, max_output, promised = self._accept_turn(request_id, request, now_ns, resume or Resume())
            sequences = [seq]
        sequences = take_up(sequences, resume)
        deadline_ns = self.deadline_ns(request, now_ns)
        for seq in sequences:
            if seq.gathered is not None:
                seq.gathered.num_promised_bytes = promised
            seq.max_output_tokens = max_output
            seq.deadline_ns = deadline_ns
            self._kv.find_inherited(seq)
            self._scheduler.add(seq)
        if state is not None:
            self._transfer.adopt(sequences[0], state)
        return sequences[0]

    def _with_content(self, request: Request) -> Request:
        """Replace the weights of a request's adapter by their content hash. Raises InvalidRequest if it is not held."""
        if request.lora is None:
            return request
        task_id, name = request.lora.task_id, request.lora.name
        content = self._scheduler.adapters.resolve((request.cache_salt, task_id))
        return msgspec.structs.replace(request, lora=LoraConfig(task_id, name=name, content=content))

    def next_seq_id(self) -> SequenceId:
        return SequenceId(next(self._next_seq_id))

    def _make(self, request_id: RequestId, request: Request, now_ns: int) -> Sequence:
        return Sequence(self.next_seq_id(), request_id, request, next(self._next_arrival), now_ns)

    def _make_beam(self, request_id: RequestId, request: Request, now_ns: int) -> BeamSequence:
        return BeamSequence(self.next_seq_id(), request_id, request, next(self._next_arrival), now_ns)

    def _accept_turn(
        self, request_id: RequestId, request: Request, now_ns: int, resume: Resume
    ) -> tuple[Sequence, int, int]:
        session = request.session
        assert session is not None  # checked by the caller
        key = SessionKey(request.cache_salt, session.id)
        if key in self.sessions_this_poll and not resume.is_life_of(self.sessions_this_poll[key]):
            raise SessionError(SessionStatus.CONFLICT, f"session {session.id} has two requests at the same moment")
        known = self._sessions.check_turn(request)
        if known is not None and resume.is_life_of(known.turn):
            self._sessions.undo(known, self._kv)
        if known is not None and known.adapter != request.adapter:
            raise SessionError(
                SessionStatus.INVALID,
                f"session {session.id} runs with another LoRA adapter; begin it afresh with START",
            )
        keep, new_ids = _kept_history(known, request)
        max_output = self._check_room(request, keep, len(new_ids))
        check_room(resume, max_output)
        promised = self._promise(request, len(new_ids), max_output)
        tell_if_cut(request, keep + len(new_ids), max_output)
        self.sessions_this_poll[key] = resume.turn
        if known is None:
            seq = self._make(request_id, request, now_ns)
            seq.turn = resume.turn
            self._sessions.put(key, seq, now_ns)
            return seq, max_output, promised
        if keep < known.num_tokens:
            self._kv.truncate(known, keep)
            known.truncate(keep)
        known.begin_turn(request_id, request, new_ids, next(self._next_arrival), now_ns)
        known.turn = resume.turn
        known.apply(Event.RETURN)
        self._sessions.touch(key, now_ns)
        return known, max_output, promised

    def _promise(self, request: Request, num_new: int, max_output: int, count: int = 1) -> int:
        """An upper bound of the bytes of tensors for each sequence of a request. Raises if there is no room for them."""
        if not wanted(request):
            return 0
        live = (*self._scheduler.waiting, *self._scheduler.running)
        return promise(request, self._model.output_widths, num_new, max_output, live, self._caps, count)

    def _check_queue(self, request: Request, count: int, num_delivered: int = 0) -> None:
        """Raise Overloaded if the queue is full. Each of the `count` sequences takes a place, and the tokens of its prompt;
        `num_delivered`: output tokens that a client has had, which are computed like a prompt.

        A namespace with less than 1 / SPARE of the places is accepted beyond the limit, up to 1 / SPARE more, so that a namespace
        that fills the queue does not keep others out. Background requests (backend/scheduler/background.py) take no place of
        others, and but for the first one are refused when half of the places are taken.
        """
        waiting, caps, namespace = self._scheduler.waiting, self._caps, request.cache_salt
        is_behind, is_half = request.is_background, request.is_background and waiting.num_background > 0
        size, most_tokens = (n // 2 if is_half else n for n in (caps.max_queue_size, caps.max_queued_tokens))
        places = len(waiting) - (0 if is_behind else waiting.num_background) + count
        if _is_full(places, waiting.num_of(namespace) + count, size):
            raise Overloaded(
                f"Exceeds maximum queue size: {places - count} requests wait, Maximum queue size of {size} is reached "
                f"(limits.max_queue_size); try again later"
            )
        num_new = count * len(request.input_token_ids) + num_delivered
        tokens = waiting.num_tokens - (0 if is_behind else waiting.num_background_tokens)
        if _is_full(tokens + num_new, waiting.num_tokens_of(namespace) + num_new, most_tokens):
            raise Overloaded(
                f"Exceeds maximum queue size: {tokens} prompt tokens wait, the limit is {most_tokens} "
                f"(limits.max_queued_tokens); try again later"
            )

    def _check_room(self, request: Request, num_history: int, num_new: int) -> int:
        """Return the output length that fits the model and the session. Raises if the sequence can never fit."""
        session = request.session
        limit = self._model.max_seq_len
        if session is not None and session.session_len is not None:
            limit = min(limit, session.session_len)
        num_prompt = num_history + num_new
        if num_prompt + min(1, request.max_tokens) > limit:
            message = (
                f"history and prompt have {num_prompt} tokens, the limit is {limit}; rewind with step or start afresh"
            )
            raise SessionError(SessionStatus.TOO_LONG, message) if session else InvalidRequest(message)
        self._check_step(request, num_new)
        max_output = min(1 if request.context_only else request.max_tokens, limit - num_prompt)
        self._check_pool(num_prompt, max_output, request.sampling_config.beam_width)
        return max_output

    def _check_step(self, request: Request, num_new: int) -> None:
        """Without chunked prompts, refuse one that is longer than a step."""
        limit = self._scheduler.max_prompt_tokens
        if limit is not None and num_new > limit:
            whole = "the model reads a text whole, in one step"
            reason = whole if self._model.reads_whole_texts else "scheduler.enable_chunked_context is off"
            limit_and_why = f"the limit is {limit} (scheduler.max_num_tokens, for {reason})"
            message = f"the prompt has {num_new} tokens, {limit_and_why}; shorten it"
            raise SessionError(SessionStatus.TOO_LONG, message) if request.session else InvalidRequest(message)

    def refusals(self, plan: StepPlan) -> Iterator[tuple[Sequence, EverbatchError]]:
        """Yield sequences that must end, with their errors: some can never fit, some were paused without room for their KV."""
        for seq in plan.rejected:
            size = seq.num_prompt_tokens, seq.max_output_tokens, seq.beam_width
            yield seq, never_fits(self._kv, self._scheduler.blocks_needed(*size), *size)
        for seq in plan.no_room:
            yield seq, no_swap_room(self._kv, seq)

    def _check_pool(self, num_prompt: int, max_output: int, beam_width: int) -> None:
        needed = self._scheduler.blocks_needed(num_prompt, max_output, beam_width)
        if needed > self._kv.usable_blocks:
            raise never_fits(self._kv, needed, num_prompt, max_output, beam_width)


def _is_full(total: int, own: int, limit: int) -> bool:
    """True if a queue of `total` is too long for a namespace that has `own` of it. Both include the new request."""
    return total > limit and (own > limit // SPARE or total > limit + limit // SPARE)


def no_swap_room(kv: KVCacheManager, seq: Sequence) -> Overloaded:
    """The error for a preempted sequence whose KV host memory has no room for."""
    swap = kv.state.swap
    return Overloaded(
        f"the request was preempted, and its {kv.geometry.blocks_for(seq.num_computed_tokens)} KV blocks do not fit into the "
        f"{swap.num_free} of {swap.num_places} that are free in host memory; raise kv_cache.swap_bytes, or use "
        f"scheduler.preemption=recompute"
    )


def never_fits(kv: KVCacheManager, needed: int, num_prompt: int, max_output: int, beam_width: int) -> InvalidRequest:
    """The error for a sequence, or for beams, that the pool cannot hold at full length."""
    beams = f" of {beam_width} beams" if beam_width > 1 else ""
    window, chunk = kv.geometry.window, kv.geometry.max_chunk_tokens
    remedy = "lower max_tokens or raise kv_cache.max_tokens"
    if window is not None and chunk > window:  # the tokens of one step are held in addition to the window
        remedy += f", or lower scheduler.max_chunk_tokens ({chunk}) towards the attention window ({window})"
    return InvalidRequest(
        f"{num_prompt} prompt tokens and {max_output} output tokens{beams} need {needed} KV blocks, the pool has "
        f"{kv.usable_blocks} of {kv.block_size} tokens; {remedy}"
    )


def _kept_history(known: Sequence | None, request: Request) -> tuple[int, list[int]]:
    """Returns (number of tokens of the session's log that stay, token ids that this turn adds)."""
    if known is None:
        return 0, request.input_token_ids
    session, prompt = request.session, request.input_token_ids
    assert session is not None  # `known` is the sequence of a session
    if session.full_history:
        pairs = zip(known.token_ids, prompt, strict=False)
        keep = next((i for i, (old, new) in enumerate(pairs) if old != new), min(known.num_tokens, len(prompt)))
        keep = min(keep, len(prompt) - 1)
        return keep, prompt[keep:]
    return min(known.num_tokens if session.step is None else session.step, known.num_tokens), prompt


def _image_limits(model: ModelInfo, config: EngineConfig) -> ImageLimits:
    most = max(0, config.scheduler.max_num_tokens - config.scheduler.max_batch_size) if model.whole_images else None
    return ImageLimits(model.image_token_id, model.image_refusal, config.images, most)

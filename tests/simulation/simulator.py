"""The simulator: the real EngineCore over shadow KV, event by event beside the naive model.

    apply(event)   the engine does it, the model does it, responses are compared, the invariants are checked
    drain()        no more arrivals: everything must end within a bounded number of steps, and nothing may be held after

A Violation (any AssertionError, in fact any exception out of the engine) is a bug of the engine, or of the model.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from random import Random

import msgspec

from backend.api import FinishReason, InvalidRequest, PerfMetrics, Request, Response, Result, SessionConfig
from backend.core.clock import ManualClock
from backend.core.sequence import SessionKey, Status
from backend.engine.core import EngineCore
from backend.engine.intake import SPARE
from tests.simulation.errors import error_class
from tests.simulation.events import (
    Advance,
    Cancel,
    Compile,
    Enqueue,
    Event,
    FailNext,
    Generator,
    Poll,
    Step,
    Stop,
    Tell,
)
from tests.simulation.guesser import Guesser
from tests.simulation.invariants import check_flights, check_invariants
from tests.simulation.level import LevelWatch, levelled
from tests.simulation.model import Model, Turn, key_of, num_rows
from tests.simulation.setups import random_setup, recurrent, swapping, tuned
from tests.simulation.workers import CheckedWorkers

NATURAL = (FinishReason.END_ID, FinishReason.STOP_WORDS, FinishReason.LENGTH)
PROBE_ID = 1_000_000  # request ids of the turns that ask every session at the end what it remembers


class Simulation:
    def __init__(self, seed: int, drops_plans: bool = False) -> None:
        """`drops_plans`: plan each step once more than is needed, and throw that plan away."""
        self._drops_plans = drops_plans
        self.rng = Random(seed)
        more = Random(f"several {seed}")
        setup = random_setup(self.rng, more, Random(f"sink tokens {seed}"))
        setup = swapping(tuned(setup, Random(f"tuned {seed}")), Random(f"swap {seed}"))
        setup = recurrent(setup, Random(f"recurrent {seed}"))
        self.setup = levelled(setup, Random(f"level {seed}"))
        self.clock = ManualClock()
        self.workers = CheckedWorkers(self.setup)
        self.level = LevelWatch(seed)
        self.core = EngineCore(self.setup.config, self.workers, self.clock, level_io=self.level.make_io)
        self.workers.on_submit = lambda: check_flights(self)
        self.model = Model(self.setup)
        self.has_drafts = Random(f"drafts {seed}").random() < 0.4
        if self.has_drafts:
            self.core.scheduler._drafter = Guesser(self.model, seed)
        self.events: list[Event] = []
        guides, paused = Random(f"guides {seed}"), Random(f"paused {seed}")
        self._generator = Generator(self.rng, more, guides, paused, self.setup, self.model)
        self._digest = hashlib.blake2b()
        self.rejections: Counter[str] = Counter()  # class of error -> how often
        self._num_rejected = 0
        self._num_finished = 0

    @property
    def has_several(self) -> bool:
        """Whether some of its requests ask for several sequences."""
        return self._generator.several > 0

    @property
    def has_guides(self) -> bool:
        """Whether some of its requests have guides."""
        return self._generator.guided > 0

    @property
    def trace_hash(self) -> str:
        """A hash of every response and every step so far."""
        return hashlib.blake2b(self._digest.digest() + self.workers.digest.digest()).hexdigest()

    def run(self, num_events: int | None = None) -> None:
        """Live through a random schedule and drain. Raises when anything is wrong; `events` ends with the culprit."""
        for _ in range(num_events if num_events is not None else self.rng.randint(30, 220)):
            self.apply(self.next_event())
        self.drain()

    def next_event(self) -> Event:
        waiting = self.core.scheduler.waiting
        return self._generator.next_event([seq.request_id for seq in waiting if seq.status is Status.PAUSED])

    def replay(self, events: list[Event]) -> None:
        for event in events:
            self.apply(event)
        self.drain()

    def apply(self, event: Event) -> None:
        self.events.append(event)
        self.workers.steps.clear()
        match event:
            case Enqueue(request_id, request):
                self._enqueue(request_id, request)
            case Cancel(request_id, keep, sequence_index):
                self._cancel(request_id, keep, sequence_index)
            case Stop():
                self._stop(event)
            case Poll():
                self.core.begin_poll()
                self.model.polled.clear()
            case Step():
                self.level.progress(self.core, self.clock)
                self._step()
            case Advance(seconds):
                self.clock.advance(seconds)
            case FailNext():
                self.workers.fail_next = RuntimeError("planted")
            case Compile(text, error):
                for request_id in self.workers.slow_guides.finish(text, error):
                    self._tell(request_id, error)
            case Tell(request_id, error):
                self._tell(request_id, error)
        check_invariants(self)

    def drain(self) -> None:
        """Step until nothing is live, ask every session for one more turn, and see that nothing is held any more."""
        self.workers.fail_next = None
        for text in list(self.workers.slow_guides.waiting):
            self.apply(Compile(text, "the guide is bad" if text == "bad" else ""))
        assert not self.model.held, f"requests {list(self.model.held)} wait for guides for ever"
        self._step_to_the_end()
        self.apply(Poll())
        for number, (salt, session_id) in enumerate(list(self.model.sessions)):
            probe = Request([1], 2, session=SessionConfig(session_id), cache_salt=salt)
            self.apply(Enqueue(PROBE_ID + number, probe))
        self._step_to_the_end()
        stats = self.core.stats()
        kv, counters = stats.latest.kv_cache, stats.counters
        assert (
            kv.used_num_blocks == 0 and self.core.kv.state.slots.num_free == self.setup.config.scheduler.max_batch_size
        ), kv
        assert kv.free_num_blocks + kv.cached_num_blocks == kv.max_num_blocks == self.model.capacity, kv
        assert sum(counters.requests_finished_total.values()) == self._num_finished == counters.requests_accepted_total
        assert counters.requests_rejected_total == self._num_rejected
        for key in list(self.model.sessions):
            self.apply(Stop(PROBE_ID, key, True))
        assert not self.workers.slow_guides.users, f"guides are kept for {self.workers.slow_guides.users}"
        self.level.drain(self.core)
        assert not self.core.kv.state.tables, f"tables of sequences that are gone: {list(self.core.kv.state.tables)}"

    def _step_to_the_end(self) -> None:
        live = [turn for first in self.model.live.values() for turn in first.family]
        rows = sum(num_rows(turn.request) for turn in live)
        for _ in range(20 + 2 * rows * sum(len(turn.prompt) + turn.max_output for turn in live)):
            if not self.core.has_work:
                break
            self.apply(Step())
        assert not self.core.has_work and not self.model.live, f"requests {list(self.model.live)} never end"
        assert not self.workers.num_in_flight, "a step was never collected"

    def _enqueue(self, request_id: int, request: Request) -> None:
        guides, now_ns = self.workers.slow_guides, self.clock.monotonic_ns()
        expected, is_held = self._judge(request_id, request), False
        by_itself = self.model.judge_fields(request_id, request)
        if request.session is not None and self.model.held_turn(key_of(request)) is not None:
            if by_itself == "ok":
                expected = "session 3"
        elif request.guide is not None and by_itself == "ok" and not guides.is_compiled(request.guide):
            if guides.is_full(request.guide):
                expected = "compiling"
            elif len(self.model.held) >= self.setup.config.limits.max_queue_size:
                expected = "queue"
            else:
                expected, is_held = "ok", True
        self.core.enqueue(request_id, request)
        if is_held:
            assert not self.core.take_responses(), "a request is answered before its guide is compiled"
            self.model.hold(request_id, request, now_ns)
        else:
            self._book_acceptance(request_id, request, now_ns, expected, self._take(self.core.take_responses()))

    def _judge(self, request_id: int, request: Request) -> str:
        expected = self.model.judge(request_id, request)
        waiting, size = self.core.scheduler.waiting, self.setup.config.limits.max_queue_size
        num_ahead = len(waiting) - (0 if request.is_background else waiting.num_background)
        is_half = request.is_background and waiting.num_background > 0
        size = size // 2 if is_half else size
        total, own = num_ahead + num_rows(request), waiting.num_of(request.cache_salt) + num_rows(request)
        is_full = total > size and (own > size // SPARE or total > size + size // SPARE)
        return "queue" if is_full and expected not in ("duplicate", "field") else expected

    def _book_acceptance(
        self, request_id: int, request: Request, arrival_ns: int, expected: str, responses: list[Response]
    ) -> bool:
        """Book that a request takes its place, or is refused as expected. Returns whether it does."""
        actual = error_class(responses[0]) if responses else "ok"
        assert len(responses) <= 1 and actual in self._allowed(expected), f"expected {expected}, got {responses}"
        if actual == "ok":
            self.model.accept(request_id, request, arrival_ns)
            return True
        self._num_rejected += 1
        self.rejections[actual] += 1
        return False

    def _tell(self, request_id: int, error: str) -> None:
        """The compiler has something to say of a request: it ends, takes its place, or has gone and nothing happens."""
        guides = self.workers.slow_guides
        request, arrival_ns, _ = self.model.held.get(request_id, (None, 0, 0))
        if request is not None and not error and not guides.is_compiled(request.guide):
            return  # no compiler says this
        if request is not None:
            guides.give_up(request_id)
            del self.model.held[request_id]
            expected = "guide" if error else self._judge(request_id, request)
        guides.tell(request_id, InvalidRequest(error) if error else None)
        self.core.admit()
        responses = self._take(self.core.take_responses())
        if request is None:
            assert not responses, f"a request that waits for no guide is answered: {responses}"
        else:
            self._book_acceptance(request_id, request, arrival_ns, expected, responses)

    def _allowed(self, expected: str) -> tuple[str, ...]:
        """Under a sliding window the engine may count on fewer blocks than the whole sequence would need."""
        return ("pool", "ok") if expected == "pool" and self.setup.window else (expected,)

    def _cancel(self, request_id: int, keep: int | None, sequence_index: int | None) -> None:
        self.core.cancel(request_id, keep, sequence_index)
        responses = self._take(self.core.take_responses())
        if sequence_index is None and request_id in self.model.held:
            (response,) = responses
            self._end_held(response, FinishReason.CANCELLED)
            return
        turn = self.model.live.get(request_id)
        hit = [other.index for other in turn.open if sequence_index in (None, other.index)] if turn else []
        assert [response.result.sequence_index for response in responses] == hit, responses
        for response in responses:
            self._finish(response, FinishReason.CANCELLED if keep is None else FinishReason.STOP_WORDS, keep)

    def _end_held(self, response: Response, reason: FinishReason) -> None:
        """A request has ended that waited for its guide: nothing else has changed."""
        request, result = self.model.held.pop(response.request_id).request, response.result
        whole = request.streaming or request.output_config.exclude_input_from_output
        assert result.output_token_ids == [[] if whole else request.input_token_ids], response
        assert result.is_final and result.finish_reasons == (reason,), response
        assert response.request_id not in self.workers.slow_guides.users, f"the guide is kept: {response}"
        self._num_finished += 1
        self.rejections[f"{reason.name} while its guide is compiled"] += 1

    def _stop(self, event: Stop) -> None:
        session = self.model.sessions.get(event.session)
        namespace, session_id = event.session
        running = next((key for key, turn in self.model.live.items() if session and turn is session.turn), None)
        self.core.stop_session(event.request_id, session_id, event.end, namespace)
        *others, answer = self._take(self.core.take_responses())
        assert answer.request_id == event.request_id and answer.is_final, answer
        waited = self.model.held_turn(event.session)
        if waited is not None:
            assert others[0].request_id == waited, others
            self._end_held(others.pop(0), FinishReason.CANCELLED)
        if waited is not None and (session is None or (running is None and not event.end)):
            assert not answer.has_error() and not others, (others, answer)
            return
        if session is None or (running is None and not event.end):
            expected = "session 1" if session is None else "session 4"
            assert error_class(answer) == expected and not others, answer
            self.rejections[expected] += 1
            return
        assert not answer.has_error() and len(others) == (running is not None), (others, answer)
        if running is None:
            del self.model.sessions[event.session]
        else:
            self._finish(others[0], FinishReason.CANCELLED, None, erase=event.end)

    def _step(self) -> None:
        now_ns = self.clock.monotonic_ns()
        late = {key for key, turn in self.model.live.items() if turn.deadline_ns <= now_ns}
        if self._drops_plans:
            self.core.scheduler.schedule()
        num_late = sum(len(self.model.live[key].open) for key in late)
        held_late = [key for key, held in self.model.held.items() if held.deadline_ns <= now_ns]
        responses = self._take(self.core.step())
        self.level.note(self.core)
        self.level.check_step(self.core, self.clock)
        for request_id in held_late:
            assert responses[0].request_id == request_id, (held_late, responses)
            self._end_held(responses.pop(0), FinishReason.TIMED_OUT)
        failed, self.workers.has_failed = self.workers.has_failed, False
        for response in responses[:num_late]:
            assert response.request_id in late, f"requests {late} are past their deadline, yet first came {response}"
            self._finish(response, FinishReason.TIMED_OUT, None)
        self.model.expire_sessions(now_ns)
        for turn in self.model.live.values():
            for sequence in turn.family:
                sequence.was_stepped = True
        for response in responses[num_late:]:
            if response.has_error():
                self._check_step_error(response, failed)
                self._settle(response, None, False)
            elif response.result.is_sequence_final:
                self._finish(response, None, None)
            else:
                self._see(response)

    def _check_step_error(self, response: Response, failed: bool) -> None:
        turn = self.model.live[response.request_id]
        error = error_class(response)
        if error == "stuck":
            assert turn.is_stuck, f"a search that could go on is said to be stuck: {response}"
            self.rejections[error] += 1
            return
        assert response.error_msg.startswith("session error 5") == (turn.request.session is not None), response
        assert failed and error == "worker", response

    def _finish(self, response: Response, reason: FinishReason | None, keep: int | None, erase: bool = False) -> None:
        """The final response of a sequence. `reason`: the only one allowed; None: the sequence's own end."""
        turn = self._see(response, is_natural=reason is None)
        actual = response.result.finish_reasons[0]
        if reason is None:
            assert actual is turn.reason, f"{turn.reason.name} != {response}"
            assert turn.beams or turn.max_output == 0 or turn.seen == turn.tokens, f"{turn.tokens} != {response}"
        elif turn.beams:
            assert response.is_final, response
        else:
            assert actual is reason, response
        turn.reason_seen = actual
        assert response.result.is_sequence_final and response.is_final == (not turn.open), response
        if response.is_final:
            self._settle(response, keep, erase)

    def _see(self, response: Response, is_natural: bool = False) -> Turn:
        """Add what a response carries to what its request has said, and compare with what it ought to say."""
        turn = self.model.live[response.request_id].family[response.result.sequence_index]
        assert any(turn is other for other in turn.open), f"a sequence that has ended goes on: {response}"
        request, result = turn.request, response.result
        if request.sampling_config.beam_width > 1:
            return self._see_beams(turn, result, is_natural)
        tokens = result.output_token_ids[0]
        if not request.streaming:
            assert result.is_sequence_final, f"a part of a request that does not stream: {response}"
            if not request.output_config.exclude_input_from_output:
                length = len(request.input_token_ids)
                assert tokens[:length] == request.input_token_ids, response
                tokens = tokens[length:]
        if request.output_config.return_log_probs:
            assert result.log_probs == [[float(token) for token in tokens]], response
        turn.seen = tokens if request.return_all_generated_tokens and request.streaming else turn.seen + tokens
        assert turn.seen == turn.tokens[: len(turn.seen)], f"{turn.tokens} was expected, {turn.seen} came: {response}"
        assert result.num_prompt_tokens == len(turn.prompt), response
        if result.perf_metrics is not None and turn.was_stepped:
            self._check_metrics(turn, result.perf_metrics)
        return turn

    def _see_beams(self, turn: Turn, result: Result, is_natural: bool) -> Turn:
        """Each response tells all beams; the one that ends by itself has those of a plain search."""
        request = turn.request
        assert result.is_final or request.streaming, result
        whole = request.streaming or request.output_config.exclude_input_from_output
        prompt = [] if whole else request.input_token_ids
        told = [(tokens, reason.name) for tokens, reason in zip(result.output_token_ids, result.finish_reasons)]
        if is_natural:
            expected = [(prompt + beam.tokens, beam.reason) for beam in turn.beams] or [(prompt, "LENGTH")]
            assert told == expected, f"{turn.beams} != {result}"
        if request.output_config.return_log_probs:
            sums = [sum(log_probs) for log_probs in result.log_probs]
            assert all(abs(a - b) < 1e-9 for a, b in zip(sums, result.cum_log_probs, strict=True)), result
        turn.seen = result.output_token_ids[0]
        return turn

    def _check_metrics(self, turn: Turn, metrics: PerfMetrics) -> None:
        """A client without a namespace is told nothing of what others have computed."""
        assert metrics.num_cached_tokens < len(turn.prompt), metrics
        is_stranger = not turn.request.cache_salt and self.setup.config.kv_cache.sharing != "all"
        if is_stranger and not turn.history and not turn.index:
            assert not metrics.num_cached_tokens, f"a request was told of KV that is not its own: {metrics}"
        if turn.seen:
            num_had = metrics.num_cached_tokens + metrics.num_context_tokens
            assert num_had >= len(turn.prompt), f"tokens of the prompt were neither found nor run: {metrics}"

    def _settle(self, response: Response, keep: int | None, erase: bool) -> None:
        request = self.model.live[response.request_id].request
        seq = self.core.sessions.get(SessionKey(*key_of(request))) if request.session else None
        log = list(seq.token_ids) if seq is not None else None
        self._num_finished += 1
        self.model.finish(response.request_id, log, response.has_error(), keep, erase, self.clock.monotonic_ns())

    def _take(self, responses: list[Response]) -> list[Response]:
        for response in responses:
            self._digest.update(msgspec.msgpack.encode(response))
        return responses

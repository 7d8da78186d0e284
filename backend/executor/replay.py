"""Replay: what an Executor keeps of its live commands, so that another engine goes on with them when one has died.

    engine dies -> hold -> (the next engine's Hello) -> again: each command once more, in the order of acceptance, with what
                                                        its client has had -> responses, without what it has had

A stream goes on from its middle where `goes_on` says so (backend/engine/resume.py). All other requests begin anew and give the
same bytes again, of which those that the client has had are dropped (repeats.py). docs/replay.md says which field makes which.

Pure: no thread, no clock of its own. The Executor calls everything under its lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from msgspec.structs import replace

from backend.api.config.schema import LimitsConfig
from backend.api.images import ImageInput
from backend.api.lora import LoraConfig
from backend.api.request import Request, RequestId
from backend.api.response import Response
from backend.api.stats import PauseCounts
from backend.core.messages import (
    CLIENT_SHIFT,
    Cancel,
    Command,
    Delivered,
    Hello,
    Resume,
    Submit,
)
from backend.engine.resume import goes_on
from backend.executor.live import Live, OnResponse, ReceivedOutput
from backend.executor.repeats import without_repeats

COUNTER = (1 << CLIENT_SHIFT) - 1  # the part of a request id that stays the same with another engine
MAX_HELD_BYTES = 512 << 20  # tensors of live requests that are kept to be sent again; a request beyond it is not held
MAX_ADAPTERS = 1024  # adapters that are kept for requests that give only a task id
MAX_ADAPTER_BYTES = 256 << 20  # the limit of their weights, as far as these came in requests
MAX_CRASHES = 2  # from so many ends of engines in a row on, a request is a suspect
TRIAL_MARGIN = 16  # tokens that a suspect has to run alone beyond those that its last life has had
LEAST_TIMEOUT_S = 0.001  # left to a request whose deadline passed while it was held


class Replay:
    """The live commands of an Executor."""

    def __init__(self) -> None:
        self._live: OrderedDict[int, Live] = OrderedDict()  # by the counters of their ids, in the order of acceptance
        self._adapters: OrderedDict[tuple[str, int], LoraConfig] = OrderedDict()  # by namespace and task id
        self._num_held_bytes = self._num_adapter_bytes = 0
        self._engine = ""  # the name of the present engine's life
        self._index = 0  # this client's, there
        self._limits = LimitsConfig()  # the present engine's
        self._trial: RequestId | None = None  # the request that runs alone there
        self._held_since_s: float | None = None
        self.counts = PauseCounts()

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id & COUNTER in self._live

    @property
    def num_held(self) -> int:
        """Commands that wait for the next engine."""
        return 0 if self._held_since_s is None else len(self._live)

    def held_s(self, now_s: float) -> float:
        """The seconds for which commands have been held; 0 while none is."""
        return 0.0 if self._held_since_s is None else now_s - self._held_since_s

    def newcomers(self) -> tuple[int, int]:
        """Requests that came while there was no engine, and the tokens of their prompts."""
        prompts = [
            len(live.request.input_token_ids) for live in self._live.values() if not live.num_lives and live.request
        ]
        return len(prompts), sum(prompts)

    def overdue(self, now_s: float, limit_s: float) -> list[RequestId]:
        """The new requests that have waited for more than `limit_s`, or are too large to be kept."""
        new = (live for live in self._live.values() if not live.num_lives)
        return [each.request_id for each in new if now_s - each.accepted_s > limit_s or each.num_held_bytes is None]

    # The life of a command

    def add(
        self, request_id: RequestId, on_response: OnResponse, command: Command, now_s: float, is_held: bool = False
    ) -> None:
        """`is_held`: it is not sent, because there is no engine; the next one gets it behind those that were there."""
        live = Live(request_id, on_response, command, now_s)
        if is_held:
            live.is_held, live.num_lives = True, 0
            self._held_since_s = now_s if self._held_since_s is None else self._held_since_s
        if isinstance(command, Submit):
            num_bytes = _bytes_of(command.request)
            live.num_held_bytes = num_bytes if self._num_held_bytes + num_bytes <= MAX_HELD_BYTES else None
            self._num_held_bytes += live.num_held_bytes or 0
            self._note_adapter(command.request)
            if command.resume is not None and command.resume.delivered:
                live.take_up(command.resume)
        self._live[request_id & COUNTER] = live

    def pop(self, request_id: RequestId) -> Live | None:
        live = self._live.pop(request_id & COUNTER, None)
        if live is not None:
            self._num_held_bytes -= live.num_held_bytes or 0
        return live

    def release(self, request_id: RequestId) -> Live | None:
        """Remove a command that is held, for another Executor to go on with it; None if it is not."""
        live = self._live.get(request_id & COUNTER)
        return self.pop(request_id) if live is not None and live.is_held else None

    def adopt(self, live: Live, request_id: RequestId, on_response: OnResponse, now_s: float) -> list[Command]:
        """Take a command over that another one has released, under a new id. Returns the commands for the engine."""
        live.request_id, live.on_response, live.is_held = request_id, on_response, False
        live.num_lives += 1
        self._count(resumed=1)
        self._num_held_bytes += live.num_held_bytes or 0
        self._live[request_id & COUNTER] = live
        return list(self._once_more(live, now_s))

    def ids(self) -> list[RequestId]:
        return [live.request_id for live in self._live.values()]

    def cancel(self, command: Cancel) -> Cancel | None:
        """Note that a request is to end. Returns the command for the present engine, if there is one and such a request."""
        live = self._live.get(command.request_id & COUNTER)
        if live is None:
            return None
        live.cancels.append(command)
        if live.is_held:
            return None
        live.num_cancels_sent += 1
        return replace(command, request_id=self._there(live.request_id))

    def take(self, response: Response, now_ns: int) -> tuple[OnResponse, Response] | None:
        """The callback of a response, and what its caller has not had of it; None if there is nothing to tell anybody."""
        live = self._live.get(response.request_id & COUNTER)
        if live is None:
            return None
        if response.request_id != live.request_id:
            response = replace(response, request_id=live.request_id)
        if live.num_lives > 1:
            told = without_repeats(live, response)
            if told is None:
                return None
            response = told
        if response.is_final:
            self.pop(live.request_id)
        else:
            live.note(response.result, now_ns)
        return live.on_response, response

    # Between two engines

    def hold(self, now_s: float) -> list[RequestId]:
        """The engine is gone, and will be replaced. Returns the commands that cannot be held."""
        if self._held_since_s is None:
            self._held_since_s = now_s
        for live in self._live.values():
            live.is_held = True
        return [live.request_id for live in self._live.values() if live.num_held_bytes is None]

    def greet(self, hello: Hello) -> list[tuple[RequestId, str]]:
        """An engine is there. Returns the requests that are not run again, each with the reason."""
        has_died = bool(self._engine) and hello.engine != self._engine
        former = hello.former
        if former.engine:  # This client may have missed the last messages about trials.
            self._trial = former.trial if former.engine == self._engine else None
        refused = list(self._blame()) if has_died else []
        self._engine, self._index, self._trial = hello.engine, hello.client_index, hello.trial
        self._limits = hello.config.limits
        return refused

    def again(self, now_s: float) -> Iterator[Command]:
        """The commands for the engine that was greeted, in the order of acceptance."""
        for live in self._live.values():
            if live.is_held:
                self._count(resumed=bool(live.num_lives))
                live.num_lives += 1
                yield from self._once_more(live, now_s)

    def let_go(self, now_s: float) -> list[Command]:
        """All held commands have been sent. Returns the cancels that have come meanwhile."""
        if self._held_since_s is not None:
            self._count(pauses=1, seconds=now_s - self._held_since_s)
            self._held_since_s = None
        late: list[Command] = []
        for live in self._live.values():
            there = self._there(live.request_id)
            late += [replace(cancel, request_id=there) for cancel in live.cancels[live.num_cancels_sent :]]
            live.is_held, live.num_cancels_sent = False, len(live.cancels)
        return late

    def note_trial(self, request_id: RequestId | None) -> None:
        """From now on only this request runs on the engine, which may be another client's; None: all do."""
        self._trial = request_id

    def _count(self, resumed: int = 0, pauses: int = 0, seconds: float = 0.0) -> None:
        counts = self.counts
        self.counts = PauseCounts(counts.resumed_requests + resumed, counts.pauses + pauses, counts.paused_s + seconds)

    def _blame(self) -> Iterator[tuple[RequestId, str]]:
        """Count the end of an engine for those who may have caused it. Yields those who have."""
        for live in self._live.values():
            if not live.num_lives:
                continue
            if self._trial is None:
                live.num_crashes += 1
            elif self._trial == self._there(live.request_id):
                live.num_crashes += 1
                yield (
                    live.request_id,
                    f"the engine has ended {live.num_crashes} times while this request ran, the last time alone; "
                    f"it is not run again: change it, or send it to another model",
                )

    def _there(self, request_id: RequestId) -> RequestId:
        """The id of a command at the present engine."""
        return RequestId(self._index << CLIENT_SHIFT | request_id & COUNTER)

    def _once_more(self, live: Live, now_s: float) -> Iterator[Command]:
        there = self._there(live.request_id)
        request = live.request
        if request is None:
            yield replace(live.command, request_id=there)
            return
        left_s = (request.timeout_s or self._limits.default_timeout_s) - (now_s - live.accepted_s)
        if (
            request.timeout_s is not None or left_s <= self._limits.max_timeout_s
        ):  # else the default may be what no client may ask
            request = replace(request, timeout_s=max(LEAST_TIMEOUT_S, left_s))
        request = self._with_adapter(request)
        yield Submit(there, request, self._resume(live, request))
        if request.sampling_config.beam_width == 1 and not goes_on(request):
            for index, output in live.outputs.items():
                if output.has_ended:
                    yield Cancel(there, sequence_index=index)
        live.num_cancels_sent = len(live.cancels)
        for cancel in live.cancels:
            yield replace(cancel, request_id=there)

    def _resume(self, live: Live, request: Request) -> Resume:
        assert isinstance(live.command, Submit)  # only requests go on
        first = live.command.resume or Resume()
        trial = None
        if live.num_crashes >= MAX_CRASHES:
            in_last_life = max((each.num_tokens - each.num_before for each in live.outputs.values()), default=0)
            trial = in_last_life + TRIAL_MARGIN if request.streaming else 0
        for output in live.outputs.values():
            output.num_before, output.num_here = output.num_tokens, 0
        live.num_repeated = live.num_responses if request.sampling_config.beam_width > 1 else 0
        delivered: list[Delivered] = []
        if goes_on(request) and live.num_responses:
            count = request.sampling_config.num_return_sequences or 1
            outputs = [live.outputs.get(index, ReceivedOutput()) for index in range(count)]
            delivered = [Delivered(list(each.token_ids), each.cum_log_prob, each.has_ended) for each in outputs]
        arrival_ns = round(live.accepted_s * 1e9)
        return Resume(delivered, first.turn, trial, live.first_token_ns, arrival_ns, is_again=live.num_lives > 1)

    # Adapters, which later requests name by a task id alone

    def _note_adapter(self, request: Request) -> None:
        lora = request.lora
        if not isinstance(lora, LoraConfig) or not lora.brings_weights:
            return
        self._forget_adapter((request.cache_salt, lora.task_id))
        self._adapters[request.cache_salt, lora.task_id] = lora
        self._num_adapter_bytes += _bytes_of_adapter(lora)
        while len(self._adapters) > MAX_ADAPTERS or self._num_adapter_bytes > MAX_ADAPTER_BYTES:
            self._forget_adapter(next(iter(self._adapters)))

    def _forget_adapter(self, name: tuple[str, int]) -> None:
        lora = self._adapters.pop(name, None)
        self._num_adapter_bytes -= 0 if lora is None else _bytes_of_adapter(lora)

    def _with_adapter(self, request: Request) -> Request:
        """The new engine holds no adapter yet, so the request brings its own."""
        lora = request.lora
        if lora is None or lora.brings_weights:
            return request
        return replace(request, lora=self._adapters.get((request.cache_salt, lora.task_id), lora))


def _bytes_of_adapter(lora: LoraConfig) -> int:
    return _length(getattr(lora.weights, "data", None))


def _bytes_of(request: Request) -> int:
    """The tensors of a request; its token ids are bounded by the queue. Its fields have not been checked yet."""
    inputs = request.extra_inputs.values() if isinstance(request.extra_inputs, dict) else ()
    embeddings, lora = getattr(request.prompt_embeddings, "data", None), request.lora
    adapter = _bytes_of_adapter(lora) if isinstance(lora, LoraConfig) else 0
    images = request.images if isinstance(request.images, tuple | list) else ()
    of_images = [image.inputs for image in images if isinstance(image, ImageInput)]
    pixels = sum(
        _length(getattr(each, "data", None))
        for given in of_images
        if isinstance(given, dict)
        for each in given.values()
    )
    return sum(map(_length, inputs)) + _length(embeddings) + adapter + _length(request.kv_state) + pixels


def _length(data: object) -> int:
    return len(data) if isinstance(data, bytes | bytearray | memoryview) else 0

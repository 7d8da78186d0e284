"""Preparation: requests wait here until their guide is compiled, their images are encoded and their LoRA adapter is read.

All take up to seconds, on threads of the compiler (guided/), of the encoder and of read_ahead.py, while other requests run.
Requests of one LoRA task id leave in the order of their arrival, because a later one that gives only the id means the adapter of
an earlier one. A request also waits while the adapters in use leave no room for its own.

    enter -> (compiled, encoded and read by other threads, which post a callback) -> take_ready -> Intake.accept

A waiting request is live, but no session, queue or cache knows it: it ends with an answer alone. This file runs on the engine's
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from backend.api.errors import EverbatchError, InvalidRequest, Overloaded, SessionError, SessionStatus
from backend.api.request import Request, RequestId
from backend.api.stats import ImageStats
from backend.core.messages import Resume
from backend.core.sequence import Sequence, SessionKey
from backend.core.step import PreparedAdapter, WorkerGroup
from backend.engine.callbacks import Callbacks
from backend.engine.read_ahead import Coming, Outcome, ReadAhead
from backend.kvcache.adapters import AdapterCache, Name


@dataclass(slots=True, eq=False)
class Waiting:
    request_id: RequestId
    request: Request
    arrived_ns: int
    deadline_ns: int
    resume: Resume | None = None
    lacks_guide: bool = False
    lacks_images: bool = False
    lacks_trial: bool = False  # it is to run alone (engine/trials.py), and its turn has not come
    adapter: Coming | None = None  # the adapter that it brings
    error: EverbatchError | None = None  # why it cannot be queued
    prepared_ns: int = 0  # when it was ready; 0: it did not wait here
    has_left: bool = False  # it has ended, and stays in its line because later requests refer to its adapter

    @property
    def line(self) -> Name | RequestId:
        """The line that it must not overtake: requests of the same namespace with the same LoRA task id."""
        lora = self.request.lora
        return self.request_id if lora is None else (self.request.cache_salt, lora.task_id)

    @property
    def lacks_parts(self) -> bool:
        """True if its guide is not compiled, or its images are not encoded."""
        return self.lacks_guide or self.lacks_images

    @property
    def lacks_adapter(self) -> bool:
        """True if the adapter that it brings has not been read."""
        return self.adapter is not None and self.adapter.outcome is None


class Preparation:
    def __init__(self, workers: WorkerGroup, adapters: AdapterCache, num_readers: int, max_size: int) -> None:
        """workers: compile guides and read adapters
        num_readers: threads that read adapters
        max_size: requests that may wait here
        """
        self._guides, self._images = workers.guides, workers.images
        self._adapters = adapters
        self._max_size = max_size
        self._waiting: dict[RequestId, Waiting] = {}
        self._lines: dict[Name | RequestId, list[Waiting]] = {}
        self._due: dict[Name | RequestId, None] = {}  # lines whose first request may be ready
        self._earliest_ns: int | None = None  # no deadline is before it
        self._suspects: dict[RequestId, Waiting] = {}  # requests that lack their trial, in the order of arrival
        self._callbacks = Callbacks()
        post = self._callbacks.post
        if self._guides is not None:
            self._guides.on_compiled(lambda *outcome: post(lambda: self._note_guide(*outcome)))
        if self._images is not None:
            self._images.on_encoded(lambda *outcome: post(lambda: self._note_images(*outcome)))
        self._reading = ReadAhead(
            *(workers.prepare_adapter, num_readers, adapters.host.capacity),
            lambda *outcome: post(lambda: self._note_adapter(*outcome)),
        )

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[RequestId]:
        return iter(list(self._waiting))

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waiting

    @property
    def earliest_deadline_ns(self) -> int | None:
        """No waiting request has an earlier deadline. None if no request waits."""
        return self._earliest_ns if self._waiting else None

    def image_stats(self) -> ImageStats:
        """Statistics of the features of images."""
        return ImageStats() if self._images is None else self._images.stats()

    def on_ready(self, wake: Callable[[], None]) -> None:
        """`wake` is called on other threads when `take_ready` may return requests."""
        self._callbacks.wake = wake

    def enter(self, waiting: Waiting) -> bool:
        """Begin the preparation of a request. Returns True if it has to wait here. Raises Overloaded, and SessionError for a turn
        while another one of its session waits.
        """
        request_id, request, resume = waiting.request_id, waiting.request, waiting.resume
        if self._waiting and request.session is not None:
            self._check_alone(SessionKey(request.cache_salt, request.session.id))
        waiting.lacks_trial = resume is not None and resume.trial_tokens is not None
        comes_behind = waiting.line in self._lines
        if request.guide is not None and self._guides is not None:
            waiting.lacks_guide = not self._guides.begin(request_id, request.guide, request.cache_salt)
        if request.images and self._images is not None:
            waiting.lacks_images = not self._images.begin(request_id, request.images, request.cache_salt)
        if request.lora is not None and request.lora.brings_weights:
            waiting.adapter = Coming(request.cache_salt, request.lora)
        if not (waiting.lacks_parts or waiting.lacks_trial or waiting.adapter is not None or comes_behind):
            return False
        if len(self._waiting) >= self._max_size and not (resume is not None and resume.is_again):
            self.end(request_id, request)
            raise Overloaded(
                f"Exceeds maximum queue size: {len(self._waiting)} requests wait for their guides, images or adapters, Maximum "
                f"queue size of {self._max_size} is reached (limits.max_queue_size); try again later"
            )
        self._waiting[request_id] = waiting
        if waiting.lacks_trial:
            self._suspects[request_id] = waiting
        self._lines.setdefault(waiting.line, []).append(waiting)
        due_ns = waiting.deadline_ns
        self._earliest_ns = due_ns if self._earliest_ns is None else min(self._earliest_ns, due_ns)
        if waiting.adapter is not None:
            self._reading.add(waiting.adapter)
        return True

    def take_ready(self, now_ns: int) -> Iterator[Waiting]:
        """Yield the requests that are ready. Accept each, or refuse it for its `error`, before taking the next: an accepted one
        keeps its adapter in the cache.
        """
        self._callbacks.run()
        for line in list(self._due):
            del self._due[line]
            for waiting in self._advance(line):
                waiting.prepared_ns = now_ns
                yield waiting

    def leave(self, request_id: RequestId) -> Waiting | None:
        """Remove a request that has ended. None for ids that do not wait here."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting.has_left = True
            self._suspects.pop(request_id, None)
            self.end(request_id, waiting.request)
            self._close_ranks(waiting.line)
        return waiting

    def begin_trial(self) -> Waiting | None:
        """Let the first request go on that lacks nothing but its trial, and return it; None if there is none."""
        for waiting in self._suspects.values():
            if not (waiting.lacks_parts or waiting.lacks_adapter) and self._lines[waiting.line][0] is waiting:
                del self._suspects[waiting.request_id]
                waiting.lacks_trial = False
                self._due[waiting.line] = None
                return waiting
        return None

    def goes_on(self, request_id: RequestId) -> bool:
        """True if a waiting request has had output from an earlier engine."""
        waiting = self._waiting.get(request_id)
        return waiting is not None and waiting.resume is not None and bool(waiting.resume.delivered)

    def late(self, now_ns: int) -> list[RequestId]:
        """The waiting requests past their deadline."""
        if self._earliest_ns is None or now_ns < self._earliest_ns:
            return []
        deadlines = {request_id: each.deadline_ns for request_id, each in self._waiting.items()}
        self._earliest_ns = min((each for each in deadlines.values() if each > now_ns), default=None)
        return [request_id for request_id, deadline_ns in deadlines.items() if deadline_ns <= now_ns]

    def waiting_turn(self, key: SessionKey) -> RequestId | None:
        """The waiting turn of a session, if there is one."""
        for request_id, each in self._waiting.items():
            session = each.request.session
            if session is not None and SessionKey(each.request.cache_salt, session.id) == key:
                return request_id
        return None

    def end(self, request_id: RequestId, request: Request) -> None:
        """Let the guide and the images of a request go that has ended, whether it has waited here or not."""
        if self._images is not None and request.images:
            self._images.end(request_id)
        if self._guides is not None and request.guide is not None:
            self._guides.end(request_id)

    def note(self, waiting: Waiting, sequences: list[Sequence]) -> None:
        """Let the sequences of a request tell when it was ready, and what of its guide's schemas is not held."""
        for seq in sequences:
            seq.prepared_ns = waiting.prepared_ns
            if self._guides is not None and waiting.request.guide is not None:
                seq.guide_notes = self._guides.notes(waiting.request_id)

    def close(self) -> list[Waiting]:
        """End the reader threads. Removes and returns all waiting requests."""
        waiting = list(self._waiting.values())
        for each in waiting:
            self.leave(each.request_id)
        self._lines.clear()
        self._due.clear()
        self._reading.close()
        return waiting

    def _check_alone(self, key: SessionKey) -> None:
        if self.waiting_turn(key) is not None:
            raise SessionError(
                SessionStatus.BUSY, f"session {key.id} has a turn that waits to begin; wait for its end or stop it"
            )

    def _note_guide(self, request_id: RequestId, error: EverbatchError | None) -> None:
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            waiting.lacks_guide, waiting.error = False, waiting.error or error
            self._due[waiting.line] = None

    def _note_images(self, request_id: RequestId, error: EverbatchError | None) -> None:
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            waiting.lacks_images, waiting.error = False, waiting.error or error
            self._due[waiting.line] = None

    def _note_adapter(self, adapter: Coming, outcome: Outcome) -> None:
        self._reading.note(adapter, outcome)
        if adapter.name in self._lines:
            self._due[adapter.name] = None

    def _advance(self, line: Name | RequestId) -> Iterator[Waiting]:
        """Yield the requests at the head of a line that are ready."""
        ranks = self._lines.get(line, [])
        while ranks:
            first = ranks[0]
            if ((first.lacks_parts or first.lacks_trial) and not first.has_left) or first.lacks_adapter:
                return
            if first.adapter is not None and not self._put(first, first.adapter):
                self._due[line] = None
                if first.has_left:
                    self._close_ranks(line)
                return
            del ranks[0]
            if not first.has_left:
                del self._waiting[first.request_id]
                if first.error is not None:
                    self.end(first.request_id, first.request)
                yield first
        self._lines.pop(line, None)

    def _put(self, waiting: Waiting, adapter: Coming) -> bool:
        """Move an adapter that has been read to the cache. False while the adapters in use leave no room."""
        error = adapter.outcome if isinstance(adapter.outcome, EverbatchError) else None
        if isinstance(adapter.outcome, PreparedAdapter):
            try:
                if not self._adapters.put(adapter.name, adapter.outcome):
                    return False
            except InvalidRequest as refusal:
                error = refusal
        waiting.error = waiting.error or error
        self._reading.let_go(adapter)
        return True

    def _close_ranks(self, line: Name | RequestId) -> None:
        """Remove ended requests, but keep those whose adapter a later request refers to or that is being read."""
        kept: list[Waiting] = []
        for each in reversed(self._lines[line]):
            is_meant = each.adapter is not None and bool(kept) and kept[-1].adapter is None
            if not each.has_left or is_meant or (each.adapter is not None and each.adapter.is_being_read):
                kept.append(each)
            elif each.adapter is not None:
                self._reading.let_go(each.adapter)
        self._lines[line] = kept[::-1]
        self._due[line] = None

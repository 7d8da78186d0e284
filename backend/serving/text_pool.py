"""TextPool: the threads that tokenise and render chat templates, so that the stub's main thread only takes requests in.

    main thread    submit(job)    queued; refused when the queue is full (requests, or bytes)
    text thread    job.read()     tokenise, render; then job.hand_over(...), which sends the rows to the engine
    housekeeper    expire()       refuses what has waited or worked longer than the timeout

Order: jobs that share a key (a session) are read and handed over one after the other, in the order they came; a job waits
for its turn in every line that it stands in. All others overtake each other as they like.

A thread whose job takes longer than the timeout is given up: its job is refused and its place goes to a new thread, as long
as no more than GIVEN_UP of them for each place are stuck. Python code (a template that loops for ever) is ended by an
exception raised in it. What runs inside a library is not: a tokenizer that never returns keeps its thread, and a core, but not
the interpreter's lock (`Tokenizer.encode` lets go of it). Not covered: one instruction of a template that keeps the lock for
long, such as the making of a string of gigabytes; templates come with the model, so that is the operator's trust.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from backend.api import EngineUnavailable, ErrorCode, EverbatchError, Overloaded

log = logging.getLogger("everbatch.serving")
MAX_BYTES = 256 << 20  # of all requests that wait for a text thread
GIVEN_UP = 2  # stuck threads that are replaced, for each thread of the pool


class _TooLate(BaseException):
    """Raised in a thread whose job has been refused meanwhile. No template catches it."""


class Job:
    """One request whose text is to be read. Its callbacks are called from a text thread, `refuse` also from expire()."""

    def __init__(
        self,
        read: Callable[[], Any],
        hand_over: Callable[[Any], None],
        refuse: Callable[[ErrorCode, str], None],
        *,
        wanted: Callable[[], bool] = lambda: True,
        num_bytes: int = 0,
        keys: frozenset[Hashable] = frozenset(),
    ):
        """`hand_over` gets what `read` returned. Exactly one of `hand_over` and `refuse` is called, once; neither when
        the job is no longer `wanted` as its turn comes.
        """
        self.read = read
        self.hand_over = hand_over
        self.refuse = refuse
        self.wanted = wanted
        self.num_bytes = num_bytes
        self.keys = keys

    def attempt(self) -> Callable[[], None]:
        """Read; returns what is to be done with the outcome."""
        try:
            result = self.read()
        except EverbatchError as error:
            code, message = error.code, error.message
            return lambda: self.refuse(code, message)
        except Exception as error:
            return lambda failure=error: self._fail(failure)
        return lambda: self.hand_over(result)

    def _fail(self, error: Exception) -> None:
        log.error("reading the text of a request failed", exc_info=error)
        self.refuse(ErrorCode.INTERNAL, "the request could not be taken in; see the server's log")


def _interrupt(thread: threading.Thread) -> None:
    """Raise _TooLate in a thread, where it next runs Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_TooLate))


class _Reading(NamedTuple):
    thread: threading.Thread
    since: float


class TextPool:
    def __init__(self, num_threads: int, timeout_s: float, max_jobs: int, clock: Callable[[], float] = time.monotonic):
        """`timeout_s` holds for the wait in the queue, and again for the reading itself."""
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        self._max_jobs = max_jobs
        self._clock = clock
        self._lock = threading.Lock()  # a plain one: no exception raised in a thread leaves it locked
        self._ready: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # all guarded by the lock
        self._queued: dict[Job, float] = {}  # -> since when; in the order they came
        self._num_bytes = 0
        self._lines: dict[Hashable, deque[Job]] = {}  # the first of a line is ready, being read or handed over
        self._reading: dict[Job, _Reading] = {}
        self._given_up: list[threading.Thread] = []
        self._threads: list[threading.Thread] = []

    def submit(self, job: Job) -> None:
        """Queue a job; returns at once. The threads are started with the first job.

        Raises Overloaded when too much waits, EngineUnavailable when all threads are stuck.
        """
        with self._lock:
            self._fill_places()
            if not self._threads:
                raise EngineUnavailable("all text threads are stuck; the server must be started again")
            if len(self._queued) >= self._max_jobs or self._num_bytes + job.num_bytes > MAX_BYTES:
                raise Overloaded(
                    f"{len(self._queued)} requests of {self._num_bytes} bytes wait for a text thread, the limits are "
                    f"{self._max_jobs} (limits.max_queue_size) and {MAX_BYTES}; try again later"
                )
            self._queued[job] = self._clock()
            self._num_bytes += job.num_bytes
            for key in job.keys:
                self._lines.setdefault(key, deque()).append(job)
            if self._is_first(job):
                self._ready.put(job)

    def expire(self) -> None:
        """Refuse what has waited or been read for too long. Call it a few times a second."""
        with self._lock:
            limit = self._clock() - self._timeout_s
            waited = [job for job, since in self._queued.items() if since <= limit]
            for job in waited:
                self._leave_queue(job)
                self._leave_lines(job)
            stuck = [job for job, reading in self._reading.items() if reading.since <= limit]
            for job in stuck:
                self._give_up(job)
            if stuck:
                self._fill_places()
        for job in waited:
            job.refuse(
                ErrorCode.UNAVAILABLE,
                f"the request waited {self._timeout_s:g} s for a text thread (triton.text_timeout_s); try again later",
            )
        for job in stuck:
            log.error("reading the text of a request took longer than %g s; it is refused", self._timeout_s)
            job.refuse(
                ErrorCode.INVALID_ARGUMENT,
                f"tokenising the request's text and rendering its messages took longer than {self._timeout_s:g} s "
                "(triton.text_timeout_s); shorten it",
            )

    @property
    def is_stuck(self) -> bool:
        """Whether no thread is left that could read anything, and none may be started."""
        with self._lock:
            return not self._threads and not self._may_start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Let the threads finish what is queued, then end them."""
        threads = list(self._threads)
        for _ in threads:
            self._ready.put(None)
        for thread in threads:
            thread.join(timeout_s)

    # ---- text threads ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (job := self._ready.get()) is not None:
                if self._begin(job):
                    outcome = job.attempt()
                    if not self._end(job):
                        return  # it has been refused, and another thread has this place
                    try:
                        outcome()
                    except Exception:  # the thread must live on; the request's own guard has answered it
                        log.exception("handing a request over failed")
                    finally:
                        with self._lock:
                            self._leave_lines(job)
        except _TooLate:
            log.warning("a text thread that had been given up has ended")

    def _begin(self, job: Job) -> bool:
        with self._lock:
            if job not in self._queued:  # it has waited too long
                return False
            self._leave_queue(job)
            if not job.wanted():
                self._leave_lines(job)
                return False
            self._reading[job] = _Reading(threading.current_thread(), self._clock())
            return True

    def _end(self, job: Job) -> bool:
        """Whether the job still counts. From here on its thread is not given up any more."""
        with self._lock:
            return self._reading.pop(job, None) is not None

    # ---- with the lock held ------------------------------------------------------------------------------------------

    def _is_first(self, job: Job) -> bool:
        return all(self._lines[key][0] is job for key in job.keys)

    def _leave_queue(self, job: Job) -> None:
        del self._queued[job]
        self._num_bytes -= job.num_bytes

    def _leave_lines(self, job: Job) -> None:
        for key in job.keys:
            line = self._lines[key]
            was_first = line[0] is job
            line.remove(job)
            if not line:
                del self._lines[key]
            elif was_first and self._is_first(line[0]):
                self._ready.put(line[0])

    def _give_up(self, job: Job) -> None:
        """End the thread if Python can: the exception is raised where it next runs Python code, at the latest on its way
        out of the job. Only here, with the lock held and while the job is being read: then the thread owns no lock.
        """
        thread = self._reading.pop(job).thread
        self._threads.remove(thread)
        self._given_up.append(thread)
        self._leave_lines(job)
        _interrupt(thread)

    def _fill_places(self) -> None:
        while len(self._threads) < self._num_threads and self._may_start():
            thread = threading.Thread(target=self._run, name="everbatch-text", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _may_start(self) -> bool:
        self._given_up = [thread for thread in self._given_up if thread.is_alive()]
        return len(self._given_up) <= GIVEN_UP * self._num_threads

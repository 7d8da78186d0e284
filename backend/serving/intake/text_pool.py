"""TextPool: the threads that tokenise text and have chats rendered, so that the stub's main thread need not.

    main thread    submit(job)    queues the job, or refuses it when too many requests or bytes wait
    text thread    job.read()     tokenises; then job.hand_over(...) sends the rows to the engine
    housekeeper    expire()       refuses each job that has waited, or has been read, for longer than the timeout

Namespaces take turns, and long texts do not keep short ones waiting (text_turns.py). Jobs that share a key (a session) are
read and handed over one after the other, in the order in which they came. They stand in one line for each key, and a job with
several keys waits until it is the first in all its lines. Other jobs may overtake each other.

A thread whose job takes longer than the timeout is given up: its job is refused, and a new thread takes its place, as long as
no more than GIVEN_UP threads for each place are stuck. An exception raised in the given-up thread ends Python code. It cannot
end code inside a library: a tokenizer that never returns keeps its thread and a core, but not the interpreter's lock, which
`Tokenizer.encode` releases. Chat templates do not run here but in a process with limits (rendering.py).
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Literal, NamedTuple

from backend.api import EngineUnavailable, ErrorCode, EverbatchError, Overloaded
from backend.serving.intake.text_turns import TextTurn, TextTurns

log = logging.getLogger("everbatch.serving")
MAX_BYTES = 256 << 20  # the most bytes of inputs that may wait for a text thread, all requests together
GIVEN_UP = 2  # for each thread of the pool, the most stuck threads with which a new one is still started


class _TooLate(BaseException):
    """Raised in a thread whose job has been refused meanwhile. It is no Exception, so nothing below the pool catches it."""


class TextJob:
    """One request whose text is to be read. A text thread calls its callbacks; `expire` may call `refuse` too."""

    def __init__(
        self,
        read: Callable[[], Any],
        hand_over: Callable[[Any], None],
        refuse: Callable[[ErrorCode, str], None],
        *,
        wanted: Callable[[], bool] = lambda: True,
        num_bytes: int = 0,
        keys: frozenset[Hashable] = frozenset(),
        namespace: str = "",
    ) -> None:
        """`hand_over` gets what `read` has returned. Exactly one of `hand_over` and `refuse` is called, and only once.

        Neither is called if the job is no longer `wanted` when its turn comes. Jobs with a common key keep their order.
        """
        self.read = read
        self.hand_over = hand_over
        self.refuse = refuse
        self.wanted = wanted
        self.num_bytes = num_bytes
        self.keys = keys
        self.namespace = namespace

    def attempt(self) -> Callable[[], None]:
        """Read the text. Returns the function that hands the outcome over, or that refuses the request."""
        try:
            result = self.read()
        except EverbatchError as error:
            return partial(self.refuse, error.code, error.message)
        except Exception as error:
            # Libraries and templates may raise anything. It ends this request with an error, and is logged with its trace.
            return partial(self._fail, error)
        return partial(self.hand_over, result)

    def _fail(self, error: Exception) -> None:
        log.error("reading the text of a request failed", exc_info=error)
        self.refuse(ErrorCode.INTERNAL, "the request could not be taken in; see the server's log")


def _interrupt(thread: threading.Thread) -> None:
    """Raise _TooLate in a running thread, as soon as it next executes Python code."""
    assert thread.ident is not None, "a thread that reads a job has been started"
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_TooLate))


class _Reading(NamedTuple):
    """The thread that reads a job, its turn, and the time at which it began."""

    thread: threading.Thread
    turn: TextTurn[TextJob]
    since: float


class TextPool:
    def __init__(
        self, num_threads: int, timeout_s: float, max_jobs: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """A job may wait for `timeout_s` seconds in the queue, and its reading may take as long again."""
        self._turns: TextTurns[TextJob] = TextTurns(num_threads)
        self._num_threads = self._turns.num_threads
        self._timeout_s = timeout_s
        self._max_jobs = max_jobs
        self._clock = clock
        # A plain Lock, because _TooLate could interrupt the Python code of a Condition and leave that locked.
        self._lock = threading.Lock()
        # True for each event after which a thread may have something to read, None for each thread that is to end.
        self._calls: queue.SimpleQueue[Literal[True] | None] = queue.SimpleQueue()
        # The lock guards the turns and all attributes below.
        self._queued: dict[TextJob, float] = {}  # for each waiting job the time when it came; the oldest is first
        self._num_bytes = 0  # the size of all waiting jobs together
        self._lines: dict[
            Hashable, deque[TextJob]
        ] = {}  # for each key its jobs in their order, also while they are read
        self._reading: dict[TextJob, _Reading] = {}
        self._given_up: list[threading.Thread] = []
        self._threads: list[threading.Thread] = []

    def submit(self, job: TextJob) -> None:
        """Queue a job, and return at once. The first job starts the threads.

        Raises Overloaded when too many jobs or bytes wait, and EngineUnavailable when all threads are stuck.
        """
        with self._lock:
            self._fill_places()
            if not self._threads:
                raise EngineUnavailable("all text threads are stuck; the server must be started again")
            if len(self._queued) >= self._max_jobs or self._num_bytes + job.num_bytes > MAX_BYTES:
                raise Overloaded(
                    f"Exceeds maximum queue size: {len(self._queued)} requests of {self._num_bytes} bytes wait for a text "
                    f"thread, the limits are {self._max_jobs} (limits.max_queue_size) and {MAX_BYTES}; try again later"
                )
            self._queued[job] = self._clock()
            self._num_bytes += job.num_bytes
            for key in job.keys:
                self._lines.setdefault(key, deque()).append(job)
            if self._is_first(job):
                self._make_ready(job)

    def expire(self) -> None:
        """Refuse each job that has waited or been read for too long. It is to be called a few times a second."""
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
        """True if no thread is left that could read a job, and none may be started."""
        with self._lock:
            return not self._threads and not self._may_start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Let the threads finish what is queued, then end them. Waits up to `timeout_s` seconds for each."""
        threads = list(self._threads)
        for _ in threads:
            self._calls.put(None)
        for thread in threads:
            thread.join(timeout_s)

    # ---- text threads ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._calls.get() is not None:
                if (job := self._begin()) is not None:
                    outcome = job.attempt()
                    if not self._end(job):
                        return  # The job has been refused, and another thread has taken this place.
                    try:
                        outcome()
                    except Exception:
                        # The thread must go on. The callback itself has answered the request, before this came out of it.
                        log.exception("handing a request over failed")
                    finally:
                        with self._lock:
                            self._leave_lines(job)
        except _TooLate:
            log.warning("a text thread that had been given up has ended")

    def _begin(self) -> TextJob | None:
        """Take the job that is to be read now out of the queue; None if there is none."""
        with self._lock:
            while (turn := self._turns.take()) is not None:
                job = turn.key
                self._leave_queue(job)
                if job.wanted():
                    self._reading[job] = _Reading(threading.current_thread(), turn, self._clock())
                    return job
                self._turns.done(turn)
                self._leave_lines(job)
            return None

    def _end(self, job: TextJob) -> bool:
        """Record that the job has been read; return whether it still counts. From now on its thread is not given up."""
        with self._lock:
            return self._leave_thread(job) is not None

    # ---- with the lock held ------------------------------------------------------------------------------------------

    def _is_first(self, job: TextJob) -> bool:
        return all(self._lines[key][0] is job for key in job.keys)

    def _make_ready(self, job: TextJob) -> None:
        self._turns.put(job, job.namespace, job.num_bytes)
        self._calls.put(True)

    def _leave_queue(self, job: TextJob) -> None:
        del self._queued[job]
        self._num_bytes -= job.num_bytes
        self._turns.discard(job)

    def _leave_thread(self, job: TextJob) -> _Reading | None:
        """End the reading of a job, so that another has its turn. None if it has been ended before."""
        reading = self._reading.pop(job, None)
        if reading is not None:
            self._turns.done(reading.turn)
            self._calls.put(True)
        return reading

    def _leave_lines(self, job: TextJob) -> None:
        """Take the job out of its lines, and make each job ready that has become the first in all of its own."""
        for key in job.keys:
            line = self._lines[key]
            was_first = line[0] is job
            line.remove(job)
            if not line:
                del self._lines[key]
            elif was_first and self._is_first(line[0]):
                self._make_ready(line[0])

    def _give_up(self, job: TextJob) -> None:
        """Give up the thread that reads a job, and raise an exception in it that ends it if it runs Python code.

        At the latest the exception comes when the thread returns from a library. It may be raised only here, with the lock
        held and while the job is being read, because the thread then holds no lock of this pool.
        """
        reading = self._leave_thread(job)
        assert reading is not None, "it is being read"
        thread = reading.thread
        self._threads.remove(thread)
        self._given_up.append(thread)
        self._leave_lines(job)
        _interrupt(thread)

    def _fill_places(self) -> None:
        """Start threads until the pool has its number, as far as it may."""
        while len(self._threads) < self._num_threads and self._may_start():
            thread = threading.Thread(target=self._run, name="everbatch-text", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _may_start(self) -> bool:
        self._given_up = [thread for thread in self._given_up if thread.is_alive()]
        return len(self._given_up) <= GIVEN_UP * self._num_threads

"""GuideCompiler: compiles guides in processes with limits, and keeps compiled guides in an LRU cache.

A client's guide may need any amount of time and memory. So it is first compiled in its own process (compile_process.py), which
the kernel ends at `guided.compile_cpu_s` and `guided.compile_bytes`, and which is killed when no request waits for it any more.
Only a guide that stays within these limits is loaded into this process, on a thread beside the step loop; its memory is known by
then. Namespaces are served round robin, and one namespace alone leaves a process free for the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from backend.api.config.schema import GuidedConfig
from backend.api.errors import EverbatchError, InvalidRequest, Overloaded
from backend.api.guide import NOT_SET_UP, Guide
from backend.api.request import RequestId
from backend.core.limited_messages import Ending, Outcome
from backend.core.limited_process import LimitedJob
from backend.core.round_robin import RoundRobin, Taken
from backend.core.step import OnCompiled
from backend.guided.compile_errors import error_of, failure, lateness, no_process
from backend.guided.compile_jobs import Jobs
from backend.guided.held import loosest
from backend.guided.protocol import CompiledGuide, GuideBackend, Matcher

log = logging.getLogger("everbatch.guided")
_OVER = (Ending.OVER_CPU, Ending.OVER_MEMORY, Ending.FAILED)
MAX_LOSSES = 2  # deaths of the process after which the guide that it was compiling is refused


@dataclass(slots=True)
class _Entry:
    """One guide, compiled or not, with the requests that use it or wait for it."""

    guide: Guide
    job: LimitedJob = field(default_factory=LimitedJob)
    is_begun: bool = False
    compiled: CompiledGuide | None = None
    num_bytes: int = 0  # memory that the compiled guide holds
    notes: tuple[str, ...] = ()  # keywords of its schemas that are not held, with their places
    users: dict[RequestId, str] = field(
        default_factory=dict
    )  # live requests, for whose sake it is kept; their namespaces
    # Requests that wait for the outcome, with their time limits.
    waiting: dict[RequestId, float] = field(default_factory=dict)


class GuideCompiler:
    """Implements core.guides.Guides, and makes the matchers of workers."""

    def __init__(self, config: GuidedConfig, make_backend: Callable[[], GuideBackend], jobs: Jobs) -> None:
        """make_backend: called once, on a thread of this class, when the first guide comes. It may raise EverbatchError.
        jobs: compiles under the limits of `config`; it is closed with this.
        """
        self._config = config
        self._make_backend = make_backend
        self._backend: GuideBackend | None = None
        self._making = threading.Lock()
        self._jobs = jobs
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._keys: dict[RequestId, bytes] = {}  # live request -> key of its guide
        self._queue: RoundRobin[bytes] = RoundRobin(
            max(1, config.compile_processes - 1)
        )  # the last place is for other namespaces
        self._lock = threading.Lock()
        self._someone_waits = threading.Condition(self._lock)
        self._work = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._warming: threading.Thread | None = None
        self._is_closed = False
        self._tell: OnCompiled = lambda request_id, error: None

    def on_compiled(self, tell: OnCompiled) -> None:
        self._tell = tell

    def start(self) -> None:
        """Start the process, and make the library in this one, in advance. Both take seconds where the vocabulary is large."""
        self._warming = threading.Thread(target=self._warm, name="guide-start", daemon=True)
        self._warming.start()

    def wait_until_ready(self) -> None:
        """Wait until `start` is done. The requests of the first guide hear of a failure."""
        if self._warming is not None:
            self._warming.join()

    def _warm(self) -> None:
        with contextlib.suppress(OSError, EverbatchError):
            self._jobs.start()
            self._made_backend()
            self._jobs.wait_until_ready()

    def begin(self, request_id: RequestId, guide: Guide, namespace: str) -> bool:
        key = _digest(guide)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._check_queue(namespace)
                entry = self._entries[key] = _Entry(guide)
            self._entries.move_to_end(key)
            self._keys[request_id] = key
            entry.users[request_id] = namespace
            if entry.compiled is not None:
                return True
            entry.waiting[request_id] = time.monotonic() + self._config.compile_timeout_s
            if not entry.is_begun:
                self._queue.put(namespace, key)
            self._work.notify()
            self._someone_waits.notify()
        self._start_threads()
        return False

    def notes(self, request_id: RequestId) -> tuple[str, ...]:
        with self._lock:
            entry = self._entries.get(self._keys.get(request_id, b""))
            return () if entry is None else entry.notes

    def end(self, request_id: RequestId) -> None:
        with self._lock:
            key = self._keys.pop(request_id, None)
            entry = None if key is None else self._entries.get(key)
            if key is None or entry is None:
                return
            entry.users.pop(request_id, None)
            if entry.waiting.pop(request_id, None) is not None:
                self._give_up(key, entry)
            self._shrink()

    def matcher(self, guide: Guide) -> Matcher:
        """A matcher at the start of an output. The guide must have been compiled for a live request."""
        with self._lock:
            compiled = self._entries[_digest(guide)].compiled
        assert compiled is not None  # the engine holds a request until its guide is compiled
        return compiled.matcher()

    def close(self) -> None:
        """End the threads and processes. Requests that wait get no answer."""
        with self._lock:
            self._is_closed = True
            for entry in self._entries.values():
                entry.job.drop()
            self._work.notify_all()
            self._someone_waits.notify_all()
        self._jobs.close()
        for thread in self._threads:
            thread.join()
        self.wait_until_ready()

    @property
    def num_bytes(self) -> int:
        """Memory of all compiled guides."""
        return sum(entry.num_bytes for entry in self._entries.values())

    def _check_queue(self, namespace: str) -> None:
        waiting = self._queue.num_waiting(namespace)
        if waiting >= self._config.max_compiling:
            raise Overloaded(
                f"{waiting} guides wait to be compiled, the limit is {self._config.max_compiling} "
                f"(guided.max_compiling); try again later"
            )

    def _start_threads(self) -> None:
        with self._lock:
            if self._threads or self._is_closed:
                return
            targets = [("guide-watch", self._watch)]
            targets += [(f"guide-compiler-{i}", self._run) for i in range(self._config.compile_processes)]
            self._threads = [threading.Thread(target=each, name=name, daemon=True) for name, each in targets]
            for thread in self._threads:
                thread.start()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            work, entry = taken
            compiled, error = self._compile(entry)
            with self._lock:
                self._queue.done(work.namespace)
                self._work.notify()
                ended = [] if self._is_closed else list(entry.waiting)
                entry.waiting.clear()
                entry.compiled = compiled
                if compiled is None and self._entries.get(work.key) is entry:
                    del self._entries[work.key]
                self._shrink()
            for request_id in ended:
                self._tell(request_id, error)

    def _take(self) -> tuple[Taken[bytes], _Entry] | None:
        """Wait for the next guide to compile. None after `close`."""
        with self._lock:
            while not self._is_closed:
                taken = self._queue.take()
                if taken is not None:
                    entry = self._entries[taken.key]
                    entry.is_begun = True
                    return taken, entry
                self._work.wait()
            return None

    def _compile(self, entry: _Entry) -> tuple[CompiledGuide | None, EverbatchError | None]:
        """Returns (the compiled guide, the error); (None, None) if no request waits for it any more."""
        try:
            backend = self._made_backend()
            outcome = self._outcome(entry)
            if outcome.ending is not Ending.DONE or not entry.waiting:
                return None, error_of(outcome, self._config)
            self._book(entry, outcome.num_bytes)
            entry.notes = outcome.notes
            if outcome.notes:
                keywords = sorted({note.rpartition(":")[2].strip() for note in outcome.notes})
                log.warning("a guide is held without %s, which cannot be held", ", ".join(keywords))
            return backend.load(outcome.result), None
        except EverbatchError as error:
            return None, error
        except OSError as error:
            if not self._is_closed:
                log.error("no process to compile guides can be started: %s", error)
            return None, no_process()
        except BaseException as error:  # any failure of the library, Rust panics too, ends this guide's requests only
            log.error("a guide of type %s failed", entry.guide.type.value, exc_info=error)
            return None, failure(type(error).__name__)

    def _made_backend(self) -> GuideBackend:
        with self._making:
            if self._backend is None:
                started = time.monotonic()
                self._jobs.start()
                try:
                    self._backend = self._make_backend()
                except EverbatchError as error:
                    raise InvalidRequest(f"{NOT_SET_UP}: {error.message}") from None
                log.info("guided decoding: %s, ready in %.1f s", self._backend.name, time.monotonic() - started)
            return self._backend

    def _outcome(self, entry: _Entry) -> Outcome:
        """Run a job and return its outcome. It is run again if the process died, and with the loosest form of its guide, if that
        has one, if it went over a limit.
        """
        guide, num_losses = entry.guide, 0
        outcome = self._jobs.run(entry.job, guide)
        while outcome.ending in _OVER or (outcome.ending is Ending.LOST and num_losses < MAX_LOSSES - 1):
            if outcome.ending is Ending.LOST:
                num_losses += 1
            elif (looser := loosest(guide)) is not None:
                guide = looser
            else:
                break
            with self._lock:
                if not entry.waiting or self._is_closed:
                    break
                entry.job = LimitedJob()
            outcome = self._jobs.run(entry.job, guide)
        return outcome

    def _book(self, entry: _Entry, num_bytes: int) -> None:
        """Account the memory of a guide. Raises Overloaded if the guides of live requests leave no room for it.

        A namespace may use at most as much as it leaves free for others; its first guide only needs room.
        """
        with self._lock:
            live = [each for each in self._entries.values() if each.users]
            free = self._config.live_bytes - sum(each.num_bytes for each in live) - num_bytes
            used = [
                sum(each.num_bytes for each in live if namespace in each.users.values())
                for namespace in set(entry.users.values())
            ]
            least = min(used, default=0)
            if free < 0 or (least and least + num_bytes > free):
                raise Overloaded(
                    f"a compiled guide of {num_bytes} bytes has no room beside those of live requests, which have "
                    f"{self._config.live_bytes} bytes (guided.live_bytes), shared between namespaces; try again later"
                )
            entry.num_bytes = num_bytes

    def _watch(self) -> None:
        """Answer requests whose time limit has passed. The thread sleeps until the next limit, or until a request waits."""
        self._await_process()
        while True:
            with self._lock:
                while not (late := self._take_late()):
                    if self._is_closed:
                        return
                    self._someone_waits.wait(self._seconds_left())
            for request_id, error in late:
                self._tell(request_id, error)

    def _await_process(self) -> None:
        """Wait for the first start of the compile process, which does not count towards the time limits of requests."""
        with contextlib.suppress(OSError):  # `_compile` reports that it cannot be started
            self._jobs.start()
            self._jobs.wait_until_ready()
        with self._lock:
            limit = time.monotonic() + self._config.compile_timeout_s
            for entry in self._entries.values():
                entry.waiting = dict.fromkeys(entry.waiting, limit)

    def _take_late(self) -> list[tuple[RequestId, EverbatchError]]:
        """Remove and return the requests whose time limit has passed, with their errors."""
        now, late = time.monotonic(), []
        for key, entry in list(self._entries.items()):
            for request_id in [each for each, limit in entry.waiting.items() if limit <= now]:
                del entry.waiting[request_id]
                late.append((request_id, lateness(entry.is_begun, self._config.compile_timeout_s)))
                self._give_up(key, entry)
        return late

    def _seconds_left(self) -> float | None:
        """Seconds until the first time limit; None if no request waits."""
        limits = [limit for entry in self._entries.values() for limit in entry.waiting.values()]
        return max(0.0, min(limits) - time.monotonic()) if limits else None

    def _give_up(self, key: bytes, entry: _Entry) -> None:
        """Cancel the job of a guide for which no request waits any more."""
        if entry.compiled is None and not entry.waiting:
            del self._entries[key]
            self._queue.discard(key)
            entry.job.drop()

    def _shrink(self) -> None:
        """Evict unused guides, least recently used first, until the rest fits."""
        size = self.num_bytes
        for key, entry in list(self._entries.items()):
            if size <= self._config.cache_bytes:
                return
            if entry.compiled is not None and not entry.users:
                size -= entry.num_bytes
                del self._entries[key]


def _digest(guide: Guide) -> bytes:
    return hashlib.blake2b(f"{guide.type.value}\0{guide.text}".encode(), digest_size=32).digest()

"""GuideCompiler: compiles guides on a thread of its own and keeps what is compiled, the least recently used going first.

A guide that takes longer than `guided.compile_timeout_s`, the wait for those ahead of it included, is answered with an error;
the thread finishes it all the same, for no library here can be interrupted, but each bounds its own work (see the backends).
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from backend.api.config import GuidedConfig
from backend.api.errors import EverbatchError, Overloaded
from backend.api.guide import NOT_SET_UP, Guide, InvalidGuide
from backend.api.request import RequestId
from backend.guided.protocol import CompiledGuide, GuideBackend, GuideError, Matcher

log = logging.getLogger("everbatch.guided")
OnCompiled = Callable[[RequestId, str], None]


@dataclass(slots=True)
class _Entry:
    """What is known of one guide."""

    guide: Guide
    compiled: CompiledGuide | None = None
    users: set[RequestId] = field(default_factory=set)  # live requests, for whose sake it is kept
    waiting: dict[RequestId, float] = field(
        default_factory=dict
    )  # those that have not been told, and their time limits


class GuideCompiler:
    """Implements core.guides.Guides, and makes the matchers of workers."""

    def __init__(self, config: GuidedConfig, make_backend: Callable[[], GuideBackend]) -> None:
        """`make_backend` is called once, on the compiling thread, when the first guide comes. It may raise EverbatchError."""
        self._config = config
        self._make_backend = make_backend
        self._backend: GuideBackend | None = None
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._keys: dict[RequestId, bytes] = {}  # of live requests
        self._lock = threading.Lock()
        self._someone_waits = threading.Condition(self._lock)
        self._work: queue.SimpleQueue[tuple[bytes, Guide]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._tell: OnCompiled = lambda request_id, error: None

    def on_compiled(self, tell: OnCompiled) -> None:
        self._tell = tell

    def begin(self, request_id: RequestId, guide: Guide) -> bool:
        key = _digest(guide)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                waiting = sum(each.compiled is None for each in self._entries.values())
                if waiting >= self._config.max_compiling:
                    raise Overloaded(
                        f"{waiting} guides wait to be compiled, the limit is {self._config.max_compiling} "
                        f"(guided.max_compiling); try again later"
                    )
                entry = self._entries[key] = _Entry(guide)
                self._work.put((key, guide))
            self._entries.move_to_end(key)
            self._keys[request_id] = key
            entry.users.add(request_id)
            if entry.compiled is not None:
                return True
            entry.waiting[request_id] = time.monotonic() + self._config.compile_timeout_s
            self._someone_waits.notify()
        self._start()
        return False

    def end(self, request_id: RequestId) -> None:
        with self._lock:
            key = self._keys.pop(request_id, None)
            if key is not None and key in self._entries:
                self._entries[key].users.discard(request_id)
                self._entries[key].waiting.pop(request_id, None)
                self._shrink()

    def matcher(self, guide: Guide) -> Matcher:
        """A matcher at the beginning of an output. The guide must have been compiled for a request that is live."""
        with self._lock:
            compiled = self._entries[_digest(guide)].compiled
        assert compiled is not None  # the engine holds a request back until its guide is
        return compiled.matcher()

    @property
    def num_bytes(self) -> int:
        """What the compiled guides take."""
        return sum(entry.compiled.num_bytes for entry in self._entries.values() if entry.compiled is not None)

    def _start(self) -> None:
        with self._lock:
            if not self._threads:
                targets = {"guide-compiler": self._run, "guide-watch": self._watch}
                self._threads = [
                    threading.Thread(target=each, name=name, daemon=True) for name, each in targets.items()
                ]
                for thread in self._threads:
                    thread.start()

    def _run(self) -> None:
        while True:
            key, guide = self._work.get()
            compiled, error = self._compile(guide)
            with self._lock:
                entry = self._entries[key]
                told = list(entry.waiting)
                entry.waiting.clear()
                entry.compiled = compiled
                if compiled is None:
                    del self._entries[key]
                self._shrink()
            for request_id in told:
                self._tell(request_id, error)

    def _compile(self, guide: Guide) -> tuple[CompiledGuide | None, str]:
        try:
            if self._backend is None:
                started = time.monotonic()
                self._backend = self._make_backend()
                log.info("guided decoding: %s, ready in %.1f s", self._backend.name, time.monotonic() - started)
            return self._backend.compile(guide), ""
        except GuideError as error:
            return None, InvalidGuide(str(error), error.place).message
        except EverbatchError as error:
            return None, f"{NOT_SET_UP}: {error.message}"
        except Exception as error:  # a library's failure ends the requests with this guide, and nobody else
            log.error("a guide of type %s failed", guide.type.value, exc_info=error)
            return None, InvalidGuide(
                f"it cannot be compiled ({type(error).__name__}); the engine's log says why"
            ).message

    def _watch(self) -> None:
        """Answer those whose time is up. The thread sleeps until the next one's is, or until somebody waits at all."""
        limit_s = self._config.compile_timeout_s
        error = InvalidGuide(
            f"it was not compiled within {limit_s:g} s (guided.compile_timeout_s); simplify it"
        ).message
        while True:
            with self._lock:
                while not (late := self._take_late()):
                    self._someone_waits.wait(self._seconds_left())
            for request_id in late:
                self._tell(request_id, error)

    def _take_late(self) -> list[RequestId]:
        """Those whose time is up; they wait no longer."""
        now, late = time.monotonic(), []
        for entry in self._entries.values():
            for request_id in [each for each, limit in entry.waiting.items() if limit <= now]:
                del entry.waiting[request_id]
                late.append(request_id)
        return late

    def _seconds_left(self) -> float | None:
        """Until the first time limit; None where nobody waits."""
        limits = [limit for entry in self._entries.values() for limit in entry.waiting.values()]
        return max(0.0, min(limits) - time.monotonic()) if limits else None

    def _shrink(self) -> None:
        """Forget what nobody uses, the least recently asked for first, until the rest fits."""
        size = self.num_bytes
        for key, entry in list(self._entries.items()):
            if size <= self._config.cache_bytes:
                return
            if entry.compiled is not None and not entry.users:
                size -= entry.compiled.num_bytes
                del self._entries[key]


def _digest(guide: Guide) -> bytes:
    return hashlib.blake2b(f"{guide.type.value}\0{guide.text}".encode(), digest_size=32).digest()

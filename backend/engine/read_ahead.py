"""ReadAhead: reads LoRA adapters on threads of its own, while their requests wait in Preparation.

A reader is free again as soon as an adapter has been read, whatever its request still waits for. The adapters that have been read
and wait are bounded in bytes: a namespace may have as much of that room as it leaves to others. Readers serve namespaces fairly.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from backend.api.errors import EverbatchError, InvalidRequest
from backend.api.lora import LoraConfig
from backend.core.round_robin import RoundRobin
from backend.core.step import PreparedAdapter

Outcome = PreparedAdapter | EverbatchError


@dataclass(slots=True, eq=False)
class Coming:
    """An adapter that a request brings."""

    namespace: str
    lora: LoraConfig
    is_being_read: bool = False
    outcome: Outcome | None = None  # when it has been read

    @property
    def name(self) -> tuple[str, int]:
        """By which the cache will know it."""
        return self.namespace, self.lora.task_id


class ReadAhead:
    """Only `_read` runs on the reader threads."""

    def __init__(
        self,
        prepare: Callable[[LoraConfig], PreparedAdapter],
        num_readers: int,
        num_bytes: int,
        report: Callable[[Coming, Outcome], None],
    ) -> None:
        """prepare: reads an adapter, on a reader's thread
        num_bytes: room for adapters that have been read and wait. One for each reader comes on top, for its size is not known.
        report: called on a reader's thread; it must have `note` called on the engine's thread
        """
        self._prepare, self._report = prepare, report
        self._num_readers, self._num_bytes = num_readers, num_bytes
        self._unread: RoundRobin[Coming] = RoundRobin(num_readers)
        self._num_reading = 0
        self._held: dict[Coming, int] = {}  # adapters that have been read and wait, with their bytes
        self._threads: ThreadPoolExecutor | None = None

    def add(self, coming: Coming) -> None:
        """Read this entry when there is a reader, and room."""
        self._unread.put(coming.namespace, coming)
        self._begin()

    def note(self, coming: Coming, outcome: Outcome) -> None:
        """Note that an adapter has been read."""
        coming.is_being_read, coming.outcome = False, outcome
        self._num_reading -= 1
        self._unread.done(coming.namespace)
        self._held[coming] = outcome.num_bytes if isinstance(outcome, PreparedAdapter) else 0
        self._begin()

    def let_go(self, coming: Coming) -> None:
        """Forget an adapter: the cache holds it now, or every request for it has ended. It must not be one that is being read."""
        self._unread.discard(coming)
        self._held.pop(coming, None)
        self._begin()

    def close(self) -> None:
        """Nothing more is read."""
        self._unread.clear()
        self._held.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    def _begin(self) -> None:
        while self._num_reading < self._num_readers and (taken := self._unread.take(self._has_room)) is not None:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._num_readers, thread_name_prefix="everbatch-adapters")
            taken.key.is_being_read = True
            self._num_reading += 1
            self._threads.submit(self._read, taken.key)

    def _has_room(self, namespace: str) -> bool:
        """True if one more adapter of the namespace may be read: its first only needs any room at all."""
        free = self._num_bytes - sum(self._held.values())
        own = sum(num_bytes for coming, num_bytes in self._held.items() if coming.namespace == namespace)
        return own < free if own else free > 0

    def _read(self, coming: Coming) -> None:
        outcome: Outcome
        try:
            outcome = self._prepare(coming.lora)
        except EverbatchError as error:
            outcome = error
        except Exception as error:  # whatever a file or a tensor does: the client must be answered
            outcome = InvalidRequest(
                f"LoRA adapter {coming.lora.shown} cannot be read ({type(error).__name__}: {error})"
            )
        self._report(coming, outcome)

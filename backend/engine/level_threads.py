"""LevelThreads: a thread that reads blocks of the second level, and one that writes them, beside the engine's.

Their queues are bounded. What they find out they post to the engine's thread. A thread that a disk holds up holds up nothing
else: the engine goes on without it, and so does the end of the process.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from backend.core.kept_block import BlockStore, Found, Miss, RecordFormat
from backend.core.sequence import Sequence
from backend.kvcache.second_level import LevelBlock, Offload

log = logging.getLogger("everbatch.engine")
QUEUE_BYTES = 64 << 20  # blocks that have been copied and wait to be written
MAX_LOADS = 256  # loads that wait to be read
CLOSE_S = 0.5  # how long an end waits for what is still to be written


@dataclass(slots=True, eq=False)
class LevelLoad:
    """Blocks that are read for a sequence which waits for them."""

    seq: Sequence
    start: int  # number of the first block in the sequence
    blocks: list[LevelBlock]
    begun_ns: int
    data: list[bytes] = field(default_factory=list)  # the KV of the first blocks, as they arrive
    is_over: bool = False  # nothing more of it is wanted, or will come


class LevelReports(Protocol):
    """Takes the outcomes of reads and writes, on the engine's thread."""

    def opened(self, found: list[Found]) -> None: ...
    def written(self, offload: Offload, is_whole: bool) -> None: ...
    def arrived(self, load: LevelLoad, block: LevelBlock, outcome: bytes | Miss) -> None: ...
    def ended(self, load: LevelLoad) -> None: ...


class LevelIo(Protocol):
    """Reads and writes blocks, and reports through `post`."""

    @property
    def num_free(self) -> int:
        """Blocks that `write` takes at present."""
        ...

    def start(self, post: Callable[[Callable[[], None]], None], reports: LevelReports) -> None: ...
    def write(self, offload: Offload, data: bytes) -> bool:
        """False if the queue is full."""
        ...

    def read(self, load: LevelLoad) -> bool:
        """False if the queue is full. Otherwise `ended` will be reported."""
        ...

    def close(self) -> None: ...


def read_one(store: BlockStore, form: RecordFormat, block: LevelBlock) -> bytes | Miss:
    """The KV of a block, after all checks."""
    try:
        return form.check(store.read(block.place), block.record)
    except OSError as error:
        log.warning("a block of the second level cannot be read (%s); its KV is computed again", error.strerror)
        return Miss.FAILED


def write_one(store: BlockStore, form: RecordFormat, offload: Offload, data: bytes) -> bool:
    """True if the block has been written."""
    try:
        store.write(offload.place, form.encode(offload.record, data, offload.stamp))
    except OSError as error:
        log.warning("a block of the second level cannot be written (%s)", error.strerror)
        return False
    return True


class LevelThreads:
    """Implements LevelIo."""

    def __init__(self, store: BlockStore, form: RecordFormat) -> None:
        self._store, self._form = store, form
        self._writes: queue.Queue[tuple[Offload, bytes] | None] = queue.Queue(max(2, QUEUE_BYTES // form.place_bytes))
        self._reads: queue.Queue[LevelLoad | None] = queue.Queue(MAX_LOADS)
        self._is_closed = False

    @property
    def num_free(self) -> int:
        return self._writes.maxsize - self._writes.qsize()

    def start(self, post: Callable[[Callable[[], None]], None], reports: LevelReports) -> None:
        self._post, self._reports = post, reports
        self._threads = [
            threading.Thread(target=run, name=f"everbatch-level-{name}", daemon=True)
            for name, run in (("writer", self._write_all), ("reader", self._read_all))
        ]
        for thread in self._threads:
            thread.start()

    def write(self, offload: Offload, data: bytes) -> bool:
        return _put(self._writes, (offload, data))

    def read(self, load: LevelLoad) -> bool:
        return _put(self._reads, load)

    def close(self) -> None:
        """Give the writer a moment for what it has. A thread that does not end keeps the store open."""
        self._is_closed = True
        for waiting in (self._writes, self._reads):
            _put(waiting, None)
        for thread in self._threads:
            thread.join(CLOSE_S)
        if not any(thread.is_alive() for thread in self._threads):
            self._store.close()

    def _write_all(self) -> None:
        found = self._scan()
        self._post(partial(self._reports.opened, found))
        for offload, data in self._items(self._writes):
            is_whole = write_one(self._store, self._form, offload, data)
            self._post(partial(self._reports.written, offload, is_whole))

    def _items(self, waiting: queue.Queue[Any]) -> Iterator[Any]:
        """Yield what comes, until the end: a None wakes the thread then, unless the queue is too full for it."""
        while not (self._is_closed and waiting.empty()):
            if (item := waiting.get()) is not None:
                yield item

    def _scan(self) -> list[Found]:
        try:
            return list(self._store.scan())
        except OSError as error:
            log.warning("the second level cannot be read (%s); it begins empty", error.strerror)
            return []

    def _read_all(self) -> None:
        for load in self._items(self._reads):
            self._read(load)

    def _read(self, load: LevelLoad) -> None:
        for block in load.blocks:
            if load.is_over or self._is_closed:
                break
            outcome = read_one(self._store, self._form, block)
            self._post(partial(self._reports.arrived, load, block, outcome))
            if isinstance(outcome, Miss):
                break
        self._post(partial(self._reports.ended, load))


def _put(waiting: queue.Queue[Any], item: object) -> bool:
    try:
        waiting.put_nowait(item)
    except queue.Full:
        return False
    return True

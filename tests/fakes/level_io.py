"""A LevelIo without threads: what was asked is done when a test says so, one block at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from backend.core.kept_block import BlockStore, Miss, RecordFormat
from backend.engine.level_threads import LevelLoad, LevelReports, read_one, write_one
from backend.kvcache.second_level import Offload


class ManualIo:
    """Implements LevelIo. `is_eager`: everything is done as soon as it is asked."""

    def __init__(self, store: BlockStore, form: RecordFormat, is_eager: bool = False, num_free: int = 100) -> None:
        self.store, self.form, self.is_eager = store, form, is_eager
        self.num_free = num_free
        self.reads: deque[LevelLoad] = deque()
        self.writes: deque[tuple[Offload, bytes]] = deque()
        self.written: list[bytes] = []  # keys of all writes
        self._num_read = 0  # blocks of the first load that have been read

    @classmethod
    def eager(cls, store: BlockStore, form: RecordFormat) -> ManualIo:
        return cls(store, form, is_eager=True)

    def start(self, post: Callable[[Callable[[], None]], None], reports: LevelReports) -> None:
        self.post, self.reports = post, reports
        found = list(self.store.scan())
        post(lambda: reports.opened(found))

    def write(self, offload: Offload, data: bytes) -> bool:
        if self.num_free <= len(self.writes):
            return False
        self.writes.append((offload, data))
        while self.is_eager and self.writes:
            self.write_next()
        return True

    def read(self, load: LevelLoad) -> bool:
        self.reads.append(load)
        while self.is_eager and self.reads:
            self.read_next()
        return True

    def close(self) -> None:
        while self.writes:
            self.write_next()
        self.store.close()

    def write_next(self) -> None:
        offload, data = self.writes.popleft()
        is_whole = write_one(self.store, self.form, offload, data)
        self.written.append(offload.key)
        self.post(lambda: self.reports.written(offload, is_whole))

    def read_next(self) -> None:
        """Read one block of the first load, or report its end."""
        load = self.reads[0]
        if load.is_over or self._num_read == len(load.blocks):
            self._end(load)
            return
        block = load.blocks[self._num_read]
        outcome = read_one(self.store, self.form, block)
        self._num_read += 1
        self.post(lambda: self.reports.arrived(load, block, outcome))
        if isinstance(outcome, Miss) or self._num_read == len(load.blocks):
            self._end(load)

    def _end(self, load: LevelLoad) -> None:
        self.reads.popleft()
        self._num_read = 0
        self.post(lambda: self.reports.ended(load))

"""LevelTraffic: moves KV between the pool and its second level, beside the steps (docs/second-level.md).

    offload    blocks that are due (kvcache/second_level.py) are copied between two steps, a bounded number at a time, and
               written by a thread. It gets a copy only when the steps that were in flight have landed: a failed step leaves
               the pool undefined
    onboard    a sequence that is about to be admitted, and of whose tokens the level has more KV than the pool, waits while a
               thread reads it; others go on. What has arrived is written to the pool as cached blocks, and the sequence is
               admitted like any other that finds its prefix there. Each admission waits once

Whatever goes wrong with the level is a miss, which is counted: the KV is computed from token ids. This file runs on the engine's
thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backend.api.stats import SecondLevelStats
from backend.core.clock import Clock
from backend.core.kept_block import Found, Miss, RecordFormat
from backend.core.sequence import Sequence
from backend.core.step import SequenceId, WorkerGroup
from backend.engine.callbacks import Callbacks
from backend.engine.level_rates import LevelRates
from backend.engine.level_threads import LevelIo, LevelLoad
from backend.kvcache.manager import KVCacheManager
from backend.kvcache.second_level import LevelBlock, Offload, SecondLevel

STALL_S = 0.1  # a level from which nothing comes for so long is a miss
BUSY_COPY_BYTES = 4 << 20  # copied between two steps
IDLE_COPY_BYTES = 64 << 20  # copied at a time while there is no step to run


@dataclass(slots=True)
class _Copy:
    """A block that was copied from the pool."""

    offload: Offload
    data: bytes
    epoch: int  # SecondLevel.num_lost_epochs when it was copied


class LevelTraffic:
    """Implements scheduler.admission.LevelLoads."""

    def __init__(
        self,
        level: SecondLevel,
        form: RecordFormat,
        io: LevelIo,
        kv: KVCacheManager,
        workers: WorkerGroup,
        clock: Clock,
        onboards: bool = True,
    ) -> None:
        """`onboards`: False: blocks are written, and none is read back."""
        self._level, self._form, self._io, self._kv = level, form, io, kv
        self._workers, self._clock, self._onboards = workers, clock, onboards
        self.rates = LevelRates(form.block_size, form.block_bytes)
        self._copies: list[_Copy] = []
        self._loading: dict[SequenceId, LevelLoad] = {}
        self._asked: set[SequenceId] = set()  # waiting sequences that have had their load, or need none
        self._being_read: set[LevelLoad] = set()
        self._queued_bytes = 0  # that the loads of `_being_read` still bring
        self._progress_ns = 0  # when the reader has last reported something, or was given something to do
        self._is_stalled = self._is_closed = False
        self._misses: dict[str, int] = {}
        self._num_onboarded = self._num_offloaded = self._num_recomputed = 0
        self.queued_tokens: Callable[[], int] = lambda: 0  # set by the scheduler
        self._callbacks = Callbacks()
        io.start(self._callbacks.post, self)

    @property
    def loads(self) -> LevelTraffic:
        """As the scheduler knows it."""
        return self

    # ---- called by the engine ----------------------------------------------------------------------------------------

    def on_ready(self, wake: Callable[[], None]) -> None:
        """`wake` is called on other threads when `advance` has something to do."""
        self._callbacks.wake = wake

    @property
    def is_loading_any(self) -> bool:
        return bool(self._loading)

    def advance(self, is_busy: bool) -> None:
        """Do what has become possible: end loads, and copy and hand over blocks that are due. Called before each step."""
        self._callbacks.run()
        self._hand_over()
        for load in list(self._loading.values()):
            if load.is_over or self._gives_up(load):
                self._land(load)
        self._copy(BUSY_COPY_BYTES if is_busy else IDLE_COPY_BYTES)

    def close(self, flushes: bool) -> None:
        """`flushes`: write what is due, as far as that takes no time to speak of. No step may be in flight."""
        if self._is_closed:
            return
        self._is_closed = True
        for _ in range(2 if flushes else 0):
            self.advance(is_busy=False)
        self._io.close()

    def stats(self) -> SecondLevelStats:
        load, prefill = self.rates.load.per_unit, self.rates.prefill.per_unit
        return SecondLevelStats(
            secondary_max_num_blocks=self._level.num_places,
            secondary_used_num_blocks=len(self._level),
            secondary_block_bytes=self._form.place_bytes,
            onboarded_blocks_total=self._num_onboarded,
            offloaded_blocks_total=self._num_offloaded,
            skipped_blocks_total=self._level.num_skipped,
            recomputed_blocks_total=self._num_recomputed,
            misses_total=dict(self._misses),
            load_bytes_per_s=1 / load if load else 0.0,
            prefill_tokens_per_s=1 / prefill if prefill else 0.0,
        )

    # ---- called by the scheduler -------------------------------------------------------------------------------------

    def is_loading(self, seq: Sequence) -> bool:
        return seq.seq_id in self._loading

    def holds_back(self, seq: Sequence, num_found_tokens: int) -> bool:
        """Begin to load KV of a sequence whose first `num_found_tokens` tokens are in the pool. False if there is nothing to
        load, or computing it is quicker.
        """
        if not self._onboards or seq.seq_id in self._asked:
            return False
        self._asked.add(seq.seq_id)
        start = num_found_tokens // self._form.block_size
        blocks = self._level.find(seq, start)
        if not blocks:
            return False
        if self._is_stalled:
            self._count(Miss.STALLED)
            return False
        now_ns = self._clock.monotonic_ns()
        count = self.rates.num_to_load(len(blocks), self._queued_bytes, self.queued_tokens(), now_ns)
        self._num_recomputed += len(blocks) - count
        load = LevelLoad(seq, start, blocks[:count], now_ns)
        if not count or not self._io.read(load):
            return False
        if not self._being_read:
            self._progress_ns = now_ns
        self._level.begin_read(load.blocks)
        self._being_read.add(load)
        self._queued_bytes += count * self._form.block_bytes
        self._loading[seq.seq_id] = load
        return True

    def forget(self, seq: Sequence) -> None:
        """The sequence has been admitted, or has left the queue."""
        self._asked.discard(seq.seq_id)
        load = self._loading.pop(seq.seq_id, None)
        if load is not None:
            load.is_over = True

    def note_step(self, num_context_tokens: int, seconds: float) -> None:
        """A step with so many tokens of prompts has taken so long."""
        if num_context_tokens >= self._form.block_size:
            self.rates.prefill.note(num_context_tokens, seconds)

    # ---- reports of the threads, on the engine's thread --------------------------------------------------------------

    def opened(self, found: list[Found]) -> None:
        self._level.open(found)

    def written(self, offload: Offload, is_whole: bool) -> None:
        self._level.written(offload.key, is_whole)
        self._num_offloaded += is_whole
        if not is_whole:
            self._count(Miss.FAILED)

    def arrived(self, load: LevelLoad, block: LevelBlock, outcome: bytes | Miss) -> None:
        self._note_progress()
        if isinstance(outcome, Miss):
            self._count(outcome)
            self._level.forget(block)
        elif not load.is_over:
            load.data.append(outcome)

    def ended(self, load: LevelLoad) -> None:
        self._note_progress()
        load.is_over = True
        self._being_read.remove(load)
        self._queued_bytes -= len(load.blocks) * self._form.block_bytes
        self._level.end_read(load.blocks)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _note_progress(self) -> None:
        self._progress_ns, self._is_stalled = self._clock.monotonic_ns(), False

    def _gives_up(self, load: LevelLoad) -> bool:
        """End a load of which nothing comes any more, or that has taken longer than computing would have."""
        now_ns = self._clock.monotonic_ns()
        if now_ns - max(self._progress_ns, load.begun_ns) > STALL_S * 1e9:
            self._is_stalled = True
            self._count(Miss.STALLED)
        else:
            limit_s = self.rates.prefill_s(len(load.blocks))
            if limit_s is None or now_ns - load.begun_ns <= limit_s * 1e9:
                return False
            self._count(Miss.SLOW)
        load.is_over = True
        return True

    def _land(self, load: LevelLoad) -> None:
        """Write what has arrived to the pool."""
        del self._loading[load.seq.seq_id]
        first, block_ids = self._level.onboard(load.seq, load.start, len(load.data)) if load.data else (0, [])
        if block_ids:
            arrived = load.data[first - load.start :]
            data = b"".join(arrived[: len(block_ids)])
            self._workers.write_blocks(block_ids, data, self._kv.num_backed_blocks)
            self._num_onboarded += len(block_ids)
        now_ns = self._clock.monotonic_ns()
        num_bytes = max(1, len(load.data)) * self._form.block_bytes
        self.rates.note_load(num_bytes, (now_ns - load.begun_ns) / 1e9, now_ns)

    def _hand_over(self) -> None:
        """Give copies to the writer. The steps that were in flight when they were made have landed, or have failed."""
        for copy in self._copies:
            is_valid = copy.epoch == self._level.num_lost_epochs
            if not (is_valid and self._io.write(copy.offload, copy.data)):
                self._level.written(copy.offload.key, False)
        self._copies = []

    def _copy(self, max_bytes: int) -> None:
        room = min(self._io.num_free, max(1, max_bytes // max(1, self._form.block_bytes)))
        offloads = self._level.take_offloads(room)
        if not offloads:
            return
        data = self._workers.read_blocks([each.block_id for each in offloads])
        size = self._form.block_bytes
        epoch = self._level.num_lost_epochs
        self._copies = [
            _Copy(each, data[index * size : (index + 1) * size], epoch) for index, each in enumerate(offloads)
        ]
        self._callbacks.post(lambda: None)  # come back to hand them over, also without a step

    def _count(self, miss: Miss) -> None:
        self._misses[miss.value] = self._misses.get(miss.value, 0) + 1


class NoLevel:
    """In place of LevelTraffic, where there is no second level."""

    loads = None

    def on_ready(self, wake: Callable[[], None]) -> None: ...

    def advance(self, is_busy: bool) -> None: ...

    def close(self, flushes: bool) -> None: ...

    def stats(self) -> SecondLevelStats:
        return SecondLevelStats()

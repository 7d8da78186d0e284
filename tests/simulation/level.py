"""The second level of a simulation: reads and writes go on with the steps by chance, stall, and bring damaged blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import msgspec

from backend.core.clock import ManualClock
from backend.core.kept_block import BlockStore, HostBlocks, RecordFormat
from backend.core.step import SequenceId
from backend.engine.core import EngineCore
from backend.engine.level_threads import LevelLoad
from backend.engine.level_traffic import STALL_S
from backend.kvcache.second_level import Offload
from tests.fakes.level_io import ManualIo
from tests.simulation.setups import Setup

SHARE = 0.35  # of all setups


def levelled(setup: Setup, rng: Random) -> Setup:
    """Some of the setups, with a second level."""
    if rng.random() >= SHARE:
        return setup
    kv_cache = setup.config.kv_cache
    place = RecordFormat(kv_cache.block_size, 8 * kv_cache.block_size).place_bytes
    kv_cache = msgspec.structs.replace(
        kv_cache,
        enable_block_reuse=True,
        sharing="all" if kv_cache.sharing == "none" else kv_cache.sharing,
        host_cache_bytes=place * rng.choice((1, 6, 20, 100)),
        onboard_blocks=rng.random() < 0.95,
        secondary_offload_min_priority=rng.choice((0, 0, 0, 35)),
    )
    return replace(setup, config=msgspec.structs.replace(setup.config, kv_cache=kv_cache))


class ChancyIo(ManualIo):
    """`seen` counts what has happened."""

    def __init__(self, store: BlockStore, form: RecordFormat, rng: Random, seen: Counter[str]) -> None:
        super().__init__(store, form)
        self._rng = rng
        self._pace = rng.choice((2, 5, 20))
        self._harms = rng.random() < 0.5
        self._stalls = rng.random() < 0.2
        self.num_signs = 0  # of a reader that has something to do: loads that it was given, and blocks that it has read
        self.seen = seen

    def write(self, offload: Offload, data: bytes) -> bool:
        taken = super().write(offload, data)
        self.seen["writes" if taken else "writes refused"] += 1
        return taken

    def read(self, load: LevelLoad) -> bool:
        if self._rng.random() < 0.05:
            return False
        self.seen["loads"] += 1
        self.num_signs += 1
        return super().read(load)

    def read_next(self) -> None:
        self.num_signs += 1
        super().read_next()

    def progress(self) -> None:
        """What the threads do between two steps."""
        if self._rng.random() < 0.3:
            self.num_free = self._rng.choice((0, 0, 1, 4, 20))
        if self._stalls and self._rng.random() < 0.5:
            return
        for _ in range(self._rng.randint(0, self._pace)):
            if self.writes and (not self.reads or self._rng.random() < 0.5):
                self.write_next()
                self._harm()
            elif self.reads:
                self._harm()
                self.read_next()

    def finish(self) -> None:
        while self.writes:
            self.write_next()
        while self.reads:
            self.read_next()

    def _harm(self) -> None:
        """Damage a block, tear it, or put another one in its place: a whole and honest one of this level. Mostly one that is
        about to be read.
        """
        store = self.store
        assert isinstance(store, HostBlocks)
        places = [place for place, content in enumerate(store._places) if content]
        if not (self._harms and places) or self._rng.random() < 0.7:
            return
        place, other = self._rng.choice(places), self._rng.choice(places)
        if self.reads:
            place = self._rng.choice(self.reads[0].blocks).place
        content = bytearray(store._places[place])
        kind = self._rng.randrange(3)
        if kind == 0:
            first = self._rng.choice((0, min(self.form.num_bytes, len(content) - 1)))
            content[self._rng.randrange(first, len(content))] ^= 1 << self._rng.randrange(8)
        elif kind == 1:
            del content[self._rng.randrange(len(content)) :]
        store._places[place] = bytes(content) if kind < 2 else store._places[other]
        self.seen["harms"] += 1


class LevelWatch:
    """What a simulation does with its second level, and what it has seen of it."""

    def __init__(self, seed: int) -> None:
        self._seed, self._times = seed, Random(f"level times {seed}")
        self._io: ChancyIo | None = None
        self.was_held: set[SequenceId] = set()  # sequences that have waited for the level: others may overtake them
        self.seen: Counter[str] = Counter()
        self._loads: dict[
            tuple[SequenceId, int], LevelLoad
        ] = {}  # of turns (sequence, request) that have not run since
        self._num_signs, self._sign_ns = 0, 0  # of the reader, and when the latest one was seen
        self._num_lost_epochs = 0

    def make_io(self, store: BlockStore, form: RecordFormat) -> ChancyIo:
        self._io = ChancyIo(store, form, Random(f"level io {self._seed}"), self.seen)
        return self._io

    def progress(self, core: EngineCore, clock: ManualClock) -> None:
        """A step is about to begin. Time passes while KV is awaited."""
        if self._io is not None:
            self._io.progress()
            clock.advance(self._times.choice((0.0, 0.0, 0.03, 0.11)) if core.level.is_loading_any else 0.0)
            self.note(core)
            self._watch_reader(clock.monotonic_ns())

    def note(self, core: EngineCore) -> None:
        if self._io is not None:
            self.was_held |= core.level._loading.keys()
            self._check_loads(core)

    def _watch_reader(self, now_ns: int) -> None:
        assert self._io is not None
        if self._io.num_signs != self._num_signs:
            self._num_signs, self._sign_ns = self._io.num_signs, now_ns

    def check_step(self, core: EngineCore, clock: ManualClock) -> None:
        """After a step nothing waits for a reader that had given no sign for STALL_S when the step began."""
        late_ns = clock.monotonic_ns() - STALL_S * 1e9
        for load in core.level._loading.values() if self._io is not None else ():
            assert max(load.begun_ns, self._sign_ns) >= late_ns, f"{load.seq!r} waits for a level that stalls"

    def _check_loads(self, core: EngineCore) -> None:
        """A turn of a sequence asks the level once before it runs, or once more when the pool has been lost."""
        if core.kv.level.num_lost_epochs != self._num_lost_epochs:
            self._num_lost_epochs = core.kv.level.num_lost_epochs
            self._loads.clear()
        for seq in core.scheduler.running:
            self._loads.pop((seq.seq_id, seq.request_id), None)
        for seq_id, load in core.level._loading.items():
            assert self._loads.setdefault((seq_id, load.seq.request_id), load) is load, (
                f"{load.seq!r} asks the level again"
            )

    def drain(self, core: EngineCore) -> None:
        """Whatever the level was asked ends, and nothing stays reserved for it."""
        if self._io is None:
            return
        level, traffic = core.kv.level, core.level
        for _ in range(5000):
            self._io.finish()
            core.admit()
            if not (level.num_due or level.num_writing or traffic._copies):
                break
        assert not (level._readers or level.num_writing or level._lost), "the level keeps something of what has ended"
        assert not (traffic._loading or traffic._asked or traffic._being_read or traffic._queued_bytes), (
            "loads are left"
        )
        stats = core.stats().latest.second_level
        self.seen.update({f"miss {reason}": count for reason, count in stats.misses_total.items()})
        self.seen["blocks read back"] += stats.onboarded_blocks_total

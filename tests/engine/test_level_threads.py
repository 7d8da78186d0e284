"""The threads beside the engine: a disk that stalls or fails holds up nothing, neither a step nor the end."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backend.core.kept_block import BlockRecord, HostBlocks, Miss, RecordFormat, digest_of
from backend.engine import level_threads
from backend.engine.level_threads import LevelLoad, LevelThreads
from backend.kvcache.second_level import LevelBlock, Offload
from tests.engine.driver import Driver, answer
from tests.engine.test_second_level import LONG, push_out, stats

FORM = RecordFormat(2, 16)
RECORD = BlockRecord(digest_of("m"), digest_of(""), digest_of("p"), (1, 2))
DATA = bytes(range(16))


class Reports:
    def __init__(self) -> None:
        self.posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.seen: list[tuple[Any, ...]] = []

    def opened(self, found: list[Any]) -> None:
        self.seen.append(("opened", len(found)))

    def written(self, offload: Offload, is_whole: bool) -> None:
        self.seen.append(("written", is_whole))

    def arrived(self, load: LevelLoad, block: LevelBlock, outcome: bytes | Miss) -> None:
        self.seen.append(("arrived", outcome))

    def ended(self, load: LevelLoad) -> None:
        self.seen.append(("ended",))

    def wait_for(self, *news: Any) -> None:
        while news not in self.seen:
            self.posted.get(timeout=30)()


class Disk(HostBlocks):
    """`gate` is set while it works."""

    def __init__(self) -> None:
        super().__init__(4)
        self.gate = threading.Event()
        self.gate.set()
        self.fails = self.is_closed = False

    def read(self, place: int) -> bytes:
        self._wait()
        return super().read(place)

    def write(self, place: int, content: bytes) -> None:
        self._wait()
        super().write(place, content)

    def close(self) -> None:
        self.is_closed = True

    def _wait(self) -> None:
        self.gate.wait(60)
        if self.fails:
            raise OSError(28, "No space left on device")


@pytest.fixture
def disk() -> Disk:
    return Disk()


def started(disk: Disk) -> tuple[LevelThreads, Reports]:
    threads, reports = LevelThreads(disk, FORM), Reports()
    threads.start(reports.posted.put, reports)
    reports.wait_for("opened", 0)
    return threads, reports


def offload(place: int = 0) -> Offload:
    return Offload(0, place, RECORD, RECORD.key, 1)


def load(num_blocks: int = 1) -> LevelLoad:
    return LevelLoad(None, 0, [LevelBlock(0, RECORD, RECORD.key)] * num_blocks, 0)


def test_a_block_is_written_and_read(disk: Disk) -> None:
    threads, reports = started(disk)
    assert threads.write(offload(), DATA)
    reports.wait_for("written", True)
    assert threads.read(load(2))
    reports.wait_for("ended")
    assert reports.seen[2:] == [("arrived", DATA), ("arrived", DATA), ("ended",)]
    threads.close()
    assert disk.is_closed and not any(thread.is_alive() for thread in threads._threads)


def test_a_disk_that_fails_is_a_miss_and_the_threads_go_on(disk: Disk) -> None:
    threads, reports = started(disk)
    disk.fails = True
    assert threads.write(offload(), DATA) and threads.read(load(3))
    reports.wait_for("written", False)
    reports.wait_for("ended")
    assert [news for news in reports.seen if news[0] == "arrived"] == [("arrived", Miss.FAILED)]
    disk.fails = False
    assert threads.write(offload(), DATA)
    reports.wait_for("written", True)
    threads.close()


def test_a_stalled_disk_takes_no_more_than_its_queues_and_holds_up_no_end(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(level_threads, "QUEUE_BYTES", 4 * FORM.place_bytes)
    monkeypatch.setattr(level_threads, "MAX_LOADS", 3)
    threads, _ = started(disk)
    disk.gate.clear()
    taken = [threads.write(offload(), DATA) for _ in range(20)]
    assert 4 <= sum(taken) <= 5 and not taken[-1] and threads.num_free == 0
    loads = [threads.read(load()) for _ in range(20)]
    assert 3 <= sum(loads) <= 4 and not loads[-1]
    began = time.monotonic()
    threads.close()
    assert time.monotonic() - began < 20, "the end does not wait for the disk"
    assert not disk.is_closed and all(thread.daemon for thread in threads._threads)
    disk.gate.set()
    for thread in threads._threads:
        thread.join(30)
        assert not thread.is_alive()


def test_a_load_that_nobody_wants_any_more_is_not_read(disk: Disk) -> None:
    threads, reports = started(disk)
    unwanted = load(2)
    unwanted.is_over = True
    assert threads.read(unwanted)
    reports.wait_for("ended")
    assert reports.seen == [("opened", 0), ("ended",)]
    threads.close()


def test_what_waits_at_the_end_is_still_written(disk: Disk) -> None:
    threads, _ = started(disk)
    for place in range(4):
        assert threads.write(offload(place), DATA)
    threads.close()
    assert all(FORM.check(HostBlocks.read(disk, place), RECORD) == DATA for place in range(4))


def test_threads_bring_the_same_and_end_with_the_engine(tmp_path: Path) -> None:
    kv_cache = {"directory": str(tmp_path), "directory_bytes": 1 << 16}
    driver = Driver(pool_tokens=40, kv_cache=kv_cache)
    driver.turn(1, LONG, 4, start=True)
    driver.run()
    wait_until(driver, lambda: stats(driver).offloaded_blocks_total == 7)
    push_out(driver)
    request = driver.ask([*LONG, 1], 4)
    wait_until(driver, lambda: not driver.core.has_work)
    assert driver.tokens(request) == answer([*LONG, 1], 4) and stats(driver).onboarded_blocks_total == 6
    threads = driver.core.level._io._threads
    driver.core.close()
    assert not any(thread.is_alive() for thread in threads)


def wait_until(driver: Driver, holds: Any) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until, "it never comes"
        driver.step()
        time.sleep(0.001)

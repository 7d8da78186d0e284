"""Blocks of a second level that are of no use, or that several read at once: each is tried once, and written anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.core.kept_block import Found, RecordFormat
from backend.kvcache.second_level import LevelBlock
from tests.engine.driver import Driver, answer
from tests.engine.test_second_level import LONG, OTHER, Level, ask, num_run, push_out, settle, stats
from tests.kvcache.harness import make_sequence


@pytest.fixture
def level(tmp_path: Path) -> Level:
    return Level(tmp_path)


def stored(driver: Driver, prompt: list[int] = LONG) -> list[LevelBlock]:
    """The blocks of the prompt that the level has."""
    return driver.core.kv.level.find(make_sequence(10**6, [*prompt, 0]), 0)


def filled(level: Level, *prompts: list[int], **options: object) -> Driver:
    """The prompts, LONG if none is given, are in the level, and no longer in the pool."""
    driver = level.make(**options)
    for prompt in prompts or (LONG,):
        for _ in range(2):
            ask(driver, prompt)
    push_out(driver)
    return driver


def records_of(level: Level) -> list[Found]:
    """What is written in all places now."""
    store, form = level.io.store, level.io.form
    found = [(place, form.decode(store.read(place))) for place in range(store.num_places)]
    return [Found(place, record) for place, record in found if record is not None]


def damage(level: Level, block: LevelBlock) -> None:
    level.io.store.write(block.place, bytes(level.io.form.place_bytes))


def test_a_damaged_block_is_read_once_and_written_anew(level: Level) -> None:
    driver = filled(level)
    damage(level, stored(driver)[2])
    for num_found, num_misses in ((2, 1), (6, 1), (6, 1)):
        before = stats(driver).onboarded_blocks_total
        assert ask(driver, [*LONG, 1]) == answer([*LONG, 1], 4)
        assert stats(driver).onboarded_blocks_total - before == num_found
        assert stats(driver).misses_total == {"damaged": num_misses}
        push_out(driver)


def test_each_damaged_block_is_a_miss_of_its_own(level: Level) -> None:
    driver = filled(level)
    for number in (4, 1, 4):
        damage(level, stored(driver)[number])
        assert ask(driver, [*LONG, 1]) == answer([*LONG, 1], 4)
        push_out(driver)
    assert stats(driver).misses_total == {"damaged": 3} and len(stored(driver)) == 6


def test_the_second_reader_of_a_damaged_block_does_not_forget_the_new_one(level: Level) -> None:
    """Both have asked for it when the first one finds the damage, and it has been written elsewhere when the second one does."""
    driver = filled(level, pool_tokens=60)
    level.io.is_eager = False
    damaged = stored(driver)[0]
    damage(level, damaged)
    first, second = driver.ask([*LONG, 1], 4), driver.ask([*LONG, 2], 4)
    driver.step()
    assert len(level.io.reads) == 2
    level.io.read_next()
    while len(driver.responses.get(first, [])) < 4:
        driver.step()
    for _ in range(3):
        settle(driver)
        while level.io.writes:
            level.io.write_next()
    settle(driver)
    (anew, *_) = stored(driver)
    assert anew.place != damaged.place, "the second one still reads there"
    level.io.is_eager = True
    while level.io.reads:
        level.io.read_next()
    driver.run()
    settle(driver)
    assert driver.tokens(second) == answer([*LONG, 2], 4)
    assert stored(driver)[0] == anew and stats(driver).misses_total == {"damaged": 2}


def test_a_place_is_reserved_until_its_last_reader_is_done(level: Level) -> None:
    place = RecordFormat(4, 32).place_bytes
    driver = filled(level, kv_cache={"directory": "", "host_cache_bytes": 6 * place}, pool_tokens=60)
    level.io.is_eager = False
    asked = [driver.ask([*LONG, number], 4) for number in (1, 2)]
    driver.step()
    driver.core.cancel(asked[0])
    driver.step()
    level.io.read_next()  # the end of the first one
    driver.step()
    assert set(driver.core.kv.level._readers.values()) == {1}
    level.io.is_eager = True
    while level.io.reads:
        level.io.read_next()
    driver.run()
    assert driver.tokens(asked[1]) == answer([*LONG, 2], 4)
    assert not driver.core.kv.level._readers and stats(driver).misses_total == {}


def test_what_was_read_lately_stays_longer_than_what_was_only_written(level: Level) -> None:
    place = RecordFormat(4, 32).place_bytes
    driver = filled(level, LONG, OTHER, kv_cache={"directory": "", "host_cache_bytes": 12 * place})
    ask(driver, [*LONG, 1])  # the older ones
    push_out(driver)
    newest = list(range(700, 709))
    for _ in range(2):
        ask(driver, newest)
    assert [len(stored(driver, prompt)) for prompt in (LONG, OTHER, newest)] == [6, 4, 2]


def test_what_is_due_when_the_engine_ends_is_written(level: Level) -> None:
    """A block is copied by one turn, and handed to the writer by the next one. It is due since the session rests."""
    driver = level.make(pool_tokens=200)
    driver.turn(1, LONG, 4, start=True)
    driver.run()
    driver.core.close()
    again = level.make()
    assert ask(again, [*LONG, 1]) == answer([*LONG, 1], 4)
    assert stats(again).onboarded_blocks_total == 6


def test_an_engine_that_is_closed_twice_writes_once(level: Level) -> None:
    driver = filled(level)
    driver.core.close()
    written = list(level.io.written)
    driver.core.close()
    assert level.io.written == written


def test_the_second_engine_writes_later_stamps_than_the_first(level: Level) -> None:
    """Of two records of one block the later one holds: whichever of their places comes first."""
    first = filled(level)
    newest = max(found.record.stamp for found in records_of(level))
    first.core.close()
    second = filled(level, OTHER)
    stamps = {found.place: found.record.stamp for found in records_of(level)}
    assert all(stamps[block.place] > newest for block in stored(second, OTHER))
    assert len(stored(second)) == 6


def test_failed_writes_are_counted_and_tried_again_at_the_next_use(
    level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = level.make()
    ask(driver, LONG)
    with monkeypatch.context() as broken:

        def fail(place: int, content: bytes) -> None:
            raise OSError("no room")

        broken.setattr(level.io.store, "write", fail)
        ask(driver, LONG)
    assert stats(driver).misses_total == {"failed": 6} and stats(driver).offloaded_blocks_total == 0
    assert stored(driver) == []
    ask(driver, LONG)
    assert stats(driver).offloaded_blocks_total == 6 == len(stored(driver))


def test_what_the_queue_of_reads_still_brings_is_nothing_in_the_end(level: Level) -> None:
    driver = filled(level)
    for number in (1, 2):
        ask(driver, [*LONG, number])
        push_out(driver)
        assert driver.core.level._queued_bytes == 0 and num_run(driver) > 0


def test_a_stall_is_counted_from_the_last_thing_that_was_to_do(level: Level) -> None:
    """The level was idle for a long time before it was asked, which is no stall."""
    driver = filled(level)
    driver.clock.advance(3600.0)
    level.io.is_eager = False
    request = driver.ask([*LONG, 1], 4)
    driver.step()
    driver.clock.advance(0.09)
    driver.step()
    assert driver.core.level.is_loading_any
    level.io.is_eager = True
    while level.io.reads:
        level.io.read_next()
    driver.run()
    assert driver.tokens(request) == answer([*LONG, 1], 4) and stats(driver).misses_total == {}

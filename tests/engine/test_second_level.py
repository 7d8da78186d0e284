"""KV that is kept outside of the pool: the same tokens, fewer of them computed, and never a wrong block."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from backend.core.kept_block import BlockStore, RecordFormat
from backend.engine.level_rates import Pace
from tests.engine.driver import Driver, answer
from tests.fakes.level_io import ManualIo

LONG = list(range(100, 125))  # 6 blocks of 4, and a token
OTHER = list(range(300, 325))
fresh = itertools.count(600)


class Level:
    """Makes drivers with a level, and keeps their io."""

    def __init__(self, directory: Path, is_eager: bool = True) -> None:
        self._directory, self._is_eager = directory, is_eager
        self.io: ManualIo

    def make(self, **options: Any) -> Driver:
        def make_io(store: BlockStore, form: RecordFormat) -> ManualIo:
            self.io = ManualIo(store, form, self._is_eager)
            return self.io

        kv_cache = {"directory": str(self._directory), "directory_bytes": 1 << 16} | options.pop("kv_cache", {})
        return Driver(**{"pool_tokens": 40, "level_io": make_io, "kv_cache": kv_cache, **options})


@pytest.fixture
def level(tmp_path: Path) -> Level:
    return Level(tmp_path)


@pytest.fixture
def slow(tmp_path: Path) -> Level:
    return Level(tmp_path, is_eager=False)


def settle(driver: Driver) -> None:
    """Let everything that is due be copied and written."""
    for _ in range(4):
        driver.core.admit()
    driver.core.kv.level.check_integrity()


def ask(driver: Driver, prompt: list[int], count: int = 4, **fields: Any) -> list[int]:
    request = driver.ask(prompt, count, **fields)
    driver.run()
    settle(driver)
    return driver.tokens(request)


def num_run(driver: Driver) -> int:
    return driver.core.counters.context_tokens_total


def stats(driver: Driver) -> Any:
    return driver.core.stats().latest.second_level


def fill_with_a_session(driver: Driver, prompt: list[int] = LONG) -> None:
    """A session rests, and other prompts push its KV out of the pool."""
    driver.turn(1, prompt, 4, start=True)
    driver.run()
    settle(driver)
    push_out(driver)


def push_out(driver: Driver) -> None:
    """Fill the pool with KV of new prompts, so that all other KV is evicted."""
    for _ in range(2):
        ask(driver, [next(fresh), *range(500, 532)], 1)


def test_a_session_finds_its_evicted_kv_again(level: Level) -> None:
    driver = level.make()
    fill_with_a_session(driver)
    before = num_run(driver)
    request = driver.turn(1, [7, 8], 4)
    driver.run()
    history = LONG + answer(LONG, 4)
    assert driver.tokens(request) == answer([*history, 7, 8], 4, counter=4)
    assert num_run(driver) - before == len(history) + 2 - 28, "7 blocks come from the level"
    assert stats(driver).onboarded_blocks_total == stats(driver).offloaded_blocks_total == 7
    assert driver.core.counters.sequences_evicted_total == 0


def test_a_new_engine_finds_what_the_one_before_it_has_written(level: Level) -> None:
    first = level.make()
    fill_with_a_session(first)
    first.core.close()
    second = level.make()
    assert ask(second, [*LONG, 1]) == answer([*LONG, 1], 4)
    assert num_run(second) == 2 and stats(second).onboarded_blocks_total == 6


def test_a_prompt_is_written_at_its_second_use_and_once(level: Level) -> None:
    driver = level.make()
    ask(driver, LONG)
    assert stats(driver).offloaded_blocks_total == 0
    ask(driver, [*LONG, 1, 2])
    assert stats(driver).offloaded_blocks_total == 6
    for number in range(3):
        ask(driver, [*LONG, number])
    push_out(driver)
    ask(driver, [*LONG, 9])
    assert stats(driver).offloaded_blocks_total == 6 == len(set(level.io.written)) == len(level.io.written)


def test_a_prompt_that_was_evicted_before_its_second_use_is_written_then(level: Level) -> None:
    driver = level.make()
    ask(driver, LONG)
    push_out(driver)
    assert stats(driver).offloaded_blocks_total == 0
    ask(driver, LONG)
    assert stats(driver).offloaded_blocks_total == 6
    push_out(driver)
    before = num_run(driver)
    assert ask(driver, LONG) == answer(LONG, 4) and num_run(driver) - before == 1


def test_others_go_on_while_a_sequence_waits_for_its_kv(slow: Level) -> None:
    driver = slow.make()
    slow.io.is_eager = True
    fill_with_a_session(driver)
    slow.io.is_eager = False
    late = driver.turn(1, [7], 4)
    quick = driver.ask([1, 2, 3], 4)
    driver.step(6)
    assert driver.tokens(quick) == answer([1, 2, 3], 4) and late not in driver.responses
    assert driver.core.scheduler.waits_for_loads
    while slow.io.reads:
        slow.io.read_next()
    driver.run()
    assert driver.tokens(late) == answer([*LONG, *answer(LONG, 4), 7], 4, counter=4)
    assert stats(driver).onboarded_blocks_total == 7


def test_a_level_that_says_nothing_for_100_ms_is_a_miss_and_what_has_arrived_is_used(slow: Level) -> None:
    driver = slow.make()
    slow.io.is_eager = True
    fill_with_a_session(driver)
    slow.io.is_eager = False
    before = num_run(driver)
    request = driver.turn(1, [7], 4)
    driver.step()
    for _ in range(2):
        slow.io.read_next()
        driver.clock.advance(0.09)
        driver.step()
    assert request not in driver.responses
    driver.clock.advance(0.11)
    driver.run()
    history = [*LONG, *answer(LONG, 4), 7]
    assert driver.tokens(request) == answer(history, 4, counter=4)
    assert num_run(driver) - before == len(history) - 8 and stats(driver).misses_total == {"stalled": 1}
    again = driver.ask([*LONG, 1], 4)  # two blocks are in the pool, others in the level, which does not answer
    driver.run()
    assert driver.tokens(again) == answer([*LONG, 1], 4) and stats(driver).misses_total == {"stalled": 1}


def test_a_stalled_level_is_asked_again_when_it_answers(slow: Level) -> None:
    driver = slow.make()
    slow.io.is_eager = True
    fill_with_a_session(driver)
    slow.io.is_eager = False
    driver.turn(1, [7], 4)
    driver.step()
    driver.clock.advance(0.2)
    driver.run()
    push_out(driver)
    ask(driver, [*LONG, 1])
    assert stats(driver).misses_total == {"stalled": 2}, "it is not even asked"
    slow.io.read_next()
    slow.io.is_eager = True
    push_out(driver)
    before = stats(driver).onboarded_blocks_total
    ask(driver, [*LONG, 2])
    assert stats(driver).onboarded_blocks_total > before


def test_a_request_that_ends_while_its_kv_comes_leaves_nothing(slow: Level) -> None:
    driver = slow.make()
    slow.io.is_eager = True
    fill_with_a_session(driver)
    slow.io.is_eager = False
    request = driver.ask([*LONG, 1], 4)
    driver.step()
    driver.core.cancel(request)
    driver.step()
    assert not driver.core.has_work and not driver.core.level.is_loading_any
    slow.io.read_next()
    settle(driver)
    assert ask(driver, [5, 6]) == answer([5, 6], 4)
    assert stats(driver).onboarded_blocks_total == 0
    assert not driver.core.kv.level._readers, "a place stays reserved"


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_a_block_that_is_used_again_before_it_is_copied_is_not_written(slow: Level, looks_ahead: bool) -> None:
    driver = slow.make(looks_ahead=looks_ahead)
    slow.io.num_free = 0  # nothing can be copied
    fill_with_a_session(driver)
    slow.io.num_free, slow.io.is_eager = 100, True
    settle(driver)
    push_out(driver)
    assert stats(driver).skipped_blocks_total >= 6
    before = num_run(driver)
    assert ask(driver, [*LONG, 1]) == answer([*LONG, 1], 4) and num_run(driver) - before >= 25


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_what_was_copied_before_a_failed_step_landed_is_not_written(slow: Level, looks_ahead: bool) -> None:
    """The fake device loses its whole pool with a failed step, at the moment when that is submitted."""
    driver = slow.make(looks_ahead=looks_ahead, pool_tokens=200)
    driver.turn(1, LONG, 4, start=True)
    driver.run()
    request = driver.ask([5, 6], 8)
    driver.step()
    driver.workers.fail_next = RuntimeError("planted")
    driver.step()
    driver.run()
    assert "model step failed" in driver.responses[request][-1].error_msg
    slow.io.is_eager = True
    settle(driver)
    assert ask(driver, [*LONG, 1]) == answer([*LONG, 1], 4)


def test_kv_from_outside_is_never_written(level: Level) -> None:
    from tests.engine.test_transfer import ON, state_of

    state = state_of(Driver(kv_transfer=ON), LONG)
    driver = level.make(kv_transfer=ON)
    for _ in range(2):
        request = driver.ask(LONG, 4, kv_state=state)
        driver.run()
        settle(driver)
        assert driver.tokens(request) == answer(LONG, 4)
    assert stats(driver).offloaded_blocks_total == 0


def test_namespaces_do_not_find_each_other(level: Level) -> None:
    driver = level.make()
    for _ in range(2):
        ask(driver, LONG, cache_salt="a")
    push_out(driver)
    before = num_run(driver)
    assert ask(driver, LONG, cache_salt="b") == answer(LONG, 4, namespace="b")
    assert num_run(driver) - before == len(LONG) and stats(driver).onboarded_blocks_total == 0
    assert ask(driver, LONG, cache_salt="a") == answer(LONG, 4, namespace="a")
    assert stats(driver).onboarded_blocks_total == 6


@pytest.mark.feature("000-11")
def test_blocks_of_a_low_priority_are_not_written(level: Level) -> None:
    from backend.api.request import RetentionConfig, TokenRangeRetention

    driver = level.make(kv_cache={"secondary_offload_min_priority": 30})
    retention = RetentionConfig((TokenRangeRetention(8, None, 20),), decode_priority=20)
    for _ in range(2):
        ask(driver, LONG, retention=retention)
    assert stats(driver).offloaded_blocks_total == 2, "those of the first 8 tokens"


def test_with_onboard_blocks_off_nothing_is_read(level: Level) -> None:
    driver = level.make(kv_cache={"onboard_blocks": False})
    fill_with_a_session(driver)
    before = num_run(driver)
    assert ask(driver, LONG) == answer(LONG, 4) and num_run(driver) - before == len(LONG)
    assert stats(driver).offloaded_blocks_total == 7 and stats(driver).onboarded_blocks_total == 0


def test_host_memory_is_a_level_as_well(level: Level) -> None:
    driver = level.make(kv_cache={"directory": "", "host_cache_bytes": 1 << 16})
    fill_with_a_session(driver)
    before = num_run(driver)
    assert ask(driver, [*LONG, 1]) == answer([*LONG, 1], 4) and num_run(driver) - before == 2


def test_the_least_recently_used_blocks_go_and_a_prefix_becomes_shorter_from_its_end(level: Level) -> None:
    place = RecordFormat(4, 32).place_bytes
    driver = level.make(kv_cache={"directory": "", "host_cache_bytes": 8 * place})
    for prompt in (LONG, OTHER):
        for _ in range(2):
            ask(driver, prompt)
    assert stats(driver).secondary_used_num_blocks == stats(driver).secondary_max_num_blocks == 8
    push_out(driver)
    before = num_run(driver)
    ask(driver, LONG)
    assert num_run(driver) - before == len(LONG) - 8, "its two first blocks are still there"
    push_out(driver)
    before = num_run(driver)
    ask(driver, OTHER)
    assert num_run(driver) - before <= len(OTHER) - 8


def test_a_rewind_into_a_block_that_came_from_the_level_leaves_it_to_others(level: Level) -> None:
    driver = level.make()
    fill_with_a_session(driver)
    driver.turn(1, [7], 1)
    driver.run()
    other = driver.turn(1, [9, 9, 9], 4, step=10)  # in the middle of a block
    driver.run()
    assert driver.tokens(other) == answer([*LONG[:10], 9, 9, 9], 4, counter=5)
    assert ask(driver, [*LONG, 1]) == answer([*LONG, 1], 4)


def test_a_place_that_is_read_is_not_given_away(slow: Level) -> None:
    place = RecordFormat(4, 32).place_bytes
    driver = slow.make(kv_cache={"directory": "", "host_cache_bytes": 7 * place})
    slow.io.is_eager = True
    fill_with_a_session(driver)
    slow.io.is_eager = False
    waiting = driver.ask([*LONG, 1], 4)
    driver.step()
    for _ in range(2):
        quick = driver.ask([3, 2, 1, 3, 2, 1, 3, 2, 1], 2)
        while len(driver.responses.get(quick, [])) < 2:
            driver.step()
        for _ in range(3):
            settle(driver)
            while slow.io.writes:
                slow.io.write_next()
    slow.io.is_eager = True
    while slow.io.reads:
        slow.io.read_next()
    driver.run()
    assert driver.tokens(waiting) == answer([*LONG, 1], 4)
    assert stats(driver).misses_total == {} and stats(driver).onboarded_blocks_total == 6


def test_a_load_that_takes_longer_than_computing_is_cut_short(slow: Level) -> None:
    driver = slow.make()
    slow.io.is_eager = True
    fill_with_a_session(driver)
    slow.io.is_eager = False
    driver.core.level.rates.prefill = Pace(32, 0.16)  # 5 ms a token
    request = driver.ask([*LONG, 1], 4)
    driver.step()
    for _ in range(3):  # 24 tokens could be computed in 0.12 s
        driver.clock.advance(0.05)
        slow.io.read_next()
        driver.step()
    driver.run()
    assert driver.tokens(request) == answer([*LONG, 1], 4)
    assert stats(driver).misses_total == {"slow": 1} and stats(driver).onboarded_blocks_total == 3


def test_a_window_keeps_what_it_sees(level: Level) -> None:
    driver = level.make(window=8, pool_tokens=64)
    for number in range(3):
        prompt = [*LONG, number]
        assert ask(driver, prompt) == answer(prompt, 4, window=8)
        push_out(driver)
        push_out(driver)
    before = num_run(driver)
    assert ask(driver, LONG) == answer(LONG, 4, window=8)
    assert num_run(driver) - before <= len(LONG)


def test_a_small_pool_takes_only_what_it_has_room_for(level: Level) -> None:
    driver = level.make(pool_tokens=40)
    fill_with_a_session(driver)
    running = driver.ask([1, 2, 3], 20)
    driver.step(3)
    request = driver.ask([*LONG, 1], 4)
    driver.run()
    assert driver.tokens(request) == answer([*LONG, 1], 4)
    assert driver.tokens(running) == answer([1, 2, 3], 20)

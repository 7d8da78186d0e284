"""Sequences of a model with recurrent layers: their state comes back from snapshots, and what has none is computed again."""

from __future__ import annotations

from typing import Any

import pytest

from backend.api import OutputConfig, SamplingConfig
from backend.api.config.schema import SpeculationConfig
from backend.api.errors import ConfigError
from backend.kvcache.states import StatePool
from tests.engine.driver import Driver, answer
from tests.fakes.hash_worker import oracle

PROMPT = list(range(100, 142))  # 10 blocks of 4 tokens, and 2 tokens more


def recurrent(pool_tokens: int = 400, snapshots: int = 20, interval: int = 0, **options: Any) -> Driver:
    kv_cache = dict(snapshots=snapshots, snapshot_interval=interval) | options.pop("kv_cache", {})
    return Driver(pool_tokens=pool_tokens, kv_cache=kv_cache, is_recurrent=True, sharing="all", **options)


def states(driver: Driver) -> StatePool:
    assert driver.core.kv.states is not None
    return driver.core.kv.states


def cached(driver: Driver, request_id: int) -> int:
    return driver.responses[request_id][-1].result.perf_metrics.num_cached_tokens


def ask(driver: Driver, prompt: list[int], count: int = 6) -> int:
    """Ask, and check the answer. Returns the prompt's tokens that were not computed."""
    request = driver.ask(prompt, count, output_config=OutputConfig(return_perf_metrics=True))
    driver.run()
    assert driver.tokens(request) == answer(prompt, count)
    return cached(driver, request)


def test_a_prompt_begins_where_the_same_prompt_left_a_snapshot() -> None:
    driver = recurrent()
    assert ask(driver, PROMPT) == 0
    assert ask(driver, PROMPT) == 40, "behind the last whole block"


def test_a_turn_begins_behind_the_answer_before_it() -> None:
    driver = recurrent()
    ask(driver, PROMPT, 13)
    longer = PROMPT + answer(PROMPT, 13) + [7, 8, 9]
    assert ask(driver, longer) == 52, "42 + 13 tokens, of which the last was never run: 13 whole blocks"


def test_where_two_prompts_part_the_second_leaves_a_snapshot_for_the_third() -> None:
    driver = recurrent()
    common = PROMPT[:30]
    found = [ask(driver, common + [tail] * 20) for tail in (1, 2, 3, 4)]
    assert found == [0, 0, 28, 28]


@pytest.mark.parametrize("interval, found", [(8, 24), (16, 16), (0, 0)])
def test_a_long_prompt_has_snapshots_at_an_interval(interval: int, found: int) -> None:
    driver = recurrent(interval=interval)
    ask(driver, PROMPT)
    assert ask(driver, PROMPT[:26] + [1] * 20) == found


def test_a_paused_sequence_comes_back_behind_its_newest_whole_block() -> None:
    driver = recurrent(40, policy="max_utilization")
    prompts = list(range(100, 110)), list(range(200, 210))
    first, second = driver.ask(prompts[0], 26), driver.ask(prompts[1], 16)
    driver.run()
    assert driver.tokens(first) == answer(prompts[0], 26) and driver.tokens(second) == answer(prompts[1], 16)
    assert driver.core.counters.pauses_total > 0


def test_a_session_goes_on_and_is_computed_again_only_from_its_newest_whole_block() -> None:
    driver = recurrent()
    driver.turn(1, PROMPT, 9, start=True)
    driver.run()
    before = driver.core.counters.context_tokens_total
    driver.turn(1, [5, 6, 7], 4)
    driver.run()
    computed = driver.core.counters.context_tokens_total - before
    assert driver.log(1)[-4:] == answer(PROMPT + answer(PROMPT, 9) + [5, 6, 7], 4, counter=9)
    assert computed == 42 + 9 + 3 - 48, "48 tokens are in whole blocks"


def test_without_snapshots_everything_begins_at_the_first_token() -> None:
    driver = recurrent(snapshots=0)
    assert [ask(driver, PROMPT), ask(driver, PROMPT)] == [0, 0]
    assert states(driver).num_saved_total == 0


def test_the_least_recently_used_snapshot_goes_first() -> None:
    driver = recurrent(snapshots=3)
    others = [[start + token for token in PROMPT[:14]] for start in (200, 400)]
    ask(driver, PROMPT, 1)
    ask(driver, others[0], 1)
    assert ask(driver, PROMPT, 1) == 40
    ask(driver, others[1], 1)
    ask(driver, [9] * 10, 1)
    assert states(driver).num_evicted_total > 0
    assert [ask(driver, PROMPT, 1), ask(driver, others[0], 1)] == [40, 0]


def test_an_answer_leaves_one_snapshot_however_long_it_is() -> None:
    driver = recurrent()
    ask(driver, PROMPT, 60)
    assert states(driver).num_used == 2, "the end of the prompt, the newest block"
    assert states(driver).num_saved_total > 10


def test_snapshots_of_equal_blocks_outlive_the_sequence_that_made_them() -> None:
    """Two requests compute the same prompt side by side: the blocks of the second are not those that others find."""
    driver = recurrent(snapshots=4)
    both = [driver.ask(PROMPT, 3), driver.ask(PROMPT, 30)]
    driver.run()
    assert [driver.tokens(each) for each in both] == [answer(PROMPT, 3), answer(PROMPT, 30)]
    longer = PROMPT + answer(PROMPT, 30)
    assert ask(driver, longer + [1]) == 68, "71 tokens were run"


def test_accepted_drafts_run_once_more_and_rejected_ones_leave_no_mark() -> None:
    driver = recurrent(speculation=SpeculationConfig(mode="lookup"), vocab=5)
    prompt = [1, 2, 3, 4] * 8
    expected = oracle(prompt, 40, 5)
    given = driver.ask(prompt, 40, draft_tokens=expected[:12] + [0, 0, 0])
    driver.run()
    assert driver.tokens(given) == expected
    counters = driver.core.counters
    assert counters.accepted_draft_tokens_total >= 12 and counters.recomputed_tokens_total >= 12


def test_beams_go_on_with_the_states_of_those_that_they_fork_from() -> None:
    plain, driver = Driver(pool_tokens=400, slots=8), recurrent(slots=8)
    answers = []
    for each in (plain, driver):
        request = each.ask(PROMPT, 12, sampling_config=SamplingConfig(beam_width=4), streaming=False)
        each.run()
        answers.append(each.responses[request][-1].result.output_token_ids)
    assert answers[0] == answers[1]
    assert any(source < 8 for step in driver.workers.trace for source, _ in step.state_copies), "no beam was forked"


def test_several_sequences_of_a_prompt_share_its_snapshot() -> None:
    driver = recurrent(slots=4)
    request = driver.ask(PROMPT, 6, sampling_config=SamplingConfig(num_return_sequences=3))
    driver.run()
    assert {each.result.sequence_index for each in driver.responses[request]} == {0, 1, 2}
    assert states(driver).num_restored_total >= 2


def test_swapping_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="hash has recurrent layers, whose state is not swapped; use recompute"):
        recurrent(preemption="swap", kv_cache={"swap_bytes": 1 << 20})


def test_snapshots_that_do_not_fit_are_refused_with_their_size() -> None:
    with pytest.raises(ConfigError, match=r"4 slots and 9999 snapshots .* lower scheduler.max_batch_size or kv_cache"):
        recurrent(snapshots=9999, free_bytes=5000)

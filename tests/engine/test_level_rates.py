"""To load or to compute: by what both have taken lately, and never more than computing would have taken."""

from __future__ import annotations

import pytest

from backend.engine.level_rates import PROBE_BLOCKS, LevelRates

SECOND = 10**9


def rates(load_s_per_block: float, prefill_s_per_block: float) -> LevelRates:
    """Blocks of 32 tokens and 1,000 bytes."""
    made = LevelRates(32, 1000)
    made.note_load(10_000, 10 * load_s_per_block, 0)
    made.prefill.note(320, 10 * prefill_s_per_block)
    return made


@pytest.mark.parametrize(
    ("load_s", "prefill_s", "loaded"),
    [(0.01, 1.0, 20), (0.79, 1.0, 20), (0.81, 1.0, 0), (1.0, 1.0, 0), (30.0, 1.0, 0)],
)
def test_all_is_loaded_or_nothing_where_nothing_waits(load_s: float, prefill_s: float, loaded: int) -> None:
    assert rates(load_s, prefill_s).num_to_load(20, 0, 0, 0) == loaded


def test_a_queue_of_loads_counts_against_loading() -> None:
    made = rates(0.1, 1.0)
    assert made.num_to_load(10, 60_000, 0, 0) == 10  # 6 s of waiting and 1 s against 10 s
    assert made.num_to_load(10, 80_000, 0, 0) == 0


def test_what_comes_while_prompts_ahead_are_computed_costs_nothing() -> None:
    """A slow level: half as fast as computing. Within the 8 s that the prompts ahead take come 4 blocks."""
    made = rates(2.0, 1.0)
    assert made.num_to_load(5, 0, 8 * 32, 0) == 4
    assert made.num_to_load(5, 0, 0, 0) == 0


def test_before_anything_is_measured_all_is_loaded() -> None:
    assert LevelRates(32, 1000).num_to_load(7, 0, 0, 0) == 7
    only_loads = LevelRates(32, 1000)
    only_loads.note_load(1, 1e9, 0)
    assert only_loads.num_to_load(7, 0, 0, 0) == 7


def test_a_slow_level_is_tried_again_with_few_blocks() -> None:
    made = rates(5.0, 1.0)
    assert made.num_to_load(20, 0, 0, 9 * SECOND) == 0
    assert made.num_to_load(20, 0, 0, 11 * SECOND) == PROBE_BLOCKS
    assert made.num_to_load(20, 1000, 0, 11 * SECOND) == 0, "not while others wait for it"
    made.note_load(4_000, 0.04, 11 * SECOND)
    for _ in range(12):
        made.note_load(10_000, 0.1, 11 * SECOND)
    assert made.num_to_load(20, 0, 0, 11 * SECOND) == 20, "old measurements are forgotten"


def test_seconds_of_computing_are_known_when_a_prompt_has_run() -> None:
    assert LevelRates(32, 1000).prefill_s(3) is None
    assert rates(1.0, 2.0).prefill_s(3) == pytest.approx(6.0)


def test_after_a_try_it_is_left_alone_again_as_long_as_before() -> None:
    made = rates(5.0, 1.0)
    assert made.num_to_load(20, 0, 0, 11 * SECOND) == PROBE_BLOCKS
    made.note_load(4_000, 20.0, 12 * SECOND)
    assert made.num_to_load(20, 0, 0, 13 * SECOND) == 0
    assert made.num_to_load(20, 0, 0, 21 * SECOND) == 0
    assert made.num_to_load(20, 0, 0, 23 * SECOND) == PROBE_BLOCKS

"""StepCost: what steps take, learnt from those that were measured."""

from __future__ import annotations

import pytest

from backend.scheduler.step_cost import StepCost


def test_step_cost_finds_base_and_slope() -> None:
    """Steps of 10 ms + 1 ms for each token."""
    cost = StepCost()
    for step in range(200):
        tokens = 1 + step % 8
        cost.note(tokens, 0.010 + 0.001 * tokens)
    assert cost.per_token == pytest.approx(0.001, rel=0.05)
    assert cost.seconds(10) == pytest.approx(0.020, rel=0.05)


def test_step_cost_knows_of_tiles() -> None:
    """Up to 32 rows take 10 ms, up to 64 take 14 ms, which no line tells of 33 rows."""
    cost = StepCost()
    for step in range(200):
        tokens = (20, 32, 33, 40, 60)[step % 5]
        cost.note(tokens, 0.010 if tokens <= 32 else 0.014)
    for tokens, expected in ((32, 0.010), (33, 0.014), (40, 0.014)):
        assert cost.seconds(tokens) == pytest.approx(expected, rel=0.06)


def test_a_size_is_known_by_its_own_steps_not_by_others() -> None:
    """32 rows take 27 ms. Then 500 steps of 33 take 33 ms, every 64th is a trial: what 32 take stays known."""
    cost, trials = StepCost(), 0
    for _ in range(20):
        cost.note(32, 0.027)
    for _ in range(500):
        trials += cost.is_trial(2.0)
        cost.note(*((32, 0.027) if cost.is_trial(2.0) else (33, 0.033)))
    assert cost.seconds(32) == pytest.approx(0.027, rel=0.01) and cost.seconds(33) == pytest.approx(0.033, rel=0.01)
    assert trials in (7, 8)
    unclear = 0
    for _ in range(64):
        unclear += cost.is_trial(1.1)
        cost.note(33, 0.033)
    assert unclear == 4


def test_a_size_that_has_not_run_for_long_is_forgotten() -> None:
    """40 tokens took 50 ms when 32 took 20; 320 steps of 32 later, at 10 ms, they are taken to cost what a slope of 5 % says."""
    cost = StepCost()
    cost.note(32, 0.020)
    cost.note(40, 0.050)
    for _ in range(299):
        cost.note(32, 0.010)
    assert cost.seconds(40) > 0.030
    for _ in range(200):
        cost.note(32, 0.010)
    assert cost.seconds(40) < 0.013


def test_before_any_step_a_token_is_a_twentieth_of_a_step() -> None:
    assert StepCost().seconds(20) == 2 * StepCost().seconds(0)


def test_an_outlier_moves_little() -> None:
    cost = StepCost()
    for step in range(100):
        cost.note(1 + step % 8, 0.010)
    cost.note(4, 10.0)  # counts as 20 ms, one of 8
    assert 0.010 < cost.seconds(4) < 0.012

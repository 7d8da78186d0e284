"""How many guesses a draft model makes: what steps cost by rows and passes, and what pays. All is worked out by hand."""

from __future__ import annotations

import pytest

from backend.api.config.schema import SpeculationConfig
from backend.core.sequence import Sequence
from backend.scheduler.drafting import Draft
from backend.scheduler.model_drafting import Acceptance, ModelDrafter
from backend.scheduler.step_cost import MARGIN, StepCost
from tests.engine.driver import Driver

CONFIG = SpeculationConfig(mode="draft_model", draft_model="small")


def test_passes_are_known_by_their_own_steps_and_lie_on_a_line_else() -> None:
    """8 rows take 10 ms, with two passes 16 and with eight 42. Three are nearest to two, 0.3 of a step each: 19 ms."""
    cost = StepCost()
    for passes, seconds in ((0, 0.010), (2, 0.099), (2, 0.016), (8, 0.042)):
        cost.note(8, seconds, passes)
    assert [cost.seconds(8, passes) for passes in (0, 2, 8)] == [0.010, 0.016, 0.042]
    assert cost.seconds(8, 3) == pytest.approx(0.019)
    assert cost.seconds(8, 1) == pytest.approx(0.013)


def test_rows_without_passes_and_rows_with_as_many_tokens_are_told_apart() -> None:
    """One row with seven passes runs eight tokens in its step, as eight rows do."""
    cost = StepCost()
    for rows, passes, seconds in ((8, 0, 0.010), (1, 0, 0.009), (1, 7, 0.020), (1, 7, 0.030)):
        cost.note(rows, seconds, passes)
    assert cost.seconds(8, 0) == 0.010
    assert cost.seconds(1, 7) == 0.030


def test_what_a_pass_costs_of_other_rows_is_assumed_of_new_ones() -> None:
    """Of 8 rows a pass takes 0.5 of a step: 32 rows of 20 ms are taken to need 30 with one. Before, 0.3 is assumed."""
    cost = StepCost()
    cost.note(32, 0.020)
    assert cost.seconds(32, 1) == pytest.approx(0.026)
    for passes, seconds in ((0, 0.010), (1, 0.015), (1, 0.015)):
        cost.note(8, seconds, passes)
    assert cost.seconds(32, 1) == pytest.approx(0.030)
    assert not cost.is_known(1)


def test_an_outlier_counts_as_twice_the_mean_and_all_with_passes_can_be_forgotten() -> None:
    cost = StepCost()
    for _ in range(8):
        cost.note(1, 0.010)
    cost.note(1, 1.0)
    assert cost.seconds(1, 0) == pytest.approx(0.010 + 0.010 / 8)
    for seconds in (0.020, 0.020, 1.0):  # the first does not count, the last as 40 ms
        cost.note(1, seconds, 1)
    assert cost.seconds(1, 1) == pytest.approx(0.030)
    cost.forget_passes()
    cost.note(1, cost.seconds(1, 0))
    assert cost.seconds(1, 0) == pytest.approx(0.010 + 0.010 / 8)
    assert cost.seconds(1, 2) == pytest.approx(cost.seconds(1, 0) * (1 + 2 * (0.030 / (0.010 + 0.010 / 8) - 1)))


def sequences(count: int) -> list[Sequence]:
    """Sequences that generate and may have 60 more tokens."""
    driver = Driver(pool_tokens=4096, slots=count)
    for index in range(count):
        driver.ask([index, 1, 2, 3], 64)
    while len(driver.core.scheduler.running) < count or not all(s.is_generating for s in driver.core.scheduler.running):
        driver.core.step()
    return list(driver.core.scheduler.running)


def drafter_of(rows: list[Sequence], share: float, plain: float, each_pass: float) -> ModelDrafter:
    """It knows that guesses at all rows are right so often, and what steps of so many rows take."""
    drafter = ModelDrafter(CONFIG)
    drafter._accepted = {seq.seq_id: Acceptance(seq, share) for seq in rows}
    drafter.cost.note(len(rows), plain)
    for _ in range(2):
        drafter.cost.note(len(rows), plain + each_pass, 1)
    return drafter


def counts(drafter: ModelDrafter, rows: list[Sequence], room: int = 1000) -> list[int]:
    drafts = drafter.propose(rows, room)
    return [drafts[seq.seq_id].num_guesses if seq.seq_id in drafts else 0 for seq in rows]


@pytest.mark.parametrize(
    ("share", "each_pass", "expected"), [(0.8, 0.08, 6), (0.8, 0.7, 0), (0.5, 0.3, 1), (0.0, 0.01, 0)]
)
def test_as_many_at_each_row_as_pay(share: float, each_pass: float, expected: int) -> None:
    """Four rows, a step of 1 s. The k-th pass pays if share^k / MARGIN is above the tokens so far, of a row, times what it adds
    to the time so far. Share 0.8, 0.08 s: the sixth brings 0.210 > 0.08 * 3.152 / 1.4, for 3.152 are 1 + 0.8 * (0.8 + ... +
    0.8^5); the seventh 0.168 < 0.08 * 3.361 / 1.48. Share 0.5, 0.3 s: the first 0.4 > 0.3, the second 0.2 < 0.3 * 1.4 / 1.3.
    """
    assert MARGIN == 1.25
    rows = sequences(4)
    drafter = drafter_of(rows, share, 1.0, each_pass)
    assert counts(drafter, rows) == counts(drafter, rows) == [expected] * 4, "asking twice changes nothing"


def test_one_good_row_of_many_does_not_pay_for_a_pass() -> None:
    rows = sequences(4)
    drafter = drafter_of(rows, 0.0, 1.0, 0.3)
    drafter._accepted[rows[0].seq_id] = Acceptance(rows[0], 0.9)
    assert counts(drafter, rows) == [0] * 4
    drafter._accepted = {seq.seq_id: Acceptance(seq, 0.9) if seq is rows[0] else None for seq in rows[:1]}
    assert counts(drafter, rows[:1])[0] == 0, "of one row no plain step is known"


def test_a_row_whose_token_is_not_known_yet_gets_no_guesses() -> None:
    rows = sequences(4)
    drafter = drafter_of(rows, 0.9, 1.0, 0.1)
    rows[2].num_inflight_samples = 1
    told = counts(drafter, rows)
    assert told[2] == 0 < min(told[0], told[1], told[3])


def test_a_step_with_draft_tokens_of_a_request_says_nothing_about_the_draft_model() -> None:
    rows = sequences(4)
    drafter = drafter_of(rows, 0.9, 1.0, 0.1)
    before = counts(drafter, rows), drafter.cost.seconds(4, 0), drafter.cost.seconds(4, 1)
    for _ in range(200):
        drafter.note(4, [Draft([1, 2], is_given=True)], 50.0)
    assert (counts(drafter, rows), drafter.cost.seconds(4, 0), drafter.cost.seconds(4, 1)) == before


def test_there_must_be_room_for_all() -> None:
    rows = sequences(4)
    drafter = drafter_of(rows, 0.95, 1.0, 0.01)
    assert counts(drafter, rows, 11) == [2] * 4
    assert counts(drafter, rows, 3) == [0] * 4


def test_guesses_that_do_not_pay_are_tried_ever_more_rarely() -> None:
    """After 256 plain steps four with one guess, after 512 more another four, and so on up to 8192."""
    rows = sequences(2)
    drafter = drafter_of(rows, 0.0, 1.0, 1.0)
    tries = []
    for step in range(2000):
        count = max(counts(drafter, rows))
        if count:
            tries.append(step)
        drafter.note(2, [Draft([], num_guesses=count)] * 2 if count else [], 1.0 + count)
    assert tries == [*range(256, 260), *range(256 + 4 + 512, 256 + 4 + 512 + 4), *range(776 + 1024, 776 + 1024 + 4)]


def test_of_steps_with_guesses_every_65th_goes_without() -> None:
    rows = sequences(1)
    drafter = drafter_of(rows, 0.9, 1.0, 0.1)
    plain = []
    for step in range(200):
        count = counts(drafter, rows)[0]
        if not count:
            plain.append(step)
        drafter.note(1, [Draft([], num_guesses=count)] if count else [], 1.0 + 0.1 * count)
    assert plain == [64, 129, 194]


def test_new_sequences_are_taken_to_be_as_former_ones_were() -> None:
    """Ten steps of two guesses, both wrong: each counts one wrong guess, 0.7 * 0.95^10."""
    (seq,) = sequences(1)
    drafter = ModelDrafter(CONFIG)
    drafter._acceptance(seq)
    for _ in range(10):
        seq.num_guessed_tokens += 2
        seq.token_ids.append(1)
        drafter._acceptance(seq)
    (other,) = sequences(1)
    drafter._accepted.clear()
    assert drafter._acceptance(other).share == pytest.approx(0.7 * 0.95**10)

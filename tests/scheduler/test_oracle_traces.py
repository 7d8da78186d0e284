"""Which iterations each request runs in, worked out on paper. Further ones: test_policies.py (119 and 160), test_batches.py (42).

An iteration that computes the last token of a prompt yields the first output token, so a request of a prompt that fits one step
and n output tokens runs in n iterations.
"""

from __future__ import annotations

import pytest

from backend.api import SamplingConfig
from tests.scheduler.runner import Runner

PROMPT = [3, 1, 4, 1]


@pytest.mark.feature("001-21", "001-22")
@pytest.mark.parametrize(("batching", "late", "total"), [("static", [7, 8], 9), ("fused", [3, 4], 7)])
def test_a_late_request_waits_for_a_static_batch_and_takes_the_first_free_slot_in_flight(
    batching: str, late: list[int], total: int
) -> None:
    """Two slots; A asks for 3 tokens and B for 7. C comes when one iteration has run, and asks for 2.

    A runs 0-2 and B 0-6. Static: C begins behind B, 7-8. In flight: C takes A's slot, 3-4, and B is the last to end.
    """
    runner = Runner(slots=2, batching=batching)
    runner.ask(0, PROMPT, 3)
    runner.ask(1, PROMPT, 7)
    runner.step()
    runner.ask(2, PROMPT, 2)
    assert runner.run() == total
    assert runner.iterations_of(2) == late
    runner.assert_answers()


@pytest.mark.feature("001-35")
@pytest.mark.parametrize(
    ("policy", "shares"),
    [
        ("first_come_first_served", [[20], [20], [20]]),
        ("equal_progress", [[10, 10], [10, 10], [20]]),
    ],
)
def test_two_long_prompts_share_steps_as_the_chunking_policy_says(policy: str, shares: list[list[int]]) -> None:
    """A of 40 and B of 20 prompt tokens, one token to generate, 20 tokens a step: three iterations either way.

    First come, first served: A takes 0 and 1, B 2. Equal progress: both take half of 0 and 1, with which B is through, and A 2.
    """
    runner = Runner(num_blocks=40, max_num_tokens=20, chunking_policy=policy)
    runner.ask(0, [i % 90 for i in range(40)], 1)
    runner.ask(1, [(7 * i) % 90 for i in range(20)], 1)
    assert runner.run() == 3
    assert [[row.num_tokens for row in step.rows] for step in runner.trace] == shares
    runner.assert_answers()


def test_an_urgent_request_goes_before_those_that_came_earlier_and_wait() -> None:
    """One slot, 2 tokens each: the first runs 0-1. Of those that wait, the last has the highest priority: 2-3; then 4-5, 6-7."""
    runner = Runner(slots=1)
    for request_id, priority in enumerate((0.5, 0.5, 0.2, 0.9)):
        runner.ask(request_id, PROMPT, 2, priority=priority)
        if request_id == 0:
            runner.step()
    assert runner.run() == 8
    assert [runner.iterations_of(n) for n in range(4)] == [[0, 1], [4, 5], [6, 7], [2, 3]]


@pytest.mark.feature("000-34", "000-35")
def test_beams_of_another_width_wait_until_nobody_runs() -> None:
    """Four slots, 3 tokens each; the second request has 4 beams.

    Though three slots are free beside the first, it runs alone, 3-5. The third, of one beam as the first, does not overtake
    it: 6-8. With one beam each all three run in 0-2.
    """
    for width, expected in ((4, [[0, 1, 2], [3, 4, 5], [6, 7, 8]]), (1, [[0, 1, 2]] * 3)):
        runner = Runner(slots=4)
        for request_id in range(3):
            beams = SamplingConfig(beam_width=width) if request_id == 1 else SamplingConfig()
            runner.ask(request_id, PROMPT, 3, sampling_config=beams)
        runner.run()
        assert [runner.iterations_of(n) for n in range(3)] == expected

"""What a policy keeps back when it admits beside others."""

from __future__ import annotations

import pytest

from tests.scheduler.runner import Runner


@pytest.mark.feature("003-17", "003-20")
@pytest.mark.parametrize(
    "policy, running, num_prompt, max_tokens, joins",
    [
        ("max_utilization", 10, 4, 6, True),
        ("max_utilization", 10, 5, 6, False),
        ("guaranteed_no_evict", 5, 4, 3, True),
        ("guaranteed_no_evict", 5, 4, 4, False),
    ],
)
def test_the_watermark_and_what_is_generated_into_are_left(
    policy: str, running: int, num_prompt: int, max_tokens: int, joins: bool
) -> None:
    """Of 10 blocks of 2 tokens the first request holds 5, or is promised them; 2 are the watermark, and 3 are left."""
    runner = Runner(num_blocks=10, block_size=2, watermark=0.2, policy=policy)
    runner.ask(0, [1] * running, 6)
    runner.ask(1, [2] * num_prompt, max_tokens)
    runner.step()
    assert runner.seen[0].running == ([0, 1] if joins else [0])
    runner.run()
    runner.assert_answers()


@pytest.mark.feature("003-20")
@pytest.mark.parametrize("max_tokens, fits", [(7, True), (8, False)])
def test_alone_a_sequence_may_use_all_but_the_watermark(max_tokens: int, fits: bool) -> None:
    runner = Runner(num_blocks=10, block_size=2, watermark=0.2, policy="max_utilization")
    runner.ask(0, [1] * 10, max_tokens)
    runner.run()
    if fits:
        runner.assert_answers()
    else:
        assert "need 9 KV blocks, the pool has 8 of 2 tokens" in runner.responses[0][0].error_msg


@pytest.mark.feature("001-26")
@pytest.mark.parametrize("max_tokens, joins", [(4, True), (5, False)])
def test_guaranteed_no_evict_keeps_what_the_running_ones_may_still_ask_for(max_tokens: int, joins: bool) -> None:
    """The first may grow from 1 to 4 of 6 blocks; 2 are left: 4 cells, of which the last output needs none."""
    runner = Runner(num_blocks=6, block_size=2)
    runner.ask(0, [1], 8)
    runner.step()
    runner.ask(1, [2], max_tokens)
    runner.step()
    assert runner.seen[1].running == ([0, 1] if joins else [0])
    runner.run()
    runner.assert_answers()

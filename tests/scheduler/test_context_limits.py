"""How much context runs beside those who generate: little of one prompt, more of many where that holds nobody up for long."""

from __future__ import annotations

import pytest

from tests.scheduler.runner import Runner


def crowd(**scheduler: object) -> Runner:
    """One stream, on blocks enough for everybody."""
    runner = Runner(num_blocks=2000, slots=32, max_num_tokens=1024, **scheduler)
    runner.ask(99, [1], 200)
    runner.step()
    return runner


def test_prompts_share_96_tokens_of_a_step_beside_a_stream_however_many_wait() -> None:
    """700 tokens in chunks of 96 leave 28 for the eighth; the second prompt takes 68 of that step, then its last 32."""
    runner = crowd()
    runner.ask(0, list(range(700)), 2)
    runner.ask(1, list(range(100)), 2)
    runner.step(9)
    assert [seen.num_tokens.get(0, 0) for seen in runner.seen[1:9]] == [96] * 7 + [28]
    assert [seen.num_tokens.get(1, 0) for seen in runner.seen[7:10]] == [0, 68, 32]
    assert all(seen.num_tokens[99] == 1 for seen in runner.seen[1:])


def test_a_long_prompt_is_computed_in_small_chunks_beside_a_stream() -> None:
    runner = crowd(max_mixed_context_tokens=512)
    runner.ask(0, list(range(700)), 2)
    runner.step(6)
    assert [seen.num_tokens[0] for seen in runner.seen[1:]] == [128] * 5 + [60]
    assert all(seen.num_tokens[99] == 1 for seen in runner.seen[1:])


def test_many_prompts_are_computed_in_large_steps_beside_a_stream() -> None:
    runner = crowd(max_mixed_context_tokens=512)
    for request_id in range(20):
        runner.ask(request_id, [request_id] * 100, 50)
    runner.step(4)
    context = [sum(n for key, n in seen.num_tokens.items() if key != 99 and n > 1) for seen in runner.seen[1:]]
    assert context == [512, 512, 512, 464]


def test_requests_that_find_no_slot_do_not_make_chunks_larger() -> None:
    runner = Runner(num_blocks=2000, slots=2, max_num_tokens=1024, max_mixed_context_tokens=512)
    runner.ask(99, [1], 200)
    runner.step()
    for request_id in range(9):
        runner.ask(request_id, [request_id] * 300, 2)
    runner.step(3)
    assert [seen.num_tokens[0] for seen in runner.seen[1:]] == [128, 128, 44]


def test_alone_a_prompt_takes_larger_chunks() -> None:
    runner = Runner(num_blocks=2000, max_num_tokens=1024)
    runner.ask(0, [5] * 1100, 2)
    runner.step(3)
    assert [seen.num_tokens[0] for seen in runner.seen] == [512, 512, 76]


@pytest.mark.parametrize("policy", ["first_come_first_served", "equal_progress"])
def test_with_a_single_token_beside_generation_every_prompt_still_comes_to_its_end(policy: str) -> None:
    runner = Runner(slots=4, max_num_tokens=16, num_blocks=64, chunking_policy=policy, mixed_context_tokens=1)
    for request_id in range(6):
        runner.ask(request_id, [request_id] * 9, 12)
        runner.step()
    runner.run()
    runner.assert_answers()

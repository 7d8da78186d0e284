"""Limits of the batch that follow the lengths of the latest requests."""

from __future__ import annotations

import pytest

from backend.api import ConfigError, load_config
from backend.api.config.schema import SchedulerConfig
from backend.scheduler.tuning import BatchTuner
from tests.scheduler.runner import Runner


def tuner(**fields: object) -> BatchTuner:
    on = dict.fromkeys(("enable_batch_size_tuning", "enable_max_num_tokens_tuning"), True)
    return BatchTuner(SchedulerConfig(**{"max_batch_size": 8, "max_num_tokens": 100, **on, **fields}))


def test_a_pool_that_one_average_sequence_fills_takes_one_at_a_time() -> None:
    """Two requests of 10 prompt tokens and 80 to generate, twice, on 100 KV tokens in blocks of 10.

    The first two run as without tuning: nobody has ended yet. Both run 0-40, the first alone 41-79, the second again 80-118.
    Then the average is 90 tokens, which is 9 of the 10 blocks: one at a time. The third takes 119-198, the fourth 199-278.
    """
    runner = Runner(num_blocks=10, block_size=10, policy="max_utilization", enable_batch_size_tuning=True)
    for request_id in (0, 1):
        runner.ask(request_id, [request_id * 100 + i for i in range(10)], 80)
    assert runner.run() == 119 and runner.core.counters.pauses_total == 1
    for request_id in (2, 3):
        runner.ask(request_id, [request_id * 100 + i for i in range(10)], 80)
    assert runner.run() == 279
    assert runner.iterations_of(2) == list(range(119, 199)) and runner.iterations_of(3) == list(range(199, 279))
    assert runner.core.counters.pauses_total == 1
    runner.assert_answers()


def test_steps_are_short_while_answers_are_long() -> None:
    """A prompt of 40 tokens fits a step of 64.

    After a request of 4 and 40 tokens, which is a ratio of 0.1, steps have 16 tokens: it runs as 16, 16 and 8. With it prompts
    have 44 tokens and answers 41, a ratio of 1.07: the next one runs in steps of 32, as 32 and 8.
    """
    runner = Runner(num_blocks=40, slots=4, enable_max_num_tokens_tuning=True)
    runner.ask(0, [5, 6, 7, 8], 40)
    runner.run()
    for request_id in (1, 2):
        runner.ask(request_id, [(request_id + i) % 90 for i in range(40)], 1)
        runner.run()
    assert [[row.num_tokens for row in step.rows] for step in runner.trace[40:]] == [[16], [16], [8], [32], [8]]
    runner.assert_answers()


@pytest.mark.parametrize(
    "prompt, output, tokens", [(20, 10, 100), (19, 10, 50), (5, 10, 50), (4, 10, 25), (0, 10, 25), (10, 0, 100)]
)
def test_the_share_of_a_step_by_how_long_prompts_are_beside_answers(prompt: int, output: int, tokens: int) -> None:
    tuned = tuner()
    assert tuned.max_num_tokens == 100
    tuned.note_end(prompt, output)
    assert tuned.max_num_tokens == tokens
    assert tuner(enable_max_num_tokens_tuning=False).max_num_tokens == 100


def test_a_step_has_a_token_for_every_row() -> None:
    tuned = tuner(max_batch_size=60)
    tuned.note_end(1, 100)
    assert tuned.max_num_tokens == 60


def test_sequences_at_once_are_those_of_the_average_length_that_the_pool_holds() -> None:
    tuned = tuner()
    assert (tuned.average_tokens, tuned.max_sequences(100, int)) == (0, 8)
    tuned.note_end(7, 4)
    tuned.note_end(5, 3)
    assert tuned.average_tokens == 10  # 19 / 2, rounded up
    assert [tuned.max_sequences(blocks, int) for blocks in (9, 10, 39, 40, 1000)] == [1, 1, 3, 4, 8]
    assert tuner(enable_batch_size_tuning=False).max_sequences(10, int) == 8


def test_only_the_latest_requests_count() -> None:
    tuned = tuner(tuning_requests=2)
    for lengths in ((1000, 1000), (6, 2), (2, 2)):
        tuned.note_end(*lengths)
    assert tuned.average_tokens == 6


def test_tuned_steps_need_chunks() -> None:
    given = ["scheduler.enable_max_num_tokens_tuning=true", "scheduler.enable_chunked_context=false"]
    with pytest.raises(ConfigError, match=r"enable_max_num_tokens_tuning is true and scheduler.enable_chunked_context"):
        load_config(overrides=given)

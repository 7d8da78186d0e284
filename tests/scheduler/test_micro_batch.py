"""How the token budget of a step is cut: properties over all inputs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.api.config.schema import SchedulerConfig
from backend.scheduler.micro_batch import MicroBatchScheduler

WANTS = st.lists(st.integers(1, 40), max_size=6)
CONFIGS = st.builds(
    SchedulerConfig,
    max_batch_size=st.just(1),
    max_num_tokens=st.integers(1, 30),
    enable_chunked_context=st.booleans(),
    max_chunk_tokens=st.none() | st.integers(1, 40),
    max_context_tokens=st.none() | st.integers(1, 40),
    mixed_context_tokens=st.none() | st.integers(1, 40),
    max_mixed_context_tokens=st.none() | st.integers(1, 40),
    chunking_policy=st.sampled_from(["first_come_first_served", "equal_progress"]),
)


@pytest.mark.feature("003-43")
@given(CONFIGS, WANTS, st.data())
def test_shares_stay_within_the_budget_and_the_wants(
    config: SchedulerConfig, wants: list[int], data: st.DataObject
) -> None:
    budget = data.draw(st.integers(0, config.max_num_tokens))
    shares = MicroBatchScheduler(config, on_cpu=True).cut(wants, budget)
    assert len(shares) == len(wants) and sum(shares) <= budget
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))
    if config.enable_chunked_context and config.max_chunk_tokens:
        assert max(shares, default=0) <= config.max_chunk_tokens


@given(CONFIGS, st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_the_first_row_always_gets_something_of_a_full_budget(config: SchedulerConfig, wants: list[int]) -> None:
    assert MicroBatchScheduler(config, on_cpu=True).cut(wants, config.max_num_tokens)[0] > 0


@given(st.integers(1, 30), WANTS)
def test_equal_progress_gives_no_row_more_than_one_token_over_an_unfinished_one(budget: int, wants: list[int]) -> None:
    config = SchedulerConfig(max_batch_size=1, max_num_tokens=budget, chunking_policy="equal_progress")
    shares = MicroBatchScheduler(config, on_cpu=True).cut(wants, budget)
    unfinished = [share for share, want in zip(shares, wants, strict=True) if share < want]
    assert sum(shares) == min(budget, sum(wants))
    assert all(max(shares) - share <= 1 for share in unfinished)


@given(st.integers(1, 30), WANTS)
def test_without_chunks_a_prompt_runs_as_a_whole_unless_no_step_could_hold_it(budget: int, wants: list[int]) -> None:
    config = SchedulerConfig(max_batch_size=1, max_num_tokens=budget, enable_chunked_context=False)
    shares = MicroBatchScheduler(config, on_cpu=True).cut(wants, budget)
    assert all(share in (0, want) or want > budget for share, want in zip(shares, wants, strict=True))


@given(CONFIGS, st.integers(0, 30), st.integers(0, 8), st.booleans())
def test_the_context_budget_leaves_room_for_generation_and_is_never_nothing_without_need(
    config: SchedulerConfig, num_generation: int, num_waiting: int, on_cpu: bool
) -> None:
    num_generation = min(num_generation, config.max_num_tokens)
    budget = MicroBatchScheduler(config, on_cpu).context_budget(num_generation, num_waiting, config.max_num_tokens)
    assert 0 <= budget <= config.max_num_tokens - num_generation
    assert (budget == 0) == (num_generation == config.max_num_tokens)


@pytest.mark.parametrize(
    "num_generation, num_waiting, budget", [(0, 1, 512), (0, 32, 512), (8, 1, 128), (8, 3, 384), (8, 24, 512)]
)
def test_with_matrix_units_context_beside_generation_grows_with_the_prompts_that_wait(
    num_generation: int, num_waiting: int, budget: int
) -> None:
    micro_batch = MicroBatchScheduler(SchedulerConfig(), on_cpu=True, has_matrix_units=True)
    assert micro_batch.context_budget(num_generation, num_waiting, 1024) == budget


@pytest.mark.parametrize("num_generation, num_waiting, budget", [(0, 32, 512), (8, 1, 96), (8, 3, 96), (8, 24, 96)])
def test_without_matrix_units_context_beside_generation_is_little(
    num_generation: int, num_waiting: int, budget: int
) -> None:
    micro_batch = MicroBatchScheduler(SchedulerConfig(), on_cpu=True)
    assert micro_batch.context_budget(num_generation, num_waiting, 1024) == budget


@pytest.mark.parametrize("num_generation, budget", [(0, 1024), (8, 1016)])
def test_elsewhere_context_takes_what_generation_leaves_of_the_step(num_generation: int, budget: int) -> None:
    assert MicroBatchScheduler(SchedulerConfig(), on_cpu=False).context_budget(num_generation, 1, 1024) == budget


def test_what_is_configured_holds_on_every_device() -> None:
    config = SchedulerConfig(max_context_tokens=96, mixed_context_tokens=32, max_mixed_context_tokens=72)
    for on_cpu in (True, False):
        micro_batch = MicroBatchScheduler(config, on_cpu)
        assert [micro_batch.context_budget(*rows, 1024) for rows in ((0, 1), (1, 1), (1, 2), (1, 9))] == [
            96,
            32,
            64,
            72,
        ]


def test_what_one_prompt_may_take_is_not_cut_by_the_default_for_all() -> None:
    micro_batch = MicroBatchScheduler(SchedulerConfig(mixed_context_tokens=200), on_cpu=True)
    assert [micro_batch.context_budget(8, waiting, 1024) for waiting in (1, 2)] == [200, 200]


def test_prompts_that_must_not_be_cut_are_not_held_to_the_limits_on_context() -> None:
    config = SchedulerConfig(
        enable_chunked_context=False, max_context_tokens=8, mixed_context_tokens=4, max_mixed_context_tokens=4
    )
    assert MicroBatchScheduler(config, on_cpu=True).context_budget(24, 1, 1024) == 1000

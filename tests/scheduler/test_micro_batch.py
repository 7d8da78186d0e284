"""How the token budget of a step is cut: properties over all inputs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.api.config import SchedulerConfig
from backend.scheduler.micro_batch import MicroBatchScheduler

WANTS = st.lists(st.integers(1, 40), max_size=6)
CONFIGS = st.builds(
    SchedulerConfig,
    max_batch_size=st.just(1),
    max_num_tokens=st.integers(1, 30),
    enable_chunked_context=st.booleans(),
    max_chunk_tokens=st.none() | st.integers(1, 40),
    chunking_policy=st.sampled_from(["first_come_first_served", "equal_progress"]),
)


@pytest.mark.feature("003-43")
@given(CONFIGS, WANTS, st.data())
def test_shares_stay_within_the_budget_and_the_wants(
    config: SchedulerConfig, wants: list[int], data: st.DataObject
) -> None:
    budget = data.draw(st.integers(0, config.max_num_tokens))
    shares = MicroBatchScheduler(config).cut(wants, budget)
    assert len(shares) == len(wants) and sum(shares) <= budget
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))
    if config.enable_chunked_context and config.max_chunk_tokens:
        assert max(shares, default=0) <= config.max_chunk_tokens


@given(CONFIGS, st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_the_first_row_always_gets_something_of_a_full_budget(config: SchedulerConfig, wants: list[int]) -> None:
    assert MicroBatchScheduler(config).cut(wants, config.max_num_tokens)[0] > 0


@given(st.integers(1, 30), WANTS)
def test_equal_progress_gives_no_row_more_than_one_token_over_an_unfinished_one(budget: int, wants: list[int]) -> None:
    config = SchedulerConfig(max_batch_size=1, max_num_tokens=budget, chunking_policy="equal_progress")
    shares = MicroBatchScheduler(config).cut(wants, budget)
    unfinished = [share for share, want in zip(shares, wants, strict=True) if share < want]
    assert sum(shares) == min(budget, sum(wants))
    assert all(max(shares) - share <= 1 for share in unfinished)


@given(st.integers(1, 30), WANTS)
def test_without_chunks_a_prompt_runs_as_a_whole_unless_no_step_could_hold_it(budget: int, wants: list[int]) -> None:
    config = SchedulerConfig(max_batch_size=1, max_num_tokens=budget, enable_chunked_context=False)
    shares = MicroBatchScheduler(config).cut(wants, budget)
    assert all(share in (0, want) or want > budget for share, want in zip(shares, wants, strict=True))

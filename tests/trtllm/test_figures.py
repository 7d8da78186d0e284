"""What the Executor of the bindings tells of itself: performance metrics, statistics, events of the KV cache."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from compat import trtllm
from tests.trtllm.helpers import SOON, finish, make_config, make_executor, run

PROMPT = [1, 2, 3, 4]


@pytest.mark.feature("000-60")
def test_times_and_blocks_of_a_request(model_path: Path) -> None:
    asked = trtllm.OutputConfig(return_perf_metrics=True)
    with make_executor(model_path, make_config()) as executor:
        request = trtllm.Request(list(range(9)), 3, streaming=True, output_config=asked)
        responses = finish(executor, executor.enqueue_request(request))
        metrics = responses[-1].result.request_perf_metrics
        times = metrics.timing_metrics
        assert timedelta() < times.arrival_time <= times.first_scheduled_time < times.first_token_time
        assert times.first_token_time < times.last_token_time
        assert times.kv_cache_transfer_start == times.kv_cache_transfer_end == timedelta()
        blocks = metrics.kv_cache_metrics
        assert (blocks.num_total_allocated_blocks, blocks.num_new_allocated_blocks) == (1, 1)
        assert (blocks.num_reused_blocks, blocks.num_missed_blocks, blocks.kv_cache_hit_rate) == (0, 1, 0.0)
        assert metrics.last_iter == responses[-1].result.decoding_iter


def test_blocks_are_reused_and_the_metrics_say_so(executor: trtllm.Executor) -> None:
    asked = trtllm.OutputConfig(return_perf_metrics=True)
    first = run(executor, list(range(25, 90)), 1, output_config=asked)  # two full blocks, and one cell of a third
    again = run(executor, [*first.output_token_ids[0][:64], 1, 2], 2, output_config=asked)  # that cell is another's
    blocks = again.request_perf_metrics.kv_cache_metrics
    assert (blocks.num_reused_blocks, blocks.num_new_allocated_blocks, blocks.num_missed_blocks) == (2, 1, 1)
    assert blocks.num_total_allocated_blocks == 1 and blocks.kv_cache_hit_rate == pytest.approx(2 / 3)


@pytest.mark.feature("000-60")
def test_a_block_that_begins_as_a_copy_counts_as_reused(model_path: Path) -> None:
    """The first request computes 9 + 60 - 1 = 68 tokens, which fill two blocks of 32. The second has the first 36 of them and 4
    more: the first block is shared, of the second one 36 - 32 = 4 tokens are right and it is copied; 40 tokens need no third.
    """
    asked = trtllm.OutputConfig(return_perf_metrics=True)
    with make_executor(model_path, make_config()) as executor:
        first = run(executor, list(range(9)), 60, output_config=asked, cache_salt_id=1)
        previous = first.output_token_ids[0][:36]
        others = [(token + 1) % 100 for token in first.output_token_ids[0][36:40]]
        second = run(executor, [*previous, *others], 1, output_config=asked, cache_salt_id=1)
    blocks = second.request_perf_metrics.kv_cache_metrics
    assert (blocks.num_reused_blocks, blocks.num_new_allocated_blocks, blocks.num_missed_blocks) == (2, 0, 0)
    assert blocks.num_total_allocated_blocks == 1 and blocks.kv_cache_hit_rate == 1.0


@pytest.mark.feature("000-60")
def test_a_block_that_never_filled_counts_as_reused_by_a_request_that_goes_on_from_it(model_path: Path) -> None:
    """The first request has 9 + 27 = 36 tokens, of which 35 are computed: a block of 32, and three tokens of another. The second
    has these 36 and 4 more: the first block is shared, the second is a copy with three right tokens, and 40 tokens need no third.
    """
    asked = trtllm.OutputConfig(return_perf_metrics=True)
    with make_executor(model_path, make_config()) as executor:
        first = run(executor, list(range(9)), 27, output_config=asked, cache_salt_id=1)
        prompt = [*first.output_token_ids[0], 1, 2, 3, 4]
        second = run(executor, prompt, 1, output_config=asked, cache_salt_id=1)
    assert len(prompt) == 40
    blocks = second.request_perf_metrics.kv_cache_metrics
    assert (blocks.num_reused_blocks, blocks.num_new_allocated_blocks, blocks.num_missed_blocks) == (2, 0, 0)
    assert blocks.num_total_allocated_blocks == 1 and blocks.kv_cache_hit_rate == 1.0


def test_a_cache_salt_keeps_prefixes_apart(executor: trtllm.Executor) -> None:
    asked = trtllm.OutputConfig(return_perf_metrics=True)
    prompt = list(range(10, 60))

    def reused(salt: int) -> int:
        result = run(executor, prompt, 1, output_config=asked, cache_salt_id=salt)
        return result.request_perf_metrics.kv_cache_metrics.num_reused_blocks

    assert [reused(1), reused(2)] == [0, 0] and reused(1) > 0


@pytest.mark.feature("001-21")
def test_a_static_batch_tells_its_own_statistics(model_path: Path) -> None:
    config = make_config(batching_type=trtllm.BatchingType.STATIC)
    with make_executor(model_path, config) as executor:
        ids = executor.enqueue_requests([trtllm.Request(PROMPT, length) for length in (7, 3)])
        assert [len(finish(executor, i)[0].result.output_token_ids[0]) for i in ids] == [11, 7]
        stats = executor.get_latest_iteration_stats()
    assert all(each.inflight_batching_stats is None for each in stats)
    empty = [each.static_batching_stats.empty_gen_slots for each in stats]
    if (
        stats[0].static_batching_stats.num_scheduled_requests == 2
    ):  # else the second came too late for the first's batch
        assert empty == [0, 0, 0, 1, 1, 1, 1]
    assert sum(each.static_batching_stats.num_ctx_tokens for each in stats) == 8


@pytest.mark.feature("000-08")
def test_iteration_statistics_are_drained(model_path: Path) -> None:
    with make_executor(model_path, make_config(iter_stats_max_iterations=10)) as executor:
        run(executor, PROMPT, 5)
        stats = executor.get_latest_iteration_stats()
        assert [each.iter for each in stats] == [0, 1, 2, 3, 4] and executor.get_latest_iteration_stats() == []
        datetime.strptime(stats[0].timestamp, "%m-%d-%Y %H:%M:%S.%f")
        assert [each.inflight_batching_stats.num_scheduled_requests for each in stats] == [1] * 5
        assert [each.inflight_batching_stats.num_ctx_tokens for each in stats] == [4, 0, 0, 0, 0]
        assert [each.num_active_requests for each in stats[:4]] == [1] * 4
        assert all(each.cpu_mem_usage > 0 and each.gpu_mem_usage > 0 for each in stats)
        cache = stats[0].kv_cache_stats
        assert (cache.max_num_blocks, cache.tokens_per_block, cache.used_num_blocks) == (64, 32, 1)
        assert cache.free_num_blocks == 63 and stats[0].static_batching_stats is None
        run(executor, PROMPT, 30)
        assert [each.iter for each in executor.get_latest_iteration_stats()] == list(range(25, 35))


@pytest.mark.feature("000-09")
def test_request_statistics_are_off_unless_asked_for(executor: trtllm.Executor, model_path: Path) -> None:
    run(executor, PROMPT, 2)
    assert executor.get_latest_request_stats() == []
    with make_executor(model_path, make_config(request_stats_max_iterations=100)) as asked:
        request_id = asked.enqueue_request(trtllm.Request(PROMPT, 3))
        finish(asked, request_id)
        per_iteration = asked.get_latest_request_stats()
    (records,) = {tuple(record.id for record in each.request_stats) for each in per_iteration}
    assert records == (request_id,)
    stages = [each.request_stats[0].stage for each in per_iteration]
    assert stages[-1] is trtllm.RequestStage.GENERATION_COMPLETE
    assert trtllm.RequestStage.GENERATION_IN_PROGRESS in stages
    assert [each.request_stats[0].num_generated_tokens for each in per_iteration] == [1, 2, 3]


@pytest.mark.feature("000-61")
def test_events_of_the_kv_cache(executor: trtllm.Executor, model_path: Path) -> None:
    assert executor.get_kv_cache_event_manager() is None
    cache = trtllm.KvCacheConfig(max_tokens=256, event_buffer_max_size=1024)
    with make_executor(model_path, make_config(kv_cache_config=cache)) as asked:
        run(asked, list(range(64)), 1)
        manager = asked.get_kv_cache_event_manager()
        created, *stored = manager.get_latest_events(SOON)
        assert created.event_id == 0 and created.data.num_blocks_per_cache_level[0] == 8
        hashes = [block.block_hash for event in stored for block in event.data.blocks]
        tokens = [token.token_id for event in stored for block in event.data.blocks for token in block.tokens]
        assert tokens == list(range(64)) and len(set(hashes)) == 2 and stored[0].data.parent_hash is None
        assert [event.event_id for event in stored] == list(range(1, len(stored) + 1))
        assert manager.get_latest_events(timedelta(milliseconds=1)) == []

"""The arrays of a response of the token model: their names, types, shapes and values."""

from __future__ import annotations

import numpy as np
import pytest

from backend.api import FinishReason, PerfMetrics, Result
from backend.api.response import TopLogProb
from backend.serving.wires.trtllm_outputs import RowSettings, token_output


def result(ids: list[int], final: bool = False, **fields: object) -> Result:
    reason = FinishReason.LENGTH if final else FinishReason.NOT_FINISHED
    return Result([ids], is_final=final, finish_reasons=(reason,), **fields)


def whole(streaming: bool = False, **fields: object) -> dict[str, np.ndarray]:
    """The only response of a row with a prompt of two tokens and an output of three."""
    output = token_output(RowSettings(streaming), [] if streaming else [7, 8])
    output.feed(result([1, 2, 3], final=True, **fields))
    return dict(*output.render())


@pytest.mark.feature("001-49")
def test_output_ids_are_one_beam_of_int32_with_the_prompt_first() -> None:
    ids = whole()["output_ids"]
    assert (ids.dtype, ids.shape, ids.tolist()) == (np.int32, (1, 1, 5), [[[7, 8, 1, 2, 3]]])
    assert whole(streaming=True)["output_ids"].tolist() == [[[1, 2, 3]]]


@pytest.mark.feature("001-50")
def test_the_sequence_length_counts_prompt_and_output() -> None:
    length = whole()["sequence_length"]
    assert (length.dtype, length.shape, length.tolist()) == (np.int32, (1, 1), [[2 + 3]])


@pytest.mark.feature("001-53", "001-54")
def test_log_probs_are_those_of_the_output_alone_and_their_sum_is_told_beside_them() -> None:
    arrays = whole(log_probs=[[-0.5, -1.25, -2.0]], cum_log_probs=[-3.75])
    log_probs, cum = arrays["output_log_probs"], arrays["cum_log_probs"]
    assert (log_probs.dtype, log_probs.shape, log_probs.tolist()) == (np.float32, (1, 1, 3), [[[-0.5, -1.25, -2.0]]])
    assert (cum.dtype, cum.shape, cum.tolist()) == (np.float32, (1, 1), [[-3.75]])


def test_log_probs_do_not_appear_unless_asked_for() -> None:
    assert set(whole()) == {"output_ids", "sequence_length"}


def top(*token_ids: int) -> list[TopLogProb]:
    return [TopLogProb(token_id, -0.25 * (n + 1)) for n, token_id in enumerate(token_ids)]


def test_the_most_likely_tokens_come_with_the_tokens_of_their_response() -> None:
    output = token_output(RowSettings(streaming=True), [])
    output.feed(result([1], top_log_probs=[top(1, 9)]))
    output.feed(result([2], top_log_probs=[top(8, 2)]))
    first = dict(*output.render())
    output.feed(result([3], final=True, top_log_probs=[top(3, 7)]))
    last = dict(*output.render())
    ids, log_probs = first["top_log_probs_ids"], first["top_log_probs"]
    assert (ids.dtype, ids.tolist()) == (np.int32, [[[1, 9], [8, 2]]])
    assert (log_probs.dtype, log_probs.tolist()) == (np.float32, [[[-0.25, -0.5]] * 2])
    assert last["top_log_probs_ids"].tolist() == [[[3, 7]]] and last["top_log_probs"].shape == (1, 1, 2)


def test_an_end_without_tokens_has_no_positions() -> None:
    output = token_output(RowSettings(streaming=True), [])
    output.feed(result([], final=True, top_log_probs=[]))
    arrays = dict(*output.render())
    assert arrays["top_log_probs_ids"].shape == arrays["top_log_probs"].shape == (1, 0, 0)


def test_each_metric_is_told_under_its_own_name() -> None:
    """All of them differ, so that none can stand in the place of another."""
    perf = PerfMetrics(
        arrival_ns=1_000_000_000_001,
        first_scheduled_ns=1_000_000_000_002,
        first_token_ns=1_000_000_000_003,
        last_token_ns=1_000_000_000_004,
        num_cached_tokens=5,
        num_context_tokens=6,
        num_recomputed_tokens=7,
        num_new_blocks=8,
        num_reused_blocks=9,
        num_draft_tokens=10,
        num_accepted_draft_tokens=4,
    )
    arrays = whole(perf_metrics=perf)
    told = {name: (array.dtype, array.tolist()) for name, array in arrays.items()}
    del told["output_ids"], told["sequence_length"]
    times = {
        "arrival_time_ns": perf.arrival_ns,
        "first_scheduled_time_ns": perf.first_scheduled_ns,
        "first_token_time_ns": perf.first_token_ns,
        "last_token_time_ns": perf.last_token_ns,
    }
    counts = {
        "kv_cache_alloc_new_blocks": 8,
        "kv_cache_reused_blocks": 9,
        "kv_cache_alloc_total_blocks": 8,
        "total_accepted_draft_tokens": 4,
        "total_draft_tokens": 10,
        "num_cached_tokens": 5,
        "num_context_tokens": 6,
        "num_recomputed_tokens": 7,
    }
    expected = {name: (np.dtype(np.int64), [[value]]) for name, value in times.items()}
    expected |= {name: (np.dtype(np.int32), [[value]]) for name, value in counts.items()}
    assert told == {**expected, "acceptance_rate": (np.dtype(np.float32), [[np.float32(0.4)]])}

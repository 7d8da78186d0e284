"""What TensorRT-LLM's Executor tells with each response of a stream, and where a request with draft tokens ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compat import trtllm
from tests.trtllm.helpers import finish, make_config, make_executor, run, tokens_of

PROMPT = [1, 2, 3, 4]
NEW = 5


def results(executor: trtllm.Executor, output: trtllm.OutputConfig, **options: object) -> list[trtllm.Result]:
    request = trtllm.Request(PROMPT, NEW, streaming=True, output_config=output, **options)
    return [response.result for response in finish(executor, executor.enqueue_request(request))]


@pytest.mark.feature("000-26")
def test_each_response_has_the_log_probabilities_of_all_tokens_so_far(executor: trtllm.Executor) -> None:
    asked = trtllm.OutputConfig(True, exclude_input_from_output=True)
    (whole,) = run(executor, PROMPT, NEW, output_config=asked).log_probs
    streamed = results(executor, asked)
    assert [len(each.output_token_ids[0]) for each in streamed] == [1] * NEW, "of the tokens only the new ones"
    # A later request finds KV, and a product of torch's depends in its last bits (1e-7) on the number of rows.
    expected = [[pytest.approx(whole[: n + 1], rel=1e-5)] for n in range(NEW)]
    assert [each.log_probs for each in streamed] == expected
    repeated = results(executor, asked, return_all_generated_tokens=True)
    assert [each.log_probs for each in repeated] == expected
    assert not executor._repeats._streams, "nothing is kept of requests that have ended"


def test_of_several_sequences_each_has_its_own(executor: trtllm.Executor) -> None:
    asked = trtllm.OutputConfig(True)
    sampling = trtllm.SamplingConfig(top_k=50, temperature=5.0, seed=3, num_return_sequences=2)
    last = {each.sequence_index: each for each in results(executor, asked, sampling_config=sampling)}
    sums = {index: sum(each.log_probs[0]) for index, each in last.items()}
    assert sums == {index: pytest.approx(last[index].cum_log_probs[0]) for index in (0, 1)} and sums[0] != sums[1]


@pytest.mark.parametrize("all_tokens", [False, True])
def test_each_response_has_the_context_logits(model_path: Path, all_tokens: bool) -> None:
    asked = trtllm.OutputConfig(return_context_logits=True)
    with make_executor(model_path, make_config()) as executor:
        streamed = results(executor, asked, return_all_generated_tokens=all_tokens)
    assert len(streamed) == NEW and list(streamed[0].context_logits.shape) == [4, 96]
    assert all(torch.equal(each.context_logits, streamed[0].context_logits) for each in streamed)


@pytest.mark.feature("000-52")
@pytest.mark.parametrize("streaming", [False, True])
def test_all_sequences_of_a_request_have_the_context_logits_of_the_whole_prompt(
    model_path: Path, streaming: bool
) -> None:
    asked = trtllm.OutputConfig(return_context_logits=True)
    sampling = trtllm.SamplingConfig(top_k=50, temperature=5.0, seed=3, num_return_sequences=3)
    config = make_config(kv_cache_config=trtllm.KvCacheConfig(False, 2048))
    with make_executor(model_path, config) as executor:
        request = trtllm.Request(PROMPT, NEW, streaming=streaming, output_config=asked, sampling_config=sampling)
        told = [response.result for response in finish(executor, executor.enqueue_request(request))]
        alone = run(executor, PROMPT, 1, output_config=asked)
    assert {each.sequence_index for each in told} == {0, 1, 2}
    for each in told:
        torch.testing.assert_close(each.context_logits, alone.context_logits)


@pytest.mark.feature("000-60")
def test_each_response_has_performance_metrics_which_count_iterations_from_zero(model_path: Path) -> None:
    with make_executor(model_path, make_config()) as executor:
        streamed = results(executor, trtllm.OutputConfig(return_perf_metrics=True))
        told = [each.request_perf_metrics for each in streamed]
        later = run(executor, PROMPT, 2, output_config=trtllm.OutputConfig(return_perf_metrics=True))
    assert [each.first_iter for each in told] == [0] * NEW
    assert [each.iter for each in told] == [0, 1, 2, 3, 4]
    assert [each.last_iter for each in told] == [None] * (NEW - 1) + [NEW - 1]
    metrics = later.request_perf_metrics
    assert (metrics.first_iter, metrics.last_iter) == (NEW, NEW + 1)


@pytest.mark.feature("000-20")
@pytest.mark.parametrize("num_right", [0, 1, 2, 4])
def test_a_request_with_draft_tokens_ends_with_the_step_that_verifies_them(
    executor: trtllm.Executor, num_right: int
) -> None:
    """The drafts that are right, and the token behind them; however many more tokens the request would take."""
    output = trtllm.OutputConfig(exclude_input_from_output=True, return_perf_metrics=True)
    plain = run(executor, PROMPT, 6, output_config=output).output_token_ids[0]
    drafts = plain[:num_right] + [(token + 1) % 96 for token in plain[num_right:4]]
    config = trtllm.ExternalDraftTokensConfig(drafts)
    result = run(executor, PROMPT, 20, output_config=output, external_draft_tokens_config=config)
    assert result.output_token_ids[0] == plain[: num_right + 1]
    assert result.finish_reasons == [trtllm.FinishReason.LENGTH]
    assert result.request_perf_metrics.speculative_decoding.total_accepted_draft_tokens == num_right
    request = trtllm.Request(PROMPT, 20, streaming=True, external_draft_tokens_config=config)
    assert tokens_of(finish(executor, executor.enqueue_request(request))) == plain[: num_right + 1]

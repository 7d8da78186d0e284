"""The Executor of the bindings over a tiny checkpoint, as a program that was written for TensorRT-LLM uses it."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compat import trtllm
from tests.trtllm.helpers import SOON, finish, make_config, make_executor, refused, run, tokens_of

PROMPT = [1, 2, 3, 4]
NEW_ONLY = trtllm.OutputConfig(exclude_input_from_output=True)


@pytest.mark.feature("000-01")
def test_a_directory_that_is_missing_raises() -> None:
    with pytest.raises(RuntimeError, match="File does not exist"):
        make_executor("Bla", make_config())


@pytest.mark.feature("000-02")
def test_buffers_and_managed_weights_give_the_tokens_of_the_directory(
    executor: trtllm.Executor, model_path: Path
) -> None:
    weights, text = (model_path / "model.safetensors").read_bytes(), (model_path / "config.json").read_text()
    expected = run(executor, PROMPT, 8).output_token_ids
    decoder = trtllm.ModelType.DECODER_ONLY
    with trtllm.Executor(weights, text, decoder, make_config()) as from_buffer:
        assert run(from_buffer, PROMPT, 8).output_token_ids == expected
    managed = load_file(model_path / "model.safetensors")
    with trtllm.Executor(b"", text, decoder, make_config(), managed_weights=managed) as from_weights:
        assert run(from_weights, PROMPT, 8).output_token_ids == expected


def test_bytes_that_are_no_weights_are_refused() -> None:
    with pytest.raises(RuntimeError, match="5 bytes that are no safetensors file"):
        trtllm.Executor(b"bytes", "{}", trtllm.ModelType.DECODER_ONLY, make_config())


def test_the_forms_with_an_encoder_are_refused_and_others_are_type_errors(model_path: Path) -> None:
    config = make_config()
    for model_type in (trtllm.ModelType.ENCODER_ONLY, trtllm.ModelType.ENCODER_DECODER):
        with pytest.raises(RuntimeError, match=f"{model_type}: only ModelType.DECODER_ONLY is served"):
            trtllm.Executor(model_path, model_type, config)
        with pytest.raises(RuntimeError, match=str(model_type)):
            trtllm.Executor(str(model_path), model_path, model_type, config)
        with pytest.raises(RuntimeError, match=str(model_type)):
            trtllm.Executor(b"", "{}", b"", "{}", model_type, config)
    for arguments in ((), (model_path,), (model_path, config), (model_path, 0, config), (1, "x", 2, config)):
        with pytest.raises(TypeError, match="incompatible constructor arguments"):
            trtllm.Executor(*arguments)


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.feature("000-12", "000-26", "000-27")
def test_a_single_request(executor: trtllm.Executor, streaming: bool, exclude: bool) -> None:
    output = trtllm.OutputConfig()
    output.exclude_input_from_output = exclude
    request = trtllm.Request(PROMPT, max_tokens=5, streaming=streaming, output_config=output)
    responses = finish(executor, executor.enqueue_request(request))
    assert len(responses) == (5 if streaming else 1)
    tokens = tokens_of(responses)
    assert len(tokens) == (5 if streaming or exclude else 9)
    assert tokens[-5:] == run(executor, PROMPT, 5, output_config=NEW_ONLY).output_token_ids[0]
    assert [response.result.is_final for response in responses] == [False] * (len(responses) - 1) + [True]
    assert responses[-1].result.finish_reasons == [trtllm.FinishReason.LENGTH]
    assert responses[-1].result.is_sequence_final and responses[-1].result.sequence_index == 0


@pytest.mark.feature("000-04", "000-06")
def test_lists_of_ids_give_lists_of_responses_in_their_order(executor: trtllm.Executor) -> None:
    requests = [trtllm.Request([i + 1, i + 2], 3 + i, streaming=bool(i % 2)) for i in range(6)]
    ids = executor.enqueue_requests(requests)
    assert len(set(ids)) == 6
    tokens: dict[int, list[int]] = {i: [] for i in ids}
    finished: set[int] = set()
    while len(finished) < len(ids):
        for request_id, responses in zip(ids, executor.await_responses(ids, SOON), strict=True):
            for response in responses:
                if response.has_error():
                    text = f"ReqId {request_id} has already been processed and was terminated."
                    assert request_id in finished and response.error_msg == text
                else:
                    assert response.request_id == request_id and request_id not in finished
                    tokens[request_id] += response.result.output_token_ids[0]
                    finished |= {request_id} if response.result.is_final else set()
    assert [len(each) for each in tokens.values()] == [3 + i if i % 2 else 5 + i for i in range(6)]


@pytest.mark.feature("000-05")
def test_the_first_argument_says_which_form_of_await_responses_it_is(executor: trtllm.Executor) -> None:
    nothing = timedelta(milliseconds=1)
    for arguments, options in (((nothing,), {}), ((), {"timeout": nothing}), ((None, nothing), {})):
        if arguments == (None, nothing):
            with pytest.raises(TypeError):
                executor.await_responses(*arguments)
        else:
            assert executor.await_responses(*arguments, **options) == []
    request_id = executor.enqueue_request(trtllm.Request(PROMPT, 1))
    (response,) = executor.await_responses(id=request_id, timeout=SOON)
    assert response.request_id == request_id
    assert [len(each) for each in executor.await_responses(ids=[request_id])] == [1]
    for wrong in (("x",), (1.5,), (request_id, 1.0), (request_id, SOON, 3)):
        with pytest.raises(TypeError):
            executor.await_responses(*wrong)


@pytest.mark.feature("000-12")
def test_exactly_as_many_responses_are_ready_as_were_asked_for(executor: trtllm.Executor) -> None:
    chance = random.Random(1234)
    lengths = [chance.randint(1, 12) for _ in range(12)]
    expected = {}
    for i, length in enumerate(lengths):
        request = trtllm.Request([1] * chance.randint(1, 20), length, streaming=bool(i % 2))
        expected[executor.enqueue_request(request)] = length if i % 2 else 1
    end = time.monotonic() + 30
    while executor.get_num_responses_ready() < sum(expected.values()) and time.monotonic() < end:
        time.sleep(0.005)
    assert {i: executor.get_num_responses_ready(i) for i in expected} == expected
    assert executor.get_num_responses_ready() == sum(expected.values())
    assert len(executor.await_responses()) == sum(expected.values())
    assert executor.get_num_responses_ready() == 0


@pytest.mark.feature("000-16")
def test_why_a_request_ended_is_told(executor: trtllm.Executor) -> None:
    first, second, third = run(executor, PROMPT, 3, output_config=NEW_ONLY).output_token_ids[0]
    ended = run(executor, PROMPT, 9, output_config=NEW_ONLY, end_id=first)
    assert (ended.output_token_ids, ended.finish_reasons) == ([[first]], [trtllm.FinishReason.END_ID])
    stopped = run(executor, PROMPT, 9, output_config=NEW_ONLY, stop_words=[[second, third]])
    assert stopped.output_token_ids == [[first, second, third]]
    assert stopped.finish_reasons == [trtllm.FinishReason.STOP_WORDS]
    free = run(executor, PROMPT, 9, output_config=NEW_ONLY, end_id=-1, bad_words=[[first]])
    assert first not in free.output_token_ids[0] and free.finish_reasons == [trtllm.FinishReason.LENGTH]


@pytest.mark.feature("000-07")
def test_cancelling_gives_one_final_response(executor: trtllm.Executor) -> None:
    request_id = executor.enqueue_request(trtllm.Request(PROMPT, 400, streaming=True))
    assert not executor.await_responses(request_id, SOON)[-1].result.is_final
    executor.cancel_request(request_id)
    last = finish(executor, request_id)[-1].result
    assert last.is_final and last.finish_reasons == [trtllm.FinishReason.CANCELLED]
    executor.cancel_request(request_id)


@pytest.mark.feature("000-62")
def test_the_time_that_a_request_may_take(executor: trtllm.Executor) -> None:
    result = run(executor, PROMPT, 450, allotted_time_ms=timedelta(milliseconds=20))
    assert result.finish_reasons == [trtllm.FinishReason.TIMED_OUT]


@pytest.mark.feature("000-17")
def test_the_client_id_comes_back(executor: trtllm.Executor) -> None:
    ids = executor.enqueue_requests([trtllm.Request([i], 1, client_id=123) for i in (1, 2)])
    assert [finish(executor, i)[0].client_id for i in ids] == [123, 123]
    wrong = executor.enqueue_request(trtllm.Request([1], 1, client_id=9, encoder_output_length=1))
    assert finish(executor, wrong)[0].client_id == 9


@pytest.mark.feature("000-21")
def test_all_tokens_so_far_where_that_is_asked_for(executor: trtllm.Executor) -> None:
    request = trtllm.Request(PROMPT, 5, streaming=True, return_all_generated_tokens=True)
    parts = [answer.result.output_token_ids[0] for answer in finish(executor, executor.enqueue_request(request))]
    assert [len(part) for part in parts] == [1, 2, 3, 4, 5]
    assert all(part == parts[-1][: len(part)] for part in parts)


@pytest.mark.feature("000-14")
def test_what_is_not_asked_for_is_none_and_log_probs_add_up(executor: trtllm.Executor) -> None:
    plain = run(executor, PROMPT, 3)
    names = "cum_log_probs log_probs context_logits generation_logits encoder_output request_perf_metrics"
    assert [getattr(plain, name) for name in names.split()] == [None] * 6 and plain.additional_outputs == []
    asked = run(executor, PROMPT, 3, output_config=trtllm.OutputConfig(return_log_probs=True))
    assert asked.cum_log_probs == pytest.approx([sum(asked.log_probs[0])]) and len(asked.log_probs[0]) == 3


def test_an_embedding_bias_forces_its_token_and_its_shape_is_checked(executor: trtllm.Executor) -> None:
    bias = torch.zeros(96)
    bias[42] = torch.finfo(torch.float32).max
    assert run(executor, PROMPT, 4, output_config=NEW_ONLY, embedding_bias=bias).output_token_ids == [[42] * 4]
    assert "embedding bias shape is not as expected" in refused(executor, PROMPT, 4, embedding_bias=torch.zeros(95))
    assert run(executor, PROMPT, 1).is_final, "the engine lives on"


@pytest.mark.feature("000-13")
def test_decoding_is_greedy_unless_top_k_or_top_p_says_otherwise(executor: trtllm.Executor) -> None:
    def output(**sampling: Any) -> list[int]:
        config = trtllm.SamplingConfig(**sampling)
        return run(executor, PROMPT, 24, output_config=NEW_ONLY, sampling_config=config).output_token_ids[0]

    greedy = output()
    assert output(temperature=5.0, seed=1) == output(top_k=1, temperature=5.0) == output(top_p=0.0) == greedy
    sampled = output(top_k=50, temperature=5.0, seed=1)
    assert sampled != greedy and output(top_k=50, temperature=5.0, seed=1) == sampled
    assert output(top_p=0.99, temperature=5.0, seed=1) != greedy


REFUSED: dict[str, Any] = {
    "eagle_config": trtllm.EagleConfig(),
    "multimodal_embedding": torch.ones(1),
    "mrope_config": trtllm.MropeConfig(torch.ones(1), 1),
    "encoder_input_token_ids": [1],
    "encoder_input_features": torch.ones(1),
    "cross_attention_mask": torch.ones(1),
    "skip_cross_attn_blocks": torch.ones(1),
    "language_adapter_uid": 1,
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.feature("000-23")
def test_what_is_not_served_is_answered_with_an_error_that_names_it(executor: trtllm.Executor, name: str) -> None:
    assert f"Request.{name} is not served" in refused(executor, PROMPT, 1, **{name: REFUSED[name]})


@pytest.mark.feature("000-62")
@pytest.mark.parametrize("size", [0, -1])
def test_a_queue_of_no_size_takes_any_number_of_requests(model_path: Path, size: int) -> None:
    """As upstream's own model.py configures it."""
    config = make_config(max_queue_size=size, max_batch_size=1, peft_cache_config=trtllm.PeftCacheConfig())
    with make_executor(model_path, config) as executor:
        ids = executor.enqueue_requests([trtllm.Request(PROMPT, 2) for _ in range(20)])
        assert all(not finish(executor, request_id)[-1].has_error() for request_id in ids)


def test_lookahead_needs_an_executor_that_is_configured_for_it(executor: trtllm.Executor) -> None:
    message = refused(executor, PROMPT, 1, lookahead_config=trtllm.LookaheadDecodingConfig(3, 5, 7))
    assert (
        "max_draft_tokens is 4 (" in message
        and "lookahead decoding" in message
        and "speculation.mode=lookup" in message
    )


def test_other_refusals_name_what_is_wrong(executor: trtllm.Executor) -> None:
    assert "LoRA task 1 not found in cache" in refused(executor, PROMPT, 1, lora_config=trtllm.LoraConfig(1))
    drafts = trtllm.ExternalDraftTokensConfig([1], acceptance_threshold=0.5)
    error = refused(executor, PROMPT, 1, external_draft_tokens_config=drafts)
    assert "ExternalDraftTokensConfig.acceptance_threshold is not served" in error
    kinds = trtllm.RequestType
    message = "kv_transfer.enabled is false"
    assert message in refused(executor, PROMPT, 1, type=kinds.REQUEST_TYPE_CONTEXT_ONLY)
    state = {"context_phase_params": trtllm.ContextPhaseParams([1], 1, b"x")}
    assert message in refused(executor, PROMPT, 1, type=kinds.REQUEST_TYPE_GENERATION_ONLY, **state)
    assert "go with REQUEST_TYPE_GENERATION_ONLY alone" in refused(executor, PROMPT, 1, **state)
    assert "params are not given" in refused(executor, PROMPT, 1, type=kinds.REQUEST_TYPE_GENERATION_ONLY)
    encoder = trtllm.OutputConfig(return_encoder_output=True)
    assert "OutputConfig.return_encoder_output is not" in refused(executor, PROMPT, 1, output_config=encoder)
    wide = trtllm.SamplingConfig(beam_width=2)
    assert "beam_width is 2, the limit is max_beam_width 1" in refused(executor, PROMPT, 1, sampling_config=wide)
    assert "outside the vocabulary" in refused(executor, [96], 1)
    assert run(executor, PROMPT, 1).is_final, "the engine lives on"


@pytest.mark.feature("000-42")
def test_a_guided_request_without_set_up_gets_an_error(executor: trtllm.Executor) -> None:
    guided = trtllm.GuidedDecodingParams(trtllm.GuidedDecodingParams.GuideType.JSON)
    assert "GuidedDecoder is not setup" in refused(executor, PROMPT, 1, guided_decoding_params=guided)


def test_prompts_longer_than_a_step_are_refused_unless_they_may_be_chunked(model_path: Path) -> None:
    long = [1] * 100
    with make_executor(model_path, make_config(max_num_tokens=64)) as executor:
        assert "64" in refused(executor, long, 2)
    with make_executor(model_path, make_config(max_num_tokens=64, enable_chunked_context=True)) as executor:
        assert run(executor, long, 2).is_final


@pytest.mark.feature("000-20")
def test_drafts_are_verified(executor: trtllm.Executor) -> None:
    """Of four drafts the model says the first two; so 2 of 4 are accepted, and the output is that of plain decoding."""
    plain = run(executor, PROMPT, 3, output_config=NEW_ONLY).output_token_ids[0]
    drafts = trtllm.ExternalDraftTokensConfig([*plain[:2], (plain[2] + 1) % 96, 10])
    told = trtllm.OutputConfig(exclude_input_from_output=True, return_perf_metrics=True)
    result = run(executor, PROMPT, 3, output_config=told, external_draft_tokens_config=drafts)
    assert result.output_token_ids[0] == plain
    metrics = result.request_perf_metrics.speculative_decoding
    assert metrics.acceptance_rate == 0.5
    assert (metrics.total_accepted_draft_tokens, metrics.total_draft_tokens) == (2, 4)


def test_a_retention_reaches_the_engine(executor: trtllm.Executor) -> None:
    span = trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig
    kept = trtllm.KvCacheRetentionConfig([span(2, None, 90), span(0, 2, 30, timedelta(seconds=9))], 80)
    assert run(executor, PROMPT, 2, kv_cache_retention_config=kept, priority=0.75).is_final
    moved = trtllm.KvCacheRetentionConfig([], 80, None, trtllm.KvCacheTransferMode.GDS)
    assert "transfer_mode" in refused(executor, PROMPT, 2, kv_cache_retention_config=moved)
    assert "priority is 1.5" in refused(executor, PROMPT, 2, priority=1.5)


@pytest.mark.feature("000-25", "000-28", "000-29", "000-30", "000-31")
def test_several_sequences_and_beams(model_path: Path) -> None:
    output = trtllm.OutputConfig(True, exclude_input_from_output=True)
    with make_executor(model_path, make_config(max_beam_width=4)) as executor:
        sampling = trtllm.SamplingConfig(top_k=50, temperature=5.0, seed=3, num_return_sequences=3)
        several = trtllm.Request(PROMPT, 6, sampling_config=sampling, output_config=output)
        results = [response.result for response in finish(executor, executor.enqueue_request(several))]
        assert sorted(result.sequence_index for result in results) == [0, 1, 2]
        assert [result.is_final for result in results].count(True) == 1 and results[-1].is_final
        assert all(result.is_sequence_final and len(result.output_token_ids) == 1 for result in results)
        beams = trtllm.SamplingConfig(4, num_return_sequences=2, length_penalty=1.0)
        best = run(executor, PROMPT, 6, sampling_config=beams, output_config=output)
        assert best.sequence_index == 0 and [len(beam) for beam in best.output_token_ids] == [6, 6]
        assert best.cum_log_probs[0] >= best.cum_log_probs[1] and len(best.finish_reasons) == 2
        greedy = run(executor, PROMPT, 6, output_config=output)
        assert best.cum_log_probs[0] >= greedy.cum_log_probs[0] - 1e-4


def test_a_window_that_the_cache_cannot_hold_fails_at_once_where_that_is_asked_for(model_path: Path) -> None:
    cache = trtllm.KvCacheConfig(max_tokens=64, max_attention_window=[256])
    with pytest.raises(RuntimeError, match="the attention window is 256 tokens, the KV cache holds 64"):
        make_executor(model_path, make_config(kv_cache_config=cache, fail_fast_on_attention_window_too_large=True))
    with make_executor(model_path, make_config(kv_cache_config=cache)) as executor:
        assert run(executor, PROMPT, 2).is_final


@pytest.mark.feature("000-03")
def test_after_shutdown_everything_raises_and_nothing_can_be_enqueued(model_path: Path) -> None:
    executor = make_executor(model_path, make_config())
    assert executor.can_enqueue_requests()
    executor.shutdown()
    assert not executor.can_enqueue_requests()
    request = trtllm.Request(PROMPT, 1)
    for call in (
        lambda: executor.enqueue_request(request),
        lambda: executor.enqueue_requests([request]),
        lambda: executor.await_responses(SOON),
        lambda: executor.await_responses(1),
        lambda: executor.get_num_responses_ready(),
        lambda: executor.cancel_request(1),
        executor.get_latest_iteration_stats,
        executor.get_latest_request_stats,
        executor.get_latest_debug_tensors,
        executor.get_kv_cache_event_manager,
    ):
        with pytest.raises(RuntimeError, match="shut down"):
            call()
    executor.shutdown()


def test_shutdown_wakes_a_waiter(model_path: Path) -> None:
    executor = make_executor(model_path, make_config())
    got: list[Any] = []
    waiter = threading.Thread(target=lambda: got.append(executor.await_responses()))
    waiter.start()
    executor.shutdown()
    waiter.join(20)
    assert not waiter.is_alive() and got in ([[]], [])


def test_an_executor_that_nobody_holds_any_more_is_shut_down(model_path: Path) -> None:
    executor = make_executor(model_path, make_config())
    core = executor._core
    gone = weakref.ref(executor)
    del executor
    gc.collect()
    assert gone() is None and not core.can_enqueue_requests()


@pytest.mark.parametrize("wrong", [None, 1, "request", [1, 2]])
def test_only_requests_can_be_enqueued(executor: trtllm.Executor, wrong: Any) -> None:
    with pytest.raises(TypeError, match="is no Request"):
        executor.enqueue_request(wrong)

"""Both phases of a request on two engines, over real checkpoints and every interface: the bits of one engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from backend.api import EngineConfig, OutputConfig, Request, SamplingConfig
from backend.api.config.kv_bits import KV_TYPES, named
from backend.api.config.schema import (
    KvCacheConfig,
    KvTransferConfig,
    ModelConfigSection,
    SchedulerConfig,
    WorkersConfig,
)
from backend.api.response import Response
from backend.executor import Executor
from compat import llm, trtllm
from tests.model.tiers import TierCase

pytestmark = pytest.mark.feature("002-49")
PROMPT = [(7 * n) % 90 + 1 for n in range(75)]  # two blocks of 32 tokens, and a part of one
SAMPLING = SamplingConfig(temperature=0.9, top_p=0.95, seed=5, repetition_penalty=1.1)


def config(tier: TierCase, kv: str = "auto", **model: Any) -> EngineConfig:
    return EngineConfig(
        ModelConfigSection(
            dtype="float32", kernels=tier.kernels, device="cpu", num_threads=1, gather_generation_logits=True, **model
        ),
        KvCacheConfig(block_size=tier.block, max_tokens=512, **named(kv)),
        SchedulerConfig(max_batch_size=2, max_num_tokens=64),
        kv_transfer=KvTransferConfig(enabled=True),
    )


def ask(executor: Executor, **fields: Any) -> Response:
    output = OutputConfig(
        exclude_input_from_output=True, return_log_probs=True, return_generation_logits=True, return_perf_metrics=True
    )
    request = Request(PROMPT, 12, output_config=output, sampling_config=SAMPLING, **fields)
    (response,) = executor.await_responses(executor.enqueue_request(request))
    return response


@pytest.mark.parametrize("kv", KV_TYPES)
def test_tokens_and_logits_have_the_bits_of_one_engine(
    checkpoint: Callable[[str], Path], tier: TierCase, kv: str
) -> None:
    settings = config(tier, kv)
    with Executor.from_directory(checkpoint("qwen3"), settings) as first:
        alone, state = ask(first).result, ask(first, context_only=True).result.kv_state
    with Executor.from_directory(checkpoint("qwen3"), settings) as second:
        found = ask(second, kv_state=state).result
        again = ask(second).result
    assert found.output_token_ids == alone.output_token_ids == again.output_token_ids
    if tier.kernels == "native":  # torch's sums depend on the number of rows
        assert found.log_probs == alone.log_probs and found.generation_logits == alone.generation_logits
    assert found.log_probs[0] == pytest.approx(alone.log_probs[0], abs=1e-4)
    assert found.perf_metrics.num_context_tokens == 1
    assert again.perf_metrics.num_context_tokens == len(PROMPT), "foreign KV serves its own request alone"


def test_a_state_goes_to_an_engine_with_the_same_model_and_settings_only(
    checkpoint: Callable[[str], Path], native_kernels: None
) -> None:
    native, torch = TierCase("native", 32), TierCase("torch", 32)
    with Executor.from_directory(checkpoint("qwen3"), config(native)) as first:
        state = ask(first, context_only=True).result.kv_state
        own = first.hello.model.kv_fingerprint
    others = [
        ("llama2", config(native)),
        ("qwen3", config(native, "int8")),
        ("qwen3", config(torch)),
        ("qwen3", config(native, quantization="int8")),
        ("qwen3", replace(config(native), kv_cache=KvCacheConfig(block_size=64, max_tokens=512))),
    ]
    for name, settings in others:
        with Executor.from_directory(checkpoint(name), settings) as second:
            assert second.hello.model.kv_fingerprint not in (own, "")
            response = ask(second, kv_state=state)
            assert response.has_error() and f"fingerprint {own[:12]!r}" in response.error_msg
            assert not ask(second).has_error()


def test_several_ranks_pass_on_the_tokens_alone(checkpoint: Callable[[str], Path], native_kernels: None) -> None:
    settings = replace(config(TierCase("native", 32)), workers=WorkersConfig(tensor_parallel_size=2))
    with Executor.from_directory(checkpoint("llama2"), settings) as executor:
        alone, state = ask(executor).result, ask(executor, context_only=True, cache_salt="a").result.kv_state
        found = ask(executor, kv_state=state, cache_salt="b").result
    assert len(state) < 1000 and found.output_token_ids == alone.output_token_ids
    assert found.perf_metrics.num_context_tokens == len(PROMPT)


def test_the_llm_api_carries_the_state_in_disaggregated_params(checkpoint: Callable[[str], Path]) -> None:
    options = dict(skip_tokenizer_init=True, engine_config=config(TierCase("torch", 4)), cache_transceiver_config={})
    params = llm.SamplingParams(max_tokens=8, seed=3, temperature=0.8, top_k=20, end_id=-1, detokenize=False)

    def generate(engine: llm.LLM, given: llm.DisaggregatedParams | None = None) -> Any:
        prompt = {"prompt_token_ids": PROMPT}
        return engine.generate(prompt, params, use_tqdm=False, disaggregated_params=given).outputs[0]

    with llm.LLM(str(checkpoint("llama2")), **options) as first:
        alone = generate(first)
        context = generate(first, llm.DisaggregatedParams(request_type="context_only"))
    given = context.disaggregated_params
    assert given.first_gen_tokens == context.token_ids == alone.token_ids[:1] and given.ctx_request_id is not None
    with llm.LLM(str(checkpoint("llama2")), **options) as second:
        rest = generate(second, changed(given, request_type="generation_only"))
        assert rest.token_ids == alone.token_ids and rest.disaggregated_params is None
        without = generate(second, llm.DisaggregatedParams(request_type="generation_only", first_gen_tokens=[1]))
        assert without.token_ids == alone.token_ids, "without a state the prompt is computed again"


def test_the_executor_bindings_carry_it_in_context_phase_params(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("llama2")

    def generate(kind: trtllm.RequestType, given: trtllm.ContextPhaseParams | None = None) -> trtllm.Result:
        settings = trtllm.ExecutorConfig(cache_transceiver_config=trtllm.CacheTransceiverConfig())
        output = trtllm.OutputConfig(exclude_input_from_output=True)
        with trtllm.Executor(path, trtllm.ModelType.DECODER_ONLY, settings) as executor:
            request = trtllm.Request(PROMPT, 8, type=kind, context_phase_params=given, output_config=output)
            (response,) = executor.await_responses(executor.enqueue_request(request))
        return response.result

    kinds = trtllm.RequestType
    alone = generate(kinds.REQUEST_TYPE_CONTEXT_AND_GENERATION).output_token_ids[0]
    context = generate(kinds.REQUEST_TYPE_CONTEXT_ONLY)
    assert context.output_token_ids[0] == context.context_phase_params.first_gen_tokens == alone[:1]
    rest = generate(kinds.REQUEST_TYPE_GENERATION_ONLY, context.context_phase_params)
    assert rest.output_token_ids[0] == alone and rest.context_phase_params is None

"""GenerationRequest and the values that travel with it."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from compat.llm import (
    BatchedLogitsProcessor,
    CompletionOutput,
    DisaggregatedParams,
    GenerationRequest,
    LogitsProcessor,
    Logprob,
    LoRARequest,
    PromptAdapterRequest,
    SamplingParams,
)


@pytest.mark.feature("002-04")
def test_an_id_is_set_once() -> None:
    request = GenerationRequest([1], SamplingParams())
    assert request.id is None
    assert request.set_id(7) is request
    with pytest.raises(ValueError, match="the request already has the id 7"):
        request.set_id(8)
    assert request.id == 7


@pytest.mark.feature("002-07")
@pytest.mark.parametrize("prompt", [[1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1), 2]])
def test_a_prompt_of_any_kind_becomes_a_list_of_ints(prompt: object) -> None:
    ids = GenerationRequest(prompt, SamplingParams(), query_token_ids=prompt).prompt_token_ids
    assert ids == [1, 2] and [type(i) for i in ids] == [int, int]


@pytest.mark.feature("002-07")
@pytest.mark.parametrize("prompt", ["text", 5, [1.5], [[1]], None, np.array([[1]])])
def test_what_is_no_list_of_token_ids_is_a_type_error(prompt: object) -> None:
    with pytest.raises(TypeError, match="prompt_token_ids"):
        GenerationRequest(prompt, SamplingParams())


@pytest.mark.feature("002-07")
def test_a_request_has_its_fields() -> None:
    params, lora = SamplingParams(max_tokens=9), LoRARequest("math", 1, "path")
    adapter, half = PromptAdapterRequest("soft", 2, "local"), DisaggregatedParams(request_type="context_only")
    request = GenerationRequest(
        [1], params, [2], lora, adapter, True, {"image": b"x"}, "retention", half, arrival_time=3.5
    )
    assert request.sampling_params is params and request.max_tokens == 9
    assert (request.prompt_token_ids, request.query_token_ids, request.streaming) == ([1], [2], True)
    assert (request.lora_request, request.prompt_adapter_request) == (lora, adapter)
    assert (request.multimodal_params, request.kv_cache_retention_config) == ({"image": b"x"}, "retention")
    assert (request.disaggregated_params, request.arrival_time) == (half, 3.5)


@pytest.mark.feature("002-08")
def test_the_query_stands_behind_its_context() -> None:
    assert GenerationRequest([1, 2], SamplingParams(), query_token_ids=[3]).all_token_ids == [1, 2, 3]


@pytest.mark.feature("002-09")
def test_the_arrival_is_noted_and_never_goes_back() -> None:
    before = time.monotonic()
    times = [GenerationRequest([1], SamplingParams()).arrival_time for _ in range(5)]
    assert before <= times[0] and times == sorted(times) and times[-1] <= time.monotonic()


def test_adapters_are_named_and_their_path_is_not_looked_at() -> None:
    lora = LoRARequest("math", 1, "does/not/exist")
    assert (lora.name, lora.adapter_id, lora.path) == ("math", 1, "does/not/exist")
    assert LoRARequest(lora_name="math", lora_int_id=1).path == ""
    soft = PromptAdapterRequest("soft", 2, "does/not/exist")
    assert (soft.name, soft.adapter_id, soft.local_path) == ("soft", 2, "does/not/exist")


@pytest.mark.parametrize("kind", ["context_only", "generation_only", "context_and_generation", None])
def test_a_disaggregated_request_is_of_a_known_type(kind: str | None) -> None:
    half = DisaggregatedParams(request_type=kind, first_gen_tokens=[1], ctx_request_id=2, opaque_state=b"x")
    assert (half.request_type, half.first_gen_tokens, half.draft_tokens) == (kind, [1], None)


def test_an_unknown_type_of_a_disaggregated_request_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="request_type is 'prefill', allowed are context_only"):
        DisaggregatedParams(request_type="prefill")


def test_logits_processors_are_classes_to_derive_from() -> None:
    for base in (LogitsProcessor, BatchedLogitsProcessor):
        with pytest.raises(TypeError, match="abstract"):
            base()
        assert type("Derived", (base,), {"__call__": lambda *arguments: None})()(1, 2, 3, 4, 5) is None


@pytest.mark.feature("002-11")
def test_an_output_begins_empty_and_tells_what_a_step_has_added() -> None:
    output = CompletionOutput(0)
    assert (output.index, output.text, output.token_ids, output.cumulative_logprob) == (0, "", [], None)
    assert (output.logprobs, output.prompt_logprobs, output.finish_reason, output.stop_reason) == ([], [], None, None)
    assert (output.generation_logits, output.disaggregated_params, output.length) == (None, None, 0)
    output.text, output.token_ids, output.logprobs = "ab", [1, 2], [{1: Logprob(-1.0, 1)}, {2: Logprob(-2.0, 1)}]
    output.begin_step()
    output.text += "c"
    output.token_ids.append(3)
    output.logprobs.append({3: Logprob(-3.0)})
    assert (output.text_diff, output.token_ids_diff, output.logprobs_diff) == ("c", [3], [{3: Logprob(-3.0, None)}])
    assert output.length == 3

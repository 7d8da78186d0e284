"""Results that hold tensors, and logits post-processors, through the bindings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compat import trtllm
from compat.trtllm import bindings
from tests.trtllm.helpers import finish, make_config, make_executor, refused, run
from tests.trtllm.test_gpt_manager import Client, names, request

PROMPT = [1, 2, 3, 4]
VOCAB = 96
NEW_ONLY = trtllm.OutputConfig(exclude_input_from_output=True)
BATCHED = trtllm.Request.BATCHED_POST_PROCESSOR_NAME


def force(token: int, logits: torch.Tensor) -> None:
    logits[:] = float("-inf")
    logits[..., token] = 0


def forty_two(request_id: int, logits: torch.Tensor, tokens: Any, stream: int, client_id: int | None) -> None:
    assert stream == 0 and logits.shape == (1, 1, VOCAB)
    force(42, logits)


def output_of(executor: trtllm.Executor, **options: Any) -> list[int]:
    return run(executor, PROMPT, 4, output_config=NEW_ONLY, **options).output_token_ids[0]


@pytest.mark.feature("000-14")
def test_logits_have_the_documented_shapes_and_choose_the_tokens(model_path: Path) -> None:
    asked = trtllm.OutputConfig(
        return_context_logits=True, return_generation_logits=True, exclude_input_from_output=True
    )
    with make_executor(model_path, make_config()) as executor:
        request_id = executor.enqueue_request(trtllm.Request(PROMPT, 5, output_config=asked))
        (response,) = finish(executor, request_id)
        result = response.result
        assert list(result.context_logits.shape) == [4, VOCAB] and result.context_logits.dtype is torch.float32
        assert list(result.generation_logits.shape) == [1, 5, VOCAB]
        assert result.generation_logits.argmax(-1).tolist() == result.output_token_ids
        assert result.context_logits[-1].argmax() == result.output_token_ids[0][0]
        response.clear_context_logits()
        assert response.result.context_logits is None
        streaming = trtllm.Request([9, 8], 3, streaming=True, output_config=asked)
        streamed = finish(executor, executor.enqueue_request(streaming))
    assert [list(each.result.generation_logits.shape) for each in streamed] == [[1, 1, VOCAB]] * 3


@pytest.mark.feature("000-48", "000-49", "000-50", "000-51")
def test_additional_outputs_come_for_who_asks_with_context_where_that_is_asked(model_path: Path) -> None:
    one, two = trtllm.AdditionalModelOutput("hidden_states"), trtllm.AdditionalModelOutput("hidden_states", True)
    with make_executor(model_path, make_config(additional_model_outputs=[one])) as executor:

        def shapes(*asked: trtllm.AdditionalModelOutput, prompt: list[int]) -> dict[str, list[int]]:
            output = trtllm.OutputConfig(additional_model_outputs=list(asked))
            return {
                each.name: list(each.output.shape)[:2]
                for each in run(executor, prompt, 3, output_config=output).additional_outputs
            }

        assert shapes(prompt=[1, 2]) == {}
        assert shapes(one, prompt=[3, 4]) == {"hidden_states": [1, 3]}
        with_context = shapes(two, prompt=[5, 6, 7, 8])
        assert with_context["hidden_states"] == [1, 3] and with_context["context_hidden_states"][0] == 4
        unknown = trtllm.OutputConfig(additional_model_outputs=[trtllm.AdditionalModelOutput("nothing")])
        assert "additional output 'nothing' is not known" in refused(executor, PROMPT, 1, output_config=unknown)
    with pytest.raises(RuntimeError, match="which the model does not mark as an output"):
        make_executor(model_path, make_config(additional_model_outputs=[trtllm.AdditionalModelOutput("nothing")]))


def test_debug_tensors_tell_what_the_model_is_given_and_gives(model_path: Path) -> None:
    """Iteration 0 runs the prompt's 4 tokens, iteration i the i-th output token, which lies at position 3 + i."""
    debug = trtllm.DebugConfig(debug_tensor_names=["logits", "position_ids"], debug_tensors_max_iterations=10)
    with make_executor(model_path, make_config(debug_config=debug)) as executor:
        tokens = output_of(executor)
        told = executor.get_latest_debug_tensors()
        assert executor.get_latest_debug_tensors() == []
    assert [each.iter for each in told] == [0, 1, 2, 3]
    assert all(set(each.debug_tensors) == {"logits", "position_ids"} for each in told)
    assert [each.debug_tensors["position_ids"].tolist() for each in told] == [[0, 1, 2, 3], [4], [5], [6]]
    assert [each.debug_tensors["logits"].argmax(-1).tolist() for each in told] == [[token] for token in tokens]
    unknown = trtllm.DebugConfig(debug_tensor_names=["hidden_states"], debug_tensors_max_iterations=1)
    with pytest.raises(RuntimeError, match="has 'hidden_states'; there are input_ids, "):
        make_executor(model_path, make_config(debug_config=unknown))


def test_no_debug_tensors_are_kept_unless_they_are_asked_for(executor: trtllm.Executor) -> None:
    run(executor, PROMPT, 2)
    assert executor.get_latest_debug_tensors() == []


@pytest.mark.feature("000-36", "000-37")
def test_a_named_post_processor_changes_the_logits_of_who_names_it(model_path: Path) -> None:
    def returned(
        request_id: int, logits: torch.Tensor, tokens: Any, stream: int, client_id: int | None
    ) -> torch.Tensor:
        clients.append(client_id)
        other = logits.clone()
        force(7, other)
        return other

    clients: list[int | None] = []
    named = {"a": forty_two, "b": returned, "none": None}
    config = make_config(logits_post_processor_config=trtllm.LogitsPostProcessorConfig(named))
    with make_executor(model_path, config) as executor:
        plain = output_of(executor)
        assert output_of(executor, logits_post_processor_name="a") == [42] * 4
        assert output_of(executor, logits_post_processor_name="b", client_id=123) == [7] * 4
        assert output_of(executor) == plain and clients == [123] * 4
        for name in ("c", "none"):
            assert f"'{name}' is not known" in refused(executor, PROMPT, 1, logits_post_processor_name=name)


@pytest.mark.feature("000-39")
def test_the_batched_post_processor_is_called_once_an_iteration(model_path: Path) -> None:
    calls: list[list[int]] = []

    def batched(ids: list[int], logits: list[torch.Tensor], tokens: Any, stream: int, clients: list[Any]) -> None:
        calls.append(ids)
        for each in logits:
            force(42, each)

    config = make_config(logits_post_processor_config=trtllm.LogitsPostProcessorConfig(processor_batched=batched))
    with make_executor(model_path, config) as executor:
        requests = [
            trtllm.Request(PROMPT, 5, output_config=NEW_ONLY, logits_post_processor_name=BATCHED) for _ in range(4)
        ]
        ids = executor.enqueue_requests(requests)
        assert [finish(executor, i)[0].result.output_token_ids for i in ids] == [[[42] * 5]] * 4
    assert max(map(len, calls)) == 4 and all(len(set(call)) == len(call) for call in calls)


def test_a_request_may_bring_its_own_post_processor(model_path: Path) -> None:
    def four(request_id: int, logits: torch.Tensor, tokens: Any, stream: int) -> None:
        seen.append(request_id)
        force(5, logits)

    seen: list[int] = []
    with make_executor(model_path, make_config()) as executor:
        plain = output_of(executor)
        assert output_of(executor, logits_post_processor=forty_two) == [42] * 4
        request_id = executor.enqueue_request(trtllm.Request(PROMPT, 3, logits_post_processor=four))
        assert finish(executor, request_id)[0].result.output_token_ids[0][-3:] == [5] * 3
        assert set(seen) == {request_id} and output_of(executor) == plain
        assert executor._own_processors._functions == {}
        both = refused(executor, PROMPT, 1, logits_post_processor=four, logits_post_processor_name="x")
        assert "are both given" in both


def test_an_engine_process_takes_only_functions_that_it_can_import(model_path: Path) -> None:
    parallel = trtllm.ParallelConfig(communication_mode=trtllm.CommunicationMode.ORCHESTRATOR)
    processors = trtllm.LogitsPostProcessorConfig({"local": lambda *arguments: None})
    config = make_config(parallel_config=parallel, logits_post_processor_config=processors)
    with pytest.raises(RuntimeError, match="'local' is to run in an engine process, which imports it"):
        make_executor(model_path, config)


@pytest.mark.feature("001-18")
def test_a_post_processor_of_an_inference_request(model_path: Path) -> None:
    forced, free = request(1, PROMPT, 4), request(2, PROMPT, 4)
    forced.logits_post_processor = lambda request_id, logits, tokens, stream: force(42, logits)
    client = Client(forced, free)
    client.run(model_path)
    assert client.sent[1][0][names.OUTPUT_IDS][0, 0, 4:].tolist() == [42] * 4
    assert client.sent[2][0][names.OUTPUT_IDS][0, 0, 4:].tolist() != [42] * 4


@pytest.mark.feature("001-19")
def test_v1_answers_such_a_request_with_an_error_and_its_mates_finish(model_path: Path) -> None:
    forced, free = request(1, PROMPT, 4), request(2, PROMPT, 4)
    forced.logits_post_processor = forty_two
    client = Client(forced, free)
    client.run(model_path, bindings.TrtGptModelType.V1)
    assert "static" in client.errors[1][0] and len(client.sent[2]) == 1


@pytest.mark.feature("001-51", "001-52", "001-55")
def test_with_the_engine_s_flags_gpt_manager_sends_logits(model_path: Path) -> None:
    client = Client(request(1, PROMPT, 3, return_context_logits=[True], return_generation_logits=[True]))
    client.run(model_path, gather_context_logits=True, gather_generation_logits=True)
    (tensors,) = client.sent[1]
    assert list(tensors[names.CONTEXT_LOGITS].shape) == [1, 4, VOCAB]
    generation = tensors[names.GENERATION_LOGITS]
    assert list(generation.shape) == [1, 1, 3, VOCAB]
    assert generation.argmax(-1)[0].tolist() == tensors[names.OUTPUT_IDS][0, :, 4:].tolist()

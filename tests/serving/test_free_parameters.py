"""Request parameters that no model reads: refused where they are known to mean something, else warned about once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from backend.api import EngineConfig, InvalidRequest
from backend.api.config.schema import TritonConfig
from backend.serving.dialect import Dialect
from backend.serving.intake.free_parameters import _GROUP, MAX_WARNINGS, FreeParameters
from backend.serving.server import ModelServer
from backend.serving.tensors import ONE, Input, ModelTensors
from backend.serving.wires.everbatch import TENSORS as EVERBATCH
from backend.serving.wires.trtllm_tensors import ENSEMBLE, TOKEN_MODEL
from tests.serving.fake_triton import InferenceRequest
from tests.serving.helpers import token_inputs
from tests.serving.scripted import ScriptedExecutor

LLMAPI = ModelTensors("llmapi", (Input("sampling_param_stop", "STRING", ONE, "request"),), (), max_batch_size=0)
NOT_READ = "came as a request parameter, which this model does not read; "


@pytest.mark.parametrize(
    ("tensors", "name", "value", "remedy"),
    [
        (TOKEN_MODEL, "max_tokens", 5, "here the input is called request_output_len (INT32)"),
        (TOKEN_MODEL, "top_k", 5, "here the input is called runtime_top_k (INT32)"),
        (TOKEN_MODEL, "temperature", 0.5, "send it as the input temperature (FP32)"),
        (TOKEN_MODEL, "stop", "x", "here the input is called stop_words_list (INT32)"),
        (ENSEMBLE, "stop", "x", "here the input is called stop_words (STRING)"),
        (ENSEMBLE, "max_new_tokens", 5, "here the input is called max_tokens (INT32)"),
        (ENSEMBLE, "n", 2, "here the input is called num_return_sequences (INT32)"),
        (ENSEMBLE, "logprobs", 3, "here the input is called return_log_probs (BOOL)"),
        (ENSEMBLE, "min_p", 0.1, "this model has nothing of the kind, leave it out"),
        (ENSEMBLE, "truncate_prompt_tokens", 5, "this model has nothing of the kind, leave it out"),
        (TOKEN_MODEL, "diversity_penalty", 0.5, "here the input is called beam_search_diversity_rate (FP32)"),
        (EVERBATCH, "best_of", 2, "put it into the JSON of the input request"),
        (EVERBATCH, "temperature", 0.5, "put it into the JSON of the input request"),
        (ENSEMBLE, "lora", "doll", "here the input is called lora_name (STRING)"),
        (ENSEMBLE, "adapter_id", "doll", "here the input is called lora_name (STRING)"),
        (ENSEMBLE, "json_schema", "{}", "here the input is called guided_decoding_guide (STRING)"),
        (LLMAPI, "stop", "x", "here the input is called sampling_param_stop (STRING)"),
    ],
)
def test_a_known_name_of_another_api_is_refused_with_the_right_one(
    tensors: ModelTensors, name: str, value: Any, remedy: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        FreeParameters(tensors, strict=False).check({name: value})
    assert refusal.value.message == f"{name} {NOT_READ}{remedy}"


def test_what_asks_for_nothing_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    FreeParameters(ENSEMBLE, strict=True).check({"n": 1, "best_of": 1, "use_beam_search": False, "id": "r7"})
    assert caplog.text == ""


def test_an_unknown_name_is_warned_about_once_and_its_value_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    parameters = FreeParameters(ENSEMBLE, strict=False)
    for _ in range(3):
        parameters.check({"temprature": "secret", "model\n\x1b": "secret"})
    assert [record.getMessage() for record in caplog.records] == [
        "request parameter 'temprature' is not known and has no effect, did you mean temperature",
        r"request parameter 'model\n\x1b' is not known and has no effect",
    ]


def test_the_number_and_length_of_warnings_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    parameters = FreeParameters(ENSEMBLE, strict=False)
    for n in range(10 * MAX_WARNINGS):
        parameters.check({f"name{n}" + "x" * 1000: n})
    assert len(caplog.records) == MAX_WARNINGS + 1
    assert max(len(record.getMessage()) for record in caplog.records) < 200


def test_strictly_an_unknown_name_is_refused() -> None:
    with pytest.raises(
        InvalidRequest, match="^'temprature' is no input of this model .*, did you mean temperature; leave"
    ):
        FreeParameters(ENSEMBLE, strict=True).check({"temprature": 0.5})


def test_no_name_stands_for_two_things() -> None:
    from backend.serving.intake.free_parameters import _SAME

    assert len(_GROUP) == sum(len(group.split()) for group in _SAME)


STRICT = EngineConfig(triton=TritonConfig(stats_period_ms=5, strict_parameters=True))


@pytest.mark.parametrize(("reads", "is_refused"), [(False, True), (True, False)])
def test_a_server_refuses_unless_the_front_reads_parameters_itself(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor, reads: bool, is_refused: bool
) -> None:
    server = make_server(config=STRICT, dialect=Dialect(reads_parameters=reads))
    request = InferenceRequest(token_inputs([[1]]), parameters={"max_tokens": 7, "cache_salt": "a", "priority": 1})
    server.execute([request])
    if is_refused:
        assert request.sender.error() == (
            f"[INVALID_ARGUMENT] max_tokens {NOT_READ}here the input is called request_output_len (INT32)"
        )
    else:
        executor.end(1, 9)
        assert request.sender.column("output_ids") == [1, 9]

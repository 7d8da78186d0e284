"""The model `tensorrt_llm` in the form of the LLM API."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from backend.api import EngineConfig, ErrorCode, FinishReason, InvalidRequest, PerfMetrics, Result, Unsupported
from backend.api.config.schema import LoraSection
from backend.api.lora import LoraConfig
from backend.core.step import ModelInfo
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.server import ModelServer
from backend.serving.wires.front import TextTools
from backend.serving.wires.llmapi import LLMAPI
from backend.serving.work import RowOutput, Work
from tests.serving.fake_triton import InferenceRequest, Tensor, TritonError
from tests.serving.scripted import ScriptedExecutor

TYPES = {spec.name: spec.dtype for spec in LLMAPI.tensors.inputs}
NUMPY = {"BOOL": bool, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32}


def arrays(**values: Any) -> dict[str, np.ndarray]:
    """Tensors of one dimension. Names of sampling parameters may be given without their prefix, its list `stop` as `stops`."""
    tensors = {}
    for name, value in values.items():
        full = "sampling_param_stop" if name == "stops" else name if name in TYPES else f"sampling_param_{name}"
        many = value if isinstance(value, list) else [value]
        if TYPES[full] == "STRING":
            tensors[full] = np.array([text.encode() for text in many], dtype=object)
        else:
            tensors[full] = np.array(many, NUMPY[TYPES[full]])
    return tensors


ENDED = {"is_final": False, "is_sequence_final": True}


def work(tools: TextTools, decoupled: bool = True, adapters: tuple[str, ...] = (), **values: Any) -> Work:
    tensors = [Tensor(*item) for item in arrays(**{"text_input": "x = 1", **values}).items()]
    batch = Batch.read(LLMAPI.tensors, tensors, 64)
    info = ModelInfo("m", tools.tokenizer.vocab_size, 64, eos_ids=(3,))
    config = EngineConfig(lora=LoraSection(enabled=bool(adapters), adapters=adapters))
    context = ServingContext(config, info, decoupled, adapters=config.lora.directories)
    LLMAPI.check(batch, context)
    (only,) = LLMAPI.parse(batch, context, Parameters(timeout_s=3.0, namespace="mine"), tools)
    return only


def told(output: RowOutput) -> dict[str, list[Any]]:
    return {name: array.tolist() for name, array in next(iter(output.render()), [])}


def result(ids: list[int], reason: FinishReason = FinishReason.NOT_FINISHED, **fields: Any) -> Result:
    fields = {"is_final": reason is not FinishReason.NOT_FINISHED, **fields}
    return Result([ids], finish_reasons=(reason,), **fields)


@pytest.mark.feature("W-10")
def test_without_parameters_the_defaults_of_the_llm_api_hold(tools: TextTools) -> None:
    request = work(tools).request
    assert request.input_token_ids == tools.tokenizer.encode("x = 1") and request.max_tokens == 32
    assert request.sampling_config.is_greedy and not request.streaming
    assert set(request.end_ids) == {3, *tools.tokenizer.eos_ids}
    assert (request.timeout_s, request.cache_salt) == (3.0, "mine")


@pytest.mark.feature("W-10")
def test_sampling_parameters_fill_the_engines_fields(tools: TextTools) -> None:
    values = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "frequency_penalty": 0.5,
        "presence_penalty": 1.5,
        "seed": 9,
    }
    config = work(tools, **values, max_tokens=5).request.sampling_config
    assert {name: getattr(config, name) for name in values} == values
    assert work(tools, top_p=0.0).request.sampling_config.top_p is None
    assert (
        work(tools, best_of=1, beam_width=1, lora_id=0, lora_name="", image_url="", logits_post_processor_name="")
        is not None
    )


@pytest.mark.feature("W-10")
def test_a_temperature_alone_decodes_greedily(tools: TextTools) -> None:
    assert work(tools, temperature=0.8).request.sampling_config.is_greedy
    assert not work(tools, temperature=0.8, top_p=1.0).request.sampling_config.is_greedy
    with pytest.raises(InvalidRequest, match="decoding is greedy, .*set sampling_param_top_k or sampling_param_top_p"):
        work(tools, best_of=2, temperature=0.8)


@pytest.mark.feature("W-10")
def test_only_what_the_flags_ask_for_is_told(tools: TextTools) -> None:
    ids = tools.tokenizer.encode("ab", add_special_tokens=False)
    plain = work(tools).output
    plain.feed(result(ids, FinishReason.LENGTH))
    assert told(plain) == {"text_output": [b"ab"]}
    flags = {f"return_{name}": True for name in ("finish_reason", "stop_reason", "cumulative_logprob")}
    output = work(tools, streaming=True, **flags).output
    output.feed(result(ids, log_probs=[[-0.5] * len(ids)]))
    first = told(output)
    assert first == {
        "text_output": [b"ab"],
        "finish_reason": [b"None"],
        "stop_reason": [b"None"],
        "cumulative_logprob": [-0.5 * len(ids)],
    }
    output.feed(result([3], FinishReason.END_ID, log_probs=[[-1.0]]))
    last = told(output)
    assert last["finish_reason"] == [b"stop"] and last["stop_reason"] == [b"None"]
    assert last["cumulative_logprob"] == [-0.5 * len(ids) - 1.0]


@pytest.mark.parametrize(
    ("reason", "name"),
    [(FinishReason.LENGTH, b"length"), (FinishReason.TIMED_OUT, b"timeout"), (FinishReason.CANCELLED, b"cancelled")],
)
def test_every_end_has_a_name(tools: TextTools, reason: FinishReason, name: bytes) -> None:
    output = work(tools, return_finish_reason=True).output
    output.feed(result([], reason))
    assert told(output)["finish_reason"] == [name]


def test_a_stop_string_of_the_list_ends_the_text_and_is_named(tools: TextTools) -> None:
    row = work(tools, stops=["zz", ";", ""], return_stop_reason=True, return_finish_reason=True)
    assert row.request.streaming, "the text is matched here"
    assert row.output.feed(result(tools.tokenizer.encode("x;y", add_special_tokens=False))) is not None
    row.output.feed(result([], FinishReason.CANCELLED))
    assert told(row.output) == {"text_output": [b"x"], "finish_reason": [b"stop"], "stop_reason": [b";"]}


@pytest.mark.parametrize(("exclude", "text"), [(None, b"y"), (True, b"y"), (False, b"x = 1y")])
def test_the_prompt_is_repeated_only_when_asked(tools: TextTools, exclude: bool | None, text: bytes) -> None:
    given = {} if exclude is None else {"exclude_input_from_output": exclude}
    output = work(tools, **given).output
    output.feed(result(tools.tokenizer.encode("y", add_special_tokens=False), FinishReason.LENGTH))
    assert told(output)["text_output"] == [text]


def test_performance_metrics_have_the_declared_types(tools: TextTools) -> None:
    output = work(tools, return_perf_metrics=True).output
    perf = PerfMetrics(
        arrival_ns=1, first_scheduled_ns=2, first_token_ns=3, last_token_ns=4, num_new_blocks=3, num_reused_blocks=1
    )
    output.feed(result([5], FinishReason.LENGTH, perf_metrics=perf))
    arrays = dict(*output.render())
    declared = {spec.name: spec.dtype for spec in LLMAPI.tensors.outputs if "perf" in spec.when}
    types = {"INT32": "int32", "INT64": "int64", "FP32": "float32"}
    assert {name: arrays[name].dtype.name for name in declared} == {
        name: types[kind] for name, kind in declared.items()
    }
    assert all(arrays[name].shape == (1,) for name in declared)
    assert arrays["kv_cache_hit_rate"].item() == 0.25 and arrays["kv_cache_missed_block"].item() == 3


@pytest.mark.feature("W-10", "W-04")
@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"text_input": ""}, InvalidRequest, "text_input is empty"),
        ({"text_input": ["a", "b"]}, InvalidRequest, "text_input holds 2 entries, the limit is 1"),
        ({"text_input": "x" * 5000}, InvalidRequest, "text_input has 5000 bytes"),
        ({"text_input": "x y " * 60}, InvalidRequest, "tokens, the limit is 63"),
        ({"max_tokens": 0}, InvalidRequest, "sampling_param_max_tokens is 0"),
        ({"stops": ["s"] * 129}, InvalidRequest, "sampling_param_stop holds 129 entries"),
        ({"best_of": 2}, InvalidRequest, "sampling_param_best_of is 2, and decoding is greedy"),
        ({"best_of": 2, "top_k": 5, "streaming": True}, InvalidRequest, "known only when all have ended"),
        (
            {"best_of": 2, "beam_width": 2},
            InvalidRequest,
            "sampling_param_best_of is 2 beside sampling_param_beam_width 2",
        ),
        ({"best_of": 2**31 - 1, "top_k": 5}, InvalidRequest, "allowed is 1 to 2048"),
        ({"image_url": "x"}, InvalidRequest, "image_url has 'x', and nothing is fetched here"),
        ({"lora_name": "doll"}, Unsupported, "start the server with --lora doll=DIRECTORY"),
        (
            {"lora_path": "/x"},
            Unsupported,
            "lora_path asks for an adapter at a path of the client's .*; send lora_name",
        ),
        ({"lora_ckpt_source": "nemo"}, Unsupported, "lora_ckpt_source asks for an adapter at a path"),
        ({"streaming": True, "decoupled": False}, InvalidRequest, "decoupled mode"),
    ],
)
def test_what_is_wrong_is_named(tools: TextTools, values: dict[str, Any], error: type[Exception], message: str) -> None:
    decoupled = values.get("decoupled", True)
    others = {name: value for name, value in values.items() if name != "decoupled"}
    with pytest.raises(error, match=message):
        work(tools, decoupled, **others)


@pytest.mark.feature("W-10")
def test_the_most_likely_of_several_sequences_is_the_answer(tools: TextTools) -> None:
    """-0.5 - 1.0 for the first, -0.25 for the second, which a stop string cuts short; -9 for the third."""
    row = work(tools, best_of=3, top_k=5, stops=[";"], return_finish_reason=True)
    config = row.request.sampling_config
    assert (config.num_return_sequences, config.beam_width) == (3, 1)
    assert row.request.output_config.return_log_probs and row.request.streaming
    x, stop = (tools.tokenizer.encode(text, add_special_tokens=False) for text in ("x", ";"))
    row.output.feed(result(x, log_probs=[[-0.5]], sequence_index=0))
    row.output.feed(result(x, log_probs=[[-9.0]], sequence_index=2))
    assert row.output.feed(result([*stop, *x], log_probs=[[-0.25, -7.0]], sequence_index=1)) == 1
    for sequence in (2, 1):
        row.output.feed(result([], FinishReason.STOP_WORDS, log_probs=[[]], sequence_index=sequence, **ENDED))
    assert not told(row.output)
    row.output.feed(result(x, FinishReason.LENGTH, log_probs=[[-1.0]], sequence_index=0))
    assert told(row.output) == {"text_output": [b""], "finish_reason": [b"stop"]}


@pytest.mark.feature("W-10")
def test_all_beams_are_told_the_best_first(tools: TextTools) -> None:
    flags = {f"return_{name}": True for name in ("finish_reason", "stop_reason", "cumulative_logprob")}
    row = work(tools, beam_width=2, stops=[";"], **flags)
    assert row.request.sampling_config.beam_width == 2 and not row.request.streaming
    assert tools.tokenizer.encode(";", add_special_tokens=False) in row.request.stop_words
    first, second = (tools.tokenizer.encode(text, add_special_tokens=False) for text in ("x;", "y"))
    ends = (FinishReason.STOP_WORDS, FinishReason.LENGTH)
    log_probs = [[-0.5] * len(first), [-1.0] * len(second)]
    row.output.feed(Result([first, second], is_final=True, finish_reasons=ends, log_probs=log_probs))
    assert told(row.output) == {
        "text_output": [b"x", b"y"],
        "finish_reason": [b"stop", b"length"],
        "stop_reason": [b";", b"None"],
        "cumulative_logprob": [-0.5 * len(first), -1.0 * len(second)],
    }


@pytest.mark.feature("W-10", "000-36")
def test_a_logits_post_processor_is_named(tools: TextTools) -> None:
    assert work(tools, logits_post_processor_name="polite").request.logits_post_processor == "polite"


# ---- in a server -----------------------------------------------------------------------------------------------------


@pytest.fixture
def server(make_server: Any, tools: TextTools) -> ModelServer:
    return make_server(
        LLMAPI.tensors,
        lambda batch, context, parameters: LLMAPI.parse(batch, context, parameters, tools),
        check_text=LLMAPI.check,
        dialect=LLMAPI.dialect,
    )


@pytest.mark.feature("W-10", "W-05")
def test_a_stop_request_is_answered_with_cancelled_and_its_request_ends(
    server: ModelServer, executor: ScriptedExecutor
) -> None:
    running = InferenceRequest(arrays(text_input="a", return_finish_reason=True), "job")
    server.execute([running])
    assert executor.submitted.acquire(timeout=10)
    stop = InferenceRequest({**arrays(text_input=""), "stop": np.array([True])}, "job")
    server.execute([stop])
    assert stop.sender.error() == "[CANCELLED] Request cancelled by client"
    assert stop.sender.wait()[-1].error().code() == TritonError.CANCELLED
    assert running.sender.column("finish_reason") == [b"cancelled"]


def test_a_stop_request_for_nobody_is_answered_alike_and_one_without_id_is_an_error(server: ModelServer) -> None:
    nobody = InferenceRequest({"stop": np.array([True])}, "nobody")
    without = InferenceRequest({"stop": np.array([True])})
    server.execute([nobody, without])
    assert nobody.sender.error() == "[CANCELLED] Request cancelled by client"
    assert "Error generating request: A request id must be provided" in without.sender.error()


def test_an_error_of_the_engine_has_the_protocols_words_in_front(
    server: ModelServer, executor: ScriptedExecutor
) -> None:
    request = InferenceRequest(arrays(text_input="a"))
    server.execute([request])
    assert executor.submitted.acquire(timeout=10)
    executor.error(1, "it broke", ErrorCode.INTERNAL)
    assert request.sender.error() == "[INTERNAL] Error generating request: it broke"


def test_an_adapter_is_one_of_the_server_s_by_name_or_one_that_the_engine_knows_by_id(tools: TextTools) -> None:
    """Beside a name the id is the client's own number for it, as in a LoRARequest."""
    served = {"adapters": ("doll=/loras/doll",)}
    for more in ({}, {"lora_id": 7}, {"lora_ckpt_source": "hf"}):
        lora = work(tools, **served, lora_name="doll", **more).request.lora
        assert (lora.path, lora.name) == ("/loras/doll", "doll") and lora.task_id != 7
    assert work(tools, **served, lora_id=7).request.lora == LoraConfig(7)
    assert work(tools, **served).request.lora is None
    with pytest.raises(Unsupported, match=r"lora_name is 'cow', there are doll"):
        work(tools, **served, lora_name="cow")

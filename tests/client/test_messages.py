"""Requests and answers as values: tensors, JSON, and chunks put together."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from client.guide import Guide
from client.messages import INPUTS, Completion, GenerateRequest, Session, TextChunk
from deploy import ROOT

if TYPE_CHECKING:
    from tritonclient.grpc import service_pb2


def test_only_what_is_given_is_sent() -> None:
    tensors = GenerateRequest(prompt="x", temperature=0.5).tensors()
    assert tensors["text_input"] == ("BYTES", ["x"])
    assert tensors["temperature"] == ("FP32", [0.5])
    assert not {"top_k", "seed", "stop_words", "CORRID", "messages"} & set(tensors)


def test_a_seed_of_zero_and_a_temperature_of_zero_are_given() -> None:
    tensors = GenerateRequest(prompt="x", temperature=0.0, seed=0).tensors()
    assert tensors["temperature"] == ("FP32", [0.0]) and tensors["seed"] == ("UINT64", [0])


def test_a_temperature_alone_samples_though_the_wire_wants_a_top_p_for_that() -> None:
    def top_p(**options: Any) -> Any:
        return GenerateRequest(prompt="x", **options).tensors().get("top_p")

    assert (
        top_p(temperature=0.7)
        == top_p(temperature=0.7, top_k=0)
        == top_p(temperature=0.7, top_p=0.0)
        == ("FP32", [1.0])
    )
    assert top_p(temperature=0.7, top_p=0.5) == ("FP32", [0.5])
    assert top_p() is top_p(temperature=0.0) is top_p(temperature=0.7, top_k=5) is None
    assert top_p(temperature=1.0, beam_width=2) is None


def test_a_chunk_has_the_log_probabilities_of_its_own_tokens() -> None:
    """In a stream the server sends those of all tokens so far with each response."""
    told = [([-1.0], 1), ([-1.0, -2.0, -3.0], 2), ([-1.0, -2.0, -3.0], 0)]
    chunks = [
        TextChunk.from_outputs({"output_log_probs": probs, "num_output_tokens": [count]}, final=False)
        for probs, count in told
    ]
    assert [chunk.log_probs for chunk in chunks] == [[-1.0], [-2.0, -3.0], []]
    assert Completion.from_chunks(chunks).log_probs == [-1.0, -2.0, -3.0]


def test_messages_travel_as_one_json_string_in_place_of_the_prompt() -> None:
    tensors = GenerateRequest(messages=[{"role": "user", "content": "grüß"}]).tensors()
    assert tensors["text_input"] == ("BYTES", [""]), "the model asks for it"
    datatype, (text,) = tensors["messages"]
    assert datatype == "BYTES" and json.loads(text) == [{"role": "user", "content": "grüß"}]


def test_a_session_is_corrid_start_end_stop_and_the_whole_history() -> None:
    tensors = GenerateRequest(prompt="x", session=Session(2**64 - 1, start=True)).tensors()
    assert tensors["CORRID"] == ("UINT64", [2**64 - 1])
    assert [tensors[name] for name in ("START", "END", "STOP")] == [("INT32", [1]), ("INT32", [0]), ("INT32", [0])]
    assert tensors["session_full_history"] == ("BOOL", [True])


@pytest.mark.parametrize("both", [{}, {"prompt": "x", "messages": []}])
def test_exactly_one_of_prompt_and_messages_is_needed(both: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        GenerateRequest(**both).tensors()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"), [("top_k", 2**31), ("seed", -1), ("seed", 2**64), ("end_id", -(2**31) - 1)]
)
def test_an_integer_its_tensor_cannot_hold_is_refused_and_named(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        GenerateRequest(prompt="x", **{field: value}).tensors()  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1e39, float("inf"), float("nan")])
def test_a_number_its_tensor_cannot_hold_is_refused_and_named(value: float) -> None:
    with pytest.raises(ValueError, match="temperature is"):
        GenerateRequest(prompt="x", temperature=value).tensors()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("prompt", {"prompt": "\ud800"}),
        (r"stop_words\[1\]", {"prompt": "x", "stop_words": ["a", "\udfff"]}),
        ("messages", {"messages": [{"role": "user", "content": "\ud800"}]}),
    ],
)
def test_half_a_surrogate_pair_is_refused_before_it_is_sent(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{name} holds half of a surrogate pair"):
        GenerateRequest(**fields).tensors()


def test_the_parameters_are_the_deadline_in_microseconds_and_the_namespace() -> None:
    assert GenerateRequest("x").parameters(2.5) == {"timeout": 2_500_000}
    assert GenerateRequest("x", namespace="").parameters(1) == {"timeout": 1_000_000}
    assert GenerateRequest("x", namespace="alice").parameters(1) == {"timeout": 1_000_000, "cache_salt": "alice"}


def test_a_namespace_has_at_most_256_characters() -> None:
    GenerateRequest("x", namespace="é" * 256).check()
    with pytest.raises(ValueError, match="257 characters, the limit is 256"):
        GenerateRequest("x", namespace="é" * 257).check()


@pytest.mark.parametrize(("namespace", "reason"), [("alice\0b", "zero character"), ("\ud800", "surrogate")])
def test_a_namespace_that_would_not_arrive_whole_is_refused(namespace: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"namespace holds .*{reason}"):
        GenerateRequest("x", namespace=namespace).check()


def test_json_has_scalars_and_keeps_word_lists_as_lists() -> None:
    body = GenerateRequest(prompt="x", stop_words=["a"], bad_words=["b", "c"], max_tokens=7).json_body()
    assert body["text_input"] == "x" and body["max_tokens"] == 7 and body["stream"] is True
    assert body["stop_words"] == ["a"] and body["bad_words"] == ["b", "c"]


def test_a_guide_and_an_adapter_are_named_on_the_wire() -> None:
    """As TensorRT-LLM's inputs have it; a schema may be a dict, and any JSON object needs no text."""
    request = GenerateRequest("x", lora_name="doll", guide=Guide("json_schema", {"type": "integer"}))
    body = request.json_body()
    assert body["lora_name"] == "doll" and body["guided_decoding_guide_type"] == "json_schema"
    assert json.loads(body["guided_decoding_guide"]) == {"type": "integer"}
    assert GenerateRequest("x", guide=Guide("regex", "[a-z]+")).json_body()["guided_decoding_guide"] == "[a-z]+"
    plain = GenerateRequest("x", guide=Guide("json")).json_body()
    assert plain["guided_decoding_guide_type"] == "json" and "guided_decoding_guide" not in plain
    assert not {"lora_name", "guided_decoding_guide_type"} & set(GenerateRequest("x").json_body())


def test_every_input_is_declared_by_the_text_model_with_the_same_type() -> None:
    config = ROOT / "model_repository" / "ensemble" / "config.pbtxt"
    declared = dict(re.findall(r'name: "(\w+)" data_type: TYPE_(\w+)', config.read_text().split("output [")[0]))
    sent = GenerateRequest(prompt="x", session=Session(1)).tensors() | {
        name: (kind, []) for name, (kind, _) in INPUTS.items()
    }
    sent |= {"messages": ("BYTES", [])} | Guide("regex", "a").tensors()
    for name, (datatype, _) in sent.items():
        assert declared[name] == {"BYTES": "STRING"}.get(datatype, datatype), name


def test_every_output_that_is_read_is_declared_by_the_text_model() -> None:
    from client.http_messages import _OURS

    config = ROOT / "model_repository" / "ensemble" / "config.pbtxt"
    declared = set(re.findall(r'name: "(\w+)"', config.read_text().split("output [")[1]))
    assert declared >= _OURS


def test_chunks_add_up_to_a_completion() -> None:
    chunks = [
        TextChunk("ab", num_output_tokens=2, num_input_tokens=5, num_cached_tokens=3, log_probs=[-1.0, -2.0],
                  first_token_time_ns=1_000_000_000, last_token_time_ns=1_000_000_000),
        TextChunk(""),
        TextChunk("c", True, "stop", num_output_tokens=1, log_probs=[-3.0],
                  first_token_time_ns=1_000_000_000, last_token_time_ns=3_500_000_000),
    ]  # fmt: skip
    whole = Completion.from_chunks(chunks)
    assert (whole.text, whole.finish_reason, whole.num_output_tokens) == ("abc", "stop", 3)
    assert (whole.num_input_tokens, whole.num_cached_tokens, whole.generation_s) == (5, 3, 2.5)
    assert whole.log_probs == [-1.0, -2.0, -3.0]


def test_a_count_of_zero_is_told_and_the_last_one_holds() -> None:
    counts = {"num_input_tokens": 5, "num_recomputed_tokens": 0}
    whole = Completion.from_chunks([TextChunk("a", num_cached_tokens=3), TextChunk("b", num_cached_tokens=0, **counts)])
    assert (whole.num_cached_tokens, whole.num_recomputed_tokens) == (0, 0)


def test_no_chunks_are_an_empty_completion() -> None:
    assert Completion.from_chunks([]) == Completion("", None, 0, None, None, None, None, None, None, [""])


@pytest.mark.parametrize("reason", ["", "None"])
def test_a_finish_reason_of_a_running_request_is_none(reason: str) -> None:
    assert TextChunk.from_outputs({"finish_reason": [reason]}, final=False).finish_reason is None


# ---- gRPC ------------------------------------------------------------------------------------------------------------

grpc_messages = pytest.importorskip("client.grpc_messages")


def test_the_grpc_request_is_rank_two_with_raw_contents_and_a_deadline() -> None:
    request = GenerateRequest(prompt="é", stop_words=["a", "bc"], max_tokens=3, session=Session(7))
    message = grpc_messages.encode_request(request, "ensemble", "r1", timeout_s=2.5)
    raw = dict(zip((tensor.name for tensor in message.inputs), message.raw_input_contents, strict=True))
    shapes = {tensor.name: list(tensor.shape) for tensor in message.inputs}
    assert message.id == "r1" and message.model_name == "ensemble"
    assert message.parameters["timeout"].int64_param == 2_500_000
    assert message.parameters["triton_enable_empty_final_response"].bool_param
    assert shapes["text_input"] == [1, 1] and shapes["stop_words"] == [1, 2]
    assert raw["text_input"] == b"\x02\0\0\0\xc3\xa9"
    assert raw["stop_words"] == b"\x01\0\0\0a\x02\0\0\0bc"
    assert raw["max_tokens"] == struct.pack("<i", 3) and raw["CORRID"] == struct.pack("<Q", 7)
    assert raw["stream"] == b"\x01"


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BYTES", ["", "a", "é€"]),
        ("INT32", [-1, 2**31 - 1]),
        ("UINT64", [2**64 - 1]),
        ("BOOL", [True, False]),
        ("FP32", [0.5]),
    ],
)
def test_values_survive_encoding(datatype: str, values: list[object]) -> None:
    assert grpc_messages.decode_values(datatype, grpc_messages.encode_values(datatype, values)) == values


def response(final: bool | None, **outputs: tuple[str, list[object]]) -> service_pb2.ModelInferResponse:
    from tritonclient.grpc import service_pb2

    message = service_pb2.ModelInferResponse()
    if final is not None:
        message.parameters["triton_final_response"].bool_param = final
    for name, (datatype, values) in outputs.items():
        output = message.outputs.add()
        output.name, output.datatype = name, datatype
        message.raw_output_contents.append(grpc_messages.encode_values(datatype, values))
    return message


def test_a_response_becomes_a_chunk_with_the_servers_final_flag() -> None:
    message = response(
        True, text_output=("BYTES", ["hi"]), finish_reason=("BYTES", ["length"]), num_output_tokens=("INT32", [2])
    )
    assert grpc_messages.decode_response(message) == TextChunk("hi", True, "length", num_output_tokens=2)


def test_an_empty_final_response_is_an_empty_final_chunk() -> None:
    assert grpc_messages.decode_response(response(True)) == TextChunk("", final=True)
    assert grpc_messages.decode_response(response(None)).final is False


def chunks(*parts: tuple[int, str, str | None]) -> list[TextChunk]:
    found = [
        TextChunk.from_outputs({"sequence_index": [n], "text_output": [text], "finish_reason": [end]}, final=False)
        for n, text, end in parts
    ]
    return found


def test_outputs_of_several_sequences_are_put_together_one_by_one() -> None:
    assert GenerateRequest(prompt="x", n=3).tensors()["num_return_sequences"] == ("INT32", [3])
    whole = Completion.from_chunks(chunks((1, "b", None), (0, "a", None), (1, "c", "stop"), (0, "d", "length")))
    assert whole.texts == ["ad", "bc"] and whole.text == "ad" and whole.finish_reason == "length"


def test_of_beams_the_last_chunk_holds() -> None:
    """In a stream each chunk has all beams from their beginnings; their log-probabilities come padded, in one list."""
    tensors = GenerateRequest(prompt="x", beam_width=2, length_penalty=0.5).tensors()
    assert tensors["beam_width"] == ("INT32", [2]) and tensors["length_penalty"] == ("FP32", [0.5])
    told = [{"text_output": ["a", "b"]}, {"text_output": ["bc", "a"], "finish_reason": ["stop", "length"]}]
    parts = [TextChunk.from_outputs({**each, "output_log_probs": [-1.0, -2.0]}, final=False) for each in told]
    whole = Completion.from_chunks(parts)
    assert parts[0].texts == ["a", "b"] and whole.texts == ["bc", "a"] and whole.text == "bc"
    assert whole.finish_reason == "stop" and whole.log_probs is None


def test_only_sequences_come_in_streams_of_their_own() -> None:
    counts = [(None, None), (3, None), (1, None), (None, 4), (2, 4)]
    assert [GenerateRequest(prompt="x", n=n, beam_width=k).num_streams for n, k in counts] == [1, 3, 1, 1, 1]


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({}, False),
        ({"temperature": 0.7}, True),
        ({"temperature": 0.7, "top_k": 1}, False),
        ({"temperature": 0.0, "top_k": 5}, False),
        ({"top_k": 5}, True),
        ({"top_p": 0.9}, True),
        ({"temperature": 0.7, "beam_width": 2}, False),
    ],
)
def test_only_a_request_that_samples_gets_a_seed_of_its_own(options: dict[str, Any], samples: bool) -> None:
    request = GenerateRequest(prompt="x", **options)
    seeds = {request.with_seed().seed for _ in range(8)}
    assert (len(seeds) == 8) if samples else (seeds == {None})
    assert all(seed is None or 0 <= seed < 1 << 32 for seed in seeds)
    assert replace(request, seed=0).with_seed().seed == 0, "a seed that is given is kept"


def test_an_answer_tells_the_seed_of_its_request() -> None:
    chunks = [TextChunk("a", seed=5), TextChunk("b", final=True, seed=5)]
    assert Completion.from_chunks(chunks).seed == 5
    assert Completion.from_chunks([TextChunk("a", final=True)]).seed is None

"""Requests of the TensorRT-LLM wire for more than one sampled sequence: sequences, beams, logits, retention, embeddings."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from backend.api import EngineConfig, FinishReason, InvalidRequest, Request, Result
from backend.api.config.schema import LimitsConfig, LoraSection, TritonConfig
from backend.api.errors import EverbatchError
from backend.api.lora import LoraConfig
from backend.api.request import RetentionConfig, TokenRangeRetention
from backend.api.tensor import TensorData
from backend.core.step import ModelInfo
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.wires.front import TextTools
from backend.serving.wires.trtllm_tensors import BLS, TOKEN_MODEL
from backend.serving.wires.trtllm_text import parse_text_requests
from backend.serving.wires.trtllm_tokens import parse_token_requests
from backend.serving.work import RowOutput, Work
from tests.serving.fake_triton import Tensor
from tests.serving.helpers import bools, floats, ints, strings, token_inputs, uint64

MODEL = ModelInfo("m", vocab_size=100, max_seq_len=64)
LORA = LoraSection(enabled=True, adapters=("doll=/loras/doll",))


def token_work(
    prompt: list[int] = [7, 8],  # noqa: B006, only read
    decoupled: bool = True,
    max_tensor_bytes: int = 0,
    **inputs: np.ndarray,
) -> Work:
    tensors = [Tensor(name, array) for name, array in token_inputs([prompt], **inputs).items()]
    config = EngineConfig(limits=LimitsConfig(max_extra_bytes=1024, max_tensor_bytes=max_tensor_bytes), lora=LORA)
    context = ServingContext(config, MODEL, decoupled, adapters=LORA.directories)
    (work,) = parse_token_requests(Batch.read(TOKEN_MODEL, tensors, 64), context, Parameters())
    return work


def asked(**inputs: np.ndarray) -> Request:
    request = token_work(**inputs).request
    assert isinstance(request, Request)
    return request


def text_work(tools: TextTools, accumulate: bool = False, max_tensor_bytes: int = 0, **inputs: np.ndarray) -> Work:
    inputs = {"text_input": strings("x ="), "max_tokens": ints(4), **inputs}
    limits, triton = LimitsConfig(max_tensor_bytes=max_tensor_bytes), TritonConfig(accumulate_tokens=accumulate)
    info = ModelInfo("m", tools.tokenizer.vocab_size, 64, eos_ids=(3,))
    context = ServingContext(EngineConfig(limits=limits, triton=triton, lora=LORA), info, adapters=LORA.directories)
    batch = Batch.read(BLS, [Tensor(name, array) for name, array in inputs.items()], 64)
    (work,) = parse_text_requests(batch, context, Parameters(), tools)
    return work


@pytest.mark.feature("000-19", "W-01")
def test_an_adapter_comes_with_its_weights_or_by_its_id_alone(tools: TextTools) -> None:
    weights, config = np.ones((1, 2, 3), np.float16), np.array([[[1, 0, 8], [4, 1, 8]]], np.int32)
    expected = LoraConfig(7, TensorData("float16", (2, 3), np.ones(6, "<f2").tobytes()), ((1, 0, 8), (4, 1, 8)))
    given = dict(lora_task_id=uint64(7), lora_weights=weights, lora_config=config)
    assert asked(**given).lora == text_work(tools, **given).request.lora == expected
    assert asked(lora_task_id=uint64(7)).lora == LoraConfig(7)
    assert asked(lora_task_id=uint64(0)).lora is None
    assert asked(**given | {"lora_task_id": uint64(0)}).lora == msgspec.structs.replace(expected, task_id=0)
    with pytest.raises(InvalidRequest, match="need the lora_task_id"):
        asked(lora_weights=weights, lora_config=config)


def test_an_adapter_of_the_server_s_is_named_instead(tools: TextTools) -> None:
    named, nobody = strings("doll"), strings("cow")
    for lora in (asked(lora_name=named).lora, text_work(tools, lora_name=named).request.lora):
        assert (lora.path, lora.name) == ("/loras/doll", "doll")
    assert asked(lora_name=strings("")).lora is None
    assert asked(lora_name=strings(""), lora_task_id=uint64(7)).lora == LoraConfig(7)
    assert asked(lora_name=named, lora_task_id=uint64(0)).lora == asked(lora_name=named).lora
    for wrong in (dict(lora_name=nobody), dict(lora_name=named, lora_task_id=uint64(7))):
        with pytest.raises(InvalidRequest, match="there are|send one of them"):
            asked(**wrong)


def told(output: RowOutput) -> list[dict[str, Any]]:
    return [{name: array.tolist() for name, array in arrays} for arrays in output.render()]


@pytest.mark.feature("000-20")
def test_draft_tokens_reach_the_request() -> None:
    drafted = asked(draft_input_ids=np.array([[2, 4, 9, 10]], np.int32))
    assert drafted.draft_tokens == [2, 4, 9, 10] and drafted.ends_after_drafts
    assert asked().draft_tokens == [] and not asked().ends_after_drafts
    assert not asked(draft_input_ids=np.empty((1, 0), np.int32)).ends_after_drafts, "preprocessing may send none"


def test_acceptance_by_probabilities_is_refused() -> None:
    logits = np.zeros((1, 1, 100), np.float32)
    for name, array in {"draft_logits": logits, "draft_acceptance_threshold": floats(0.5)}.items():
        with pytest.raises(EverbatchError, match=name):
            asked(draft_input_ids=ints(2), **{name: array})


def result(ids: list[int], sequence: int, last: bool = False, final: bool = False, **fields: Any) -> Result:
    reason = FinishReason.LENGTH if last or final else FinishReason.NOT_FINISHED
    ends = {"is_final": final, "is_sequence_final": last or final}
    return Result([ids], sequence_index=sequence, finish_reasons=(reason,), **ends, **fields)


# ---- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.feature("W-01", "001-04")
def test_sampling_of_sequences_and_beams_reaches_the_engine() -> None:
    config = asked(
        num_return_sequences=ints(2),
        beam_width=ints(4),
        len_penalty=floats(0.5),
        early_stopping=bools(False),
        beam_search_diversity_rate=floats(-0.5),
    ).sampling_config
    assert (config.num_return_sequences, config.beam_width, config.length_penalty) == (2, 4, 0.5)
    assert config.beam_search_diversity_rate == -0.5
    assert config.early_stopping == 0 and type(config.early_stopping) is int, "a bool could not be sent to the engine"
    plain = asked().sampling_config
    assert (plain.num_return_sequences, plain.beam_width, plain.early_stopping) == (None, 1, None)


@pytest.mark.feature("W-01")
def test_top_p_decay_is_read_and_what_clients_send_for_nothing_is_unset() -> None:
    decay = {"runtime_top_p": floats(0.75), "runtime_top_p_decay": floats(0.5), "runtime_top_p_min": floats(0.25)}
    config = asked(**decay, runtime_top_p_reset_ids=ints(0)).sampling_config
    assert (config.top_p, config.top_p_decay, config.top_p_min, config.top_p_reset_ids) == (0.75, 0.5, 0.25, 0)
    zeros = {name: floats(0.0) for name in decay}
    assert asked(**zeros, runtime_top_p_reset_ids=ints(-1)).sampling_config == asked().sampling_config


@pytest.mark.feature("W-01")
def test_logits_are_asked_for_one_by_one() -> None:
    output = asked(return_context_logits=bools(True), return_generation_logits=bools(False)).output_config
    assert (output.return_context_logits, output.return_generation_logits) == (True, False)


RANGES = {
    "retention_token_range_starts": [8, 0],
    "retention_token_range_ends": [-1, 8],
    "retention_token_range_priorities": [10, 90],
    "retention_token_range_durations_ms": [-1, 1500],
}


def int_row(*values: int) -> np.ndarray:
    return np.array([values], np.int32)


@pytest.mark.feature("W-01", "002-47")
def test_retention_ranges_are_put_in_order_and_minus_one_means_no_end() -> None:
    tensors = {name: int_row(*values) for name, values in RANGES.items()}
    retention = asked(**tensors, retention_decode_priority=ints(80), retention_decode_duration_ms=ints(250)).retention
    ranges = (TokenRangeRetention(0, 8, 90, 1.5), TokenRangeRetention(8, None, 10, None))
    assert retention == RetentionConfig(ranges, 80, 0.25)
    del tensors["retention_token_range_durations_ms"]
    assert [each.duration_s for each in asked(**tensors).retention.token_ranges] == [None, None]
    assert asked(retention_decode_priority=ints(35)).retention == RetentionConfig(decode_priority=35)
    assert asked(retention_decode_duration_ms=ints(-1)).retention == RetentionConfig()
    assert asked().retention is None


@pytest.mark.parametrize("name", [*RANGES])
def test_retention_tensors_that_do_not_go_together_are_refused(name: str) -> None:
    tensors = {each: int_row(*values) for each, values in RANGES.items()}
    tensors[name] = int_row(3)
    with pytest.raises(InvalidRequest, match="send as many of each"):
        asked(**tensors)
    if name != "retention_token_range_durations_ms":
        del tensors[name]
        with pytest.raises(InvalidRequest, match="send as many of each"):
            asked(**tensors)


@pytest.mark.feature("W-01", "000-18")
def test_an_embedding_table_makes_room_for_ids_beyond_the_vocabulary() -> None:
    table = np.array([[[0.5, -2.0, 8.0], [1.0, 0.25, 4.0]]], np.float16)
    request = asked(prompt=[5, 101, 100], prompt_embedding_table=table, prompt_vocab_size=ints(2))
    assert request.input_token_ids == [5, 101, 100]
    assert request.prompt_embeddings == TensorData("float32", (2, 3), table.astype(np.float32).tobytes())
    with pytest.raises(InvalidRequest, match=r"holds 102, allowed is 0 to 101 \(the vocabulary and the rows of"):
        asked(prompt=[102], prompt_embedding_table=table)
    assert asked(prompt_table_extra_ids=np.array([[1, 2]], np.uint64)) == asked()
    with pytest.raises(InvalidRequest, match="a value that is not a finite number"):
        asked(prompt_embedding_table=table * np.float16("inf"))
    with pytest.raises(
        InvalidRequest, match=r"takes 1028 bytes in float32, the limit is 1024 \(limits.max_extra_bytes"
    ):
        asked(prompt_embedding_table=np.zeros((1, 1, 257), np.float16))
    assert asked(prompt_embedding_table=np.zeros((1, 1, 256), np.float16)).prompt_embeddings is not None


@pytest.mark.parametrize("count", [0, -1, 2049, 2**31 - 1])
def test_the_number_of_sequences_is_checked_before_anything_is_made_for_them(count: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"num_return_sequences is {count}, allowed is 1 to 2048"):
        asked(num_return_sequences=ints(count))


def test_a_model_that_is_not_decoupled_can_send_beams_but_not_several_sequences() -> None:
    with pytest.raises(InvalidRequest, match="num_return_sequences is 2.*only a decoupled model can send"):
        token_work(num_return_sequences=ints(2), decoupled=False)
    assert token_work(num_return_sequences=ints(2), beam_width=ints(2), decoupled=False)
    assert token_work(num_return_sequences=ints(1), decoupled=False)


# ---- what is told ----------------------------------------------------------------------------------------------------


@pytest.mark.feature("W-02", "W-05")
def test_each_sequence_has_responses_of_its_own_with_its_index() -> None:
    output = token_work(num_return_sequences=ints(2), return_num_output_tokens=bools(True)).output
    output.feed(result([5], 1, last=True))
    assert told(output) == [
        {"output_ids": [[[7, 8, 5]]], "sequence_length": [[3]], "sequence_index": [[1]], "num_output_tokens": [[1]]}
    ]
    output.feed(result([6, 9], 0, final=True))
    (last,) = output.render()
    arrays = dict(last)
    assert arrays["sequence_index"].tolist() == [[0]] and arrays["sequence_index"].dtype == np.int32
    assert arrays["output_ids"].tolist() == [[[7, 8, 6, 9]]]
    alone = token_work(num_return_sequences=ints(1)).output
    alone.feed(result([5], 0, final=True))
    assert set(told(alone)[0]) == {"output_ids", "sequence_length"}


def beams(ids: list[list[int]], final: bool = True, **fields: Any) -> Result:
    reason = FinishReason.LENGTH if final else FinishReason.NOT_FINISHED
    return Result(ids, is_final=final, is_sequence_final=final, finish_reasons=(reason,) * len(ids), **fields)


@pytest.mark.feature("W-02", "000-25")
def test_beams_are_rows_of_one_response_padded_with_minus_one() -> None:
    """With the prompt 7 8 in front of each; log-probabilities are those of the output alone."""
    flags = {"return_log_probs": bools(True), "return_num_output_tokens": bools(True)}
    output = token_work(beam_width=ints(2), **flags).output
    output.feed(beams([[1, 2, 3], [4]], log_probs=[[-0.5, -0.25, -1.0], [-2.5]], cum_log_probs=[-1.75, -2.5]))
    (arrays,) = map(dict, output.render())
    assert arrays["output_ids"].tolist() == [[[7, 8, 1, 2, 3], [7, 8, 4, -1, -1]]]
    assert arrays["sequence_length"].tolist() == [[5, 3]]
    assert arrays["output_log_probs"].tolist() == [[[-0.5, -0.25, -1.0], [-2.5, -1.0, -1.0]]]
    assert arrays["cum_log_probs"].tolist() == [[-1.75, -2.5]]
    assert arrays["num_output_tokens"].tolist() == [[3 + 1]]
    assert {arrays[name].dtype for name in ("output_log_probs", "cum_log_probs")} == {np.dtype(np.float32)}
    assert {arrays[name].dtype for name in ("output_ids", "sequence_length")} == {np.dtype(np.int32)}


@pytest.mark.feature("W-02")
def test_a_stream_of_beams_holds_them_from_their_beginnings_without_the_prompt() -> None:
    output = token_work(beam_width=ints(2), streaming=bools(True)).output
    output.feed(beams([[1], [2]], final=False))
    assert told(output) == [{"output_ids": [[[1], [2]]], "sequence_length": [[1, 1]]}]
    output.feed(beams([[2, 3], [1, 4]]))
    assert told(output) == [{"output_ids": [[[2, 3], [1, 4]]], "sequence_length": [[2, 2]]}]


@pytest.mark.feature("W-02")
def test_logits_have_a_dimension_of_the_batch_and_one_of_the_beam() -> None:
    rows = np.arange(6, dtype=np.float32)
    output = token_work(return_context_logits=bools(True), return_generation_logits=bools(True)).output
    context, generation = (
        TensorData("float32", (2, 3), rows.tobytes()),
        TensorData("float32", (1, 2, 3), rows.tobytes()),
    )
    output.feed(result([1, 2], 0, final=True, context_logits=context, generation_logits=generation))
    (arrays,) = map(dict, output.render())
    assert arrays["context_logits"].dtype == arrays["generation_logits"].dtype == np.float32
    assert arrays["context_logits"].tolist() == [[[0, 1, 2], [3, 4, 5]]]
    assert arrays["generation_logits"].tolist() == [[[[0, 1, 2], [3, 4, 5]]]]


@pytest.mark.feature("W-01", "W-02")
@pytest.mark.parametrize("max_bytes", [60, 24, 0])
@pytest.mark.parametrize("is_text", [False, True])
def test_each_response_of_a_stream_has_the_log_probabilities_of_all_tokens_so_far(
    tools: TextTools, is_text: bool, max_bytes: int
) -> None:
    """Clients keep those of the last response. The context logits, of 24 bytes, come again while there is room, and with it."""
    flags = {"return_log_probs": bools(True), "return_context_logits": bools(True), "num_return_sequences": ints(2)}
    output = (
        text_work(tools, stream=bools(True), max_tensor_bytes=max_bytes, **flags)
        if is_text
        else token_work(streaming=bools(True), max_tensor_bytes=max_bytes, **flags)
    ).output
    a, b = tools.tokenizer.encode("ab", add_special_tokens=False)[:1], [5]
    logits = TensorData("float32", (2, 3), np.arange(6, dtype=np.float32).tobytes())
    told_so_far: dict[int, list[list[float]]] = {0: [], 1: []}
    found_logits: dict[int, list[bool]] = {0: [], 1: []}
    for step, (sequence, ids) in enumerate([(0, a), (1, a), (0, b), (0, a), (0, b), (1, b)], 1):
        fields = {"log_probs": [[-float(step)]], "context_logits": logits if not told_so_far[sequence] else None}
        output.feed(result(ids, sequence, last=step >= 5, final=step == 6, **fields))
        for arrays in map(dict, output.render()):
            told_so_far[sequence].append(arrays["output_log_probs"][0, 0].tolist())
            found_logits[sequence].append("context_logits" in arrays)
    assert told_so_far == {0: [[-1], [-1, -3], [-1, -3, -4], [-1, -3, -4, -5]], 1: [[-2], [-2, -6]]}
    assert found_logits == {0: [True, max_bytes >= 24, max_bytes >= 48, True], 1: [True, True]}


@pytest.mark.feature("W-02")
def test_texts_of_beams_are_elements_of_one_tensor(tools: TextTools) -> None:
    work = text_work(tools, beam_width=ints(2), stop_words=strings([";"]), return_log_probs=bools(True))
    assert isinstance(work.request, Request) and not work.request.streaming
    ids = [tools.tokenizer.encode(text, add_special_tokens=False) for text in ("a;", "bc")]
    assert ids[0][1:] in work.request.stop_words, "beams are ranked by where they end, so the engine must end them"
    work.output.feed(beams(ids, log_probs=[[-1.0] * len(each) for each in ids]))
    (arrays,) = map(dict, work.output.render())
    assert arrays["text_output"].tolist() == [b"x =a;", b"x =bc"]
    assert arrays["finish_reason"].tolist() == [b"stop", b"length"]
    assert arrays["cum_log_probs"].tolist() == [[-float(len(each)) for each in ids]]


@pytest.mark.feature("W-02", "W-05")
def test_a_stop_string_ends_one_sequence_and_accumulated_text_is_its_own(tools: TextTools) -> None:
    flags = {"stream": bools(True), "stop_words": strings([";"]), "seed": uint64(3)}
    work = text_work(tools, accumulate=True, num_return_sequences=ints(2), **flags)
    a, b, stop = (tools.tokenizer.encode(text, add_special_tokens=False) for text in ("a", "b", ";"))
    assert isinstance(work.request, Request) and work.request.streaming and not work.request.stop_words
    work.output.feed(result(a, 0))
    work.output.feed(result(b, 1))
    assert [(each["text_output"], each["sequence_index"]) for each in told(work.output)] == [
        ([b"a"], [[0]]),
        ([b"b"], [[1]]),
    ]
    assert work.output.feed(result(stop, 1)) == 2
    work.output.feed(result(a, 0))
    work.output.feed(result([], 1, last=True))
    ends = [(each["text_output"], each["sequence_index"], each.get("finish_reason")) for each in told(work.output)]
    assert ends == [([b"aa"], [[0]], None), ([b"b;"], [[1]], [b"stop"])]

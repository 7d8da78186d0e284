"""Rows of several sequences or beams: who is told of what, in how many responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer as Backend
from tokenizers import models

from backend.api import FinishReason, Result
from backend.api.tensor import TensorData
from backend.serving.delivery.outputs import BeamsOutput, JointOutput, SeparateOutput
from backend.serving.delivery.sequence_output import SequenceOutput, context_logits, generation_logits
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.server import ModelServer
from backend.serving.wires.trtllm_outputs import RowSettings, text_output, token_output
from backend.serving.wires.trtllm_tokens import parse_token_requests
from backend.serving.work import Arrays, RowOutput, Work
from backend.text.accumulator import OutputDelta
from backend.text.stream import TextStream
from backend.text.tokenizer import Tokenizer
from tests.serving.fake_triton import InferenceRequest
from tests.serving.helpers import ints, token_request
from tests.serving.scripted import ScriptedExecutor
from tests.serving.test_pump import until

TOKENIZER = Tokenizer(Backend(models.WordLevel({"a": 0, "b": 1, "x": 2}, unk_token="a")))


def result(sequence: int, ids: list[int], last: bool = False, final: bool = False, **fields: Any) -> Result:
    """`last`: the sequence ends; `final`: and with it the row."""
    reason = FinishReason.LENGTH if last or final else FinishReason.NOT_FINISHED
    return Result(
        [ids],
        is_final=final,
        is_sequence_final=last or final,
        sequence_index=sequence,
        finish_reasons=(reason,),
        **fields,
    )


def as_ids(told: Sequence[OutputDelta]) -> Arrays:
    return [(str(news.sequence), np.array([*news.ids, *([-1] if news.finish else [])])) for news in told]


def told(output: RowOutput) -> list[dict[str, list[int]]]:
    """The responses that are due: ids by sequence, with -1 behind them where the end of the sequence is told."""
    return [{name: array.tolist() for name, array in arrays} for arrays in output.render()]


def tokens(count: int, streaming: bool) -> list[SequenceOutput]:
    return [SequenceOutput(streaming=streaming) for _ in range(count)]


def test_each_sequence_streams_for_itself_and_its_end_is_told_once() -> None:
    output = SeparateOutput(tokens(2, True), as_ids)
    output.feed(result(1, [5]))
    output.feed(result(0, [6]))
    output.feed(result(1, [7]))
    assert told(output) == [{"0": [6]}, {"1": [5, 7]}]
    output.feed(result(1, [8], last=True))
    assert told(output) == [{"1": [8, -1]}]
    output.feed(result(0, [9]))
    assert told(output) == [{"0": [9]}]
    output.feed(result(0, [], final=True))
    assert told(output) == [{"0": [-1]}] and output.num_output_tokens == 5 and output.finish is FinishReason.LENGTH
    assert told(output) == []


def test_without_streaming_each_sequence_has_one_response_at_its_end() -> None:
    output = SeparateOutput(tokens(2, False), as_ids)
    output.feed(result(0, [5, 6], last=True))
    assert told(output) == [{"0": [5, 6, -1]}]
    output.feed(result(1, [7, 8], final=True))
    assert told(output) == [{"1": [7, 8, -1]}]


def test_joint_responses_tell_of_all_sequences() -> None:
    output = JointOutput(tokens(2, True), as_ids, streaming=True)
    assert told(output) == []
    output.feed(result(0, [5], last=True))
    assert told(output) == [{"0": [5, -1], "1": []}]
    output.feed(result(1, [6]))
    assert told(output) == [{"0": [-1], "1": [6]}]
    output.feed(result(1, [], final=True))
    assert told(output) == [{"0": [-1], "1": [-1]}]


def test_a_joint_answer_waits_for_the_last_sequence() -> None:
    output = JointOutput(tokens(2, False), as_ids, streaming=False)
    output.feed(result(0, [5], last=True))
    assert told(output) == []
    output.feed(result(1, [6], final=True))
    assert told(output) == [{"0": [5, -1], "1": [6, -1]}]


def test_a_stop_string_ends_its_own_sequence() -> None:
    """` b` is the stop string; the second token of the second sequence completes it, and the first sequence goes on."""

    def render(told: Sequence[OutputDelta]) -> Arrays:
        return [(str(news.sequence), np.array([news.text])) for news in told]

    output = SeparateOutput(
        [SequenceOutput(TextStream(TOKENIZER, stops=[" b"]), streaming=True) for _ in range(2)], render
    )
    assert output.feed(result(0, [0])) is None and output.feed(result(1, [0])) is None
    assert output.feed(result(1, [1])) == 2
    assert told(output) == [{"0": ["a"]}], "what is left of the second waits for its end"
    output.feed(result(1, [0], last=True))
    output.feed(result(0, [2]))
    assert told(output) == [{"0": [" x"]}, {"1": ["a"]}]
    assert output.num_output_tokens == 2 + 2 and output.finish is None


def beams(ids: list[list[int]], final: bool = False) -> Result:
    reason = FinishReason.LENGTH if final else FinishReason.NOT_FINISHED
    return Result(ids, is_final=final, is_sequence_final=final, finish_reasons=(reason,) * len(ids))


def test_beams_are_told_from_their_beginning_in_one_response() -> None:
    """The second Result has a beam that is no continuation of what the first one had in its place."""
    output = BeamsOutput(lambda: SequenceOutput(streaming=True), as_ids, streaming=True)
    assert told(output) == []
    output.feed(beams([[5, 6], [5, 7]]))
    assert told(output) == [{"0": [5, 6], "1": [5, 7]}] and told(output) == []
    output.feed(beams([[8, 6, 1], [5]], final=True))
    assert told(output) == [{"0": [8, 6, 1, -1], "1": [5, -1]}] and output.num_output_tokens == 4


@pytest.mark.feature("001-52")
def test_the_logits_of_beams_are_one_tensor_with_a_row_for_each() -> None:
    """[1, beams, longest, vocabulary]; behind the end of a shorter beam are zeros."""
    numbers = np.arange(1, 13, dtype=np.float32).reshape(2, 2, 3)
    numbers[1, 1] = 0
    output = token_output(RowSettings(has_beams=True), [])
    output.feed(
        replace(beams([[8, 6], [5]], True), generation_logits=TensorData("float32", (2, 2, 3), numbers.tobytes()))
    )
    (arrays,) = output.render()
    np.testing.assert_array_equal(dict(arrays)["generation_logits"], numbers[np.newaxis])


def test_beams_that_do_not_stream_answer_at_their_end() -> None:
    output = BeamsOutput(lambda: SequenceOutput(streaming=False), as_ids, streaming=False)
    output.feed(beams([[5, 6], [5, 7]]))
    assert told(output) == []
    output.feed(beams([[8, 6, 1], [5]], final=True))
    assert told(output) == [{"0": [8, 6, 1, -1], "1": [5, -1]}]


def test_logits_come_with_the_tokens_that_they_belong_to() -> None:
    """Two context rows with the first token; the row of what a stop string cuts off is left out."""

    def tensor(*shape: int) -> TensorData:
        return TensorData("float32", shape, np.arange(np.prod(shape), dtype=np.float32).tobytes())

    sequence = SequenceOutput(TextStream(TOKENIZER, stops=[" b"]), streaming=True)
    sequence.append(result(0, [0], context_logits=tensor(2, 3), generation_logits=tensor(1, 1, 3)))
    sequence.append(result(0, [0], generation_logits=tensor(1, 1, 3)))
    first = sequence.take()
    assert (found := context_logits(first)) is not None and found.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (found := generation_logits(first)) is not None and found.tolist() == [[0, 1, 2]] * 2
    sequence.append(result(0, [1, 2], final=True, generation_logits=tensor(1, 2, 3)))
    last = sequence.take()
    assert context_logits(last) is None
    assert (found := generation_logits(last)) is not None and found.tolist() == [[0, 1, 2]]


# ---- in a server -----------------------------------------------------------------------------------------------------


@pytest.fixture
def server(make_server: Callable[..., ModelServer]) -> ModelServer:
    """Text of the words a, b and x; ` b` is a stop string."""

    def parse(batch: Batch, context: ServingContext, parameters: Parameters) -> list[Work]:
        (work,) = parse_token_requests(batch, context, parameters)
        settings = RowSettings(streaming=True, num_sequences=2)
        return [work._replace(output=text_output(settings, lambda: TextStream(TOKENIZER, stops=[" b"])))]

    return make_server(parse=parse)


def texts(request: InferenceRequest) -> list[tuple[int, bytes]]:
    """Sequence and text of each response, once the last has been sent."""
    found = [response.outputs() for response in request.sender.wait()]
    return [(told["sequence_index"].item(), told["text_output"].item()) for told in found]


@pytest.mark.feature("W-02", "W-05")
def test_a_stop_string_stops_its_sequence_in_the_engine_and_the_last_end_is_final(
    server: ModelServer, executor: ScriptedExecutor
) -> None:
    request = token_request([[1]], num_return_sequences=ints(2))
    server.execute([request])
    executor.tokens(1, 0, 1, sequence_index=1)
    until(lambda: executor.cancelled == [(1, 2)] and executor.cancelled_sequences == [1])
    executor.tokens(1, 0, sequence_index=0)
    executor.end(1, 2, sequence_index=0)
    told = texts(request)
    assert b"".join(text for sequence, text in told if sequence == 0) == b"a x"
    assert [text for sequence, text in told if sequence == 1] == [b"a"]
    assert told[-1][0] == 0, "with the end of the last one the request is over"


@pytest.mark.feature("W-05")
def test_a_client_that_leaves_cancels_all_sequences(server: ModelServer, executor: ScriptedExecutor) -> None:
    request = token_request([[1]], num_return_sequences=ints(2))
    server.execute([request])
    assert executor.submitted.acquire(timeout=10)
    executor.tokens(1, 0, sequence_index=1)
    request.sender.client_gone = True
    until(lambda: executor.cancelled == [(1, None)] and executor.cancelled_sequences == [None])
    request.sender.wait()

"""Streams that go on from their middle: what follows is, response by response, what would have followed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from backend.api import FinishReason, InvalidRequest, Request, SessionConfig
from backend.core.messages import Delivered
from backend.serving.intake.submit import resume_of
from backend.serving.wires.front import TextTools
from backend.serving.work import RowOutput, Work
from tests.serving.helpers import bools, ints, token_inputs
from tests.serving.test_everbatch_model import result, work
from tests.serving.test_token_requests import works

TEXT = "return ö🌍 self.x;y"
LENGTH = FinishReason.LENGTH


def told(output: RowOutput) -> list[Any]:
    return [json.loads(one) for arrays in output.render() for one in dict(arrays)["response"]]


def streamed(output: RowOutput, ids: list[int], start: int, is_final: bool = True, **fields: Any) -> list[Any]:
    """Every response of the tokens from `start` on."""
    found = []
    for place in range(start, len(ids)):
        is_last = is_final and place == len(ids) - 1
        scores = {"log_probs": [[-0.5 * place]], **fields}
        output.feed(result([ids[place]], LENGTH if is_last else FinishReason.NOT_FINISHED, **scores))
        found += told(output)
    return found


@pytest.mark.feature("002-34")
@pytest.mark.parametrize(
    "fields",
    [{}, {"logprobs": 0}, {"echo": True}, {"stop": [";y!", "self.z"]}, {"skip_special_tokens": False}],
)
def test_a_stream_of_text_goes_on_with_the_same_responses_wherever_it_was_cut(
    tools: TextTools,
    fields: dict[str, Any],
) -> None:
    ids = tools.tokenizer.encode(TEXT, add_special_tokens=False)
    asked = {"prompt": "a", "stream": True, "seed": 3, "max_tokens": 50, **fields}
    whole = streamed(work(tools, **asked).output, ids, 0)
    assert len(whole) == len(ids) and any(not one["text"] for one in whole), "half of a character"
    for cut in range(1, len(ids)):
        resumed = work(tools, **asked, resume=[{"token_ids": ids[:cut]}])
        assert resumed.delivered == [Delivered(ids[:cut])]
        assert streamed(resumed.output, ids, cut) == whole[cut:], cut


def test_of_several_sequences_those_that_have_ended_say_no_more(tools: TextTools) -> None:
    asked = {"prompt": "a", "stream": True, "seed": 3, "n": 3}
    entries = [{"token_ids": [5, 6], "ended": True}, {"token_ids": [7]}, {}]
    output = work(tools, **asked, resume=entries).output
    assert told(output) == []
    output.feed(result([8], sequence_index=2))
    output.feed(result([9], LENGTH, sequence_index=1))
    ends = {one["index"]: one.get("usage", {}).get("completion_tokens") for one in told(output)}
    assert ends == {1: 2, 2: None}


def test_the_seed_that_was_chosen_is_told_once_and_must_come_back(tools: TextTools) -> None:
    first = work(tools, prompt="a", stream=True)
    responses = streamed(first.output, [5, 6], 0)
    assert responses[0]["seed"] == first.request.sampling_config.seed and "seed" not in responses[1]
    with pytest.raises(InvalidRequest, match="^resume needs the seed with which the request began"):
        work(tools, prompt="a", stream=True, resume=[{"token_ids": [5]}])
    work(tools, prompt="a", stream=True, temperature=0, resume=[{"token_ids": [5]}])
    for quiet in ({"temperature": 0}, {"seed": 3}):
        assert "seed" not in streamed(work(tools, prompt="a", stream=True, **quiet).output, [5], 0)[0]
    assert "seed" not in streamed(work(tools, prompt="a").output, [5], 0)[0]


@pytest.mark.parametrize(
    ("resume", "fields", "message"),
    [
        ([{"token_ids": [5]}], {"stream": False}, "^resume is for requests that stream"),
        ([{"token_ids": [5]}] * 2, {}, "^resume has 2 entries, expected is one for each of the 1 sequences"),
        ([{"token_ids": [5]}] * 1000, {"n": 2}, "^resume has 1000 entries"),
        ([{"token_ids": [5] * 9}], {"max_tokens": 8}, "^resume has 9 output tokens of a sequence, .* allows 8"),
        ([{"token_ids": [5] * 5000}], {}, "^resume has 5000 output tokens"),
        ([{"token_ids": [-1]}], {}, "^resume: output token -1 is outside the vocabulary"),
        ([{"token_ids": [1 << 40]}], {}, "^resume: output token 1099511627776 is outside"),
        ([{"token_ids": [1.5]}], {}, r"^request\.resume\[0\]\.token_ids\[0\]: expected `int`"),
        ([{"ids": [1]}], {}, r"^request\.resume"),
        ("abc", {}, r"^request\.resume: expected"),
        ([{"token_ids": [5], "ended": "yes"}], {}, r"^request\.resume\[0\]\.ended: expected `bool`"),
    ],
)
def test_what_cannot_have_come_is_refused(
    tools: TextTools,
    resume: Any,
    fields: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        work(tools, **{"prompt": "a", "stream": True, "seed": 1, "max_tokens": 50, "resume": resume, **fields})


def test_an_output_with_a_stop_string_has_ended(tools: TextTools) -> None:
    ids = tools.tokenizer.encode("x;y", add_special_tokens=False)
    asked = {"prompt": "a", "stream": True, "seed": 1, "stop": [";"]}
    with pytest.raises(InvalidRequest, match="^resume has output with the stop string ';', which ends it"):
        work(tools, **asked, resume=[{"token_ids": ids}])


# ---- model tensorrt_llm ----------------------------------------------------------------------------------------------


def token_work(max_tokens: int = 8, **extra: np.ndarray) -> Work:
    (only,) = works(token_inputs([[1, 2, 3]], max_tokens, streaming=bools(True), **extra))
    return only


def matrix(*rows: list[float], dtype: type = np.int32) -> np.ndarray:
    return np.array([rows], dtype)


def arrays_of(output: RowOutput, results: list[tuple[int, float, float]]) -> list[dict[str, Any]]:
    found = []
    for token, log_prob, total in results:
        output.feed(result([token], log_probs=[[log_prob]], cum_log_probs=[total]))
        found += [{name: array.tolist() for name, array in arrays} for arrays in output.render()]
    return found


def test_log_probabilities_of_all_tokens_so_far_go_on() -> None:
    asked = {"return_log_probs": bools(True)}
    results = [(5, -0.1, -0.1), (6, -0.25, -0.35), (7, -0.5, -0.85)]
    whole = arrays_of(token_work(**asked).output, results)
    had = matrix([5, 6, -1]), np.array([[whole[1]["output_log_probs"][0][0] + [-1.0]]], np.float32)
    resumed = token_work(**asked, resume_output_ids=had[0], resume_log_probs=had[1])
    assert arrays_of(resumed.output, results[2:]) == whole[2:]
    (delivered,) = resumed.delivered
    assert delivered.token_ids == [5, 6] and delivered.cum_log_prob == pytest.approx(-0.35)


def test_ends_of_sequences_are_read() -> None:
    resumed = token_work(
        num_return_sequences=ints(2), resume_output_ids=matrix([5, 6], [7, -1]), resume_ended=np.array([[True, False]])
    )
    assert resumed.delivered == [Delivered([5, 6], has_ended=True), Delivered([7])]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"resume_ended": np.array([[True]])}, "send resume_output_ids with them"),
        ({"resume_log_probs": matrix([0.5], dtype=np.float32)}, "send resume_output_ids with them"),
        ({"resume_output_ids": matrix([5]), "resume_ended": np.array([[True, True]])}, "has 2 values, .* 1 rows"),
        ({"resume_output_ids": matrix([5]), "return_log_probs": bools(True)}, "has the shape none"),
        (
            {"resume_output_ids": matrix([5]), "resume_log_probs": matrix([np.inf], dtype=np.float32)},
            "not a finite number",
        ),
        ({"resume_output_ids": matrix([5, -1, 6])}, "output token -1 is outside"),
        ({"resume_output_ids": matrix([5] * 9)}, "has 9 output tokens"),
        ({"resume_output_ids": matrix([100])}, "output token 100 is outside"),
        ({"resume_output_ids": matrix([5], [6])}, "has 2 entries"),
        ({"resume_output_ids": matrix([5]), "streaming": bools(False)}, "for requests that stream"),
    ],
)
def test_tensors_that_cannot_have_come_are_refused(inputs: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        works(token_inputs([[1, 2, 3]], 8, **{"streaming": bools(True), **inputs}))


# ---- what the engine is told -----------------------------------------------------------------------------------------


def asked(prompt: list[int], **fields: Any) -> Request:
    return Request(prompt, 4, streaming=True, **fields)


def test_a_new_request_is_told_as_new_and_a_turn_by_its_request_id() -> None:
    assert resume_of(asked([1]), (), "id") is None
    turn = asked([1], session=SessionConfig(7))
    assert resume_of(turn, (), "") is None
    first, other = resume_of(turn, (), "id"), resume_of(asked([2], session=SessionConfig(7)), (), "id")
    again = resume_of(turn, [Delivered([5])], "id")
    assert first.turn == again.turn != other.turn, "another prompt is another turn"
    assert again.is_life_of(first.turn + "executor-1") and not first.is_life_of(first.turn + "executor-1")
    assert not again.is_life_of(other.turn + "executor-1")


def test_a_turn_is_that_of_one_client_session_request_id_and_prompt() -> None:
    def turn(request_id: str = "id", session: int = 7, prompt: int = 1, salt: str = "alice") -> str:
        resume = resume_of(asked([prompt], session=SessionConfig(session), cache_salt=salt), (), request_id)
        assert resume is not None
        return resume.turn

    others = {turn(request_id="di"), turn(session=8), turn(prompt=2), turn(salt="bob"), turn(salt="")}
    assert len(others) == 5 and turn() == turn() not in others


def test_a_turn_goes_on_only_by_its_request_id() -> None:
    with pytest.raises(InvalidRequest, match="needs the request id"):
        resume_of(asked([1], session=SessionConfig(7)), [Delivered([5])], "")

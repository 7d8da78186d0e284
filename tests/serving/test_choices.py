"""Several sequences for one prompt, of models `vllm` and `everbatch`: asked for by vLLM's names, told by index."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from backend.api import FinishReason, InvalidRequest, PerfMetrics, Result, SamplingConfig, Unsupported
from backend.serving.wires.front import TextTools
from backend.serving.wires.vllm import CANCELLED, Cancelled
from backend.serving.work import RowOutput
from tests.serving import test_everbatch_model as everbatch
from tests.serving import test_vllm_front as vllm

pytestmark = pytest.mark.feature("W-07")
GOES_ON = FinishReason.NOT_FINISHED
BEAMS = {"use_beam_search": True, "n": 2}


def result(
    tools: TextTools,
    sequence: int,
    text: str,
    reason: FinishReason = GOES_ON,
    *,
    final: bool = False,
    each: float = -0.5,
) -> Result:
    """New tokens of one sequence, each of the log-probability `each`. `final`: the row ends with it."""
    ids = vllm.ids_of(tools, text)
    return Result(
        [ids],
        is_final=final,
        is_sequence_final=reason is not GOES_ON,
        sequence_index=sequence,
        finish_reasons=(reason,),
        log_probs=[[each] * len(ids)],
        perf_metrics=PerfMetrics(num_cached_tokens=sequence),
    )


def lists(output: RowOutput) -> list[dict[str, list[Any]]]:
    """The responses of model vllm that are due: each output as a list, texts decoded."""
    return [
        {name: [one.decode() for one in array] if array.dtype == object else array.tolist() for name, array in arrays}
        for arrays in output.render()
    ]


def objects(output: RowOutput) -> list[list[dict[str, Any]]]:
    """The responses of model everbatch that are due: the objects in each."""
    return [[json.loads(one) for one in dict(arrays)["response"]] for arrays in output.render()]


# ---- what the engine is asked for ------------------------------------------------------------------------------------


def test_both_models_ask_the_engine_for_as_many_sequences_as_best_of_says(tools: TextTools) -> None:
    sampling = {"n": 2, "best_of": 5, "seed": 3}
    for request in (vllm.work(tools, sampling=sampling).request, everbatch.work(tools, prompt="a", **sampling).request):
        config = request.sampling_config
        assert (config.num_return_sequences, config.beam_width, config.seed) == (5, 1, 3)
        assert request.output_config.return_log_probs, "to choose by"
    plain = vllm.work(tools, sampling={"n": "3"}).request
    assert plain.sampling_config.num_return_sequences == 3 and not plain.output_config.return_log_probs
    assert vllm.work(tools, sampling={"n": 1}).request.sampling_config.num_return_sequences is None


@pytest.mark.parametrize(
    ("asked", "config"),
    [
        ({}, SamplingConfig(beam_width=2, num_return_sequences=2, length_penalty=1.0, early_stopping=0)),
        (
            {"best_of": 4, "length_penalty": -0.5, "early_stopping": "true", "temperature": 0},
            SamplingConfig(beam_width=4, num_return_sequences=2, length_penalty=-0.5, early_stopping=1),
        ),
        (
            {"n": 1, "early_stopping": "never", "temperature": 1.0},
            SamplingConfig(beam_width=1, num_return_sequences=1, length_penalty=1.0, early_stopping=2, temperature=0.0),
        ),
    ],
)
def test_beams_have_vllms_defaults_and_draw_nothing(
    tools: TextTools, asked: dict[str, Any], config: SamplingConfig
) -> None:
    """vLLM's length penalty is 1 and its early stopping False where nothing is said, and its temperature 0 or 1."""
    assert vllm.work(tools, sampling=BEAMS | asked).request.sampling_config == config


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"n": 0}, InvalidRequest, "^n is 0, allowed is 1 to 128"),
        ({"n": 129}, InvalidRequest, "^n is 129"),
        ({"best_of": 1 << 40}, InvalidRequest, "^best_of is 1099511627776"),
        ({"n": 3, "best_of": 2}, InvalidRequest, "^best_of is 2, the least is n, which is 3"),
        ({"early_stopping": True}, InvalidRequest, "^early_stopping is True, which only beams heed"),
        ({"length_penalty": 0.5}, InvalidRequest, "^length_penalty is 0.5, which only beams heed"),
        ({**BEAMS, "early_stopping": "ever"}, InvalidRequest, "early_stopping"),
        ({**BEAMS, "temperature": 0.7}, Unsupported, "^temperature is 0.7, and beams are ranked"),
        ({**BEAMS, "logprobs": 2}, Unsupported, "^logprobs is 2; beams"),
        ({**BEAMS, "stop": "x"}, Unsupported, "^stop cannot be had with use_beam_search"),
    ],
)
def test_what_cannot_be_had_is_named(
    tools: TextTools, asked: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        vllm.work(tools, sampling=asked)
    with pytest.raises(error, match=message):
        everbatch.work(tools, prompt="a", **asked)


def test_a_stream_cannot_tell_which_sequences_will_be_the_best(tools: TextTools) -> None:
    for asked, name in ((BEAMS, "use_beam_search"), ({"n": 2, "best_of": 3}, "best_of")):
        with pytest.raises(Unsupported, match=f"^{name} cannot be had in a stream"):
            vllm.work(tools, stream=True, sampling=asked)
        with pytest.raises(Unsupported, match=f"^{name} cannot be had in a stream"):
            everbatch.work(tools, prompt="a", stream=True, **asked)
    assert vllm.work(tools, stream=True, sampling={"n": 2, "best_of": 2}).request.streaming


def test_the_ranks_of_beams_tokens_are_not_known(tools: TextTools) -> None:
    with pytest.raises(Unsupported, match="^return_logprobs cannot be had with use_beam_search"):
        vllm.work(tools, sampling=BEAMS | {"logprobs": 0}, return_logprobs=True)
    assert vllm.work(tools, sampling=BEAMS | {"logprobs": 0}).request.output_config.top_log_probs == 0


# ---- model vllm ------------------------------------------------------------------------------------------------------

FLAGS = dict.fromkeys(("return_finish_reason", "return_cumulative_logprob", "return_num_output_tokens"), True)


def test_outputs_of_vllm_have_an_element_for_each_sequence(tools: TextTools) -> None:
    output = vllm.work(tools, sampling={"n": 2}, return_num_input_tokens=True, **FLAGS).output
    output.feed(result(tools, 1, " b", FinishReason.LENGTH))
    assert output.render() == [], "the other one goes on"
    output.feed(result(tools, 0, " a c", FinishReason.END_ID, final=True))
    (response,) = lists(output)
    assert response == {
        "text_output": ["def main( a c", "def main( b"],
        "finish_reason": ["stop", "length"],
        "cumulative_logprob": [-1.0, -0.5],
        "num_input_tokens": [len(tools.tokenizer.encode("def main("))],
        "num_output_tokens": [2, 1],
    }


def test_each_response_of_a_stream_tells_of_all_sequences_what_is_new(tools: TextTools) -> None:
    output = vllm.work(tools, stream=True, sampling={"n": 2}, **FLAGS).output
    told = []
    for new in (
        result(tools, 0, " a"),
        result(tools, 1, " b"),
        result(tools, 0, " c", FinishReason.LENGTH),
        result(tools, 1, " d", FinishReason.END_ID, final=True),
    ):
        output.feed(new)
        told += lists(output)
    assert [one["text_output"] for one in told] == [[" a", ""], ["", " b"], [" c", ""], ["", " d"]]
    assert [one["num_output_tokens"] for one in told] == [[1, 0], [0, 1], [1, 0], [0, 1]]
    assert [one["finish_reason"] for one in told] == [["None", "None"]] * 2 + [["length", "None"], ["length", "stop"]]
    assert [one["cumulative_logprob"] for one in told] == [[-0.5, 0], [-0.5, -0.5], [-1, -0.5], [-1, -1]]


def test_of_best_of_the_most_likely_are_told_the_best_first(tools: TextTools) -> None:
    """Sums -2.0, -0.5, -1.0 and -0.5: the second is the best, the fourth as good and later, the first one the worst."""
    output = vllm.work(tools, sampling={"n": 3, "best_of": 4}, exclude_input_in_output=True, **FLAGS).output
    for sequence, (text, each) in enumerate(((" a b", -1.0), (" c", -0.5), (" d e", -0.5), (" f", -0.5))):
        output.feed(result(tools, sequence, text, FinishReason.LENGTH, each=each, final=sequence == 3))
    (response,) = lists(output)
    assert response["text_output"] == [" c", " f", " d e"]
    assert response["cumulative_logprob"] == [-0.5, -0.5, -1.0] and response["num_output_tokens"] == [1, 1, 2]


def test_beams_are_told_in_the_engines_order(tools: TextTools) -> None:
    output = vllm.work(tools, sampling=BEAMS, exclude_input_in_output=True, **FLAGS).output
    reasons = (FinishReason.LENGTH, FinishReason.END_ID)
    texts = [vllm.ids_of(tools, text) for text in (" a b", " c")]
    output.feed(Result(texts, True, True, finish_reasons=reasons, log_probs=[[-1.0, -1.0], [-0.5]]))
    (response,) = lists(output)
    assert response["text_output"][0] == " a b" and response["finish_reason"] == ["length", "stop"]
    assert response["cumulative_logprob"] == [-2.0, -0.5] and response["num_output_tokens"] == [2, 1]


def test_a_cancelled_stream_of_several_sequences_ends_with_the_error(tools: TextTools) -> None:
    output = vllm.work(tools, stream=True, sampling={"n": 2}).output
    output.feed(result(tools, 0, " a", FinishReason.LENGTH))
    assert len(output.render()) == 1
    output.feed(result(tools, 1, "", FinishReason.CANCELLED, final=True))
    with pytest.raises(Cancelled, match=f"^{CANCELLED}$"):
        output.render()


def test_log_probabilities_are_told_of_each_sequence_with_its_own_texts(tools: TextTools) -> None:
    sampling = {"n": 2, "logprobs": 0}
    output = vllm.work(tools, stream=True, sampling=sampling, return_logprobs=True).output
    half = vllm.ids_of(tools, "é")  # two tokens, of which the first shows nothing by itself
    for sequence, ids in ((0, half[:1]), (1, vllm.ids_of(tools, "x")), (0, half[1:])):
        output.feed(Result([ids], sequence_index=sequence, log_probs=[[-0.5]], top_log_probs=[[]]))
        (response,) = lists(output)
        told = json.loads(response["logprobs"][sequence])
        assert [one["decoded_token"] for entry in told for one in entry.values()] == [response["text_output"][sequence]]
        assert response["logprobs"][1 - sequence] == "[]"
    assert response["text_output"] == ["é", ""]


# ---- model everbatch -------------------------------------------------------------------------------------------------


def test_a_stream_of_everbatch_tells_of_one_sequence_in_each_response(tools: TextTools) -> None:
    output = everbatch.work(tools, prompt="a", n=2, stream=True).output
    output.feed(result(tools, 1, " b"))
    output.feed(result(tools, 0, " a"))
    told = objects(output)
    assert [[(one["index"], one["text"]) for one in response] for response in told] == [[(0, " a")], [(1, " b")]]
    output.feed(result(tools, 1, " d", FinishReason.LENGTH))
    ((last,),) = objects(output)
    num_prompt = len(tools.tokenizer.encode("a"))
    usage = {"prompt_tokens": num_prompt, "completion_tokens": 2, "cached_tokens": 1}
    assert (last["index"], last["finish_reason"], last["usage"]) == (1, "length", usage)


def test_without_streaming_one_response_of_everbatch_has_them_all(tools: TextTools) -> None:
    output = everbatch.work(tools, prompt="a", n=2, echo=True).output
    output.feed(result(tools, 1, " b", FinishReason.LENGTH))
    assert output.render() == []
    output.feed(result(tools, 0, " a", FinishReason.LENGTH, final=True))
    (response,) = objects(output)
    assert [(one["index"], one["text"]) for one in response] == [(0, "a a"), (1, "a b")]


def test_tokens_that_best_of_leaves_out_are_counted_with_the_best(tools: TextTools) -> None:
    output = everbatch.work(tools, prompt="a", n=2, best_of=3, logprobs=0).output
    for sequence, (text, each) in enumerate(((" a b c", -1.0), (" c", -2.0), (" d", -0.5))):
        output.feed(result(tools, sequence, text, FinishReason.LENGTH, each=each, final=sequence == 2))
    ((first, second),) = objects(output)
    assert [(one["index"], one["text"]) for one in (first, second)] == [(0, " d"), (1, " c")]
    assert first["usage"]["discarded_tokens"] == 3 and "discarded_tokens" not in second["usage"]
    assert [one["token"] for one in first["logprobs"]] == [" d"] and second["logprobs"][0]["logprob"] == -2.0


def test_beams_of_everbatch_are_told_by_index(tools: TextTools) -> None:
    output = everbatch.work(tools, prompt="a", logprobs=0, **BEAMS).output
    ids = [vllm.ids_of(tools, text) for text in (" a", " c")]
    reasons = (FinishReason.LENGTH, FinishReason.LENGTH)
    output.feed(Result(ids, True, True, finish_reasons=reasons, log_probs=[[-0.5], [-1.0]]))
    ((first, second),) = objects(output)
    assert [(one["index"], one["text"], one["logprobs"][0]["logprob"]) for one in (first, second)] == [
        (0, " a", -0.5),
        (1, " c", -1.0),
    ]


def test_one_sequence_has_no_index(tools: TextTools) -> None:
    output = everbatch.work(tools, prompt="a", n=1, best_of=2).output
    for sequence in range(2):
        output.feed(result(tools, sequence, " a", FinishReason.LENGTH, final=sequence == 1))
    arrays = dict(output.render()[0])
    assert arrays["response"].shape == (1,) and isinstance(arrays["response"], np.ndarray)
    assert "index" not in json.loads(arrays["response"][0])


def test_tokens_that_share_a_character_are_shown_for_each_sequence_by_itself(tools: TextTools) -> None:
    """The tokens of two sequences take turns."""
    output = everbatch.work(tools, prompt="a", n=2, stream=True, logprobs=0).output
    texts, shown = (" é!", "ü é"), {0: "", 1: ""}
    rows = [tools.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    for i in range(max(map(len, rows))):
        for sequence, ids in enumerate(rows):
            if i < len(ids):
                output.feed(Result([ids[i : i + 1]], sequence_index=sequence, log_probs=[[-0.5]]))
                for one in (one for response in objects(output) for one in response):
                    shown[one["index"]] += "".join(entry["token"] for entry in one["logprobs"])
    assert max(map(len, rows)) > 3 and shown == dict(enumerate(texts))

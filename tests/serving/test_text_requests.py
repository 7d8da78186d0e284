from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from backend.api import EngineConfig, FinishReason, InvalidRequest, Request, Result, Unsupported
from backend.api.config.schema import TritonConfig
from backend.api.draft_limits import check_drafts
from backend.api.response import TopLogProb
from backend.core.step import ModelInfo
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.tensors import ModelTensors
from backend.serving.wires.front import TextTools
from backend.serving.wires.limits import MAX_TOKEN_BYTES
from backend.serving.wires.trtllm_tensors import BLS, ENSEMBLE, ENSEMBLE_UINT32
from backend.serving.wires.trtllm_text import parse_text_requests
from backend.serving.work import Arrays, Work
from tests.serving.fake_triton import Tensor
from tests.serving.helpers import bools, floats, ints, strings, uint64

DEFAULTS = TritonConfig()


@pytest.fixture
def works(tools: TextTools) -> Callable[..., list[Work]]:
    def parse(
        model: ModelTensors = ENSEMBLE,
        triton: TritonConfig = DEFAULTS,
        max_seq_len: int = 64,
        has_head: bool = True,
        **inputs: np.ndarray,
    ) -> list[Work]:
        inputs.setdefault("max_tokens", ints(*[4] * len(next(iter(inputs.values()), [0]))))
        batch = Batch.read(model, [Tensor(name, array) for name, array in inputs.items()], 64)
        info = ModelInfo("m", tools.tokenizer.vocab_size, max_seq_len, eos_ids=(3,), has_head=has_head)
        return parse_text_requests(batch, ServingContext(EngineConfig(triton=triton), info), Parameters(), tools)

    return parse


def text_of(arrays: Arrays | None) -> str:
    return dict(arrays)["text_output"][0].decode()


def result(ids: list[int], final: bool = False, reason: FinishReason = FinishReason.LENGTH, **fields: object) -> Result:
    return Result([ids], is_final=final, finish_reasons=[reason] if final else [FinishReason.NOT_FINISHED], **fields)


@pytest.mark.parametrize("model", [ENSEMBLE, BLS], ids=lambda model: model.model)
def test_a_temperature_alone_decodes_greedily(works: Callable[..., list[Work]], model: ModelTensors) -> None:
    def is_greedy(**sampling: np.ndarray) -> bool:
        request = works(model, text_input=strings("a"), **sampling)[0].request
        assert isinstance(request, Request)
        return request.sampling_config.is_greedy

    assert is_greedy(temperature=floats(1.0)) and is_greedy(temperature=floats(1.0), top_k=ints(0), top_p=floats(0.0))
    assert not is_greedy(temperature=floats(1.0), top_p=floats(1.0))


def test_text_is_tokenised_and_ends_at_the_models_end_ids(works: Callable[..., list[Work]], tools: TextTools) -> None:
    request = works(text_input=strings("def main("))[0].request
    assert isinstance(request, Request)
    assert request.input_token_ids == tools.tokenizer.encode("def main(")
    assert set(request.end_ids) == {3, *tools.tokenizer.eos_ids} and request.max_tokens == 4
    assert works(text_input=strings("a"), end_id=ints(-1))[0].request.end_ids == ()
    assert works(text_input=strings("a"), end_id=ints(5))[0].request.end_ids == (5,)


def test_text_level_names_fill_the_same_fields(works: Callable[..., list[Work]]) -> None:
    config = works(
        text_input=strings("a"), top_k=ints(5), top_p=floats(0.5), min_length=ints(2), random_seed=uint64(3)
    )[0]
    sampling = config.request.sampling_config
    assert (sampling.top_k, sampling.top_p, sampling.min_tokens, sampling.seed) == (5, 0.5, 2, 3)


def test_messages_go_through_the_chat_template_and_bring_their_own_special_tokens(
    works: Callable[..., list[Work]], tools: TextTools
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    request = works(messages=strings(json.dumps(messages)))[0].request
    rendered = tools.template.render(messages)
    assert request.input_token_ids == tools.tokenizer.encode(rendered, add_special_tokens=False)


def test_messages_to_a_model_that_generates_nothing_are_refused(works: Callable[..., list[Work]]) -> None:
    messages = strings(json.dumps([{"role": "user", "content": "hi"}]))
    with pytest.raises(Unsupported, match="has no output head and generates nothing; ask for embeddings"):
        works(messages=messages, has_head=False)


def test_a_later_turn_of_a_session_is_not_given_a_new_beginning(
    works: Callable[..., list[Work]], tools: TextTools
) -> None:
    session = {"CORRID": uint64(1), "END": ints(0)}
    later = works(text_input=strings(" more"), START=ints(0), **session)[0].request
    assert later.input_token_ids == tools.tokenizer.encode(" more", add_special_tokens=False)
    first = works(text_input=strings(" more"), START=ints(1), **session)[0].request
    assert first.input_token_ids == tools.tokenizer.encode(" more")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "text_input is empty; give at least one character, or messages"),
        ({"text_input": strings("a"), "messages": strings("[]")}, "are both given"),
        ({"text_input": strings("")}, "text_input is empty"),
        ({"text_input": strings(b"\xff\xfe")}, "text_input is not valid UTF-8 at byte 0"),
        ({"text_input": strings("a" * (64 * MAX_TOKEN_BYTES + 1))}, "bytes, the limit is"),
        ({"text_input": strings("x " * 500)}, "tokens, the limit is 63"),
        ({"text_input": strings("a"), "max_tokens": ints(0)}, "max_tokens must be a single value > 0"),
        ({"text_input": strings("a"), "max_tokens": ints(-3)}, "max_tokens must be a single value > 0"),
        ({"messages": strings("{")}, "messages is not JSON"),
        ({"messages": strings("[" * 1000)}, "messages is not JSON"),
        ({"messages": strings("{}")}, "messages is no JSON list"),
        ({"messages": strings("[]")}, "0 messages, allowed is 1"),
        ({"messages": strings('[{"content": "x"}]')}, "a message has no role"),
        (
            {"text_input": strings("a"), "stop_words": strings([str(n) for n in range(10_000)])},
            "10000 entries, the limit is 128",
        ),
        ({"text_input": strings("a"), "stop_words": strings("s" * 4097)}, "4097 bytes, the limit is 4096"),
        ({"text_input": strings("a"), "bad_words": strings([b"ok", b"\xc3"])}, "bad_words is not valid UTF-8"),
        (
            {"text_input": strings("a"), "embedding_bias_words": strings(["x", "y"])},
            "2 entries and embedding_bias_weights 0",
        ),
    ],
)
def test_bad_text_is_refused_in_one_sentence(
    works: Callable[..., list[Work]], inputs: dict[str, np.ndarray], message: str
) -> None:
    inputs = {"max_tokens": ints(4), **inputs}
    with pytest.raises(InvalidRequest, match=message):
        works(**inputs)


def test_an_integer_that_python_does_not_read_is_refused_as_what_it_is(works: Callable[..., list[Work]]) -> None:
    messages = '[{"role": "user", "content": %s}]' % ("9" * 4301)
    with pytest.raises(InvalidRequest, match="messages holds an integer of more than 4300 digits; send it as a string"):
        works(messages=strings(messages), max_seq_len=128)


def test_as_many_bytes_of_text_as_the_limits_say_are_read(works: Callable[..., list[Work]]) -> None:
    words = {"stop_words": strings("s" * 4096), "embedding_bias_words": strings("w" * 65_536)}
    work = works(text_input=strings("a"), embedding_bias_weights=floats(1.0), **words)[0]
    assert work.request.sampling_config.logit_bias
    with pytest.raises(InvalidRequest, match="65537 bytes, the limit is 65536 .limits.max_bias_bytes."):
        works(text_input=strings("a"), embedding_bias_words=strings(["w" * 65_536 + "w"]))


def test_a_session_turn_may_generate_nothing(works: Callable[..., list[Work]]) -> None:
    assert works(text_input=strings("a"), max_tokens=ints(0), CORRID=uint64(1))[0].request.max_tokens == 0


@pytest.mark.feature("W-01")
def test_num_draft_tokens_bounds_the_guesses_of_a_step(works: Callable[..., list[Work]]) -> None:
    """Upstream's draft model makes so many for each step; here the engine guesses, and 0 leaves the number to it."""
    for sent, expected in ((2, 2), (0, None), (None, None), (-1, -1)):
        inputs = {} if sent is None else {"num_draft_tokens": ints(sent)}
        (work,) = works(BLS, text_input=strings("a"), **inputs)
        assert work.request.max_draft_tokens == expected
    with pytest.raises(InvalidRequest, match="max_draft_tokens is -1, the least is 0"):
        check_drafts(work.request, takes_drafts=True, max_seq_len=64, guesses=True)
    (two,) = works(BLS, text_input=strings("a"), num_draft_tokens=ints(2))
    check_drafts(two.request, takes_drafts=True, max_seq_len=64, guesses=True)
    with pytest.raises(Unsupported, match=r"2 \(num_draft_tokens of tensorrt_llm_bls;.* speculation.mode=lookup"):
        check_drafts(two.request, takes_drafts=True, max_seq_len=64, guesses=False)


def test_images_and_logits_of_drafts_are_refused(works: Callable[..., list[Work]]) -> None:
    for name, array in {"image_input": np.ones((1, 1, 3, 1, 1), np.float16), "use_draft_logits": bools(True)}.items():
        with pytest.raises(Unsupported, match=name):
            works(BLS, text_input=strings("a"), **{name: array})
    assert works(BLS, text_input=strings("a"), use_draft_logits=bools(False), image_url_input=strings(""))


def test_the_weight_of_a_word_is_added_to_each_of_its_tokens(
    works: Callable[..., list[Work]], tools: TextTools
) -> None:
    words = ["import", "import os"]
    bias = works(
        text_input=strings("a"),
        embedding_bias_words=strings(words),
        embedding_bias_weights=np.array([[1.0, 2.0]], np.float32),
    )[0].request.sampling_config.logit_bias
    expected: dict[int, float] = {}
    for word, weight in zip(words, (1.0, 2.0)):
        for token in tools.tokenizer.encode(word):
            expected[token] = expected.get(token, 0.0) + weight
    assert bias == expected


def test_a_row_with_stop_strings_streams_inside_even_when_its_client_does_not(works: Callable[..., list[Work]]) -> None:
    assert not works(text_input=strings("a"))[0].request.streaming
    assert works(text_input=strings("a"), stop_words=strings(["\n", ""]))[0].request.streaming
    assert not works(text_input=strings("a"), stop_words=strings([""]))[0].request.streaming


@pytest.mark.feature("002-26")
def test_streamed_text_concatenates_to_the_whole_text(works: Callable[..., list[Work]], tools: TextTools) -> None:
    ids = tools.tokenizer.encode("naïve — 数 = 3\n", add_special_tokens=False)
    output = works(text_input=strings("a"), stream=bools(True), return_num_output_tokens=bools(True))[0].output
    pieces, counts = [], []
    for n, token in enumerate(ids):
        output.feed(result([token], final=n == len(ids) - 1))
        for arrays in output.render():
            pieces.append(text_of(arrays))
            counts.append(int(dict(arrays)["num_output_tokens"][0, 0]))
    assert "".join(pieces) == "naïve — 数 = 3\n" and all("\ufffd" not in piece for piece in pieces)
    assert sum(counts) == len(ids) == output.num_output_tokens
    assert dict(arrays)["finish_reason"][0] == b"length"


def test_the_prompt_is_echoed_unless_excluded_and_a_chat_only_when_asked(
    works: Callable[..., list[Work]], tools: TextTools
) -> None:
    ids = tools.tokenizer.encode(" os", add_special_tokens=False)

    def answer(**inputs: np.ndarray) -> str:
        output = works(**inputs)[0].output
        output.feed(result(ids, final=True))
        return text_of(output.render()[0])

    chat = strings(json.dumps([{"role": "user", "content": "hi"}]))
    assert answer(text_input=strings("import")) == "import os"
    assert answer(text_input=strings("import"), exclude_input_in_output=bools(True)) == " os"
    assert answer(messages=chat) == " os"
    assert answer(messages=chat, exclude_input_in_output=bools(False)).endswith(" os")
    assert answer(messages=chat, exclude_input_in_output=bools(False)) != " os"


def test_a_stop_string_across_tokens_ends_the_row_and_says_how_many_tokens_count(
    works: Callable[..., list[Work]], tools: TextTools
) -> None:
    head = tools.tokenizer.encode("x = 1;", add_special_tokens=False)
    stop = tools.tokenizer.encode("return y\n", add_special_tokens=False)
    output = works(text_input=strings("a"), stream=bools(True), stop_words=strings(["return y"]))[0].output
    assert len(stop) > 1, "the stop must span tokens"
    kept = [output.feed(result([token])) for token in [*head, *stop]]
    first = next(n for n in kept if n is not None)
    assert tools.tokenizer.decode([*head, *stop][:first]).endswith("return y")
    assert not output.render(), "the last text waits for the end that rides on it"
    output.feed(result([1, 2], final=True, reason=FinishReason.CANCELLED))  # the engine had gone on
    (arrays,) = output.render()
    assert text_of(arrays) == "x = 1;return y" and dict(arrays)["finish_reason"][0] == b"stop"
    assert output.num_output_tokens == first


def test_accumulated_responses_each_hold_the_whole_text_so_far(
    works: Callable[..., list[Work]], tools: TextTools
) -> None:
    ids = tools.tokenizer.encode("a b c d", add_special_tokens=False)
    output = works(triton=TritonConfig(accumulate_tokens=True), text_input=strings("a"), stream=bools(True))[0].output
    texts = []
    for n, token in enumerate(ids):
        output.feed(result([token], final=n == len(ids) - 1))
        texts.append(text_of(output.render()[0]))
    assert texts[-1] == "a b c d" and all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:]))


def test_what_a_stop_string_cuts_off_has_no_top_log_probs_either(
    works: Callable[..., list[Work]], tools: TextTools
) -> None:
    output = works(text_input=strings("a"), stop_words=strings([";"]), top_log_probs=ints(1))[0].output
    ids = tools.tokenizer.encode("x;y z", add_special_tokens=False)
    kept = output.feed(result(ids, top_log_probs=[[TopLogProb(token, -1.0)] for token in ids]))
    output.feed(result([], final=True, top_log_probs=[]))
    arrays = dict(*output.render())
    assert 0 < kept < len(ids)
    assert arrays["top_log_probs_ids"].tolist() == [[[token] for token in ids[:kept]]]


def test_log_probs_of_a_streams_response_are_those_of_all_tokens_so_far(works: Callable[..., list[Work]]) -> None:
    output = works(text_input=strings("a"), stream=bools(True), return_log_probs=bools(True))[0].output
    output.feed(result([10], log_probs=[[-1.0]], cum_log_probs=[-1.0]))
    output.feed(result([11], log_probs=[[-2.0]], cum_log_probs=[-3.0]))
    first = dict(*output.render())
    output.feed(result([12], final=True, log_probs=[[-4.0]], cum_log_probs=[-7.0]))
    last = dict(*output.render())
    assert first["output_log_probs"].tolist() == [[[-1.0, -2.0]]] and first["cum_log_probs"].tolist() == [[-3.0]]
    assert last["output_log_probs"].tolist() == [[[-1.0, -2.0, -4.0]]] and last["cum_log_probs"].tolist() == [[-7.0]]


@pytest.mark.feature("W-01")
@pytest.mark.parametrize(
    ("name", "neutral", "asking", "feature"),
    [
        ("decoder_text_input", strings(""), strings("x"), "encoder input"),
    ],
)
def test_what_was_once_ignored_is_accepted_at_neutral_values_alone(
    works: Callable[..., list[Work]], name: str, neutral: np.ndarray, asking: np.ndarray, feature: str
) -> None:
    assert works(text_input=strings("a"), **{name: neutral})[0].request == works(text_input=strings("a"))[0].request
    with pytest.raises(Unsupported, match=f"{name} asks for {feature}, which this version does not have; leave it out"):
        works(text_input=strings("a"), **{name: asking})


@pytest.mark.feature("W-01")
def test_unsigned_integers_fill_the_same_fields(works: Callable[..., list[Work]]) -> None:
    unsigned = {"top_k": 5, "min_length": 2, "max_tokens": 7, "beam_width": 1, "pad_id": 0, "prompt_vocab_size": 0}
    arrays = {name: np.array([[value]], np.uint32) for name, value in unsigned.items()}
    end_ids = []
    for end_id in (4, 2**32 - 1):
        request = works(ENSEMBLE_UINT32, text_input=strings("a"), end_id=np.array([[end_id]], np.uint32), **arrays)[
            0
        ].request
        end_ids.append(request.end_ids)
    assert end_ids == [(4,), ()], "-1, as an unsigned integer holds it, is no end id"
    assert (request.max_tokens, request.sampling_config.top_k, request.sampling_config.min_tokens) == (7, 5, 2)

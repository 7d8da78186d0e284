"""What of SamplingParams reaches the engine, and what is refused by its name."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from backend.api import OutputConfig, Request, SamplingConfig, Unsupported
from backend.api.guide import Guide, GuideType
from backend.api.lora import LoraConfig
from backend.api.request import RetentionConfig, TokenRangeRetention
from backend.core.step import ModelInfo
from backend.text.tokenizer import Tokenizer
from compat.llm import (
    GenerationRequest,
    GuidedDecodingParams,
    LoRARequest,
    NotHere,
    SamplingParams,
)
from compat.llm.mapping import core_request, sampling_config, text_params

MODEL = ModelInfo("scripted", 1000, 64, eos_ids=(5, 6))


def mapped(tokenizer: Tokenizer | None = None, prompt: list[int] | None = None, **fields: Any) -> Request:
    request = GenerationRequest(prompt or [1, 2, 3], SamplingParams(**fields))
    return core_request(request, tokenizer, MODEL, 20)


@pytest.mark.feature("002-12")
def test_what_is_not_asked_for_does_not_reach_the_engine() -> None:
    request = mapped()
    assert request.sampling_config == SamplingConfig()
    assert request.output_config == OutputConfig(exclude_input_from_output=True)
    assert (request.max_tokens, request.streaming, request.stop_words, request.bad_words) == (32, False, [], [])


@pytest.mark.feature("002-12")
def test_sampling_controls_are_handed_on_under_their_names() -> None:
    fields = dict(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3, min_tokens=2,
        repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3,
    )  # fmt: skip
    assert mapped(**fields).sampling_config == SamplingConfig(**fields)


@pytest.mark.feature("002-12")
def test_beams_are_for_beam_search_only() -> None:
    beams = mapped(n=2, best_of=4, use_beam_search=True)
    assert (beams.sampling_config.beam_width, beams.sampling_config.num_return_sequences) == (4, 2)
    assert beams.return_all_generated_tokens
    sampled = mapped(n=2, best_of=4, top_k=9)
    assert (sampled.sampling_config.beam_width, sampled.sampling_config.num_return_sequences) == (1, 4)
    assert not sampled.return_all_generated_tokens


@pytest.mark.parametrize("asked", [{"temperature": 0.7}, {"top_k": 9}, {"top_p": 0.9, "n": 2}])
def test_a_request_that_samples_without_a_seed_gets_a_new_one(asked: dict) -> None:
    assert len({mapped(**asked).sampling_config.seed for _ in range(8)}) == 8
    assert mapped(**asked, seed=0).sampling_config.seed == 0
    phases = [sampling_config(SamplingParams(**asked), is_phase=True) for _ in range(2)]
    assert phases[0] == phases[1], "the engine of the second phase samples the first tokens again"


@pytest.mark.parametrize("greedy", [{}, {"temperature": 0.0}, {"use_beam_search": True, "n": 2}])
def test_a_request_that_does_not_sample_keeps_the_seed_of_the_engine(greedy: dict) -> None:
    assert mapped(**greedy).sampling_config.seed == SamplingConfig().seed


@pytest.mark.parametrize("greedy", [{"top_k": 1, "temperature": 2.0}, {"top_p": 0.0}, {"temperature": 0.0, "top_k": 7}])
def test_a_greedy_request_sends_nothing_that_would_sample(greedy: dict) -> None:
    assert mapped(seed=4, **greedy).sampling_config == SamplingConfig(seed=4)


@pytest.mark.parametrize("logprobs, told, alternatives", [(None, False, 0), (0, True, 0), (3, True, 3)])
def test_log_probabilities_are_asked_for_where_they_are_wanted(logprobs: int, told: bool, alternatives: int) -> None:
    output = mapped(logprobs=logprobs).output_config
    assert (output.return_log_probs, output.top_log_probs) == (told, alternatives)


def test_the_best_sequences_are_chosen_by_log_probabilities_that_are_not_shown() -> None:
    request = GenerationRequest([1], SamplingParams(n=1, best_of=3, top_k=9))
    assert core_request(request, None, MODEL, 20).output_config.return_log_probs
    assert text_params(request, None, 1).log_probs is None


def test_more_alternatives_than_the_engine_tells_are_refused_with_the_limit() -> None:
    with pytest.raises(ValueError, match="logprobs is 21, the limit is 20"):
        mapped(logprobs=21)


def test_the_output_ends_at_the_id_of_the_request_else_where_tokenizer_and_model_end(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids
    assert mapped(tokenizer, end_id=9).end_ids == (9,)
    assert mapped(tokenizer).end_ids == (*tokenizer.eos_ids, 5, 6)
    assert mapped(end_id=-1).end_ids == ()
    assert mapped().end_ids == (5, 6)
    assert mapped(tokenizer, end_id=9, ignore_eos=True).end_ids == ()


def test_without_a_number_of_tokens_the_context_is_filled() -> None:
    assert mapped(max_tokens=None, prompt=[1] * 10).max_tokens == 54


def test_words_become_token_lists(tokenizer: Tokenizer) -> None:
    request = mapped(tokenizer, bad="fox", bad_token_ids=[7], stop_token_ids=[8, 9])
    assert tokenizer.encode("fox", add_special_tokens=False) in request.bad_words
    assert request.bad_words[-1] == [7]
    assert request.stop_words == [[8], [9]]


def test_a_stop_string_is_looked_for_in_the_text_of_each_token(tokenizer: Tokenizer) -> None:
    assert mapped(tokenizer).streaming is False
    request = mapped(tokenizer, stop="fox")
    assert (request.streaming, request.stop_words) == (True, [])
    assert not mapped(tokenizer, stop="fox", n=2, use_beam_search=True).streaming, "beams are cut at the end"


def test_a_stop_string_is_left_to_the_engine_where_there_is_no_text_or_several(tokenizer: Tokenizer) -> None:
    word = tokenizer.encode("fox", add_special_tokens=False)
    assert word in mapped(tokenizer, stop="fox", detokenize=False).stop_words
    assert not mapped(tokenizer, stop="fox", detokenize=False).streaming
    assert word in mapped(tokenizer, stop="fox", n=2, top_k=5).stop_words


def test_a_stop_string_that_is_a_special_token_stops_though_the_text_hides_it(tokenizer: Tokenizer) -> None:
    assert mapped(tokenizer, stop="<|im_end|>").stop_words == [[tokenizer.token_to_id("<|im_end|>")]]


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="stop is text, and there is no tokenizer; give stop_token_ids"):
        mapped(stop="fox")


def test_a_dense_bias_is_sent_as_the_entries_that_change_something() -> None:
    bias = np.zeros(1000, np.float32)
    bias[[3, 7]] = [1.5, -2.0]
    assert mapped(embedding_bias=bias).sampling_config.logit_bias == {3: 1.5, 7: -2.0}
    assert mapped(embedding_bias=[0.0] * 1000).sampling_config.logit_bias is None
    with pytest.raises(ValueError, match="embedding_bias"):
        mapped(embedding_bias=[float("nan")])
    with pytest.raises(ValueError, match="embedding_bias"):
        mapped(embedding_bias=3.0)


REFUSED = {
    "return_encoder_output": True,
    "spaces_between_special_tokens": False,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_here_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(NotHere, match=f"^{name} is "):
        mapped(**{name: REFUSED[name]})


def test_a_refusal_is_a_value_error_and_says_unsupported() -> None:
    assert issubclass(NotHere, ValueError) and issubclass(NotHere, Unsupported)


def test_lookahead_bounds_the_guesses_of_a_step() -> None:
    assert mapped().max_draft_tokens is None
    assert mapped(lookahead_config={"max_ngram_size": 5}).max_draft_tokens == 4


OPTIONAL = {
    "top_p_min": (0.1, 1e-6),
    "top_p_reset_ids": (3, None),
    "top_p_decay": (0.5, 1.0),
    "beam_search_diversity_rate": (0.5, 0.0),
    "length_penalty": (1.0, 0.0),
    "early_stopping": (0, 1),
    "no_repeat_ngram_size": (3, 1 << 30),
    "beam_width_array": ([2, 3], None),
}


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_field_reaches_an_engine_that_has_it_and_is_refused_by_one_that_has_not(name: str) -> None:
    value, neutral = OPTIONAL[name]
    if name in SamplingConfig.__struct_fields__:
        assert getattr(mapped(**{name: value}).sampling_config, name) == value
        return
    with pytest.raises(NotHere, match=f"^{name} is "):
        mapped(**{name: value})
    assert mapped(**{name: neutral}).sampling_config == SamplingConfig()


@pytest.mark.parametrize(
    "fields",
    [
        {"postproc_params": object()},
        {"scheduling_params": object()},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_a_request_brings_besides_is_refused_by_its_name(fields: dict) -> None:
    request = GenerationRequest([1], SamplingParams(), **fields)
    with pytest.raises(NotHere, match=f"^{next(iter(fields))} is set"):
        core_request(request, None, MODEL, 20)


@pytest.mark.feature("002-07", "002-45")
def test_an_adapter_is_known_by_its_id_and_read_from_its_directory() -> None:
    request = GenerationRequest([1], SamplingParams(), lora_request=LoRARequest("math", 7, "dir"))
    assert core_request(request, None, MODEL, 20).lora == LoraConfig(7, path="dir", name="math")


def test_what_a_prompt_brings_besides_tokens_travels_with_it() -> None:
    request = GenerationRequest([1], SamplingParams(), multimodal_params={"image": b"one"}, cache_salt="me")
    mapped_request = core_request(request, None, msgspec.structs.replace(MODEL, takes_extra_inputs=True), 20)
    assert (mapped_request.extra_inputs, mapped_request.cache_salt) == ({"image": b"one"}, "me")


def test_a_priority_is_between_0_and_1() -> None:
    def priority(value: float) -> Request:
        return core_request(GenerationRequest([1], SamplingParams(), priority=value), None, MODEL, 20)

    with pytest.raises(ValueError, match="priority is 1.5, allowed is 0 to 1"):
        priority(1.5)
    assert (mapped().priority, priority(0.5).priority, priority(0.9).priority) == (0.5, 0.5, 0.9)


def test_retention_comes_as_our_own_or_with_the_fields_of_tensorrt_llm() -> None:
    ours = RetentionConfig((TokenRangeRetention(0, 8, 80, 2.0), TokenRangeRetention(8, None, 10)), 20, 0.5)
    theirs = SimpleNamespace(
        token_range_retention_configs=[
            SimpleNamespace(token_start=0, token_end=8, priority=80, duration_ms=timedelta(seconds=2)),
            SimpleNamespace(token_start=8, token_end=None, priority=10, duration_ms=None),
        ],
        decode_retention_priority=20,
        decode_duration_ms=500,
    )
    for given in (ours, theirs):
        request = GenerationRequest([1], SamplingParams(), kv_cache_retention_config=given)
        assert core_request(request, None, MODEL, 20).retention == ours
    assert mapped().retention is None
    with pytest.raises(TypeError, match="kv_cache_retention_config is a int"):
        core_request(GenerationRequest([1], SamplingParams(), kv_cache_retention_config=5), None, MODEL, 20)


@pytest.mark.parametrize(
    ("given", "guide"),
    [
        ({"json": {"type": "object"}}, Guide(GuideType.JSON_SCHEMA, '{"type": "object"}')),
        ({"json": "{}"}, Guide(GuideType.JSON_SCHEMA, "{}")),
        ({"regex": "a"}, Guide(GuideType.REGEX, "a")),
        ({"grammar": "start: x"}, Guide(GuideType.EBNF_GRAMMAR, "start: x")),
        ({"structural_tag": "{}"}, Guide(GuideType.STRUCTURAL_TAG, "{}")),
        ({"json_object": True}, Guide(GuideType.JSON)),
        ({}, None),
    ],
)
def test_guided_decoding_params_are_a_guide(given: dict[str, Any], guide: Guide | None) -> None:
    assert mapped(guided_decoding=GuidedDecodingParams(**given)).guide == guide


def test_a_guide_that_is_no_guided_decoding_params_is_named() -> None:
    with pytest.raises(TypeError, match="guided_decoding is a dict, a GuidedDecodingParams is needed"):
        mapped(guided_decoding={"json": {}})

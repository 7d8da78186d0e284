"""SamplingParams and GuidedDecodingParams: names, defaults and errors."""

from __future__ import annotations

import dataclasses

import pytest

from backend.api import InvalidRequest
from compat.llm import GuidedDecodingParams, SamplingParams

UNSET = """end_id pad_id bad bad_token_ids stop stop_token_ids embedding_bias logits_processor top_k top_p top_p_min
    top_p_reset_ids top_p_decay seed temperature min_tokens beam_search_diversity_rate repetition_penalty presence_penalty
    frequency_penalty length_penalty early_stopping no_repeat_ngram_size min_p beam_width_array logprobs prompt_logprobs
    additional_model_outputs lookahead_config guided_decoding truncate_prompt_tokens""".split()
OFF = """include_stop_str_in_output apply_batched_logits_processor use_beam_search return_context_logits
    return_generation_logits return_encoder_output return_perf_metrics ignore_eos""".split()
ON = "exclude_input_from_output detokenize add_special_tokens skip_special_tokens spaces_between_special_tokens".split()


def test_every_field_has_its_default() -> None:
    expected = dict.fromkeys(UNSET) | dict.fromkeys(OFF, False) | dict.fromkeys(ON, True)
    assert vars(SamplingParams()) == expected | {"max_tokens": 32, "n": 1, "best_of": 1}


def test_only_keywords_are_taken() -> None:
    with pytest.raises(TypeError):
        SamplingParams(5)
    with pytest.raises(TypeError, match="tempratur"):
        SamplingParams(tempratur=1.0)
    assert dataclasses.is_dataclass(SamplingParams)


def test_the_padding_is_the_end_unless_told_otherwise() -> None:
    assert SamplingParams(end_id=7).pad_id == 7
    assert SamplingParams(end_id=7, pad_id=3).pad_id == 3


def test_best_of_is_n_unless_told_otherwise_and_never_less() -> None:
    assert SamplingParams(n=3, top_k=5).best_of == 3
    with pytest.raises(ValueError, match=r"best_of \(2\) cannot be less than n \(3\)"):
        SamplingParams(n=3, best_of=2, top_k=5)


@pytest.mark.parametrize("chosen", [{}, {"top_k": 1}, {"temperature": 0.0, "top_k": 5}, {"top_p": 0.0}])
def test_several_sequences_of_a_greedy_request_are_refused(chosen: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="Greedy decoding in the LLM API does not allow multiple returns"):
        SamplingParams(best_of=2, **chosen)
    monkeypatch.setenv("TLLM_ALLOW_N_GREEDY_DECODING", "1")
    assert SamplingParams(best_of=2, **chosen).num_sequences == 2


@pytest.mark.parametrize("chosen", [{"top_k": 4}, {"top_p": 0.9}, {"temperature": 0.8}, {"use_beam_search": True}])
def test_several_sequences_are_made_by_sampling_and_by_beam_search(chosen: dict) -> None:
    assert SamplingParams(n=2, best_of=4, **chosen).num_sequences == 4


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be >= 1, got 0"),
        ({"n": 0}, "n is 0"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"logprobs": -2}, "logprobs is -2"),
        ({"stop": ""}, "stop holds an empty text"),
        ({"stop": ["a", ""]}, "stop holds an empty text"),
        ({"bad": [3]}, "bad holds a int, text is needed; token ids go to bad_token_ids"),
    ],
)
def test_values_that_can_never_be_used_are_errors_at_once(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        SamplingParams(**fields)
    assert isinstance(raised.value, InvalidRequest)


def test_true_asks_for_the_log_probability_of_one_alternative() -> None:
    assert (SamplingParams(logprobs=True).logprobs, SamplingParams(logprobs=False).logprobs) == (1, None)


def test_one_guide_at_most() -> None:
    assert GuidedDecodingParams() == GuidedDecodingParams(
        json=None, regex=None, grammar=None, json_object=False, structural_tag=None
    )
    assert GuidedDecodingParams(regex="a+").regex == "a+"
    with pytest.raises(ValueError, match="Only one guide can be used for a request, but got 2"):
        GuidedDecodingParams(regex="a+", json_object=True)
